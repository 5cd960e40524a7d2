"""How far the running stages of a pipeline are, read from what they leave behind while they run.

Journals of rollouts, checkpoints of trainings, answers of models, the log of a sweep's point, jobs of a cluster. A file
that is half-written is passed over until it is whole. Rates are of what grew while it was watched.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter

from captrain.baselines import TRACE_STAGES, trained_baselines
from captrain.errors import InfrastructureError
from captrain.execution import jobs
from captrain.ledger import LedgerEntry, budget
from captrain.models import ANSWERS, answer_times
from captrain.monitoring.processes import UNREADABLE

CACHE = Path(".cache")
CLUSTER = 30.0
"""Seconds between two questions to Slurm."""
SLACK = 2.0
"""Seconds by which the clocks of a file system and of the processes may differ."""


class _Row(BaseModel):
    """What is shown of a step of a training."""

    step: int
    rollouts: int
    reward: float
    success: float
    informative: float
    places: dict[str, int] = {}


class _Result(BaseModel):
    """What is shown of a training that is over."""

    rollouts: int
    history: list[_Row]


HISTORY = TypeAdapter(list[_Row])


@dataclass
class _Journal:
    """A journal, read as far as it was whole."""

    offset: int = 0
    lines: int = 0
    passed: int = 0
    errors: int = 0

    def read(self, path: Path) -> None:
        """Count what has been appended; from the beginning where the file was written anew."""
        if path.stat().st_size < self.offset:
            self.__init__()
        with path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                self.lines += 1
                # Rollouts are too long to be read as JSON again and again. Only text comes after the last key of that
                # name, and text has its quotes escaped.
                outcome = line.rpartition(b'"outcome":"')[2]
                self.passed += outcome.startswith(b'passed"')
                self.errors += outcome.startswith(b'error"')


class Progress:
    """Remembers what rates are made of, and what is dear to find out.

    Args:
        root: the folder that holds dvc.yaml, resolved.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._asked = float("-inf")
        self._cluster = list[str]()
        self._journals: dict[Path, _Journal] = {}
        self._samples: dict[str, list[tuple[float, int]]] = {}

    def of(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        """What the stage has left behind since it began, and when."""
        for source in (self._played, self._trained, self._answered, self._said):
            with suppress(OSError):  # what is there one moment is replaced or removed in the next
                yield from source(stage, since)

    def _played(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        folder = self.root / CACHE / "rollouts"
        # A journal's lock is opened for writing whenever somebody begins to play, or goes on.
        opened = {path.with_suffix(".jsonl"): path.stat().st_mtime for path in folder.glob("*.lock")}
        times = {path: path.stat().st_mtime for path, at in opened.items() if at >= since - SLACK and path.exists()}
        times = dict(sorted(times.items(), key=lambda item: item[1]))
        for path in times:
            self._journals.setdefault(path, _Journal()).read(path)
        grown = [self._journals[path] for path in times if self._journals[path].lines]
        if not grown:
            return
        count, at = sum(one.lines for one in grown), max(times.values())
        scored = count - sum(one.errors for one in grown)
        spec, wanted = self._spec(), None
        each = {
            "rollouts": _product(spec, "rollouts.tasks", "rollouts.trials"),
            "environments": _product(spec, "environments.groups", "environments.group_size"),
            "evaluation": _product(spec, "evaluation.tasks", "evaluation.trials"),
        }.get(stage)
        parts = [f"{count:,} rollouts in {len(grown):,} {'journal' if len(grown) == 1 else 'journals'}"]
        if stage == "rollouts" and each:
            wanted = each
            parts = [f"{count:,} of at most {each:,} rollouts"]
        elif each:
            parts.append(f"the newest has {grown[-1].lines:,} of at most {each:,}")
        if scored:
            parts.append(f"pass rate {sum(one.passed for one in grown) / scored:.3f}")
        if count > scored:
            parts.append(f"{count - scored:,} errors")
        yield ", ".join([*parts, *self._pace(f"{stage}/journals", count, at, wanted)]), at

    def _pace(self, key: str, count: int, at: float, wanted: int | None) -> list[str]:
        """Rate and end, from what this watch has seen to grow."""
        samples = self._samples.setdefault(key, [])
        if samples and count < samples[-1][1]:
            samples.clear()
        if not samples:
            samples.append((time.time(), count))  # what was there before says nothing of the rate
        elif count > samples[-1][1]:
            samples.append((at, count))
        del samples[1:-50]
        return _pace(samples[0], samples[-1], wanted)

    def _trained(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        wanted = self._budget(stage)
        whole = list[tuple[_Result, float]]()
        for lock in sorted(self.root.glob(f"{CACHE}/adapters/*/lock")):
            begun = lock.stat().st_mtime  # it is opened for writing whenever a training begins or goes on
            if begun < since - SLACK:
                continue
            result = lock.with_name("result.json")
            if result.exists():
                with suppress(*UNREADABLE):
                    at = max(begun, result.stat().st_mtime)
                    whole.append((_Result.model_validate_json(result.read_bytes()), at))
            else:
                yield _training(lock.parent, begun, wanted)
        if whole:
            spent, at = sum(one.rollouts for one, _ in whole), max(at for _, at in whole)
            names = ", ".join(_name(one.history) for one, _ in whole)
            yield f"{len(whole)} trained or found whole, {spent:,} rollouts: {names}", at

    def _budget(self, stage: str) -> int | None:
        """Rollouts of each training of a stage, where that is known beforehand."""
        if stage in trained_baselines():
            paths = [self.root / "results" / one / "ledger.jsonl" for one in TRACE_STAGES]
            return budget([entry for path in paths for entry in ledger(path)]) or None
        return _product(self._spec(), "adapters.rollouts") if stage in ("adapters", "controls") else None

    def _answered(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        times = answer_times(self.root / ANSWERS)
        if new := [at for at in times if at >= since - SLACK]:
            pace = self._pace(f"{stage}/answers", len(new), max(new), None)
            yield ", ".join([f"{len(new):,} new answers of models, {len(times):,} on disk", *pace]), max(new)

    def _said(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        """The last line of the log, which the points of a sweep have."""
        path = self.root / "log.txt"
        if not path.exists() or (at := path.stat().st_mtime) < since - SLACK:
            return
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        if said := next((line for line in reversed(lines) if line.strip()), ""):
            yield f"said: {clean(jobs.without_bar(said))}", at

    def cluster(self) -> list[str]:
        """Jobs on the cluster that are not over, by their states; asked for now and then."""
        if time.monotonic() - self._asked < CLUSTER:
            return self._cluster
        self._asked, self._cluster = time.monotonic(), []
        folder = self.root / jobs.JOBS
        try:
            sent = {one.key: one for row in jobs.submissions(folder) for one in row.attempts(folder)}
        except UNREADABLE as error:
            self._cluster = [f"jobs: the ledger cannot be read ({type(error).__name__})"] if folder.exists() else []
            return self._cluster
        left = {key: one for key, one in sent.items() if not (folder / "results" / f"{key}.pkl").exists()}
        if not left:
            return []
        try:
            known = jobs.states([one.job for one in left.values()])
        except InfrastructureError as error:
            self._cluster = [f"jobs: {len(left)} are not finished; Slurm does not answer: {clean(str(error))}"]
            return self._cluster
        count = Counter(known[one.job].name.lower() for one in left.values())
        words = ", ".join(f"{number} {word}" for word, number in sorted(count.items()))
        self._cluster = [f"jobs: {len(sent) - len(left)} of {len(sent)} finished, {words}"]
        for one in left.values():
            if known[one.job].name == "RUNNING":
                lines = one.tail()
                said = clean(jobs.without_bar(next(reversed(lines), "")))
                self._cluster.append(
                    f"job {one.job}: {jobs.progress_of(lines) or 'running'}{f'; {said}' if said else ''}"
                )
        return self._cluster

    def _spec(self) -> Any:
        try:
            return yaml.safe_load((self.root / "results/spec.yaml").read_text())
        except UNREADABLE:
            return None


def _training(workspace: Path, begun: float, wanted: int | None) -> tuple[str, float]:
    """How far a training is by its checkpoints, of which two are kept. The rate is of what was played since it
    was begun or gone on with."""
    marks, rows = list[tuple[float, int]](), list[_Row]()
    for path in sorted(workspace.glob("checkpoints*/checkpoint-*/history.json"), key=lambda path: path.stat().st_mtime):
        with suppress(*UNREADABLE):
            if read := HISTORY.validate_json(path.read_bytes()):
                rows = read
                marks.append((path.stat().st_mtime, read[-1].rollouts))
    if not rows:
        return f"training {workspace.name} begun, no checkpoint yet", begun
    before = [count for at, count in marks if at < begun]
    start, end, last = (begun, max(before, default=0)), marks[-1], rows[-1]
    played = f"{last.rollouts:,}{f' of {wanted:,}' if wanted and wanted >= last.rollouts else ''} rollouts"
    parts = [
        f"training {_name(rows)}: step {last.step}, {played}, mean reward {last.reward:.3f}, "
        f"pass rate {last.success:.3f}, informative {last.informative:.0%}"
    ]
    return ", ".join([*parts, *_pace(start, end, wanted)]), max(end[0], begun)


def _pace(start: tuple[float, int], end: tuple[float, int], wanted: int | None) -> list[str]:
    """Rate and end in words, of two (time, count); nothing where nothing has grown."""
    if end[1] <= start[1] or end[0] <= start[0]:
        return []
    rate = (end[1] - start[1]) / (end[0] - start[0])
    said = [f"{rate:.1f} a second" if rate >= 1 else f"{60 * rate:.1f} a minute"]
    if wanted and wanted > end[1]:
        said.append(f"ends about {clock(end[0] + (wanted - end[1]) / rate)}")
    return said


def _name(rows: Sequence[_Row]) -> str:
    """What a training is called, which only the places of its groups tell."""
    names = dict.fromkeys(name for row in rows for name in row.places)
    shown = [clean(name, 40) for name in names]
    return " + ".join(shown[:3] + [f"{len(shown) - 3} more"] * (len(shown) > 3)) or "an adapter"


def ledger(path: Path) -> list[LedgerEntry]:
    """Entries of a ledger, those that are whole."""
    entries = list[LedgerEntry]()
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                entries.append(LedgerEntry.model_validate_json(line))
    return entries


def _product(spec: Any, *keys: str) -> int | None:
    """Product of settings by their dotted names, None where one is no positive number."""
    total = 1
    for key in keys:
        value = spec
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return None
        total *= value
    return total


def clean(text: str, most: int = 100) -> str:
    """What a file says, without what a terminal would act on."""
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return text if len(text) <= most else f"{text[: most - 1]}…"


def clock(at: float) -> str:
    """A point in time by the local clock, with the date where it is another day's."""
    there, here = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if there[:3] == here[:3] else "%Y-%m-%d %H:%M", there)
