"""Progress of the running stages of a pipeline, read from what they leave behind while they run.

Journals of rollouts, checkpoints of trainings, answers of models, the log of a sweep's point, jobs of a cluster. A file
that is half-written is passed over until it is whole. Rates are of what grew while it was watched.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from captrain.baselines import TRACE_STAGES, baselines, trained_baselines
from captrain.environments import read_passports
from captrain.errors import InfrastructureError, UserError
from captrain.execution import jobs
from captrain.ledger import LedgerEntry, budget
from captrain.models import ANSWERS, answer_times
from captrain.monitoring.processes import UNREADABLE
from captrain.records import Capability, load, read_json, read_yaml, remains

CACHE = Path(".cache")
CLUSTER = 30.0
"""Seconds between two questions to Slurm."""
SLACK = 2.0
"""Seconds by which the clocks of a file system and of the processes may differ."""


class _HistoryRow(BaseModel):
    """Fields of a training step that are shown."""

    step: int
    rollouts: int
    reward: float
    success: float
    informative: float
    places: dict[str, int] = {}


class _TrainingResult(BaseModel):
    """Fields of a finished training that are shown."""

    rollouts: int
    history: list[_HistoryRow]


@dataclass
class _JournalCount:
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
    """Memory of what rates are made of, and of what is dear to find out.

    Args:
        root: the folder that holds dvc.yaml, resolved.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._last_query = float("-inf")
        self._cluster = list[str]()
        self._journals: dict[Path, _JournalCount] = {}
        self._samples: dict[str, list[tuple[float, int]]] = {}

    def of(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        """Yield lines on the progress that the stage has made since it began, each with its time."""
        for source in (self._rollouts, self._trainings, self._answers, self._last_log_line):
            with suppress(OSError):  # what is there one moment is replaced or removed in the next
                yield from source(stage, since)

    def _rollouts(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        folder = self.root / CACHE / "rollouts"
        # A journal's lock is opened for writing whenever somebody begins to play, or goes on.
        locks = {path.with_suffix(".jsonl"): path.stat().st_mtime for path in folder.glob("*.lock")}
        times = {
            path: path.stat().st_mtime for path, opening in locks.items() if opening >= since - SLACK and path.exists()
        }
        times = dict(sorted(times.items(), key=lambda item: item[1]))
        for path in times:
            self._journals.setdefault(path, _JournalCount()).read(path)
        journals = [self._journals[path] for path in times if self._journals[path].lines]
        if not journals:
            return
        count, newest = sum(journal.lines for journal in journals), max(times.values())
        scored = count - sum(journal.errors for journal in journals)
        spec, total = self._spec(), None
        size = {
            "rollouts": _product(spec, "rollouts.tasks", "rollouts.trials"),
            "environments": _product(spec, "environments.groups", "environments.group_size"),
            "evaluation": _product(spec, "evaluation.tasks", "evaluation.trials"),
        }.get(stage)
        parts = [f"{count:,} rollouts in {len(journals):,} {'journal' if len(journals) == 1 else 'journals'}"]
        if stage == "rollouts" and size:
            total = size
            parts = [f"{count:,} of at most {size:,} rollouts"]
        elif size:
            parts.append(f"the newest has {journals[-1].lines:,} of at most {size:,}")
        if scored:
            parts.append(f"pass rate {sum(journal.passed for journal in journals) / scored:.3f}")
        if count > scored:
            parts.append(f"{count - scored:,} errors")
        yield ", ".join([*parts, *self._pace(f"{stage}/journals", count, newest, total)]), newest

    def _pace(self, key: str, count: int, moment: float, total: int | None) -> list[str]:
        """Rate and end, from what this watch has seen to grow."""
        samples = self._samples.setdefault(key, [])
        if samples and count < samples[-1][1]:
            samples.clear()
        if not samples:
            samples.append((time.time(), count))  # what was there before says nothing of the rate
        elif count > samples[-1][1]:
            samples.append((moment, count))
        del samples[1:-50]
        return _pace(samples[0], samples[-1], total)

    def _trainings(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        total = self._budget(stage)
        finished = list[tuple[_TrainingResult, float]]()
        for lock in sorted(self.root.glob(f"{CACHE}/adapters/*/lock")):
            start = lock.stat().st_mtime  # it is opened for writing whenever a training begins or goes on
            if start < since - SLACK:
                continue
            result = lock.with_name("result.json")
            if result.exists():
                with suppress(*UNREADABLE):
                    end = max(start, result.stat().st_mtime)
                    finished.append((read_json(result, _TrainingResult), end))
            else:
                yield _training(lock.parent, start, total)
        if finished:
            rollouts, newest = sum(result.rollouts for result, _ in finished), max(end for _, end in finished)
            names = ", ".join(_name(result.history) for result, _ in finished)
            yield f"{len(finished)} trained or found whole, {rollouts:,} rollouts: {names}", newest

    def _budget(self, stage: str) -> int | None:
        """Look up the rollouts of each training of a stage, where they are known beforehand.

        A baseline has what TRACE has spent, without what the baseline is charged for of it: diagnosis and calibration
        are not for it to play.
        """
        if stage in trained_baselines():
            paths = [self.root / "results" / name / "ledger.jsonl" for name in TRACE_STAGES]
            entries = [entry for path in paths for entry in ledger(path)]
            ranked, baseline = self._ranked(), baselines()[stage]
            charged = [entry for entry in entries if baseline.charged(entry, ranked)]
            return budget(entries) - budget(charged) or None
        return _product(self._spec(), "adapters.rollouts") if stage in ("adapters", "controls") else None

    def _ranked(self) -> list[str]:
        """List capabilities with an environment, best first; none while that cannot be read."""
        try:
            capabilities = load(self.root / "results/capabilities/capabilities.jsonl", Capability)
            environments = read_passports(self.root / "results/environments")
        except (UserError, *UNREADABLE):
            return []
        return [capability.id for capability in capabilities if capability.id in environments]

    def _answers(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        times = answer_times(self.root / ANSWERS)
        if new := [moment for moment in times if moment >= since - SLACK]:
            pace = self._pace(f"{stage}/answers", len(new), max(new), None)
            yield ", ".join([f"{len(new):,} new answers of models, {len(times):,} on disk", *pace]), max(new)

    def _last_log_line(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        """Yield the last line of the log, which the points of a sweep have."""
        path = self.root / "log.txt"
        if not path.exists() or (newest := path.stat().st_mtime) < since - SLACK:
            return
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        if line := next((line for line in reversed(lines) if line.strip()), ""):
            yield f"said: {clean(jobs.without_bar(line))}", newest

    def cluster(self) -> list[str]:
        """List jobs on the cluster that are not over, by their states; asked for now and then."""
        if time.monotonic() - self._last_query < CLUSTER:
            return self._cluster
        self._last_query, self._cluster = time.monotonic(), []
        folder = self.root / jobs.JOBS
        try:
            attempts = {attempt.key: attempt for row in jobs.submissions(folder) for attempt in row.attempts(folder)}
        except UNREADABLE as error:
            problem = str(error).partition("\n")[0]
            self._cluster = [f"jobs: the ledger cannot be read: {problem}"] if folder.exists() else []
            return self._cluster
        pending = [attempt for key, attempt in attempts.items() if not (folder / "results" / f"{key}.pkl").exists()]
        if not pending:
            return []
        try:
            states = jobs.states([attempt.job for attempt in pending])
        except InfrastructureError as error:
            self._cluster = [f"jobs: {len(pending)} are not finished; Slurm does not answer: {clean(str(error))}"]
            return self._cluster
        counts = Counter(states[attempt.job].name.lower() for attempt in pending)
        words = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
        self._cluster = [f"jobs: {len(attempts) - len(pending)} of {len(attempts)} finished, {words}"]
        for attempt in pending:
            if states[attempt.job].name == "RUNNING":
                lines = attempt.tail()
                last = clean(jobs.without_bar(next(reversed(lines), "")))
                share = jobs.progress_of(lines) or "running"
                self._cluster.append(f"job {attempt.job}: {share}{f'; {last}' if last else ''}")
        return self._cluster

    def _spec(self) -> object:
        try:
            return read_yaml(self.root / "results/spec.yaml", object)
        except UNREADABLE:
            return None


def _training(workspace: Path, start: float, total: int | None) -> tuple[str, float]:
    """Measure a training by its checkpoints, of which two are kept.

    The rate is of what was played since `start`, when it was begun or gone on with.
    """
    marks, history = list[tuple[float, int]](), list[_HistoryRow]()
    for path in sorted(workspace.glob("checkpoints*/checkpoint-*/history.json"), key=lambda path: path.stat().st_mtime):
        with suppress(*UNREADABLE):
            if rows := read_json(path, list[_HistoryRow]):
                history = rows
                marks.append((path.stat().st_mtime, rows[-1].rollouts))
    if not history:
        return f"training {workspace.name} begun, no checkpoint yet", start
    before = [count for moment, count in marks if moment < start]
    end, last = marks[-1], history[-1]
    count = f"{last.rollouts:,}{f' of {total:,}' if total and total >= last.rollouts else ''} rollouts"
    parts = [
        f"training {_name(history)}: step {last.step}, {count}, mean reward {last.reward:.3f}, "
        f"pass rate {last.success:.3f}, informative {last.informative:.0%}"
    ]
    return ", ".join([*parts, *_pace((start, max(before, default=0)), end, total)]), max(end[0], start)


def _pace(start: tuple[float, int], end: tuple[float, int], total: int | None) -> list[str]:
    """Rate and end in words, of two (time, count); nothing where nothing has grown."""
    if end[1] <= start[1] or end[0] <= start[0]:
        return []
    rate = (end[1] - start[1]) / (end[0] - start[0])
    words = [f"{rate:.1f} a second" if rate >= 1 else f"{60 * rate:.1f} a minute"]
    if total and total > end[1]:
        words.append(f"ends about {clock(end[0] + (total - end[1]) / rate)}")
    return words


def _name(rows: Sequence[_HistoryRow]) -> str:
    """Name a training by the places of its groups, which alone tell it."""
    names = [clean(name, 40) for name in dict.fromkeys(name for row in rows for name in row.places)]
    return " + ".join(names[:3] + [f"{len(names) - 3} more"] * (len(names) > 3)) or "an adapter"


def ledger(path: Path) -> list[LedgerEntry]:
    """Read the entries of a ledger, those that are whole."""
    with suppress(*UNREADABLE):
        return [entry for entry in remains(path, LedgerEntry) if entry is not None]
    return []


def _product(spec: object, *keys: str) -> int | None:
    """Multiply settings by their dotted names, None where one is no positive number."""
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
    """Shorten the text of a file and drop what a terminal would act on."""
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return text if len(text) <= most else f"{text[: most - 1]}…"


def clock(moment: float) -> str:
    """Format a point in time by the local clock, with the date where it is another day's."""
    date, today = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M:%S" if date[:3] == today[:3] else "%Y-%m-%d %H:%M", date)
