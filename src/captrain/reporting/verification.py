"""`captrain verify`: were the committed results made by the committed code, specification and data?

Each question is answered by the tool that knows it:

- `dvc status` compares code, parameters, data and outputs with the hashes in dvc.lock.
- `git` compares code, data and dvc.lock with the commit, and results that were made again with the committed ones. If
  results were made again, the new pass rates are compared with the committed intervals.
- requirements.lock pins the libraries that compute the results.

A fresh clone lacks the outputs that only DVC's cache holds (artifacts/). They are listed as not checked and are no
fault: dvc.lock has their hashes and those of the stages that read them.
"""

import hashlib
import logging
import math
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import chdir
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from captrain.errors import UserError
from captrain.records import counted, parse_table, require_regular

if TYPE_CHECKING:
    from dvc.output import Output

LOCK, PINS = "dvc.lock", "requirements.lock"
TABLE = "results/evaluation/main.csv"
"""Table of pass rates over the whole test split; it decides whether results agree within noise."""
READ_BY_DVC = ("dvc.yaml", LOCK, "params.yaml")
COMPUTING = (
    *("accelerate", "datasets", "gepa", "krippendorff", "matplotlib", "networkx", "numpy", "pandas", "peft", "pillow"),
    *("safetensors", "scikit-learn", "scipy", "seaborn", "statsmodels", "tokenizers", "torch", "transformers", "trl"),
)
"""Packages whose version can change a result or a figure."""
MOST = 4
"""Most entries that one line lists. Further ones are counted."""
Topic = Literal["code", "specification", "data", "edits", "results", "libraries", "not checked"]
CLAUSES: dict[Topic, str] = {
    "code": "the code here is not that of the committed run",
    "specification": "the specification here is not that of the committed run",
    "data": "the data here is not that of the committed run",
    "edits": "results were edited or removed after their stage made them",
}
"""What the verdict says if a topic has differences."""
Differences = defaultdict[Topic, defaultdict[str, list[str]]]
"""Topic -> difference -> the stages that have this difference."""


class Comparison(NamedTuple):
    """Result of one comparison: a summary, and every difference behind it."""

    topic: Topic
    status: Literal["ok", "differs", "note"]
    text: str
    details: tuple[str, ...] = ()


class Verification(NamedTuple):
    """Verdict in one sentence, and the comparisons behind it."""

    summary: str
    holds: bool
    comparisons: list[Comparison]


class _Pipeline(NamedTuple):
    """Inputs and outputs of all stages, and what `dvc status` reports.

    inputs: paths. outputs: path -> true if it is in git, false if it is in DVC's cache. altered: output file whose hash
    differs from dvc.lock -> its stage. status: stage -> changes, each a message or
    `{"changed deps" | "changed outs": {path: state}}`.
    """

    inputs: set[str]
    outputs: dict[str, bool]
    altered: dict[str, str]
    status: dict[str, list[str | dict[str, dict[str, object]]]]

    def topic_of(self, path: str) -> Topic:
        """Return the topic that a path belongs to. A folder of outputs counts as a result."""
        if path == LOCK or _is_below(path, self.outputs) or any(_is_below(output, [path]) for output in self.outputs):
            return "results"
        if path.endswith(".py") or path.startswith(("src/", "stages/")) or path == "dvc.yaml":
            return "code"
        return "specification" if path == "params.yaml" or path.split("/")[0] == "conf" else "data"


def verify(root: Path) -> Verification:
    """Compare code, results and libraries with dvc.lock and with the commit.

    Raises:
        UserError: there is no pipeline, no dvc.lock or no commit, or a stage is running.
    """
    root = root.resolve()
    pipeline = _read_pipeline(root)
    commit = _git(root, "rev-parse", "--short", "HEAD").strip()
    differences = _compare_with_lock(pipeline)
    remade = _compare_with_commit(root, pipeline, commit, differences)
    libraries = _other_libraries(_committed(root, PINS))
    comparisons, clauses = list[Comparison](), list[str]()
    for topic, clause in CLAUSES.items():
        texts = [f"{text} ({_some(stages)})" if stages else text for text, stages in differences[topic].items()]
        if texts:
            comparisons.append(Comparison(topic, "differs", _some(texts, "; "), tuple(texts)))
            clauses.append(clause)
        elif topic != "edits":
            comparisons.append(Comparison(topic, "ok", "the same here, in the run and in the commit"))
    if remade:
        installation = "with other versions of libraries" if libraries else "on another machine"
        rates, beyond = _compare_pass_rates(root)
        text = f"made again here, other than in {commit}: {_some(remade)}; {rates}"
        comparisons.append(Comparison("results", "differs", text, (*remade, *beyond)))
        clauses.append(f"the results were made again here{'' if clauses else f', {installation}'}: {rates}")
    elif not differences["edits"]:
        comparisons.append(Comparison("results", "ok", f"the same here, in {LOCK} and in commit {commit}"))
    text = f"{_some(libraries)}; results that you make here may differ" if libraries else f"as {PINS} pins them"
    comparisons.append(Comparison("libraries", "note" if libraries else "ok", text, tuple(libraries)))
    if absent := tuple(differences["not checked"]):
        comparisons.append(
            Comparison("not checked", "note", f"{counted(len(absent), 'output')} of DVC's cache: not here", absent)
        )
    summary = "verified: the committed results are those of the committed code, specification and data"
    return Verification(f"not verified: {'; '.join(clauses)}" if clauses else summary, not clauses, comparisons)


def _read_pipeline(root: Path) -> _Pipeline:
    """Read inputs, outputs and `dvc status` of all stages, with DVC silent.

    Raises:
        UserError: dvc.lock is missing, DVC cannot read the repository, or a stage is running in it.
    """
    from dvc.exceptions import DvcException  # a second to import
    from dvc.lock import LockError
    from dvc.repo import Repo

    def relative(path: str) -> str:
        return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path

    if not (root / LOCK).exists():
        raise UserError("nothing to verify: no stage has run here (dvc.lock is missing)", "run `captrain run`")
    logging.getLogger("dvc").setLevel(logging.CRITICAL)
    for path in (root / name for name in READ_BY_DVC):
        if path.exists() and not path.is_dir():
            require_regular(path)  # DVC would wait for a pipe
    try:
        # DVC names files relative to the current folder.
        with chdir(root), Repo(str(root)) as repo:
            stages = repo.index.stages
            inputs = {relative(path) for stage in stages for path in (stage.path, *(dep.fs_path for dep in stage.deps))}
            outputs = {relative(out.fs_path): not out.use_cache for stage in stages for out in stage.outs}
            altered = {
                relative(path): stage.addressing for stage in stages for out in stage.outs for path in _altered(out)
            }
            return _Pipeline(inputs, outputs, altered, repo.status())  # pyright: ignore[reportArgumentType]
    except LockError:
        raise UserError("a stage is running: its results are not complete", "wait until `dvc repro` ends") from None
    except (DvcException, RecursionError) as error:
        is_endless = isinstance(error, RecursionError)
        message = "one of its files is nested without end" if is_endless else " ".join(str(error).split())
        raise UserError(
            f"DVC cannot read the pipeline in {root.name}/: {message}",
            "see `dvc status`; if dvc.lock was cut off by a kill, delete it: `dvc repro` restores what DVC's cache has",
        ) from error


def _altered(out: "Output") -> list[str]:
    """List the files of an output whose content differs from dvc.lock.

    This is needed because `dvc status` compares only sizes and times, and names only folders.
    """
    from dvc_data.hashfile.tree import Tree

    path = Path(out.fs_path)
    if not out.hash_info or not path.exists():
        return []
    if not path.is_dir():
        return [] if out.hash_info.isdir or _md5(path) == out.hash_info.value else [str(path)]
    listing = out.get_obj()
    if not isinstance(listing, Tree):  # DVC's cache lacks it
        return []
    files = {path.joinpath(*key): hash_info.value for key, _, hash_info in listing if hash_info}
    return [str(file) for file, expected in files.items() if file.is_file() and _md5(file) != expected]


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _compare_with_lock(pipeline: _Pipeline) -> Differences:
    """Collect what `dvc status` reports as changed since the stages ran."""
    differences: Differences = defaultdict(lambda: defaultdict(list))
    for path, stage in pipeline.altered.items():
        differences["edits"][f"{path}: altered since the run"].append(stage)
    for stage, changes in pipeline.status.items():
        for change in changes:
            if isinstance(change, str):
                differences["code"][change].append(stage)
                continue
            for path, state in change.get("changed deps", {}).items():
                # A result is reported as output of its stage.
                if (topic := pipeline.topic_of(path)) != "results":
                    text = f"{path}: {', '.join(state)} changed" if isinstance(state, dict) else f"{path}: {state}"
                    differences[topic][f"{text} since the run"].append(stage)
            for path, state in change.get("changed outs", {}).items():
                if state in ("deleted", "not in cache") and not pipeline.outputs.get(path):
                    differences["not checked"][f"{path}, output of {stage}"].append(stage)
                elif not any(_is_below(file, [path]) for file in pipeline.altered):
                    differences["edits"][f"{path}: {state} since the run"].append(stage)
    return differences


def _compare_with_commit(root: Path, pipeline: _Pipeline, commit: str, differences: Differences) -> list[str]:
    """Add to `differences` the inputs that differ from git's HEAD or are not committed.

    Returns:
        Results that differ from HEAD but were not edited after their stage wrote them.
    """
    in_git = {path for path, is_in_git in pipeline.outputs.items() if is_in_git}
    inputs = {path for path in pipeline.inputs if pipeline.topic_of(path) != "results"}
    paths = sorted(path for path in {*inputs, *in_git, LOCK} if not Path(path).is_absolute())

    def listed(*arguments: str) -> list[str]:
        return [*filter(None, _git(root, *arguments, "--", *paths).split("\0"))]

    files, edited = listed("ls-files", "-z"), [text.partition(": ")[0] for text in differences["edits"]]
    unknown = [path for path in paths if not any(_is_below(file, [path]) for file in files)]
    texts = dict.fromkeys(listed("diff", "--name-only", "--relative", "-z", "HEAD"), f"differs from commit {commit}")
    texts |= dict.fromkeys((*unknown, *listed("ls-files", "--others", "--exclude-standard", "-z")), "is not committed")
    for path, text in texts.items():
        if (topic := pipeline.topic_of(path)) != "results":
            differences[topic][f"{path} {text}"] = []
    return [path for path in texts if pipeline.topic_of(path) == "results" and not _is_below(path, edited)]


def _compare_pass_rates(root: Path) -> tuple[str, list[str]]:
    """Compare the current pass rates with the committed intervals. Return a verdict, and the rows outside them."""
    old, new = (
        _committed(root, TABLE),
        (root / TABLE).read_text(errors="replace", encoding="utf-8") if (root / TABLE).is_file() else "",
    )
    if new == old:
        return "the same pass rates", []
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
        (rate, low, high), new_rate = (before[name][column] for column in numbers), after[name]["pass_rate"]
        both_undefined = math.isnan(rate) and math.isnan(new_rate)
        if rate != new_rate and not both_undefined and not low <= new_rate <= high:
            beyond.append(f"{name} {rate:.3f} -> {new_rate:.3f} ({low:.3f} to {high:.3f})")
    if not beyond:
        return "the same result within noise", []
    count = len({**before, **after})
    return f"{len(beyond)} of {counted(count, 'pass rate')} are beyond the committed intervals: {_some(beyond)}", beyond


def _other_libraries(pins: str) -> list[str]:
    """List the libraries in `COMPUTING`, and Python, if the installed version differs from the pinned version.

    Args:
        pins: `name==version` lines. A comment may say `Python 3.11`. A build tag (`+cpu`) is compared only if the pin
            has one.
    """
    # Read versions from pip's metadata, because importing the libraries would take seconds.
    installed = {package.metadata["Name"].lower().replace("_", "-"): package.version for package in distributions()}
    others = list[str]()
    python = re.search(r"^#.*\bPython (\d+\.\d+)", pins, re.MULTILINE)
    if python and not f"{platform.python_version()}.".startswith(f"{python[1]}."):
        others.append(f"python {platform.python_version()} (pinned {python[1]})")
    for name, version in re.findall(r"^([\w.-]+)==([^\s;#]+)", pins.lower().replace("_", "-"), re.MULTILINE):
        actual = installed.get(name, "not installed")
        if name in COMPUTING and version not in (actual, actual.partition("+")[0]):
            others.append(f"{name} {actual} (pinned {version})")
    return others


def _git(root: Path, *arguments: str) -> str:
    """Run git and return its output.

    Raises:
        UserError: git fails, for instance because nothing is committed yet.
    """
    command = ["git", "-C", str(root), *arguments]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if process.returncode:
        raise UserError(f"git {arguments[0]} failed: {process.stderr.strip()}", "run in a git clone that has a commit")
    return process.stdout


def _committed(root: Path, path: str) -> str:
    """Read a file as committed in git's HEAD; "" if it is not there."""
    if not _git(root, "ls-tree", "--name-only", "HEAD", "--", path):
        return ""
    return _git(root, "show", f"HEAD:./{path}")


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _some(entries: Sequence[str], separator: str = ", ") -> str:
    """Join the first entries and count the rest."""
    entries = [*dict.fromkeys(entries)]
    text = separator.join(entries[:MOST])
    return text if len(entries) <= MOST else f"{text} and {len(entries) - MOST} more"
