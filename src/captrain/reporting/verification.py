"""Answers of `captrain verify` to three questions: are the results those of the committed code, spec and data, are
their bytes the committed ones, and if not, are they the same within noise?

`dvc status` says which stages differ from dvc.lock, git says what differs from the commit, and dvc.lock here against
the committed one says what was made again. A stage whose recorded inputs are the committed ones and whose outputs are
not leaves the installation or the machine as the reason. Outputs in DVC's cache alone (artifacts/) are absent in a
fresh clone: that is said and is no fault, because dvc.lock has their hashes, and those that later stages read.

DVC believes a file that has kept its time and size, so that a flipped bit in the cache is restored unseen, and one in
an output is read by the next stage: `check_integrity` hashes every file anew. One of the cache is named by its own
hash, and one of an output by dvc.lock or by the listing of its folder.
"""

import hashlib
import json
import logging
import math
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from captrain.errors import UserError
from captrain.records import BLOCK, JsonObject, parse_table, parse_yaml, read_json, read_yaml, require_regular
from captrain.run import load_spec

if TYPE_CHECKING:
    from dvc.repo import Repo

LOCK, SPEC, PINS = "dvc.lock", "results/spec.yaml", "requirements.lock"
RESTORE = f"restore it with `git checkout {LOCK}`"
TABLE = "results/evaluation/main.csv"
"""Table of pass rates over the whole test split, which decides whether results are the same within noise."""
READ_BY_DVC = ("dvc.yaml", LOCK, "params.yaml", SPEC)
COMPUTING = (
    *("accelerate", "datasets", "gepa", "krippendorff", "matplotlib", "networkx", "numpy", "pandas", "peft", "pillow"),
    *("python", "safetensors", "scikit-learn", "scipy", "seaborn", "statsmodels", "tokenizers", "torch"),
    *("transformers", "trl"),
)
"""Packages whose versions decide bytes of results or figures: another version of a progress bar is no reason for
another number."""
CPUINFO = Path("/proc/cpuinfo")
VECTORS = {"AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}, "AVX2": {"avx2", "fma"}}
"""The flags by which torch chooses its vector kernels, the widest first."""
SWITCHES = ("ATEN_CPU_CAPABILITY", "BLIS_", "DNNL_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_")
"""Prefixes of the variables that choose kernels of torch, numpy and BLAS, or how many threads share a sum."""
PROMISE = "every trained weight and every result of the embedded default has the same bytes on any x86-64 CPU with AVX2"
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
        if _is_below(path, self.outputs):
            return "results"
        if path.endswith(".py") or path.startswith(("src/", "stages/")) or path == "dvc.yaml":
            return "code"
        return "specification" if path == "params.yaml" or path.split("/")[0] == "conf" else "data"


@dataclass
class _Differences:
    """Answers to the three questions, as far as they are no: by topic each difference with its stages; the stages that
    were made again, those of them whose inputs were the committed ones, and the topics that explain the others; and
    the rows of the table, with those beyond the committed intervals (None where it is the committed one)."""

    by_topic: defaultdict[Topic, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    remade: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    reasons: set[Topic] = field(default_factory=set)
    rows: int = 0
    beyond: list[str] | None = None

    def add(self, topic: Topic, text: str, *stages: str) -> None:
        """Add a difference, of these stages where it is of any."""
        self.by_topic[topic].setdefault(text, []).extend(stages)

    @property
    def holds(self) -> bool:
        """True if there is none."""
        return not self.remade and not any(self.by_topic.values())


def verify(root: Path) -> Verification:
    """Compare results, dvc.lock and commit, and say what follows.

    Raises:
        UserError: there is no pipeline, no dvc.lock, or no git commit to compare with; or a stage runs.
    """
    root = root.resolve()
    pipeline = _read_pipeline(root)
    commit = _git(root, "rev-parse", "--short", "HEAD").strip()
    locks = [read_yaml(root / LOCK, JsonObject, RESTORE), parse_yaml(_committed(root, LOCK), JsonObject, LOCK, RESTORE)]
    pipeline.lock, pipeline.committed = ((lock or {}).get("stages") or {} for lock in locks)

    # First question: code, specification and data, here and in the commit, against what the run recorded.
    differences, unchecked = _Differences(), list[str]()
    for topic, stage, text in _differences_from_lock(root, pipeline, unchecked):
        differences.add(topic, text, stage)
    # Second question: what was made again here, and what of it the recorded inputs explain.
    for stage in pipeline.stages:
        if stage not in pipeline.lock or stage not in pipeline.committed:
            continue
        new, old = pipeline.lock[stage], pipeline.committed[stage]
        changes = [*_other_inputs(new, old, pipeline)]
        for topic, text in changes:
            differences.add(topic, text, stage)
            differences.reasons.add(topic)
        if _hashes(new, "outs") != _hashes(old, "outs"):
            differences.remade.append(stage)
            results = [path for path in _differing(new, old) if pipeline.topic_of(path) == "results"]
            differences.origins += [stage] * (not changes and not results)
    made_again = [path for stage in differences.remade for path in _hashes(pipeline.lock[stage], "outs")]
    changed, missing = _against_commit(root, pipeline)
    texts = {path: f"{path} differs from commit {commit}" for path in changed if path != LOCK}
    for path, text in {**texts, **{path: f"{path} is not committed" for path in missing}}.items():
        topic = pipeline.topic_of(path)
        if topic != "results":
            differences.add(topic, text)
        elif (root / path).exists() and not _is_below(path, made_again):
            differences.add("edits", text)
    if LOCK in changed and differences.holds:
        differences.add("record", f"{LOCK} differs from commit {commit}")
    # Third question: the pass rates of what was made again, against the committed intervals.
    if differences.remade and TABLE in changed and (root / TABLE).is_file():
        new_table = (root / TABLE).read_text(errors="replace")
        differences.rows, differences.beyond = _beyond(_committed(root, TABLE), new_table)

    pins = _committed(root, PINS)
    libraries = _other_libraries(pins)
    computing = {name: versions for name, versions in libraries.items() if name in COMPUTING}
    topics: tuple[Topic, ...] = ("code", "specification", "data", "edits", "record")
    findings = [_finding(topic, len(pipeline.stages), differences.by_topic[topic]) for topic in topics]
    findings += [_results(differences, len(pipeline.stages), commit)]
    findings += [_libraries(differences, libraries, computing) if pins else NO_PINS]
    findings += [_machine(root, differences, bool(computing)) if differences.remade else None]
    installation = "with other versions of libraries" if computing else "on another machine"
    summary = _summary(differences, installation if pins else "with other libraries or on another machine")
    return Verification(summary, differences.holds, tuple(filter(None, findings)), tuple(unchecked))


def check_integrity(root: Path) -> tuple[int, list[str]]:
    """Hash every file of DVC's cache, and of the outputs that lie here.

    Returns:
        The number of files, and what to do about each one whose bytes have changed.

    Raises:
        UserError: there is no dvc.lock, or it is damaged.
    """
    with chdir(root), dvc_pipeline(root) as repo:
        cache = Path(str(repo.cache.local.path))
        outputs = [
            (getattr(stage, "name", ""), Path(out.fs_path), str(out.hash_info.value))
            for stage in repo.index.stages
            for out in stage.outs
            if out.hash_info
        ]
    cache = cache if cache.name == "md5" else cache / "files/md5"
    count, damages = 0, list[str]()
    for path in sorted(cache.glob("[0-9a-f][0-9a-f]/*")):
        name, count = f"{path.parent.name}{path.name}".removesuffix(".dir"), count + 1
        if path.is_file() and len(name) == 32 and _md5(path) != name:
            damages.append(f"{path} of DVC's cache is damaged: remove it, and `dvc repro` makes it again")
    # One that is not here is not looked at.
    for name, output, digest in (entry for entry in outputs if entry[1].exists()):
        files: list[JsonObject] = [{"md5": digest, "relpath": ""}]
        if digest.endswith(".dir"):
            listing = cache / digest[:2] / digest[2:]
            is_whole = listing.exists() and _md5(listing) == digest.removesuffix(".dir")
            files = read_json(listing, list[JsonObject]) if is_whole else []
        for file in files:
            path, count = output / file["relpath"], count + 1
            if not path.is_file() or _md5(path) != file["md5"]:
                place = path.relative_to(root)
                damages.append(f"{place}, of {name}, is not what dvc.lock has: `dvc repro {name}`, or restore it")
    return count, damages


def _md5(path: Path) -> str:
    total = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()


@contextmanager
def dvc_pipeline(root: Path) -> "Iterator[Repo]":
    """Open the DVC repository at `root`, with DVC silent.

    Raises:
        UserError: it has no dvc.lock, DVC cannot read it, or is at work there.
    """
    from dvc.exceptions import DvcException  # a second to import
    from dvc.lock import LockError
    from dvc.repo import Repo

    if not (root / LOCK).exists():
        raise UserError("dvc.lock is missing: no stage was ever run here", "run `dvc repro`")
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

    def relative(path: str) -> str:
        return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path

    # DVC names files relative to the current folder.
    with chdir(root), dvc_pipeline(root) as repo:
        stages = [*networkx.dfs_postorder_nodes(repo.index.graph)]
        names = {stage.addressing: getattr(stage, "name", None) or Path(stage.path).name for stage in stages}
        inputs = {relative(path) for stage in stages for path in (stage.path, *(dep.fs_path for dep in stage.deps))}
        outputs = {relative(out.fs_path): not out.use_cache for stage in stages for out in stage.outs}
        status = {names[address]: changes for address, changes in repo.status().items()}  # pyright: ignore
        return _Pipeline([*names.values()], inputs, outputs, status)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


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
                    recorded = pipeline.lock[stage].get("params", {}).get(path) or {}
                    present = flat(read_yaml(root / path, JsonObject) if (root / path).exists() else {})
                    for key in state:
                        now = {name: value for name, value in present.items() if f"{name}.".startswith(f"{key}.")}
                        for text in _other_settings(flat({key: recorded.get(key)}), now):
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


def _other_settings(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings that differ, by their dotted keys, each with both values."""
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield f"{key} {json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"


def flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Values of a nested document by their dotted keys."""
    values: dict[str, object] = {}
    for key, value in content.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def _hashes(entry: JsonObject, kind: Literal["deps", "outs"]) -> dict[str, str | None]:
    return {row["path"]: row.get("md5") for row in entry.get(kind, [])}


def _differing(new: JsonObject, old: JsonObject) -> list[str]:
    after, before = _hashes(new, "deps"), _hashes(old, "deps")
    return sorted(path for path in {**before, **after} if before.get(path) != after.get(path))


def _other_inputs(new: JsonObject, old: JsonObject, pipeline: _Pipeline) -> Iterator[tuple[Topic, str]]:
    """Inputs of a stage's run that are not those of the committed run; results of other stages aside."""
    if new.get("cmd") != old.get("cmd"):
        yield "code", "run by another command than committed"
    for path in _differing(new, old):
        if (topic := pipeline.topic_of(path)) != "results":
            yield topic, f"run on another {path} than committed"
    for text in _other_settings(flat(old.get("params", {})), flat(new.get("params", {}))):
        yield "specification", f"run with {text}"


def _against_commit(root: Path, pipeline: _Pipeline) -> tuple[list[str], list[str]]:
    """Files that differ from git's HEAD, and those that it does not hold; of code, specification, data and results."""
    inputs = {path for path in pipeline.inputs if pipeline.topic_of(path) != "results"}
    committed = inputs | {path for path, in_git in pipeline.outputs.items() if in_git} | {LOCK}
    paths = sorted(path for path in committed if not Path(path).is_absolute())

    def listed(*arguments: str) -> list[str]:
        return [*filter(None, _git(root, *arguments, "--", *paths).split("\0"))]

    files = listed("ls-files", "-z")
    unknown = [path for path in paths if not any(_is_below(file, [path]) for file in files)]
    untracked = listed("ls-files", "--others", "--exclude-standard", "-z")
    return listed("diff", "--name-only", "--relative", "-z", "HEAD"), sorted({*unknown, *untracked})


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
    numbers, beyond = ("pass_rate", "low", "high"), list[str]()
    tables = [
        parse_table(text, TABLE, "make it again, or restore it", columns=["method"], numbers=numbers)
        for text in (old, new)
    ]
    before, after = ({row["method"]: row for row in table.to_dict("records")} for table in tables)
    for name in {**before, **after}:
        if name not in before or name not in after:
            beyond.append(f"{name} in one version only")
            continue
        (rate, low, high), moved = (before[name][column] for column in numbers), after[name]["pass_rate"]
        undefined = math.isnan(rate) and math.isnan(moved)
        if rate != moved and not undefined and not low <= moved <= high:
            beyond.append(f"{name} {rate:.3f} -> {moved:.3f} ({low:.3f} to {high:.3f})")
    return len({**before, **after}), beyond


def _other_libraries(pins: str) -> dict[str, tuple[str, str]]:
    """Compare the installed versions with those that a requirements file pins, and Python's with the one it is for.

    Args:
        pins: text of the file, `name==version` a line; a comment may say `Python 3.11`. Of a wheel's build (`+cpu`)
            only what is pinned counts.

    Returns:
        Of each that differs the pinned version and the installed one.
    """

    def plain(name: str) -> str:  # as indexes write the name of a distribution
        return re.sub(r"[-_.]+", "-", name).lower()

    # Versions of pip's metadata: importing the libraries would take seconds.
    installed = {plain(package.metadata["Name"]): package.version for package in distributions()}
    changed: dict[str, tuple[str, str]] = {}
    if match := re.search(r"^#.*\bPython (\d+\.\d+)", pins, re.MULTILINE):
        expected, actual = match[1], platform.python_version()
        if not f"{actual}.".startswith(f"{expected}."):
            changed["python"] = (expected, actual)
    for name, version in re.findall(r"^([\w.-]+)==([^\s;#]+)", pins, re.MULTILINE):
        actual = installed.get(plain(name), "not installed")
        if version not in (actual, actual.partition("+")[0]):
            changed[plain(name)] = (version, actual)
    return changed


def _finding(topic: Topic, stages: int, texts: Mapping[str, Sequence[str]]) -> Finding | None:
    if texts:
        words = [f"{text} ({_some(names, ', ')})" if any(names) else text for text, names in texts.items()]
        return Finding(topic, "differs", _some(words), tuple(words))
    sound: dict[Topic, str] = {
        "code": f"of {_count(stages, 'stage')} is that which made the results, and committed",
        "specification": "is that which made the results, and committed",
        "record": "each stage read what the stage before it made",
    }
    return Finding(topic, "ok", sound[topic]) if topic in sound else None


def _results(differences: _Differences, count: int, commit: str) -> Finding | None:
    stages, remade, beyond = _count(count, "stage"), differences.remade, differences.beyond
    if not remade:
        text = f"of {stages} are as dvc.lock has them and as committed in {commit}"
        is_faulty = differences.by_topic["edits"] or differences.by_topic["record"]
        return None if is_faulty else Finding("results", "ok", text)
    text = f"made again here: {len(remade)} of {stages} made other files than committed"
    text += f", beginning with {_some(differences.origins, ', ')}" if differences.origins else ""
    if beyond is None:
        text += f". {TABLE} is the committed one"
    else:
        within = f"{differences.rows - len(beyond)} of {differences.rows} pass rates in {TABLE}"
        text += f". {within} are within the committed intervals"
        text += f", beyond are {_some(beyond, ', ')}" if beyond else ": the same result within noise"
    return Finding("results", "differs", text, (*remade, *(beyond or ())))


NO_PINS = Finding("libraries", "note", f"not compared: no {PINS} is committed")


def _libraries(
    differences: _Differences, libraries: Mapping[str, tuple[str, str]], computing: Mapping[str, tuple[str, str]]
) -> Finding:
    details = tuple(f"{name} {actual}, pinned {pinned}" for name, (pinned, actual) in sorted(libraries.items()))
    tools = len(libraries) - len(computing)
    remainder = f"; of others {tools} differ, which decide no result" if tools else ""
    if not computing:
        return Finding("libraries", "ok", f"those that compute are as {PINS} pins them{remainder}", details)
    text = _some(f"{name} {actual} (pinned {pinned})" for name, (pinned, actual) in computing.items()) + remainder
    text += "" if differences.remade else "; what is run here may come out otherwise"
    return Finding("libraries", "differs" if differences.origins else "note", text, details)


def _machine(root: Path, differences: _Differences, has_other_libraries: bool) -> Finding:
    """Machine of results that were made again, which is the reason where no other is left: architecture as the kernel
    calls it, model, widest vector instructions that torch uses, and the switches that choose kernels."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    model, flags = (
        match[1] if (match := re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)) else ""
        for name in ("model name", "flags")
    )
    architecture = platform.machine()
    vectors = next((name for name, needed_flags in VECTORS.items() if {*flags.split()} >= needed_flags), "")
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    switches = [switch for switch in switches if switch != "OMP_NUM_THREADS=1"]  # which the Makefile sets
    cpu = ", ".join(filter(None, (model, f"{architecture} with {vectors}" if vectors else architecture)))
    cpu += f"; set here: {', '.join(switches)}" if switches else ""
    if not differences.origins or has_other_libraries:
        reason = "libraries differ" if differences.origins else "what the first stage was run on differs"
        return Finding("machine", "note", f"{cpu}. Whether it matters cannot be told while {reason}")

    embedded = not (root / SPEC).exists() or load_spec(root / SPEC).base.model is None
    exclusion = "" if embedded else "it is of the embedded model alone"
    if architecture in ("aarch64", "arm64"):
        exclusion = "arm64 is designed for and was not measured"
    elif architecture not in ("x86_64", "AMD64"):
        exclusion = f"{architecture} was not measured"
    elif not vectors:
        exclusion = "AVX2 was not found here"
    verdict = "That is against the promise: please report it, with what `captrain verify --all` prints"
    if exclusion:
        verdict = f"The promise does not cover that: {exclusion}"
    text = (
        f"code, specification, inputs and libraries of {_some(differences.origins, ', ')} are the committed ones, and "
        f"what came out is not, which leaves this machine: {cpu}. {verdict} ({PROMISE} or later)"
    )
    return Finding("machine", "differs", text)


def _summary(differences: _Differences, installation: str) -> str:
    """Verdict in one sentence; `installation` is where results were made again that nothing else explains."""
    if differences.holds:
        return "verified: the committed results are those of the committed code, specification and data"
    clauses, beyond = list[str](), differences.beyond
    if differences.remade:
        causes: dict[Topic, str] = {
            "code": "by other code",
            "specification": "to another specification",
            "data": "from other data",
        }
        words = [text for topic, text in causes.items() if topic in differences.reasons]
        cause = " and ".join([*words, *([installation] if differences.origins else [])])
        rates = "the same pass rates" if beyond is None else "the same result within noise"
        if beyond:
            rates = f"{len(beyond)} of {differences.rows} pass rates are beyond the committed intervals"
        clauses.append(f"the results were made again here{', ' if cause else ''}{cause}: {rates}")
    else:
        nouns: dict[Topic, str] = {"code": "code", "specification": "specification", "data": "input data"}
        for topic, noun in nouns.items():
            if differences.by_topic[topic]:
                clauses.append(f"the {noun} here is not that of the committed run")
    if differences.by_topic["edits"]:
        clauses.append("results were edited after their stage made them")
    if differences.by_topic["record"]:
        clauses.append("the record of the run is incomplete or contradicts itself")
    return f"not verified: {'; '.join(clauses)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _some(entries: Iterable[str], separator: str = "; ", most: int = 4) -> str:
    """Join the first entries, and say how many there are more."""
    entries = [*dict.fromkeys(entries)]
    text = separator.join(entries[:most])
    return text if len(entries) <= most else f"{text} and {len(entries) - most} more"
