"""The pipeline of a project: the stages that captrain brings along, each with what decides its results; its runs, and
its upgrade to another version of captrain, of which what it makes stale is said before it is taken over.

In captrain's own repository a stage depends on the files of its code. A project has no such files: there the digest of
a stage's code stands in captrain.yaml and is a param of the stage, so that DVC knows what another version of captrain
makes stale, and nothing is made again before `captrain upgrade` has taken the new digests over.
"""

import logging
import runpy
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
from captrain.run import alternatives, code_closure, files_below, read_stages, row_of, shipped

VERSIONS = "captrain.yaml"
COMPONENTS = "components"
"""Folder of a project's own benchmarks, policies and other parts."""
SELECTABLE = {"base", "benchmark", "policy", "analyst", "synthesizer", "trainer", "router"}
"""Sections of the configuration that a class of the project's may stand behind."""
SPEC = "results/spec.yaml"
HEAD = "# The stages of captrain, as `captrain init` and `captrain upgrade` write them. What `captrain run` runs is\n"
HEAD += "# captrain's own, unless stages/NAME.py is here; its code is known by the digests in captrain.yaml.\n"


class Versions(Record):
    """Content of captrain.yaml: the captrain that a project's results are made by, and the digests of the dvc.yaml that
    it wrote and of each stage's code."""

    captrain: str
    pipeline: str = ""
    stages: dict[str, str]


def shipped_stages() -> dict[str, JsonObject]:
    """Read the stages that captrain brings along, in the order of the pipeline, each by its own name."""
    return {row_of(name): stage for name, stage in read_stages(shipped("dvc.yaml"), "install captrain again").items()}


def project_pipeline(root: Path) -> str:
    """Write the text of a project's dvc.yaml: the same stages and results, code by its digest."""
    stages = {}
    for name, stage in shipped_stages().items():
        keys = [key for entry in stage.get("params", []) if isinstance(entry, dict) for key in entry.get(SPEC, [])]
        script = f"stages/{name}.py"
        deps = [script] if (root / script).is_file() else []
        deps += [COMPONENTS] if SELECTABLE & {key.partition(".")[0] for key in keys} else []
        deps += [path for path in stage.get("deps", []) if not path.startswith(("src/", "stages/"))]
        params = [*stage.get("params", []), {VERSIONS: [f"stages.{name}"]}]
        whole = {"desc": "", "cmd": "", "params": [], "deps": [], **stage}
        whole |= {"cmd": f"captrain run {name}", "params": params, "deps": deps}
        stages[name] = {key: value for key, value in whole.items() if value}
    pipeline = {**read_yaml(shipped("dvc.yaml"), JsonObject), "stages": stages}
    return HEAD + yaml.safe_dump(pipeline, sort_keys=False, width=118, default_flow_style=None)


def stage_code(name: str) -> list[Path]:
    """List the files of code that a stage runs, first its script: its own, or that of all rows with the row's entry."""
    from captrain.comparison import row_file

    script = shipped(f"stages/{name}.py")
    starts = [script] if script.is_file() else [shipped("stages/row.py"), row_file(name)]
    code = sorted({path for start in starts for path in code_closure(start)})
    return [starts[0], *(path for path in code if path != starts[0])]


def stage_digest(name: str) -> str:
    """Hash the code that a stage runs; of `compose` with the configuration that captrain brings along."""
    folders = [Path(__file__).parents[1] / "run", shipped("conf")] if name == "compose" else []
    return file_digest(*stage_code(name), *(path for folder in folders for path in files_below(folder)))


def stage_digests() -> dict[str, str]:
    """Hash each stage's code as it is installed."""
    return {name: stage_digest(name) for name in shipped_stages()}


def versions_text(pipeline: str, stages: Mapping[str, str]) -> str:
    """Write the text of captrain.yaml, from the text of dvc.yaml and the digests of the stages' code."""
    head = "# Which captrain this project's results are made by; `captrain upgrade` takes over what is installed.\n"
    content = {"captrain": __version__, "pipeline": digest(pipeline), "stages": dict(stages)}
    return head + yaml.safe_dump(content, sort_keys=False)


def recorded_versions(root: Path) -> Versions | None:
    """Read captrain.yaml; None in captrain's own repository, which has the code itself.

    Raises:
        UserError: it is not what captrain wrote.
    """
    path = root / VERSIONS
    return read_yaml(path, Versions, "restore it from git, or run `captrain upgrade`") if path.exists() else None


@dataclass(frozen=True)
class Upgrade:
    """Change from one version to the installed one: stages whose code differs, those behind them, which run again only
    if what they read comes out different, and stages that came or went."""

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
    """Compare a project with the captrain that is installed, and take that over.

    Args:
        root: of the project.
        dry: change nothing.

    Raises:
        UserError: this is captrain's own repository, or dvc.yaml was edited since captrain wrote it.
    """
    recorded = recorded_versions(root)
    if recorded is None:
        raise UserError(
            f"there is no {VERSIONS} in {root.name}/: its stages depend on the files of captrain themselves",
            "`dvc status` says what is stale",
        )
    present, text = read_text(root / "dvc.yaml", "restore it from git"), project_pipeline(root)
    if digest(present) != recorded.pipeline and present != text and not dry:
        raise UserError(
            "dvc.yaml was edited since captrain wrote it, and would be replaced",
            "keep your changes aside, `git checkout dvc.yaml`, and upgrade again; or `captrain upgrade --dry-run`",
        )
    before, after = recorded.stages, stage_digests()
    changed = [name for name in after if name in before and before[name] != after[name]]
    added, removed = [name for name in after if name not in before], [name for name in before if name not in after]
    # Behind these are the stages that read, directly or not, what they make; in the order in which they run.
    behind, products = list[str](), list[str]()
    for name, stage in yaml.safe_load(text)["stages"].items():
        files = [path for entry in stage["params"] if isinstance(entry, dict) for path in entry]
        inputs = [*stage.get("deps", []), *files]
        is_behind = any(path == out or path.startswith(f"{out}/") for path in inputs for out in products)
        is_made_anew = name in changed or name in added
        behind += [name] * (is_behind and not is_made_anew)
        if is_behind or is_made_anew:
            for out in (out for kind in ("outs", "plots", "metrics") for out in stage.get(kind, [])):
                products += [out] if isinstance(out, str) else out
    upgrade = Upgrade(recorded.captrain, __version__, changed, behind, added, removed, present != text)
    if upgrade.is_needed and not dry:
        publish_text(root / "dvc.yaml", text)
        publish_text(root / VERSIONS, versions_text(text, after))
    return upgrade


def pending_upgrade(root: Path) -> Upgrade | None:
    """List what `captrain upgrade` would change of a project; None where no stage is to be taken over, and in
    captrain's own repository.

    Raises:
        UserError: captrain.yaml is not what captrain wrote.
    """
    if recorded_versions(root) is None:
        return None
    upgrade = upgrade_project(root, dry=True)
    return upgrade if upgrade.changed or upgrade.added or upgrade.removed else None


def remove_cut_off(root: Path) -> list[str]:
    """Remove files of DVC's own that a kill has cut off while DVC wrote them, and that it cannot read: of the locks in
    one no process is left, and stages that the other told of are restored from DVC's cache.

    Returns:
        Their names.
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

    names = [name for name in (".dvc/tmp/rwlock", "dvc.lock") if is_cut_off(name)]
    if names:
        time.sleep(1)  # a DVC at work may be writing it
    removed = [name for name in names if is_cut_off(name)]
    for name in removed:
        (root / name).unlink()
    return removed


def run_pipeline(root: Path) -> None:
    """Bring the pipeline up to date as `dvc repro` does, of which nothing is seen but what the stages print.

    Raises:
        UserError: a stage failed, or DVC cannot run.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    for name in remove_cut_off(root):
        print(f"removed {name}, which a kill had cut off: DVC restores from its cache what was whole", flush=True)
    try:
        with Repo(str(root)) as repo:
            repo.reproduce()  # pyright: ignore[reportCallIssue]: DVC gives a function to the class as a method
    except DvcException as error:
        cause = error
        while isinstance(cause.__cause__, DvcException):
            cause = cause.__cause__
        raise UserError(
            f"{error}: {cause}" if cause is not error else str(error),
            "mend what the lines above name and run again: stages that ended are kept",
        ) from None


def run_stage(root: Path, name: str) -> None:
    """Run one stage in a project, whose folder is the current one: its own script of that name, or captrain's.

    Raises:
        UserError: there is no such stage, or the project's results are made by another captrain than is installed.
    """
    local = root / f"stages/{name}.py"
    if not local.is_file() and name not in shipped_stages():
        names = {*shipped_stages(), *(path.stem for path in local.parent.glob("*.py"))} - {"row"}
        raise UserError(f"there is no stage {name!r}", alternatives(name, sorted(names)))
    script = local if local.is_file() else stage_code(name)[0]
    recorded = recorded_versions(root)
    if recorded is not None and script != local and recorded.stages.get(name) != stage_digest(name):
        raise UserError(
            f"stage {name} of this project is that of captrain {recorded.captrain}, and another is installed",
            "`captrain upgrade` says what that makes stale, and takes it over; or install the version in captrain.yaml",
        )
    sys.argv = [str(script), name]
    runpy.run_path(str(script), run_name="__main__")
