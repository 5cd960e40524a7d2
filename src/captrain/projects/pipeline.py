"""The pipeline of a project: the stages that captrain brings along, each with what decides its results.

In captrain's own repository a stage depends on the files of its code. A project has no such files: there the digest of
a stage's code stands in captrain.yaml and is a param of the stage, so that DVC knows what another version of captrain
makes stale, and nothing is made again before `captrain upgrade` has taken the new digests over.
"""

import logging
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from captrain.config import alternatives, read_stages, row_of, shipped
from captrain.errors import UserError
from captrain.execution import code_closure, files_below
from captrain.records import JsonObject, Record, digest, file_digest, read_json, read_yaml

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
    pipeline = read_yaml(shipped("dvc.yaml"), JsonObject)
    stages = {name: _project_stage(name, stage, root) for name, stage in shipped_stages().items()}
    text = yaml.safe_dump({**pipeline, "stages": stages}, sort_keys=False, width=118, default_flow_style=None)
    return HEAD + text


def _project_stage(name: str, stage: JsonObject, root: Path) -> JsonObject:
    params = [*stage.get("params", []), {VERSIONS: [f"stages.{name}"]}]
    deps = [path for path in stage.get("deps", []) if not path.startswith(("src/", "stages/"))]
    if _sections(stage) & SELECTABLE:
        deps.insert(0, COMPONENTS)
    if (script := f"stages/{name}.py") and (root / script).is_file():
        deps.insert(0, script)
    whole = {"desc": "", "cmd": "", "params": [], "deps": [], **stage}
    whole |= {"cmd": f"captrain run {name}", "params": params, "deps": deps}
    return {key: value for key, value in whole.items() if value}


def _sections(stage: JsonObject) -> set[str]:
    """List the sections of the configuration that are params of a stage."""
    keys = [key for entry in stage.get("params", []) if isinstance(entry, dict) for key in entry.get(SPEC, [])]
    return {key.partition(".")[0] for key in keys}


def stage_code(name: str) -> list[Path]:
    """List the files of code that a stage runs, first its script: its own, or that of all rows with the row's entry."""
    from captrain.comparison import row_file

    script = shipped(f"stages/{name}.py")
    starts = [script] if script.is_file() else [shipped("stages/row.py"), row_file(name)]
    code = sorted({path for start in starts for path in code_closure(start)})
    return [starts[0], *(path for path in code if path != starts[0])]


def stage_digest(name: str) -> str:
    """Hash the code that a stage runs; of `compose` with the configuration that captrain brings along."""
    files = stage_code(name)
    if name == "compose":
        files += [*files_below(Path(__file__).parents[1] / "config"), *files_below(shipped("conf"))]
    return file_digest(*files)


def stage_digests() -> dict[str, str]:
    """Hash each stage's code as it is installed."""
    return {name: stage_digest(name) for name in shipped_stages()}


def versions_text(version: str, pipeline: str, stages: Mapping[str, str]) -> str:
    """Write the text of captrain.yaml.

    Args:
        version: of captrain.
        pipeline: text of dvc.yaml.
        stages: digests of their code.
    """
    head = "# Which captrain this project's results are made by; `captrain upgrade` takes over what is installed.\n"
    content = {"captrain": version, "pipeline": digest(pipeline), "stages": dict(stages)}
    return head + yaml.safe_dump(content, sort_keys=False)


def recorded_versions(root: Path) -> Versions | None:
    """Read captrain.yaml; None in captrain's own repository, which has the code itself.

    Raises:
        UserError: it is not what captrain wrote.
    """
    path = root / VERSIONS
    if not path.exists():
        return None
    return read_yaml(path, Versions, "restore it from git, or run `captrain upgrade`")


def remove_cut_off(root: Path) -> list[str]:
    """Remove files of DVC's own that a kill has cut off while DVC wrote them, and that it cannot read: of the locks in
    one no process is left, and stages that the other told of are restored from DVC's cache.

    Returns:
        Their names.
    """
    names = [name for name in (".dvc/tmp/rwlock", "dvc.lock") if not _is_whole(root / name)]
    if names:
        time.sleep(1)  # a DVC at work may be writing it
    removed = [name for name in names if not _is_whole(root / name)]
    for name in removed:
        (root / name).unlink()
    return removed


def _is_whole(path: Path) -> bool:
    from dvc.dvcfile import Lockfile
    from dvc.exceptions import DvcException

    if not path.exists():
        return True
    try:
        if path.suffix == ".lock":
            Lockfile.validate(read_yaml(path, JsonObject))
        else:
            read_json(path, JsonObject)
    except (UserError, DvcException):
        return False
    return True


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
