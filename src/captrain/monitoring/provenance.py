"""Where results come from: which stages are up to date, and whether committed results belong to the committed code.

DVC knows what a stage was run on (dvc.lock) and what is here; git knows what is committed. `stage_states` puts the
first in plain words, `verify` holds both against each other. Outputs in DVC's cache alone (artifacts/) are absent in a
fresh clone: that is reported as not checked, and is no fault, because their hashes are in dvc.lock and every stage
that read them recorded the same hash.

Looking takes no lock: `dvc repro` waits three seconds for its own and then gives up, so that somebody who holds it
while hashing would end the run. What changes while it is looked at is called so; what runs is told by the caller.
"""

import json
import logging
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from captrain.config import compose_spec, load_choice, load_spec
from captrain.errors import UserError
from captrain.monitoring import processes
from captrain.monitoring.versions import MISSING, difference, value_changes
from captrain.records import JsonObject

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import Stage

Kind = Literal["never run", "changed", "altered", "uncached", "missing", "absent", "cached", "absent input"]
State = Literal["fresh", "cached", "waiting", "missing", "stale", "never run", "running", "changing"]
STALE = ("changed", "altered", "uncached")
LOOKS = 3
"""How often the stages are looked at until nothing is recorded meanwhile."""
SPEC = "results/spec.yaml"


@dataclass(frozen=True)
class Change:
    """One difference between what dvc.lock records of a stage and what is here.

    Kinds: `changed` input, code, parameter or command; `altered` output; `uncached` output in place that DVC's cache
    has lost; `missing` output that git should hold; `absent` output of DVC's cache, not here at all; `cached` output
    that the cache can put back; `absent input`, an output of another stage that is not here.
    """

    kind: Kind
    text: str
    path: str = ""


@dataclass(frozen=True)
class StageState:
    """What `dvc repro` would find of one stage, and why, in words."""

    name: str
    state: State
    reasons: tuple[str, ...]


@dataclass
class Verification:
    """What was found to hold, what does not, and what could not be looked at."""

    holds: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


@contextmanager
def _pipeline(root: Path) -> "Iterator[Repo]":
    """The DVC repository at `root`, not locked, and DVC silent."""
    from dvc.exceptions import DvcException  # a second to import
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    try:
        with Repo(str(root)) as repo:
            yield repo
    except DvcException as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"DVC cannot read the pipeline in {root.name}/: {message}",
            "run it again if another dvc command is at work, which may have been writing; else see `dvc status`",
        ) from error


def _path(entry: "Output", root: Path) -> str:
    """Path of an input or output relative to the root, with forward slashes."""
    path = Path(entry.fs_path)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _stages(repo: "Repo") -> "dict[str, Stage]":
    """Stages by name, each after those it depends on."""
    import networkx

    return {_name(stage): stage for stage in networkx.dfs_postorder_nodes(repo.index.graph)}


def _name(stage: "Stage") -> str:
    """Name of a stage of dvc.yaml; file name of data added with `dvc add`."""
    return getattr(stage, "name", None) or Path(stage.path).name


def _changes(stage: "Stage", outputs: set[str], root: Path) -> list[Change]:
    """All differences of one stage; `outputs` are the outputs of all stages."""
    if not any(entry.hash_info for entry in (*stage.deps, *stage.outs)):
        return [Change("never run", "dvc.lock has no record of it")]
    changes: list[Change] = []
    if stage.is_callback or stage.always_changed:
        changes.append(Change("changed", "it runs every time"))
    if getattr(stage, "cmd_changed", False):
        changes.append(Change("changed", "its command changed"))
    for dep in stage.deps:
        changes += _input_changes(dep, _path(dep, root), outputs)
    for out in stage.outs:
        changes += _output_changes(out, _path(out, root))
    return changes


def _input_changes(dep: "Output", path: str, outputs: set[str]) -> list[Change]:
    from dvc.dependency.param import ParamsDependency

    status = dep.workspace_status()
    if not status:
        return []
    if isinstance(dep, ParamsDependency) and dep.exists:
        recorded = dep.hash_info.value if dep.hash_info else None
        return [
            Change("changed", f"parameter {key} ({path}): {_text(before)} -> {_text(now)}")
            for key, (before, now) in value_changes(recorded or {}, dep.read_params()).items()
        ]
    sort = "code" if path.endswith(".py") or path.startswith(("src/", "stages/")) else "input"
    if dep.exists:
        return [Change("changed", f"{sort} changed: {path}")]
    if any(path == out or path.startswith(f"{out}/") for out in outputs):
        return [Change("absent input", f"input {path} is not here")]
    return [Change("changed", f"{sort} is missing: {path}")]


def _output_changes(out: "Output", path: str) -> list[Change]:
    uncached = out.use_cache and bool(out.hash_info) and out.changed_cache()
    if not out.exists:
        if not out.use_cache:
            return [Change("missing", f"output {path} is missing")]
        if uncached or not out.hash_info:
            return [Change("absent", f"output {path} is neither here nor in DVC's cache", path)]
        return [Change("cached", f"output {path} is in DVC's cache only; `dvc checkout` puts it in place", path)]
    if out.workspace_status():
        return [Change("altered", f"output {path} was altered after the stage made it")]
    return [Change("uncached", f"output {path} is here but no longer in DVC's cache")] if uncached else []


def _text(value: object) -> str:
    return "(none)" if value is MISSING else json.dumps(value, default=str)


def stage_states(root: Path, running: Collection[str] = ()) -> list[StageState]:
    """The state of every stage, in the order of the pipeline.

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
        before = _recorded(root)
        states = _look(root, running)
        if _recorded(root) == before:
            return states
    raise UserError(
        f"dvc.lock was written each time that it was looked at, {LOOKS} times: stages end faster than can be told",
        "run it again in a moment",
    )


def _recorded(root: Path) -> bytes:
    path = root / "dvc.lock"
    return path.read_bytes() if path.exists() else b""


def _look(root: Path, running: Collection[str]) -> list[StageState]:
    """See `stage_states`."""
    import networkx
    from dvc.exceptions import DvcException

    states: dict[str, StageState] = {}
    with _pipeline(root) as repo:
        stages = _stages(repo)
        outputs = {_path(out, root) for stage in stages.values() for out in stage.outs}
        for name, stage in stages.items():
            if name in running:
                states[name] = StageState(name, "running", ("what it writes is not whole yet",))
                continue
            try:
                changes = _changes(stage, outputs, root)
            except (DvcException, OSError) as error:
                message = " ".join(str(error).split()).replace(f"{root}/", "")
                reason = f"its files changed while they were looked at: {message}"
                states[name] = StageState(name, "changing", (reason,))
                continue
            kinds = {change.kind for change in changes}
            earlier = [_name(source) for source in networkx.descendants(repo.index.graph, stage)]
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


def verify(root: Path) -> Verification:
    """Say whether the committed results were made by the committed code, specification and data.

    Raises:
        UserError: there is no pipeline, no dvc.lock, or no git commit to compare with; a stage runs, or one ended
            meanwhile.
    """
    verification = Verification()
    root = root.resolve()
    before = _recorded(root)
    _refuse_running(root)
    with _pipeline(root) as repo:
        if not (root / "dvc.lock").exists():
            raise UserError("dvc.lock is missing: no stage was ever run here", "run `dvc repro`")
        stages = _stages(repo)
        outputs = {_path(out, root): out for stage in stages.values() for out in stage.outs}
        _verify_stages(stages, set(outputs), root, verification)
        _verify_lock(repo, stages, root, verification)
        tracked = {_path(dep, root) for stage in stages.values() for dep in stage.deps}
        tracked -= {path for path in tracked if any(path == out or path.startswith(f"{out}/") for out in outputs)}
        tracked |= {path for path, out in outputs.items() if not out.use_cache}
        tracked |= {Path(stage.path).relative_to(root).as_posix() for stage in stages.values()} | {"dvc.lock"}
    if SPEC in outputs:
        _verify_spec(root, verification)
    _verify_committed(root, sorted(path for path in tracked if not Path(path).is_absolute()), verification)
    _refuse_running(root)
    if _recorded(root) != before:
        raise UserError("dvc.lock was written while it was verified", "wait for the end of `dvc repro`")
    return verification


def _refuse_running(root: Path) -> None:
    """What a stage is about to replace cannot be verified."""
    running, _ = processes.running(root, processes.pipeline(root))
    if running:
        raise UserError(f"{', '.join(running)} runs now: its results are not whole", "wait for the end of `dvc repro`")


def _verify_stages(stages: "Mapping[str, Stage]", outputs: set[str], root: Path, verification: Verification) -> None:
    """dvc.lock against what is here."""
    sound = 0
    for name, stage in stages.items():
        changes = _changes(stage, outputs, root)
        faults = [change for change in changes if change.kind in ("never run", "changed", "altered", "missing")]
        verification.problems += [f"{name}: {change.text}" for change in faults]
        absent = [change.path for change in changes if change.kind in ("absent", "cached")]
        verification.unchecked += [f"{path}, output of {name}: not here, not checked" for path in absent]
        sound += not faults
    verification.holds.append(
        f"{sound} of {len(stages)} stages: code, parameters and results here are those of dvc.lock"
    )


def _verify_lock(repo: "Repo", stages: Collection[str], root: Path, verification: Verification) -> None:
    """dvc.lock against itself: what one stage made is what a later one read."""
    recorded = (yaml.safe_load((root / "dvc.lock").read_text()) or {}).get("stages", {})
    # What DVC records of a stage stays when the stage goes; nothing that is here came from it.
    entries: dict[str, JsonObject] = {name: entry for name, entry in recorded.items() if name in stages}
    verification.problems += [
        f"dvc.lock records stage {name}, which dvc.yaml has no more: delete the entry `{name}:` from dvc.lock"
        for name in recorded
        if name not in stages
    ]
    output_hashes = {out["path"]: out.get("md5") for entry in entries.values() for out in entry.get("outs", [])}
    listings: dict[str, dict[str, str]] = {}
    links = 0
    for name, entry in entries.items():
        for dep in entry.get("deps", []):
            path, digest = dep["path"], dep.get("md5")
            expected = output_hashes.get(path)
            folder = next((out for out in output_hashes if path.startswith(f"{out}/")), None)
            if folder is not None:
                listing = listings.setdefault(folder, _listing(repo, output_hashes[folder]))
                expected = listing.get(path.removeprefix(f"{folder}/"))
            if expected is None:
                continue
            links += 1
            if expected != digest:
                verification.problems.append(f"dvc.lock: {name} read another {path} than its stage made last")
    verification.holds.append(
        f"dvc.lock: {links} outputs were read by later stages; each hash was compared with its maker's"
    )


def _listing(repo: "Repo", digest: str) -> dict[str, str]:
    """Hashes of the files of a recorded folder, as far as DVC's cache holds the listing."""
    path = Path(repo.cache.local.oid_to_path(digest))
    return {file["relpath"]: file["md5"] for file in json.loads(path.read_text())} if path.exists() else {}


def _verify_spec(root: Path, verification: Verification) -> None:
    """results/spec.yaml against params.yaml and conf/, composed again."""
    try:
        choice = load_choice(root / "params.yaml")
        composed = compose_spec(choice.experiment, choice.seed, choice.overrides, root / "conf")
        derived = load_spec(root / SPEC)
    except UserError as error:
        verification.problems.append(f"the configuration does not compose: {error.problem}")
        return
    changes = value_changes(*(spec.model_dump(mode="json", by_alias=True) for spec in (derived, composed)))
    verification.problems += [
        f"{SPEC}: {key} is {_text(actual)}, but params.yaml and conf/ say {_text(selected)}"
        for key, (actual, selected) in changes.items()
    ]
    if not changes:
        verification.holds.append(f"{SPEC} is what params.yaml and conf/ compose to")


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command.

    Raises:
        UserError: git refuses, for instance because nothing is committed yet.
    """
    process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise UserError(f"git {arguments[0]} failed: {process.stderr.strip()}", "run in a git clone that has a commit")
    return process.stdout


def _verify_committed(root: Path, paths: list[str], verification: Verification) -> None:
    """What is here against git's HEAD, for everything that makes results and for the results themselves."""
    head = _git(root, "rev-parse", "--short", "HEAD").strip()
    changed = [
        line for line in _git(root, "diff", "--name-only", "--relative", "-z", "HEAD", "--", *paths).split("\0") if line
    ]
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *paths)
    files = _git(root, "ls-files", "-z", "--", *paths).split("\0")
    unknown = [path for path in paths if not any(file == path or file.startswith(f"{path}/") for file in files)]
    verification.problems += [f"{path} differs from commit {head}{_amount(root, path)}" for path in changed]
    missing = sorted({*unknown, *filter(None, untracked.split("\0"))})
    verification.problems += [f"{path} is not committed" for path in missing]
    if not (changed or untracked or unknown):
        verification.holds.append(f"git: {len(paths)} inputs and results are as committed in {head}")


def _amount(root: Path, path: str) -> str:
    """By how much the numbers of a changed table differ from the committed ones."""
    if not path.endswith((".csv", ".json", ".jsonl")):
        return ""
    if not (root / path).exists():
        return ": it is missing"
    return f": {difference(_git(root, 'show', f'HEAD:./{path}'), (root / path).read_text(), Path(path).suffix)}"
