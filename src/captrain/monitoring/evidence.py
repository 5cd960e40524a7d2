"""Differences between the committed results and those that are here, collected; `verification` draws the conclusion.

Three accounts can disagree: the files here with dvc.lock (somebody edited something after the run), dvc.lock here with
the committed one (somebody ran the pipeline), and the files here with the commit. A difference is kept with its account
and its topic, because an edited file, other code and another machine ask for different remedies although each ends in
other bytes. A stage whose code, specification and inputs are recorded as the same and whose outputs are not is where a
run parted from the committed one: an `origin`, for which only the installation or the machine is left as a reason.

Outputs in DVC's cache alone (artifacts/) are absent in a fresh clone: that is noted as not checked, and is no fault,
because their hashes are in dvc.lock and every stage that read them recorded the same hash.
"""

import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from captrain.config import compose_spec, load_choice, load_spec
from captrain.errors import UserError
from captrain.monitoring.integrity import ListedFile
from captrain.monitoring.provenance import (
    dvc_pipeline,
    parameter_text,
    path_of,
    sort_of,
    stage_changes,
    stages_by_name,
    value_text,
)
from captrain.monitoring.versions import Rates, compare_rates, difference, value_changes
from captrain.records import JsonObject, parse_yaml, read_json, read_text

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import Stage

Topic = Literal["code", "specification", "data", "results", "edits", "record"]
Account = Literal["files", "lock", "commit"]
SPEC = "results/spec.yaml"
LOCK = "dvc.lock"
TABLES = (".csv", ".json", ".jsonl")
"""Results whose numbers are compared."""


@dataclass(frozen=True)
class Difference:
    """One thing that does not hold, in one line, by the account that disagrees: `files` here with dvc.lock, `lock` with
    the committed dvc.lock or with itself, files here with the `commit`.

    Topics: `code`, `specification` and `data` decide results; `results` were made again here, `edits` were not made by
    their stage; `record` is what dvc.lock or the commit lacks or contradicts.
    """

    topic: Topic
    account: Account
    text: str
    path: str = ""
    stage: str = ""


@dataclass
class Evidence:
    """Differences and states that `gather` collected.

    `code` has the changed files of code with the stages that run them, `remade` the stages whose outputs in dvc.lock
    are not those of the committed one, `origins` those of them for which no recorded input says why, and `rates` the
    tables of pass rates that were made again.
    """

    commit: str
    stages: list[str]
    differences: list[Difference] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    code: dict[str, list[str]] = field(default_factory=dict)
    remade: dict[str, list[str]] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    rates: dict[str, Rates] = field(default_factory=dict)
    links: int = 0


@dataclass(frozen=True)
class _Commit:
    """Comparison with git's HEAD: files that differ, files that git does not hold."""

    name: str
    changed: list[str]
    missing: list[str]

    def touches(self, output: str) -> bool:
        """Return whether anything of an output is not as committed."""
        return any(_is_below(path, output) for path in (*self.changed, *self.missing))


def gather(root: Path) -> Evidence:
    """Compare files, dvc.lock, specification and commit with each other.

    Args:
        root: the folder that holds dvc.yaml, resolved.

    Raises:
        UserError: there is no pipeline, no dvc.lock, or no git commit to compare with.
    """
    with dvc_pipeline(root) as repo:
        if not (root / LOCK).exists():
            raise UserError("dvc.lock is missing: no stage was ever run here", "run `dvc repro`")
        stages = stages_by_name(repo)
        outputs = {path_of(out, root): out for stage in stages.values() for out in stage.outs}
        commit = _compare_commit(root, _tracked(stages, outputs, root))
        evidence = Evidence(commit.name, [*stages])
        remedy = f"restore it with `git checkout {LOCK}`"
        texts = read_text(root / LOCK, remedy), committed_text(root, LOCK)
        lock, committed = (parse_yaml(text or "{}", JsonObject, LOCK, remedy).get("stages") or {} for text in texts)
        _compare_locks(lock, committed, outputs, evidence)
        topics = _compare_files(stages, outputs, root, commit, evidence)
        _check_lock(repo, lock, evidence)
    if SPEC in outputs:
        evidence.differences += _check_spec(root)
    _add_commit(root, commit, outputs, topics, evidence)
    evidence.code = _changed_code(root, evidence.differences)
    return evidence


def _tracked(stages: "Mapping[str, Stage]", outputs: "Mapping[str, Output]", root: Path) -> list[str]:
    """List the paths that git is to hold: code, specification, data from outside, results outside of DVC's cache, and
    the pipeline."""
    deps = {path_of(dep, root) for stage in stages.values() for dep in stage.deps}
    paths = {path for path in deps if sort_of(path, outputs) != "result"}
    paths |= {path for path, out in outputs.items() if not out.use_cache}
    paths |= {Path(stage.path).relative_to(root).as_posix() for stage in stages.values()} | {LOCK}
    return sorted(path for path in paths if not Path(path).is_absolute())


def _compare_locks(
    lock: Mapping[str, JsonObject],
    committed: Mapping[str, JsonObject],
    outputs: Collection[str],
    evidence: Evidence,
) -> None:
    """Compare dvc.lock here with the committed one: what was run again, and which of its inputs were others."""
    for name in evidence.stages:
        if name not in lock or name not in committed:
            continue
        new, old = lock[name], committed[name]
        differences = list(_entry_differences(name, new, old, outputs))
        results = [path for path in _changed_hashes(new, old, "deps") if sort_of(path, outputs) == "result"]
        evidence.differences += differences
        if remade := _changed_hashes(new, old, "outs"):
            evidence.remade[name] = remade
            if not differences and not results:
                evidence.origins.append(name)


def _entry_differences(name: str, new: JsonObject, old: JsonObject, outputs: Collection[str]) -> Iterator[Difference]:
    """Yield differences between the recorded inputs of a stage and those of the committed run; results of other stages
    aside."""
    if new.get("cmd") != old.get("cmd"):
        yield Difference("code", "lock", f"{name}: run by another command than committed", "dvc.yaml", name)
    for path in _changed_hashes(new, old, "deps"):
        sort = sort_of(path, outputs)
        if sort != "result":
            yield Difference(sort, "lock", f"{name}: run on another {path} than committed", path, name)
    files = {*new.get("params", {}), *old.get("params", {})}
    for file in sorted(files):
        changes = value_changes(old.get("params", {}).get(file) or {}, new.get("params", {}).get(file) or {})
        for key, (before, after) in changes.items():
            yield Difference("specification", "lock", f"{name}: {parameter_text(key, file, before, after)}", file, name)


def _changed_hashes(new: JsonObject, old: JsonObject, kind: Literal["deps", "outs"]) -> list[str]:
    before, after = ({row["path"]: row.get("md5") for row in entry.get(kind, [])} for entry in (old, new))
    return sorted(path for path in {**before, **after} if before.get(path) != after.get(path))


def _compare_files(
    stages: "Mapping[str, Stage]", outputs: "Mapping[str, Output]", root: Path, commit: _Commit, evidence: Evidence
) -> dict[str, Topic]:
    """Compare the files that are here with dvc.lock, and enter what differs as evidence.

    Returns:
        Outputs that are not those of the committed run, each with the topic that it belongs to.
    """
    topics: dict[str, Topic] = {path: "results" for paths in evidence.remade.values() for path in paths}
    for name, stage in stages.items():
        for change in stage_changes(stage, {*outputs}, root):
            text = f"{name}: {change.text}"
            topic: Topic = "record"
            if change.kind in ("absent", "cached"):
                evidence.unchecked.append(f"{change.path}, output of {name}: not here, not checked")
                continue
            elif change.kind in ("uncached", "absent input"):
                continue
            elif change.kind == "missing":
                topics[change.path] = topic
            elif change.kind == "altered":
                # What git ignores cannot be as committed.
                tracked = not outputs[change.path].use_cache
                if tracked and name in evidence.remade and not commit.touches(change.path):
                    text = f"{name}: {change.path} is as committed, and dvc.lock is of a run here"
                else:
                    topic = "edits"
                topics[change.path] = topic
            elif change.kind == "changed" and change.sort != "result":
                topic = change.sort
            elif any(kind == "edits" and _is_below(change.path, output) for output, kind in topics.items()):
                topic = "edits"  # the reader of an edited file: stages come after those that they read
            evidence.differences.append(Difference(topic, "files", text, change.path, name))
    return topics


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _check_lock(repo: "Repo", recorded: Mapping[str, JsonObject], evidence: Evidence) -> None:
    """Compare dvc.lock with itself: what one stage made is what a later one read."""
    # What DVC records of a stage stays when the stage goes; nothing that is here came from it.
    entries = {name: entry for name, entry in recorded.items() if name in evidence.stages}
    evidence.differences += [
        Difference(
            "record",
            "lock",
            f"dvc.lock records stage {name}, which dvc.yaml has no more: delete the entry `{name}:` from dvc.lock",
        )
        for name in recorded
        if name not in entries
    ]
    output_hashes = {out["path"]: out.get("md5") for entry in entries.values() for out in entry.get("outs", [])}
    listings: dict[str, dict[str, str]] = {}
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
            evidence.links += 1
            if expected != digest:
                text = f"dvc.lock: {name} read another {path} than its stage made last"
                evidence.differences.append(Difference("record", "lock", text, path, name))


def _listing(repo: "Repo", digest: str) -> dict[str, str]:
    """Read the hashes of the files of a recorded folder, as far as DVC's cache holds the listing."""
    path = Path(repo.cache.local.oid_to_path(digest))
    return {file.relpath: file.md5 for file in read_json(path, list[ListedFile])} if path.exists() else {}


def _check_spec(root: Path) -> list[Difference]:
    """Compare results/spec.yaml with params.yaml and conf/, composed again."""
    try:
        choice = load_choice(root / "params.yaml")
        composed = compose_spec(choice.experiment, choice.seed, choice.overrides, root / "conf")
        derived = load_spec(root / SPEC)
    except UserError as error:
        text = f"the configuration does not compose: {error.problem}"
        return [Difference("specification", "files", text, "conf")]
    changes = value_changes(*(spec.model_dump(mode="json", by_alias=True) for spec in (derived, composed)))
    return [
        Difference(
            "specification",
            "files",
            f"{SPEC}: {key} is {value_text(actual)}, but params.yaml and conf/ say {value_text(selected)}",
            SPEC,
        )
        for key, (actual, selected) in changes.items()
    ]


def _git(root: Path, *arguments: str) -> str:
    """Run a git command and return its output.

    Raises:
        UserError: git refuses, for instance because nothing is committed yet.
    """
    command = ["git", "-C", str(root), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode:
        raise UserError(f"git {arguments[0]} failed: {process.stderr.strip()}", "run in a git clone that has a commit")
    return process.stdout


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\0") if line]


def committed_text(root: Path, path: str) -> str:
    """Read a file as git's HEAD has it, "" where it has none."""
    if not _git(root, "ls-tree", "--name-only", "HEAD", "--", path):
        return ""
    return _git(root, "show", f"HEAD:./{path}")


def _compare_commit(root: Path, paths: list[str]) -> _Commit:
    """Compare everything that makes results, and the results themselves, with git's HEAD."""
    head = _git(root, "rev-parse", "--short", "HEAD").strip()
    changed = _lines(_git(root, "diff", "--name-only", "--relative", "-z", "HEAD", "--", *paths))
    untracked = _lines(_git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *paths))
    files = _lines(_git(root, "ls-files", "-z", "--", *paths))
    unknown = [path for path in paths if not any(_is_below(file, path) for file in files)]
    return _Commit(head, changed, sorted({*unknown, *untracked}))


def _add_commit(
    root: Path, commit: _Commit, outputs: Collection[str], topics: Mapping[str, Topic], evidence: Evidence
) -> None:
    """Enter the files that differ from the commit, those of an output under its topic."""
    for path in commit.changed:
        if path == LOCK and (evidence.remade or any(change.account == "lock" for change in evidence.differences)):
            continue
        text = f"{path} differs from commit {commit.name}"
        topic = _topic(path, outputs, topics)
        if not (root / path).is_file():
            text += ": it is not a file" if (root / path).exists() else ": it is missing"
        elif topic in ("results", "edits") and path.endswith(TABLES):
            versions = committed_text(root, path), (root / path).read_text(errors="replace")
            text += f": {difference(*versions, Path(path).suffix)}"
            if topic == "results" and (rates := compare_rates(*versions)):
                evidence.rates[path] = rates
        evidence.differences.append(Difference(topic, "commit", text, path))
    for path in commit.missing:
        topic = _topic(path, outputs, topics)
        evidence.differences.append(Difference(topic, "commit", f"{path} is not committed", path))


def _topic(path: str, outputs: Collection[str], topics: Mapping[str, Topic]) -> Topic:
    if path == LOCK:
        return "record"
    if (sort := sort_of(path, outputs)) != "result":
        return sort
    for output, topic in topics.items():
        if _is_below(path, output):
            return topic
    return "edits"


def _changed_code(root: Path, differences: list[Difference]) -> dict[str, list[str]]:
    """List the files of code that changed since dvc.lock was committed, each with the stages that run it.

    A folder stands for itself where git does not know the state that the run had.
    """
    stages: defaultdict[str, list[str]] = defaultdict(list)
    for change in differences:
        if change.topic == "code" and change.stage and change.stage not in stages[change.path]:
            stages[change.path].append(change.stage)
    since = _git(root, "log", "-1", "--format=%H", "--", LOCK).strip()
    if not stages or not since:
        return dict(stages)
    files = _lines(_git(root, "diff", "--name-only", "--relative", "-z", since, "--", *stages))
    files += _lines(_git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *stages))
    code: defaultdict[str, list[str]] = defaultdict(list)
    for path, names in stages.items():
        for file in [file for file in files if _is_below(file, path)] or [path]:
            code[file] += [name for name in names if name not in code[file]]
    return dict(code)
