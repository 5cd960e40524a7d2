"""The live view of a running pipeline: `captrain watch`.

What runs is read from the list of processes: a stage is the Python process whose script is the one that dvc.yaml names,
in this folder. No lock says that as well: DVC's own (`.dvc/tmp/lock`) is free while a stage runs, and its list of
readers and writers (`.dvc/tmp/rwlock`) outlives a run that was killed, and names no machine. The latter is shown where
it names a process that is not here, which may be one of another node.

How far a stage is, is read from what it leaves behind while it runs: journals of rollouts, checkpoints of trainings,
answers of models, jobs of a cluster. A file that is half-written is passed over until it is whole.

Watching changes nothing, and takes no lock: `dvc repro` waits three seconds for its own and then gives up, so that
somebody who holds it in order to look would end the run. What is stale takes DVC seconds to find out, and is looked at
once a minute at most.
"""

import json
import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import BaseModel, TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from captrain import jobs
from captrain.baselines import budget
from captrain.clock import TIMES
from captrain.errors import InfrastructureError
from captrain.points import WORKSPACES as POINTS
from captrain.provenance import State, _changes, _path, _stages, _state
from captrain.records import LedgerEntry

CACHE = Path(".cache")
PATIENCE = 60.0
"""Seconds between two looks at what is stale."""
CLUSTER = 30.0
"""Seconds between two questions to Slurm."""
SLACK = 2.0
"""Seconds by which the clocks of a file system and of the processes may differ."""
TARGETED = ("rollouts", "environments", "adapters")
"""Stages that spend TRACE's budget, which each baseline is given as a whole."""
WHOLE = ("grpo_target", "awm", "single", "mixed", "ramp")
"""Stages that train one adapter with that budget."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError)
"""What reading a file may come to that is half-written, gone, or not what it should be."""
AHEAD = ("stale", "never run", "missing")


@dataclass(frozen=True)
class Running:
    """The process of a stage, and when it began, in seconds since 1970."""

    pid: int
    since: float


@dataclass
class View:
    """What one look has found.

    Args:
        stages: of dvc.yaml, in the order in which they run.
        states: of each, as far as they could be found out; without those that run.
        running: stages whose process is alive.
        ended: stages that ran when they were looked at before, and have not been looked at since.
        points: points of a sweep whose stages run, each with what runs there.
        facts: how far the running stages are, a line each, which changes only with what it says.
        sign: when any of them left something behind last, None for nothing yet.
        notes: what hinders the view, and what does not fit into it.
        spent: rollouts in the ledger of each stage.
        took: seconds of each stage's last run here.
        at: when it was.
    """

    stages: list[str] = field(default_factory=list)
    states: Mapping[str, State] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    points: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    sign: float | None = None
    notes: list[str] = field(default_factory=list)
    spent: dict[str, int] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    at: float = field(default_factory=time.time)

    def following(self) -> str | None:
        """The stage that would run next, and on what condition."""
        left = {name: self.states.get(name) for name in self.stages if name not in self.ended}
        for states, condition in ((AHEAD, ""), (("waiting",), " if its inputs change")):
            if found := next((name for name, state in left.items() if state in states), None):
                return f"{found}{condition}"
        return None


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


class Watch:
    """Looks at a project again and again, and remembers what is dear to find out, and what rates are made of.

    Args:
        root: the folder that holds dvc.yaml.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._states: dict[str, State] = {}
        self._order: list[str] = []
        self._trouble = ""
        self._looked = self._asked = float("-inf")
        self._cluster = list[str]()
        self._ran: set[str] = set()
        self._ended: set[str] = set()
        self._journals: dict[Path, _Journal] = {}
        self._samples: dict[str, list[tuple[float, int]]] = {}

    def look(self) -> View:
        """What is to be seen now."""
        view = View()
        pipeline = self._pipeline()
        view.running, view.points = self._running(pipeline)
        self._ended = (self._ended | self._ran) - view.running.keys()
        self._ran = set(view.running)
        if time.monotonic() - self._looked >= PATIENCE:
            self._find_stale(view.running)
            self._looked = time.monotonic()
            self._ended = set()
        view.ended = set(self._ended)
        view.stages = self._order or [*pipeline]
        view.states = {name: state for name, state in self._states.items() if name not in view.running}
        view.notes += [self._trouble] if self._trouble else []
        if not view.running:
            view.notes += self._writers(pipeline)
        signs = list[float]()
        for name, one in view.running.items():
            for said, at in self._progress(name, one.since):
                view.facts.append(f"{name}: {said}")
                signs.append(at)
        view.sign = max(signs, default=None)
        view.facts += self._jobs()
        view.spent = {
            path.parent.name: sum(entry.rollouts for entry in _ledger(path))
            for path in sorted(self.root.glob("results/*/ledger.jsonl"))
        }
        view.took = self._took()
        return view

    def _pipeline(self) -> dict[str, Any]:
        """The stages of dvc.yaml as they stand there; none while it cannot be read."""
        try:
            stages = (yaml.safe_load((self.root / "dvc.yaml").read_text()) or {})["stages"]
            return {str(name): stage for name, stage in stages.items() if isinstance(stage, dict)}
        except UNREADABLE:
            return {}

    def _running(self, pipeline: Mapping[str, Any]) -> tuple[dict[str, Running], list[str]]:
        """Stages that run here, and in the points beneath."""
        scripts = {
            (self.root / word).resolve(): name
            for name, stage in pipeline.items()
            for word in _words(stage.get("cmd"))
            if word.endswith(".py")
        }
        running, points = dict[str, Running](), dict[tuple[str, str], float]()
        beneath = self.root / POINTS
        for process in psutil.process_iter(["pid", "cmdline", "cwd", "create_time", "status"]):
            found = process.info
            script = _script(found["cmdline"] or [], found["cwd"] or "")
            if script is None or found["status"] == psutil.STATUS_ZOMBIE:
                continue
            since = found["create_time"]
            if name := scripts.get(script):
                # Processes that a stage forks have its command line, too.
                if name not in running or since < running[name].since:
                    running[name] = Running(found["pid"], since)
            elif script.parent.name == "stages" and script.parents[2] == beneath:
                key = script.parents[1].name, script.stem
                points[key] = min(since, points.get(key, since))
        order = [*pipeline]
        running = {name: running[name] for name in sorted(running, key=order.index)}
        return running, [f"{point}: {name}, since {clock(since)}" for (point, name), since in sorted(points.items())]

    def _find_stale(self, running: Mapping[str, Running]) -> None:
        """Ask DVC, without its lock; where it cannot say, what was known stays."""
        import networkx
        from dvc.exceptions import DvcException  # a second to import
        from dvc.repo import Repo

        logging.getLogger("dvc").setLevel(logging.CRITICAL)
        states = dict[str, State]()
        try:
            with Repo(str(self.root)) as repo:
                stages = _stages(repo)
                outputs = {_path(out, self.root) for stage in stages.values() for out in stage.outs}
                for name, stage in stages.items():
                    if name in running:  # what it writes is not whole
                        states[name] = "stale"
                        continue
                    kinds = {change.kind for change in _changes(stage, outputs, self.root)}
                    before = {getattr(one, "name", "") for one in networkx.descendants(repo.index.graph, stage)}
                    states[name] = _state(kinds, any(states.get(one) in AHEAD for one in before))
        except (DvcException, *UNREADABLE) as error:
            said = " ".join(str(error).split()).replace(str(self.root), self.root.name)
            self._trouble = f"what is stale cannot be found out now: {_clean(said, 160)}"
            return
        self._states, self._order, self._trouble = states, [*states], ""

    def _writers(self, pipeline: Mapping[str, Any]) -> list[str]:
        """Whom DVC says to be at work, when no stage is seen to run."""
        try:
            held = yaml.safe_load((self.root / ".dvc/tmp/rwlock").read_bytes()) or {}
            held = {str(path): int(one["pid"]) for path, one in held.get("write", {}).items()}
        except UNREADABLE:
            return []
        stages = {
            str(self.root / path): name
            for name, stage in pipeline.items()
            for kind in ("outs", "plots", "metrics")
            for one in stage.get(kind) or []
            for path in ([one] if isinstance(one, str) else one)
        }
        found = {(stages.get(path, "an unknown stage"), pid) for path, pid in held.items()}
        return [
            f"DVC is about to begin or to end {name} (process {pid})"
            if psutil.pid_exists(pid)
            else f"DVC's rwlock has process {pid} at work on {name}, which is not here: it runs on another machine, or "
            "was killed"
            for name, pid in sorted(found)
        ]

    def _progress(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
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
        if stage in WHOLE:
            paths = [self.root / "results" / one / "ledger.jsonl" for one in TARGETED]
            return budget([entry for path in paths for entry in _ledger(path)]) or None
        return _product(self._spec(), "adapters.rollouts") if stage in ("adapters", "controls") else None

    def _answered(self, stage: str, since: float) -> Iterator[tuple[str, float]]:
        times = [path.stat().st_mtime for path in (self.root / CACHE / "answers").glob("*.json")]
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
            yield f"said: {_clean(jobs.without_bar(said))}", at

    def _jobs(self) -> list[str]:
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
            self._cluster = [f"jobs: {len(left)} are not finished; Slurm does not answer: {_clean(str(error))}"]
            return self._cluster
        count = Counter(known[one.job].name.lower() for one in left.values())
        words = ", ".join(f"{number} {word}" for word, number in sorted(count.items()))
        self._cluster = [f"jobs: {len(sent) - len(left)} of {len(sent)} finished, {words}"]
        for one in left.values():
            if known[one.job].name == "RUNNING":
                lines = one.tail()
                said = _clean(jobs.without_bar(next(reversed(lines), "")))
                self._cluster.append(f"job {one.job}: {jobs.progress(lines) or 'running'}{f'; {said}' if said else ''}")
        return self._cluster

    def _spec(self) -> Any:
        try:
            return yaml.safe_load((self.root / "results/spec.yaml").read_text())
        except UNREADABLE:
            return None

    def _took(self) -> dict[str, float]:
        found = dict[str, float]()
        for folder in (self.root / TIMES).glob("*"):
            with suppress(*UNREADABLE):
                newest = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
                found[folder.name] = float(json.loads(newest.read_bytes())["wall_s"])
        return found


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
    shown = [_clean(name, 40) for name in names]
    return " + ".join(shown[:3] + [f"{len(shown) - 3} more"] * (len(shown) > 3)) or "an adapter"


def _script(command: Sequence[str], folder: str) -> Path | None:
    """The script that a Python process runs, None where it runs none."""
    if not command or not Path(command[0]).name.startswith("python"):
        return None
    for word in command[1:]:
        if not word.startswith("-"):
            return Path(os.path.realpath(Path(folder) / word)) if word.endswith(".py") else None
    return None


def _words(command: Any) -> list[str]:
    try:
        return shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return []


def _ledger(path: Path) -> list[LedgerEntry]:
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


def _clean(text: str, most: int = 100) -> str:
    """What a file says, without what a terminal would act on."""
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return text if len(text) <= most else f"{text[: most - 1]}…"


def clock(at: float) -> str:
    """A point in time by the local clock, with the date where it is another day's."""
    there, here = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if there[:3] == here[:3] else "%Y-%m-%d %H:%M", there)


def span(seconds: float) -> str:
    """A length of time in words."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _headlines(view: View) -> list[str]:
    lines = [
        f"{name} runs since {clock(one.since)} (process {one.pid})"
        + (f"; last time it took {span(view.took[name])}" if name in view.took else "")
        for name, one in view.running.items()
    ]
    following = view.following()
    if lines:
        lines += [f"next: {following}"] if following else []
    elif following:
        lines = [f"no stage runs; `dvc repro` would begin with {following}"]
    else:
        lines = ["no stage runs; nothing is left to do" if view.states else "no stage runs"]
    return [*lines, *(f"point {line}" for line in view.points), *view.notes]


def lines(view: View) -> list[str]:
    """The view in lines of which each changes only when what it says does."""
    done = [name for name in view.stages if view.states.get(name) in ("fresh", "cached")]
    count = [f"{len(done)} of {len(view.stages)} stages are done"] if view.states else []
    return [*_headlines(view), *view.facts, *count]


def shown(view: View) -> list[RenderableType]:
    """The view as it is drawn: what runs and how far it is, then all stages."""
    parts: list[RenderableType] = [Text(line, "bold" if view.running else "") for line in _headlines(view)]
    parts += [Text(f"  {line}") for line in view.facts]
    if view.running:
        sign = span(view.at - view.sign) + " ago" if view.sign else "nothing was left behind yet"
        parts.append(Text(f"  last sign of progress: {sign}", "dim"))
    table = Table("stage", "state", title_justify="left")
    table.add_column("rollouts spent", justify="right")
    table.add_column("last took", justify="right")
    for name in view.stages:
        colour, words = _state_of(view, name)
        spent, took = view.spent.get(name), view.took.get(name)
        old = "dim" if colour in ("yellow", "red", "bold green") else ""
        table.add_row(
            Text(name), Text(words, colour), Text(f"{spent:,}" if spent is not None else "", old),
            Text(span(took) if took is not None else "", old),
        )  # fmt: skip
    return [*parts, table]


def _state_of(view: View, name: str) -> tuple[str, str]:
    """Colour and words."""
    if name in view.running:
        return "bold green", f"runs, for {span(view.at - view.running[name].since)}"
    if name in view.ended:
        return "yellow", "has ended"
    state = view.states.get(name)
    if state in AHEAD:
        return "red", f"to come ({state})"
    if state == "waiting":
        return "yellow", "to come if its inputs change"
    return ("green", "done") if state else ("dim", "not known")


def follow(root: Path, interval: float) -> None:
    """Show the view until it is interrupted: redrawn on a terminal, else a line for each change.

    Args:
        root: the folder that holds dvc.yaml.
        interval: seconds between two looks.
    """
    watch = Watch(root)
    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            console = Console(highlight=False, markup=False, emoji=False)
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(Group(*shown(watch.look())), refresh=True)
                    time.sleep(interval)
        before: list[str] = []
        while True:
            now = lines(watch.look())
            for line in now:
                if line not in before:
                    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
            before = now
            time.sleep(interval)
