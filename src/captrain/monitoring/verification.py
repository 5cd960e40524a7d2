"""Verdict on the committed results: are they those of the committed code, and if not, why? Each thing that may be the
reason is a finding.

Other code, another specification, edited files, other versions of libraries and another machine are different verdicts.
Results that were made again are judged by their numbers, not by their bytes: pass rates within the committed intervals
are the same result within noise. That is said, and is still not verified, because no byte of it was.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from captrain.config import load_spec
from captrain.errors import UserError
from captrain.monitoring import processes
from captrain.monitoring.evidence import SPEC, Difference, Evidence, Topic, committed_text, gather
from captrain.monitoring.installation import PROMISE, Libraries, compare_libraries, processor
from captrain.monitoring.provenance import lock_bytes

TABLE = "results/evaluation/main.csv"
"""The table that decides whether results are the same within noise: pass rates over the whole test split. Others hold
fewer tasks a row, and training again moves these further than intervals over tasks say."""
PINS = "requirements.lock"
ENTRIES = 4
"""Entries that a finding names; its details have all."""
Status = Literal["ok", "differs", "note"]


@dataclass(frozen=True)
class Finding:
    """Finding on one topic, in a sentence or two, and every single thing behind it."""

    topic: str
    status: Status
    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The verdict: in one sentence, whether it `holds`, the findings, and what could not be looked at."""

    summary: str
    holds: bool
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]


def verify(root: Path) -> Verification:
    """Say whether the committed results were made by the committed code, specification and data, and if not, why.

    Raises:
        UserError: there is no pipeline, no dvc.lock, or no git commit to compare with; a stage runs, or one ended
            meanwhile.
    """
    root = root.resolve()
    before = lock_bytes(root)
    _refuse_running(root)
    evidence = gather(root)
    pins = committed_text(root, PINS)
    libraries = compare_libraries(pins) if pins else Libraries(0, {}, {})
    by_topic: defaultdict[Topic, list[Difference]] = defaultdict(list)
    for difference in evidence.differences:
        by_topic[difference.topic].append(difference)
    findings = [
        _code(evidence, by_topic["code"]),
        _specification(root, by_topic["specification"]),
        _listed("data", by_topic["data"]),
        _listed("edits", by_topic["edits"]),
        _record(evidence, by_topic["record"]),
        _results(root, evidence, by_topic["results"], bool(by_topic["edits"] or by_topic["record"])),
        _libraries(evidence, libraries),
        _machine(root, evidence, libraries),
    ]
    _refuse_running(root)
    if lock_bytes(root) != before:
        raise UserError("dvc.lock was written while it was verified", "wait for the end of `dvc repro`")
    return Verification(
        _summary(root, evidence, libraries),
        not evidence.differences and not evidence.remade,
        tuple(finding for finding in findings if finding),
        tuple(evidence.unchecked),
    )


def _refuse_running(root: Path) -> None:
    """Refuse to verify results that a running stage is about to replace."""
    running, _ = processes.running(root, processes.pipeline(root))
    if running:
        raise UserError(f"{', '.join(running)} runs now: its results are not whole", "wait for the end of `dvc repro`")


def _code(evidence: Evidence, differences: Sequence[Difference]) -> Finding:
    if not differences:
        return Finding(
            "code", "ok", f"of {_count(evidence.stages, 'stage')} is that which made the results, and committed"
        )
    entries = [f"{path} ({_some(stages)})" for path, stages in sorted(evidence.code.items())]
    entries += [
        change.text for change in differences if change.account == "commit" and change.path not in evidence.code
    ]
    stages = {stage for names in evidence.code.values() for stage in names}
    amount = f"changed for {len(stages)} of {_count(evidence.stages, 'stage')}: " if stages else ""
    return Finding("code", "differs", amount + _some(entries, "; "), _texts(differences))


def _specification(root: Path, differences: Sequence[Difference]) -> Finding:
    if not differences:
        composed = f"{SPEC} is what params.yaml and conf/ compose to"
        return Finding("specification", "ok", composed if (root / SPEC).exists() else "parameters are as in dvc.lock")
    return Finding("specification", "differs", _some(_by_stage(differences), "; "), _texts(differences))


def _listed(topic: str, differences: Sequence[Difference]) -> Finding | None:
    if not differences:
        return None
    # What git tells of an edited file, with numbers, is more than that DVC found its folder altered.
    files = [change for change in differences if change.account == "commit"]
    outside = [
        change
        for change in differences
        if change.account != "commit" and not any(file.path.startswith(change.path) for file in files)
    ]
    return Finding(topic, "differs", _some(_by_stage([*outside, *files]), "; "), _texts(differences))


def _record(evidence: Evidence, differences: Sequence[Difference]) -> Finding:
    if differences:
        return Finding("record", "differs", _some(_by_stage(differences), "; "), _texts(differences))
    links = f"dvc.lock agrees with itself: each of {evidence.links} outputs was read as it was made"
    return Finding("record", "ok", links)


def _results(root: Path, evidence: Evidence, differences: Sequence[Difference], faulty: bool) -> Finding | None:
    if not evidence.remade:
        text = f"of {_count(evidence.stages, 'stage')} are as dvc.lock has them and as committed in {evidence.commit}"
        return None if faulty else Finding("results", "ok", text)
    text = (
        f"made again here: {len(evidence.remade)} of {_count(evidence.stages, 'stage')} made other files than committed"
    )
    if evidence.origins:
        text += f", beginning with {_some(evidence.origins)}"
    sentences = [text]
    if rates := evidence.rates.get(TABLE):
        within = rates.rows - len(rates.beyond)
        sentences.append(
            f"{within} of {rates.rows} pass rates in {TABLE} are within the committed intervals"
            + (f", beyond are {_some(rates.beyond, ', ')}" if rates.beyond else ": the same result within noise")
        )
    elif _is_kept(root, evidence):
        sentences.append(f"{TABLE} is the committed one")
    for path, rates in evidence.rates.items():
        if path != TABLE:
            sentences.append(
                f"{rates.rows - len(rates.beyond)} of {rates.rows} in {path}, which holds fewer tasks a row and is not "
                "judged"
            )
    details = _texts(differences) + tuple(
        f"{path}: {row}" for path, rates in evidence.rates.items() for row in rates.beyond
    )
    return Finding("results", "differs", ". ".join(sentences), details)


def _is_kept(root: Path, evidence: Evidence) -> bool:
    """Return whether the table of pass rates is the committed one."""
    return (root / TABLE).exists() and all(change.path != TABLE for change in evidence.differences)


def _libraries(evidence: Evidence, libraries: Libraries) -> Finding:
    if not libraries.pinned:
        return Finding("libraries", "note", f"not compared: no {PINS} is committed")
    details = tuple(
        f"{name} {actual}, pinned {expected}"
        for name, (expected, actual) in sorted({**libraries.computing, **libraries.tools}.items())
    )
    remainder = f"; of others {len(libraries.tools)} differ, which decide no result" if libraries.tools else ""
    if not libraries.computing:
        return Finding("libraries", "ok", f"those that compute are as {PINS} pins them{remainder}", details)
    changed = [f"{name} {actual} (pinned {expected})" for name, (expected, actual) in libraries.computing.items()]
    consequence = "" if evidence.remade else "; what is run here may come out otherwise"
    status: Status = "differs" if evidence.origins else "note"
    return Finding("libraries", status, _some(changed, ", ", 2 * ENTRIES) + remainder + consequence, details)


def _machine(root: Path, evidence: Evidence, libraries: Libraries) -> Finding | None:
    """Find the machine to be the reason of results that were made again, where no other reason is left."""
    if not evidence.remade:
        return None
    cpu = processor()
    if not evidence.origins or libraries.computing:
        reason = "libraries differ" if evidence.origins else "what the first stage was run on differs"
        return Finding("machine", "note", f"{cpu}. Whether it matters cannot be told while {reason}")
    exclusion = cpu.exclusion or ("" if _is_embedded(root) else "it is of the embedded model alone")
    verdict = (
        f"The promise does not cover that: {exclusion}"
        if exclusion
        else "That is against the promise: please report it, with what `captrain verify --all` prints"
    )
    return Finding(
        "machine",
        "differs",
        f"code, specification, inputs and libraries of {_some(evidence.origins)} are the committed ones, and what came "
        f"out is not, which leaves this machine: {cpu}. {verdict} ({PROMISE} or later)",
    )


def _is_embedded(root: Path) -> bool:
    return not (root / SPEC).exists() or load_spec(root / SPEC).base.model is None


def _summary(root: Path, evidence: Evidence, libraries: Libraries) -> str:
    """Word the verdict in one sentence."""
    accounts: defaultdict[str, set[str]] = defaultdict(set)
    for change in evidence.differences:
        accounts[change.topic].add(change.account)
    if not accounts and not evidence.remade:
        return "verified: the committed results are those of the committed code, specification and data"
    clauses = [_rerun(root, evidence, libraries)]
    for topic, noun in (("code", "code"), ("specification", "specification"), ("data", "input data")):
        if "files" in accounts[topic]:
            clauses.append(f"the {noun} here is not that which made the results")
        elif accounts[topic] == {"commit"}:
            clauses.append(f"the {noun} here is not the committed one")
        elif accounts[topic] and not evidence.remade:
            clauses.append(f"the {noun} here is not the committed one, and made the same results")
    if accounts["edits"]:
        clauses.append("results were edited after their stage made them")
    if accounts["record"]:
        clauses.append("the record of the run is incomplete or contradicts itself")
    return f"not verified: {'; '.join(filter(None, clauses))}"


def _rerun(root: Path, evidence: Evidence, libraries: Libraries) -> str:
    """Say what a run made here changed and why, "" if there was none."""
    if not evidence.remade:
        return ""
    inputs = {change.topic for change in evidence.differences if change.account == "lock"}
    unknown = "with other libraries or on another machine"
    installation = "with other versions of libraries" if libraries.computing else "on another machine"
    causes = {
        "by other code": "code" in inputs,
        "to another specification": "specification" in inputs,
        "from other data": "data" in inputs,
        installation if libraries.pinned else unknown: bool(evidence.origins),
    }
    reason = " and ".join(cause for cause, holds in causes.items() if holds)
    text = f"the results were made again here{', ' if reason else ''}{reason}"
    if rates := evidence.rates.get(TABLE):
        noise = f"{len(rates.beyond)} of {rates.rows} pass rates are beyond the committed intervals"
        return f"{text}: {noise if rates.beyond else 'the same result within noise'}"
    return f"{text}: the same pass rates" if _is_kept(root, evidence) else text


def _texts(differences: Iterable[Difference]) -> tuple[str, ...]:
    return tuple(change.text for change in differences)


def _by_stage(differences: Iterable[Difference]) -> list[str]:
    """List each difference once, with the stages that it concerns."""
    stages: defaultdict[str, list[str]] = defaultdict(list)
    for change in differences:
        names = stages[change.text.removeprefix(f"{change.stage}: ") if change.stage else change.text]
        if change.stage and change.stage not in names:
            names.append(change.stage)
    return [f"{text} ({_some(names)})" if names else text for text, names in stages.items()]


def _count(things: Sequence[str], noun: str) -> str:
    return f"{len(things)} {noun}{'s' if len(things) > 1 else ''}"


def _some(entries: Sequence[str], separator: str = ", ", most: int = ENTRIES) -> str:
    """Join the first entries, and say how many there are more."""
    text = separator.join(entries[:most])
    return text if len(entries) <= most else f"{text} and {len(entries) - most} more"
