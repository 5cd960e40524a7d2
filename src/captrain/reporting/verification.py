"""Answers of `captrain verify` to three questions: are the results those of the committed code, spec and data, are
their bytes the committed ones, and if not, are they the same within noise?

`dvc status` says which stages differ from dvc.lock, git says what differs from the commit, and dvc.lock here against
the committed one says what was made again. A stage whose recorded inputs are the committed ones and whose outputs are
not leaves the installation or the machine as the reason. Outputs in DVC's cache alone (artifacts/) are absent in a
fresh clone: that is said and is no fault, because dvc.lock has their hashes, and those that later stages read.
"""

import json
import logging
import math
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from captrain.config import load_spec
from captrain.errors import UserError
from captrain.records import JsonObject, parse_table, parse_yaml, read_yaml, require_regular
from captrain.reporting.installation import PROMISE, Libraries, compare_libraries, processor

if TYPE_CHECKING:
    from dvc.repo import Repo

LOCK, SPEC, PINS = "dvc.lock", "results/spec.yaml", "requirements.lock"
TABLE = "results/evaluation/main.csv"
"""Table of pass rates over the whole test split, which decides whether results are the same within noise."""
READ_BY_DVC = ("dvc.yaml", LOCK, "params.yaml", SPEC)
Topic = Literal["code", "specification", "data", "results", "edits", "record", "libraries", "machine"]
Status = Literal["ok", "differs", "note"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one comparison, in a sentence or two, with every single thing behind it."""

    topic: Topic
    status: Status
    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """Verdict in one sentence, the findings behind it, and outputs that are not here."""

    summary: str
    holds: bool
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]


@dataclass
class _Pipeline:
    """Stages in order, their inputs and outputs, what DVC finds changed, and dvc.lock here and as committed."""

    stages: list[str]
    inputs: set[str]
    outputs: dict[str, bool]
    """Paths; True where git holds the file, False where DVC's cache alone does."""
    status: dict[str, list[str | JsonObject]]
    lock: dict[str, JsonObject] = field(default_factory=dict)
    committed: dict[str, JsonObject] = field(default_factory=dict)

    def topic_of(self, path: str) -> Topic:
        """Tell what a file is to the pipeline: code, specification, data from outside, or a result."""
        if any(_is_below(path, output) for output in self.outputs):
            return "results"
        if path.endswith(".py") or path.startswith(("src/", "stages/")) or path == "dvc.yaml":
            return "code"
        return "specification" if path == "params.yaml" or path.split("/")[0] == "conf" else "data"


def verify(root: Path) -> Verification:
    """Compare results, dvc.lock and commit, and say what follows.

    Raises:
        UserError: there is no pipeline, no dvc.lock, or no git commit to compare with; or a stage runs.
    """
    root = root.resolve()
    if not (root / LOCK).exists():
        raise UserError("dvc.lock is missing: no stage was ever run here", "run `dvc repro`")
    pipeline = _read_pipeline(root)
    commit = _git(root, "rev-parse", "--short", "HEAD").strip()
    remedy = f"restore it with `git checkout {LOCK}`"
    locks = [read_yaml(root / LOCK, JsonObject, remedy), parse_yaml(_committed(root, LOCK), JsonObject, LOCK, remedy)]
    pipeline.lock, pipeline.committed = ((lock or {}).get("stages") or {} for lock in locks)

    # First question: code, specification and data, here and in the commit, against what the run recorded.
    differences: defaultdict[Topic, dict[str, list[str]]] = defaultdict(dict)
    unchecked = list[str]()
    for topic, stage, text in _differences_from_lock(root, pipeline, unchecked):
        differences[topic].setdefault(text, []).append(stage)
    # Second question: what was made again here, and what of it the recorded inputs explain.
    remade, origins, reasons = list[str](), list[str](), set[Topic]()
    for stage in pipeline.stages:
        if stage not in pipeline.lock or stage not in pipeline.committed:
            continue
        new, old = pipeline.lock[stage], pipeline.committed[stage]
        changes = [*_other_inputs(new, old, pipeline)]
        for topic, text in changes:
            differences[topic].setdefault(text, []).append(stage)
        reasons |= {topic for topic, _ in changes}
        if _hashes(new, "outs") != _hashes(old, "outs"):
            remade.append(stage)
            results = [path for path in _differing(new, old, "deps") if pipeline.topic_of(path) == "results"]
            origins += [stage] * (not changes and not results)
    made_again = {path for stage in remade for path in _hashes(pipeline.lock[stage], "outs")}
    changed, missing = _against_commit(root, pipeline)
    texts = {path: f"{path} differs from commit {commit}" for path in changed if path != LOCK}
    for path, text in {**texts, **{path: f"{path} is not committed" for path in missing}}.items():
        topic = pipeline.topic_of(path)
        if topic != "results":
            differences[topic].setdefault(text, [])
        elif (root / path).exists() and not any(_is_below(path, output) for output in made_again):
            differences["edits"].setdefault(text, [])
    if LOCK in changed and not remade and not any(differences.values()):
        differences["record"][f"{LOCK} differs from commit {commit}"] = []

    # Third question: the pass rates of what was made again, against the committed intervals.
    beyond: list[str] | None = None
    rows = 0
    if remade and TABLE in changed and (root / TABLE).is_file():
        rows, beyond = _beyond(_committed(root, TABLE), (root / TABLE).read_text(errors="replace"))
    pins = _committed(root, PINS)
    libraries = compare_libraries(pins) if pins else Libraries(0, {}, {})

    findings = [
        _finding(topic, pipeline, differences[topic]) for topic in ("code", "specification", "data", "edits", "record")
    ]
    findings += [
        _results(pipeline, commit, remade, origins, rows, beyond, bool(differences["edits"] or differences["record"]))
    ]
    findings += [_libraries(libraries, bool(remade), bool(origins))]
    findings += [_machine(root, libraries, origins) if remade else None]
    summary = _summary(differences, remade, origins, reasons, libraries, rows, beyond)
    holds = not remade and not any(differences.values())
    return Verification(summary, holds, tuple(filter(None, findings)), tuple(unchecked))


@contextmanager
def dvc_pipeline(root: Path) -> "Iterator[Repo]":
    """Open the DVC repository at `root`, with DVC silent.

    Raises:
        UserError: DVC cannot read it, or is at work there.
    """
    from dvc.exceptions import DvcException  # a second to import
    from dvc.lock import LockError
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    for path in (root / name for name in READ_BY_DVC):
        if path.exists() and not path.is_dir():
            require_regular(path)  # DVC would wait for a pipe
    try:
        with Repo(str(root)) as repo:
            yield repo
    except LockError:
        raise UserError("a stage runs now: its results are not whole", "wait for the end of `dvc repro`") from None
    except (DvcException, RecursionError) as error:
        is_endless = isinstance(error, RecursionError)
        message = "one of its files is nested without end" if is_endless else " ".join(str(error).split())
        raise UserError(
            f"DVC cannot read the pipeline in {root.name}/: {message}",
            "remove a dvc.lock that a kill has cut off: `dvc repro` then takes from its cache what was whole; else see "
            "`dvc status`",
        ) from error


def _read_pipeline(root: Path) -> _Pipeline:
    import networkx

    # DVC names files relative to the current folder.
    with chdir(root), dvc_pipeline(root) as repo:
        stages = [*networkx.dfs_postorder_nodes(repo.index.graph)]
        names = {stage.addressing: getattr(stage, "name", None) or Path(stage.path).name for stage in stages}
        inputs = {_relative(dep.fs_path, root) for stage in stages for dep in stage.deps}
        inputs |= {_relative(stage.path, root) for stage in stages}
        outputs = {_relative(out.fs_path, root): not out.use_cache for stage in stages for out in stage.outs}
        status = {names[address]: changes for address, changes in repo.status().items()}  # pyright: ignore
        return _Pipeline([*names.values()], inputs, outputs, status)


def _relative(path: str, root: Path) -> str:
    return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _differences_from_lock(root: Path, pipeline: _Pipeline, unchecked: list[str]) -> Iterator[tuple[Topic, str, str]]:
    """Yield topic, stage and text of what DVC finds changed since the stages ran; outputs of DVC's cache that are not
    here go to `unchecked`."""
    for stage in pipeline.stages:
        if stage not in pipeline.lock:
            yield "record", stage, f"{LOCK} has no record of it"
            continue
        for change in pipeline.status.get(stage, []):
            if not isinstance(change, dict):
                yield "code", stage, change
                continue
            for path, state in change.get("changed deps", {}).items():
                topic = pipeline.topic_of(path)
                if isinstance(state, dict):
                    for text in _settings(root / path, pipeline.lock[stage].get("params", {}).get(path) or {}, state):
                        yield "specification", stage, f"{text} in {path}"
                elif topic != "results":
                    yield topic, stage, f"{path} was {state} since the run"
            for path, state in change.get("changed outs", {}).items():
                if state == "modified":
                    yield "edits", stage, f"{path} is not as its stage left it"
                elif state == "deleted" and pipeline.outputs.get(path):
                    yield "record", stage, f"{path} is missing"
                elif state in ("deleted", "not in cache"):
                    unchecked.append(f"{path}, output of {stage}: not here, not checked")
    latest = {path: digest for entry in pipeline.lock.values() for path, digest in _hashes(entry, "outs").items()}
    for stage, entry in pipeline.lock.items():
        if stage not in pipeline.stages:
            yield "record", stage, f"{LOCK} records a stage that dvc.yaml has no more: delete its entry `{stage}:`"
            continue
        for path, digest in _hashes(entry, "deps").items():
            if latest.get(path, digest) != digest:
                yield "record", stage, f"{LOCK}: it read another {path} than its stage made last"


def _settings(path: Path, recorded: Mapping[str, object], state: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameters of a file that changed, each with its value of the run and of now."""
    present = read_yaml(path, JsonObject) if path.exists() else {}
    for key in state:
        value: object = present
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        before, after = flat({key: recorded.get(key)}), flat({key: value})
        for place in sorted({*before, *after}):
            if before.get(place) != after.get(place):
                yield f"{place} {json.dumps(before.get(place))} -> {json.dumps(after.get(place))}"


def flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Values of a nested document by their dotted keys."""
    values: dict[str, object] = {}
    for key, value in content.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        values |= inner
    return values


def _hashes(entry: JsonObject, kind: Literal["deps", "outs"]) -> dict[str, str | None]:
    return {row["path"]: row.get("md5") for row in entry.get(kind, [])}


def _differing(new: JsonObject, old: JsonObject, kind: Literal["deps", "outs"]) -> list[str]:
    after, before = _hashes(new, kind), _hashes(old, kind)
    return sorted(path for path in {**before, **after} if before.get(path) != after.get(path))


def _other_inputs(new: JsonObject, old: JsonObject, pipeline: _Pipeline) -> Iterator[tuple[Topic, str]]:
    """Inputs of a stage's run that are not those of the committed run; results of other stages aside."""
    if new.get("cmd") != old.get("cmd"):
        yield "code", "run by another command than committed"
    for path in _differing(new, old, "deps"):
        if (topic := pipeline.topic_of(path)) != "results":
            yield topic, f"run on another {path} than committed"
    before, after = flat(old.get("params", {})), flat(new.get("params", {}))
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            values = f"{json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
            yield "specification", f"run with {key} {values}"


def _against_commit(root: Path, pipeline: _Pipeline) -> tuple[list[str], list[str]]:
    """Files that differ from git's HEAD, and those that it does not hold; of code, specification, data and results."""
    inputs = {path for path in pipeline.inputs if pipeline.topic_of(path) != "results"}
    committed = inputs | {path for path, in_git in pipeline.outputs.items() if in_git} | {LOCK}
    paths = sorted(path for path in committed if not Path(path).is_absolute())
    changed = _git(root, "diff", "--name-only", "--relative", "-z", "HEAD", "--", *paths)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *paths)
    files = _git(root, "ls-files", "-z", "--", *paths).split("\0")
    unknown = [path for path in paths if not any(_is_below(file, path) for file in files)]
    return [*filter(None, changed.split("\0"))], sorted({*unknown, *filter(None, untracked.split("\0"))})


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command.

    Raises:
        UserError: git refuses, for instance because nothing is committed yet.
    """
    command = ["git", "-C", str(root), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode:
        raise UserError(f"git {arguments[0]} failed: {process.stderr.strip()}", "run in a git clone that has a commit")
    return process.stdout


def _committed(root: Path, path: str) -> str:
    """A file as git's HEAD has it, "" where it has none."""
    if not _git(root, "ls-tree", "--name-only", "HEAD", "--", path):
        return ""
    return _git(root, "show", f"HEAD:./{path}")


def _beyond(old: str, new: str) -> tuple[int, list[str]]:
    """Number of rows of two versions of a table of pass rates, and those whose new rate is beyond the old interval or
    that one version lacks."""
    before, after = _rates(old), _rates(new)
    beyond = list[str]()
    for name in {**before, **after}:
        if name not in before or name not in after:
            beyond.append(f"{name} in one version only")
            continue
        (rate, low, high), (moved, *_) = before[name], after[name]
        undefined = math.isnan(rate) and math.isnan(moved)
        if rate != moved and not undefined and not low <= moved <= high:
            beyond.append(f"{name} {rate:.3f} -> {moved:.3f} ({low:.3f} to {high:.3f})")
    return len({**before, **after}), beyond


def _rates(text: str) -> dict[str, tuple[float, float, float]]:
    """Pass rate and interval of each method, NaN where undefined."""
    numbers = ("pass_rate", "low", "high")
    table = parse_table(text, TABLE, "make it again, or restore it", columns=["method"], numbers=numbers)
    return {row["method"]: (row["pass_rate"], row["low"], row["high"]) for row in table.to_dict("records")}


def _finding(topic: Topic, pipeline: _Pipeline, texts: Mapping[str, list[str]]) -> Finding | None:
    if texts:
        words = [f"{text} ({_some(stages, ', ')})" if any(stages) else text for text, stages in texts.items()]
        return Finding(topic, "differs", _some(words), tuple(words))
    sound: dict[Topic, str] = {
        "code": f"of {_count(len(pipeline.stages), 'stage')} is that which made the results, and committed",
        "specification": "is that which made the results, and committed",
        "record": "each stage read what the stage before it made",
    }
    return Finding(topic, "ok", sound[topic]) if topic in sound else None


def _results(
    pipeline: _Pipeline,
    commit: str,
    remade: list[str],
    origins: list[str],
    rows: int,
    beyond: list[str] | None,
    is_faulty: bool,
) -> Finding | None:
    stages = _count(len(pipeline.stages), "stage")
    if not remade:
        text = f"of {stages} are as dvc.lock has them and as committed in {commit}"
        return None if is_faulty else Finding("results", "ok", text)
    text = f"made again here: {len(remade)} of {stages} made other files than committed"
    text += f", beginning with {_some(origins, ', ')}" if origins else ""
    if beyond is None:
        text += f". {TABLE} is the committed one"
    else:
        text += f". {rows - len(beyond)} of {rows} pass rates in {TABLE} are within the committed intervals"
        text += f", beyond are {_some(beyond, ', ')}" if beyond else ": the same result within noise"
    return Finding("results", "differs", text, (*remade, *(beyond or ())))


def _libraries(libraries: Libraries, is_remade: bool, is_origin: bool) -> Finding:
    if not libraries.pinned:
        return Finding("libraries", "note", f"not compared: no {PINS} is committed")
    versions = sorted({**libraries.computing, **libraries.tools}.items())
    details = tuple(f"{name} {actual}, pinned {expected}" for name, (expected, actual) in versions)
    remainder = f"; of others {len(libraries.tools)} differ, which decide no result" if libraries.tools else ""
    if not libraries.computing:
        return Finding("libraries", "ok", f"those that compute are as {PINS} pins them{remainder}", details)
    changed = [f"{name} {actual} (pinned {expected})" for name, (expected, actual) in libraries.computing.items()]
    text = _some(changed, ", ") + remainder + ("" if is_remade else "; what is run here may come out otherwise")
    return Finding("libraries", "differs" if is_origin else "note", text, details)


def _machine(root: Path, libraries: Libraries, origins: list[str]) -> Finding:
    """Machine of results that were made again: the reason where no other is left."""
    cpu = processor()
    if not origins or libraries.computing:
        reason = "libraries differ" if origins else "what the first stage was run on differs"
        return Finding("machine", "note", f"{cpu}. Whether it matters cannot be told while {reason}")
    embedded = not (root / SPEC).exists() or load_spec(root / SPEC).base.model is None
    exclusion = cpu.exclusion or ("" if embedded else "it is of the embedded model alone")
    verdict = (
        f"The promise does not cover that: {exclusion}"
        if exclusion
        else ("That is against the promise: please report it, with what `captrain verify --all` prints")
    )
    text = (
        f"code, specification, inputs and libraries of {_some(origins, ', ')} are the committed ones, and what came "
        f"out is not, which leaves this machine: {cpu}. {verdict} ({PROMISE} or later)"
    )
    return Finding("machine", "differs", text)


def _summary(
    differences: Mapping[Topic, Mapping[str, list[str]]],
    remade: list[str],
    origins: list[str],
    reasons: set[Topic],
    libraries: Libraries,
    rows: int,
    beyond: list[str] | None,
) -> str:
    """Verdict in one sentence."""
    clauses = list[str]()
    if remade:
        installation = "with other versions of libraries" if libraries.computing else "on another machine"
        if not libraries.pinned:
            installation = "with other libraries or on another machine"
        words: dict[str, bool] = {
            "by other code": "code" in reasons,
            "to another specification": "specification" in reasons,
            "from other data": "data" in reasons,
            installation: bool(origins),
        }
        cause = " and ".join(word for word, holds in words.items() if holds)
        rates = "the same pass rates" if beyond is None else "the same result within noise"
        if beyond:
            rates = f"{len(beyond)} of {rows} pass rates are beyond the committed intervals"
        clauses.append(f"the results were made again here{', ' if cause else ''}{cause}: {rates}")
    else:
        nouns: dict[Topic, str] = {"code": "code", "specification": "specification", "data": "input data"}
        clauses += [
            f"the {noun} here is not that of the committed run" for topic, noun in nouns.items() if differences[topic]
        ]
    if differences["edits"]:
        clauses.append("results were edited after their stage made them")
    if differences["record"]:
        clauses.append("the record of the run is incomplete or contradicts itself")
    if not clauses and not any(differences.values()):
        return "verified: the committed results are those of the committed code, specification and data"
    return f"not verified: {'; '.join(clauses)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _some(entries: Iterable[str], separator: str = "; ", most: int = 4) -> str:
    """Join the first entries, and say how many there are more."""
    entries = [*dict.fromkeys(entries)]
    text = separator.join(entries[:most])
    return text if len(entries) <= most else f"{text} and {len(entries) - most} more"
