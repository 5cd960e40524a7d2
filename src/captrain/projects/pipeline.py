"""The pipeline of a project: its stages, its runs, and its upgrade to another version of captrain.

The stage `compose` writes a digest of each stage's code to `results/spec.yaml`, and the digest is a param of the stage:
a stage reruns if the code that it runs has changed. In captrain's own repository `compose` depends on all code. A
project does not have it. There it depends on captrain.yaml, which `captrain upgrade` writes, so no stage runs again
before that.
"""

import difflib
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

import yaml

from captrain import __version__
from captrain.errors import UserError
from captrain.records import (
    JsonObject,
    Record,
    digest,
    file_digest,
    publish_text,
    read_json,
    read_text,
    read_yaml,
)
from captrain.run import (
    PLACE,
    Spec,
    expand_stages,
    files_below,
    launch,
    reached_code,
    read_stages,
    row_of,
    shipped,
)

if TYPE_CHECKING:
    from dvc.stage import Stage

VERSIONS = "captrain.yaml"
COMPONENTS = "components"
"""Folder of a project's own benchmarks, policies and other components."""
SELECTABLE = {"base", "benchmark", "policy", "analyst", "synthesizer", "trainer", "router"}
"""Sections of the configuration that may name a class of the project."""
SPEC = "results/spec.yaml"
HEAD = "# The stages of captrain, as `captrain init` and `captrain upgrade` write them. What `captrain run` runs is\n"
HEAD += "# captrain's own, unless stages/NAME.py is here; its code is known by the digests in captrain.yaml.\n"


class Versions(Record):
    """Content of captrain.yaml: the version of captrain, digests of dvc.yaml and of each stage's code."""

    captrain: str
    pipeline: str = ""
    stages: dict[str, str]


def shipped_stages() -> dict[str, JsonObject]:
    """Read captrain's stages by name, in the order of the pipeline."""
    return {row_of(name): stage for name, stage in read_stages(shipped("dvc.yaml"), "install captrain again").items()}


def project_pipeline(root: Path) -> str:
    """Return a project's dvc.yaml: captrain's stages, with captrain.yaml in place of its code."""
    pipeline, rows, stages = read_yaml(shipped("dvc.yaml"), JsonObject), shipped_stages(), dict[str, JsonObject]()
    for name, stage in pipeline["stages"].items():
        if name == "row":
            stages |= {row: _project_stage(root, row, rows[row], row) for row in stage["foreach"]}
        elif "foreach" in stage:
            do = _project_stage(root, name, stage["do"], f"{name}@${{key}}")
            stages[name] = {"foreach": stage["foreach"], "do": do}
        else:
            stages[name] = _project_stage(root, name, stage, name)
    pipeline["stages"] = stages
    return HEAD + yaml.safe_dump(pipeline, sort_keys=False, width=118, default_flow_style=None)


def _project_stage(root: Path, name: str, stage: JsonObject, argument: str) -> JsonObject:
    """Return a stage of a project: one of captrain's, run with an argument."""
    keys = [key for entry in stage.get("params", []) if isinstance(entry, dict) for key in entry.get(SPEC, [])]
    script = f"stages/{name}.py"
    deps = [script] if (root / script).is_file() else []
    deps += [COMPONENTS] if SELECTABLE & {key.partition(".")[0] for key in keys} else []
    for path in stage.get("deps", []):  # DVC refuses a dependency on a folder that is not there
        if not path.startswith(("src/", "stages/")) and (path != "stages" or (root / path).is_dir()):
            deps.append(path)
    params = [*stage.get("params", []), *([{VERSIONS: None}] if name == "compose" else [])]
    whole = {"desc": "", "cmd": "", "params": [], "deps": [], **stage}
    whole |= {"cmd": f"captrain run {argument}", "params": params, "deps": deps}
    return {key: value for key, value in whole.items() if value}


def digested(name: str) -> str:
    """Return the name in captrain.yaml of a stage's code, which all rows of the evaluation share."""
    return name.partition("@")[0]


def stage_scripts(name: str) -> list[Path]:
    """List where the code of a stage starts, its script first; rows share a script and have a module each."""
    from captrain.comparison import row_file

    script = shipped(f"stages/{digested(name)}.py")
    return [script] if script.is_file() else [shipped("stages/row.py"), row_file(name)]


def stage_digest(name: str, components: Collection[str] | None = None) -> str:
    """Hash the code that a stage reaches (see `reached_code`); for `compose`, captrain's configuration, too."""
    folders = [Path(__file__).parents[1] / "run", shipped("conf")] if name == "compose" else []
    files = [path for folder in folders for path in files_below(folder)]
    return digest(reached_code(stage_scripts(name), components), file_digest(*files))


def stage_digests(components: Collection[str] | None = None) -> dict[str, str]:
    """Hash the installed code of each stage, with the named components or with all."""
    return {name: stage_digest(name, components) for name in dict.fromkeys(map(digested, shipped_stages()))}


def code_digests(spec: Spec) -> dict[str, str]:
    """Hash the code that each stage runs under a configuration; the stages depend on it (`dvc.yaml`)."""
    targets, values = set[str](), [*spec.model_dump(mode="json", by_alias=True).values()]
    while values:
        value = values.pop()
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if isinstance(value, dict) and isinstance(target := value.get("_target_"), str):
            targets.add(target)
    return {name: text for name, text in stage_digests(targets).items() if name != "compose"}


def versions_text(pipeline: str, stages: Mapping[str, str]) -> str:
    """Return captrain.yaml, given dvc.yaml and the digests of the stages' code."""
    head = "# Which captrain this project's results are made by; `captrain upgrade` takes over what is installed.\n"
    content = {"captrain": __version__, "pipeline": digest(pipeline), "stages": dict(stages)}
    return head + yaml.safe_dump(content, sort_keys=False)


def recorded_versions(root: Path) -> Versions | None:
    """Read captrain.yaml; None in captrain's own repository.

    Raises:
        UserError: it is invalid.
    """
    path = root / VERSIONS
    return read_yaml(path, Versions, "restore it from git, or run `captrain upgrade`") if path.exists() else None


@dataclass(frozen=True)
class Upgrade:
    """The change to the installed version: stages with other code, stages behind them, new and removed stages.

    A stage behind a changed one runs again only if its inputs change.
    """

    before: str
    after: str
    changed: list[str]
    behind: list[str]
    added: list[str]
    removed: list[str]
    pipeline: bool
    """True if dvc.yaml changes."""

    @property
    def is_needed(self) -> bool:
        """True if anything differs."""
        return self.pipeline or self.before != self.after or bool(self.changed or self.added or self.removed)


def upgrade_project(root: Path, *, dry: bool = False) -> Upgrade:
    """Upgrade a project to the installed version of captrain.

    Args:
        root: the project.
        dry: only compare.

    Raises:
        UserError: this is captrain's own repository, or dvc.yaml was edited.
    """
    recorded = recorded_versions(root)
    if recorded is None:
        raise UserError(
            f"there is no {VERSIONS} in {root.name}/: this is captrain's own repository, which needs no upgrade",
            "`dvc status` says what is stale",
        )
    present, text = read_text(root / "dvc.yaml", "restore it from git"), project_pipeline(root)
    if digest(present) != recorded.pipeline and present != text and not dry:
        raise UserError(
            "dvc.yaml was edited since captrain wrote it, and would be replaced",
            "save your changes elsewhere, `git checkout dvc.yaml`, and upgrade again; or `captrain upgrade --dry-run`",
        )
    before, after = recorded.stages, stage_digests()
    changed = [name for name in after if name in before and before[name] != after[name]]
    added, removed = [name for name in after if name not in before], [name for name in before if name not in after]
    # Stages that read outputs of these, directly or not, in the order in which they run.
    behind, products = list[str](), list[str]()
    for name, stage in expand_stages(yaml.safe_load(text)["stages"]).items():
        files = [path for entry in stage["params"] if isinstance(entry, dict) for path in entry]
        inputs = [*stage.get("deps", []), *files]
        pairs = ((path, out) for path in inputs for out in products)
        is_behind = any(f"{path}/".startswith(f"{out}/") or out.startswith(f"{path}/") for path, out in pairs)
        is_made_anew = digested(name) in (*changed, *added)
        behind += [digested(name)] * (is_behind and not is_made_anew)
        if is_behind or is_made_anew:
            for out in (out for kind in ("outs", "plots", "metrics") for out in stage.get(kind, [])):
                products += [out] if isinstance(out, str) else out
    behind = [*dict.fromkeys(behind)]
    upgrade = Upgrade(recorded.captrain, __version__, changed, behind, added, removed, present != text)
    if upgrade.is_needed and not dry:
        publish_text(root / "dvc.yaml", text)
        publish_text(root / VERSIONS, versions_text(text, after))
    return upgrade


def pending_upgrade(root: Path) -> Upgrade | None:
    """Return what `captrain upgrade` would change; None if no stage changes, or in captrain's own repository.

    Raises:
        UserError: captrain.yaml is invalid.
    """
    if recorded_versions(root) is None:
        return None
    upgrade = upgrade_project(root, dry=True)
    return upgrade if upgrade.changed or upgrade.added or upgrade.removed else None


LOCK_S = 10
"""Seconds between two writes of dvc.lock."""
RUNNING = ".dvc/tmp/rwlock"
"""File of DVC that names the running processes."""


def remove_cut_off(root: Path, files: Sequence[str] = (RUNNING, "dvc.lock")) -> list[str]:
    """Remove DVC's lock files if a kill cut them off and DVC cannot read them. DVC restores stages from its cache.

    Args:
        root: folder of the project.
        files: names of the files that may be removed.

    Returns:
        The names of removed files.
    """
    from dvc.dvcfile import Lockfile
    from dvc.exceptions import DvcException

    def is_cut_off(name: str) -> bool:
        try:
            if (root / name).exists() and name == "dvc.lock":
                Lockfile.validate(read_yaml(root / name, JsonObject))
            elif (root / name).exists():
                read_json(root / name, JsonObject)
        except (UserError, DvcException):
            return True
        return False

    names = [name for name in files if is_cut_off(name)]
    if names:
        time.sleep(1)  # a running DVC may be writing it
    removed = [name for name in names if is_cut_off(name)]
    for name in removed:
        (root / name).unlink()
    return removed


class _Places(logging.Handler):
    """Tells each stage, before DVC starts it, its place among the stages to run.

    DVC names a stage in its log before it starts or skips it. The stage inherits the environment.
    """

    def __init__(self, stages: Collection[str], skipped: Collection[str]) -> None:
        super().__init__()
        self._left, self._count, self._skipped = {*stages}, len(stages), skipped

    def emit(self, record: logging.LogRecord) -> None:
        """Set the environment variable PLACE for the stage that the record names."""
        if "tage '%s'" not in str(record.msg) or not isinstance(record.args, tuple):
            return
        os.environ.pop(PLACE, None)
        name = row_of(str(record.args[0]))
        if name in self._left:
            self._left.remove(name)
            os.environ[PLACE] = f"{self._count - len(self._left):2} of {self._count}"
        elif name in self._skipped:
            os.environ[PLACE] = ""


def number_stages(stages: Collection[str], skipped: Collection[str]) -> None:
    """Begin the lines of stages with their place, "7 of 27", when `run_pipeline` runs them; skipped ones print none."""
    logger = logging.getLogger("dvc.stage")  # the parent of the loggers that name stages
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Places(stages, skipped))


def prepare_dvc(root: Path) -> None:
    """Silence DVC's own output in this process, and remove its list of running processes if a kill has cut it off.

    A damaged dvc.lock stays: it may hold a merge conflict, and git has it.
    """
    for name in remove_cut_off(root, [RUNNING]):
        print(f"removed {name}, which a kill had cut off", flush=True)
    logging.getLogger("dvc").setLevel(logging.CRITICAL)  # after its import, which sets another level


class _LockFile:
    """Writes finished stages to dvc.lock together, at most every `LOCK_S` seconds.

    DVC itself parses and writes the whole file after each stage, which takes longer than a short stage. If a kill loses
    finished stages, the next run restores them from DVC's run cache.
    """

    def __init__(self) -> None:
        self._finished, self._written, self._writing = list["Stage"](), time.monotonic(), Lock()
        self.is_interrupted = False
        """Set to start no further stage."""

    def reproduce(self, stage: "Stage", *, interactive: bool, **settings: object) -> "Stage | None":
        """Run a stage unless it is up to date. DVC calls this in place of its own, which also writes."""
        if self.is_interrupted:
            raise InterruptedError
        finished: Stage | None = stage.reproduce(interactive, **settings)
        if finished is not None:
            self._finished.append(finished)
        if time.monotonic() - self._written > LOCK_S:
            self.write()
        return finished

    def write(self) -> None:
        """Write the finished stages that are not yet written."""
        with self._writing:
            for path in dict.fromkeys(stage.path for stage in self._finished):
                stages = [stage for stage in self._finished if stage.path == path]
                stages[0].dvcfile.dump_stages(stages, update_pipeline=False)
            self._finished, self._written = [], time.monotonic()

    def close(self) -> None:
        """Wait until a write has ended, and block later ones: the end of this process must not cut one off."""
        self._writing.acquire()


def run_pipeline(root: Path, targets: Sequence[str] = ()) -> None:
    """Run `dvc repro TARGETS`. An interrupt ends the running stage, even if it still imports its libraries.

    Raises:
        UserError: a stage failed, or DVC cannot run.
    """
    os.environ[launch.PIPELINE] = str(os.getpid())
    # DVC ignores interrupts while a stage runs, but only in the main thread.
    outcome, lock = Future[None](), _LockFile()
    Thread(target=_reproduce, args=(root, targets, outcome, lock), daemon=True).start()
    try:
        outcome.result()
    except KeyboardInterrupt:
        lock.is_interrupted = True
        launch.end_children()
        wait([outcome], timeout=1)  # it writes the finished stages
        launch.end_children()  # DVC was just about to start a stage
        lock.close()
        raise
    finally:
        del os.environ[launch.PIPELINE]


def _reproduce(root: Path, targets: Sequence[str], outcome: "Future[None]", lock: _LockFile) -> None:
    """Run `dvc repro` and store its end in the future."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo, lock_repo

    # Stages inherit this, so that Ctrl-C prints no traceback while their interpreter starts (`captrain/__init__.py`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with Repo(str(root)) as repo:
            try:
                repo.reproduce(targets=[*targets], repro_fn=lock.reproduce)  # pyright: ignore[reportCallIssue]: DVC gives a function to the class as a method
            finally:
                with lock_repo(repo):
                    lock.write()
    except DvcException as error:
        cause = error
        while isinstance(cause.__cause__, DvcException):
            cause = cause.__cause__
        problem = f"{error}: {cause}" if cause is not error else str(error)
        remedy = "fix what the lines above name and run again: finished stages are kept"
        outcome.set_exception(UserError(problem, remedy))
    except BaseException as error:  # or the main thread would wait for ever
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def run_stage(root: Path, name: str) -> None:
    """Run a stage in a project, which is the current folder: the project's script of that name, or else captrain's.

    Raises:
        UserError: there is no such stage, or its code differs from the recorded digest.
    """
    local = root / f"stages/{digested(name)}.py"
    if not local.is_file() and name not in shipped_stages():
        names = {*shipped_stages(), *(path.stem for path in local.parent.glob("*.py"))} - {"row"}
        near = difflib.get_close_matches(name, sorted(names))
        remedy = f"did you mean {' or '.join(near)}?" if near else "`dvc stage list --name-only` lists the stages"
        raise UserError(f"there is no stage {name!r}", remedy)
    script = local if local.is_file() else stage_scripts(name)[0]
    recorded = recorded_versions(root)
    if recorded is not None and script != local and recorded.stages.get(digested(name)) != stage_digest(name):
        problem = (
            f"stage {name} was recorded with captrain {recorded.captrain}, but {__version__} is installed"
            if recorded.captrain != __version__
            else f"the installed code of stage {name} differs from the code that {VERSIONS} records"
        )
        raise UserError(
            problem,
            "`captrain upgrade --dry-run` lists the stages that become stale; `captrain upgrade` accepts the new code",
        )
    sys.argv = [str(script), name]
    runpy.run_path(str(script), run_name="__main__")
