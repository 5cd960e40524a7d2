"""Provenance of results: each stage of the pipeline as dvc.lock records it, against what is here, in plain words.

`stage_changes` has the differences of one stage, `stage_states` what they come to. What git has committed is the matter
of `evidence`.

Looking takes no lock: `dvc repro` waits three seconds for its own and then gives up, so that somebody who holds it
while hashing would end the run. What changes while it is looked at is called so; what runs is told by the caller.
"""

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from captrain.errors import UserError
from captrain.monitoring.versions import MISSING, value_changes
from captrain.records import require_regular

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import Stage

Kind = Literal["never run", "changed", "altered", "uncached", "missing", "absent", "cached", "absent input"]
Sort = Literal["code", "specification", "data", "result"]
State = Literal["fresh", "cached", "waiting", "missing", "stale", "never run", "running", "changing"]
STALE = ("changed", "altered", "uncached")
READ_BY_DVC = ("dvc.yaml", "dvc.lock", "params.yaml", "results/spec.yaml")
LOOKS = 3
"""Times that the stages are looked at until nothing is recorded meanwhile."""


@dataclass(frozen=True)
class Change:
    """One difference between what dvc.lock records of a stage and what is here.

    Kinds: `changed` input, code, parameter or command; `altered` output; `uncached` output in place that DVC's cache
    has lost; `missing` output that git should hold; `absent` output of DVC's cache, not here at all; `cached` output
    that the cache can put back; `absent input`, an output of another stage that is not here. What was `changed` is of a
    sort: see `sort_of`; a command counts as code.
    """

    kind: Kind
    text: str
    path: str = ""
    sort: Sort = "result"


@dataclass(frozen=True)
class StageState:
    """State in which `dvc repro` would find a stage, and why, in words."""

    name: str
    state: State
    reasons: tuple[str, ...]


@contextmanager
def dvc_pipeline(root: Path) -> "Iterator[Repo]":
    """Open the DVC repository at `root`, not locked, and DVC silent."""
    from dvc.exceptions import DvcException  # a second to import
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    for path in (root / name for name in READ_BY_DVC):
        if path.exists() and not path.is_dir():
            require_regular(path)  # DVC would wait for a pipe
    try:
        with Repo(str(root)) as repo:
            yield repo
    except (DvcException, RecursionError) as error:
        is_endless = isinstance(error, RecursionError)
        message = "one of its files is nested without end" if is_endless else " ".join(str(error).split())
        raise UserError(
            f"DVC cannot read the pipeline in {root.name}/: {message}",
            "run it again if another dvc command is at work, which may have been writing; a dvc.lock that a kill has "
            "cut off is to be removed: `dvc repro` then takes from its cache what was whole; else see `dvc status`",
        ) from error


def path_of(entry: "Output", root: Path) -> str:
    """Return the path of an input or output relative to the root, with forward slashes."""
    path = Path(entry.fs_path)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def stages_by_name(repo: "Repo") -> "dict[str, Stage]":
    """Collect stages by name, each after those it depends on."""
    import networkx

    return {name_of(stage): stage for stage in networkx.dfs_postorder_nodes(repo.index.graph)}


def name_of(stage: "Stage") -> str:
    """Name of a stage of dvc.yaml; file name of data added with `dvc add`."""
    return getattr(stage, "name", None) or Path(stage.path).name


def sort_of(path: str, outputs: Collection[str]) -> Sort:
    """Sort a file of the pipeline: code, specification, data from outside, or a `result` of one of its stages."""
    if any(path == out or path.startswith(f"{out}/") for out in outputs):
        return "result"
    if path.endswith(".py") or path.startswith(("src/", "stages/")) or path == "dvc.yaml":
        return "code"
    return "specification" if path == "params.yaml" or path.split("/")[0] == "conf" else "data"


def stage_changes(stage: "Stage", outputs: set[str], root: Path) -> list[Change]:
    """List all differences of one stage; `outputs` are the outputs of all stages."""
    if not any(entry.hash_info for entry in (*stage.deps, *stage.outs)):
        return [Change("never run", "dvc.lock has no record of it")]
    changes: list[Change] = []
    if stage.is_callback or stage.always_changed:
        changes.append(Change("changed", "it runs every time"))
    if getattr(stage, "cmd_changed", False):
        changes.append(Change("changed", "its command changed", "dvc.yaml", "code"))
    for dep in stage.deps:
        changes += _input_changes(dep, path_of(dep, root), outputs)
    for out in stage.outs:
        changes += _output_changes(out, path_of(out, root))
    return changes


def _input_changes(dep: "Output", path: str, outputs: set[str]) -> list[Change]:
    from dvc.dependency.param import ParamsDependency

    status = dep.workspace_status()
    if not status:
        return []
    if isinstance(dep, ParamsDependency) and dep.exists:
        recorded = dep.hash_info.value if dep.hash_info else None
        return [
            Change("changed", parameter_text(key, path, before, now), path, "specification")
            for key, (before, now) in value_changes(recorded or {}, dep.read_params()).items()
        ]
    sort = sort_of(path, outputs)
    word = "code" if sort == "code" else "input"
    if dep.exists:
        return [Change("changed", f"{word} changed: {path}", path, sort)]
    if sort == "result":
        return [Change("absent input", f"input {path} is not here", path)]
    return [Change("changed", f"{word} is missing: {path}", path, sort)]


def _output_changes(out: "Output", path: str) -> list[Change]:
    uncached = out.use_cache and bool(out.hash_info) and out.changed_cache()
    if not out.exists:
        if not out.use_cache:
            return [Change("missing", f"output {path} is missing", path)]
        if uncached or not out.hash_info:
            return [Change("absent", f"output {path} is neither here nor in DVC's cache", path)]
        return [Change("cached", f"output {path} is in DVC's cache only; `dvc checkout` puts it in place", path)]
    if out.workspace_status():
        return [Change("altered", f"output {path} was altered after the stage made it", path)]
    return [Change("uncached", f"output {path} is here but no longer in DVC's cache", path)] if uncached else []


def parameter_text(key: str, path: str, before: object, now: object) -> str:
    """Word a parameter that changed."""
    return f"parameter {key} ({path}): {value_text(before)} -> {value_text(now)}"


def value_text(value: object) -> str:
    """Word a value of a parameter."""
    return "(none)" if value is MISSING else json.dumps(value, default=str)


def stage_states(root: Path, running: Collection[str] = ()) -> list[StageState]:
    """Find the state of every stage, in the order of the pipeline.

    fresh: nothing to do; cached: outputs can be put back; missing: outputs must be made again; stale: something it
    was run on changed; never run; waiting: fresh or cached itself, but a stage before it is not; running; changing:
    its files came or went while they were looked at.

    Args:
        root: the folder that holds dvc.yaml.
        running: stages that run now (`processes.running`): what they write is not whole, and is not looked at.

    Raises:
        UserError: there is no DVC pipeline, it does not parse, or dvc.lock is written faster than it can be looked at.
    """
    root = root.resolve()
    for _ in range(LOOKS):
        before = lock_bytes(root)
        states = _look(root, running)
        if lock_bytes(root) == before:
            return states
    raise UserError(
        f"dvc.lock was written each time that it was looked at, {LOOKS} times: stages end faster than can be told",
        "run it again in a moment",
    )


def lock_bytes(root: Path) -> bytes:
    """Read dvc.lock as it stands, by which a run that goes on meanwhile is noticed."""
    path = root / "dvc.lock"
    return path.read_bytes() if path.is_file() else b""


def _look(root: Path, running: Collection[str]) -> list[StageState]:
    """See `stage_states`."""
    import networkx
    from dvc.exceptions import DvcException

    states: dict[str, StageState] = {}
    with dvc_pipeline(root) as repo:
        stages = stages_by_name(repo)
        outputs = {path_of(out, root) for stage in stages.values() for out in stage.outs}
        for name, stage in stages.items():
            if name in running:
                states[name] = StageState(name, "running", ("what it writes is not whole yet",))
                continue
            try:
                changes = stage_changes(stage, outputs, root)
            except (DvcException, OSError) as error:
                message = " ".join(str(error).split()).replace(f"{root}/", "")
                reason = f"its files changed while they were looked at: {message}"
                states[name] = StageState(name, "changing", (reason,))
                continue
            kinds = {change.kind for change in changes}
            earlier = [name_of(source) for source in networkx.descendants(repo.index.graph, stage)]
            ahead = [
                f"{source} ({states[source].state})"
                for source in stages
                if source in earlier and states[source].state not in ("fresh", "cached", "waiting")
            ]
            reasons = tuple(change.text for change in changes)
            state = _state(kinds, bool(ahead))
            if state == "waiting":
                reasons += (f"runs again only if its inputs come out different: {', '.join(ahead)}",)
            states[name] = StageState(name, state, reasons)
    return list(states.values())


def _state(kinds: Collection[str], waits: bool) -> State:
    if "never run" in kinds:
        return "never run"
    if any(kind in kinds for kind in STALE):
        return "stale"
    if "missing" in kinds or "absent" in kinds:
        return "missing"
    if waits:
        return "waiting"
    return "cached" if "cached" in kinds or "absent input" in kinds else "fresh"
