"""One look at a running pipeline: what runs, how far it is, what is to come.

What runs is told by `processes`, how far it is by `progress`, what is stale by `provenance`; `view` shows it.

Watching changes nothing, and takes no lock: `dvc repro` waits three seconds for its own and then gives up, so that
somebody who holds it in order to look would end the run. What is stale takes DVC seconds to find out, and is looked at
once a minute at most.
"""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from captrain.errors import UserError
from captrain.execution import TIMES
from captrain.monitoring import processes
from captrain.monitoring.processes import UNREADABLE, Running, RunningPoint
from captrain.monitoring.progress import Progress, clean, ledger
from captrain.monitoring.provenance import State, stage_states
from captrain.records import JsonObject, read_json

PATIENCE = 60.0
"""Seconds between two looks at what is stale."""
AHEAD = ("stale", "never run", "missing")


@dataclass
class View:
    """Findings of one look at the pipeline.

    Args:
        stages: of dvc.yaml, in the order in which they run.
        states: of each, as far as they could be found out; without those that run.
        running: stages whose process is alive.
        finished: stages that ran when they were looked at before, and have not been looked at since.
        points: stages that run in the points of a sweep.
        facts: how far the running stages are, a line each, which changes only with what it says.
        sign: when any of them left something behind last, None for nothing yet.
        notes: what hinders the view, and what does not fit into it.
        rollouts: in the ledger of each stage.
        durations: seconds of each stage's last run here.
        time: when it was.
    """

    stages: list[str] = field(default_factory=list)
    states: Mapping[str, State] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    points: list[RunningPoint] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    sign: float | None = None
    notes: list[str] = field(default_factory=list)
    rollouts: dict[str, int] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def following(self) -> str | None:
        """The stage that would run next, and on what condition."""
        candidates = {name: self.states.get(name) for name in self.stages if name not in self.finished}
        for states, condition in ((AHEAD, ""), (("waiting",), " if its inputs change")):
            if following := next((name for name, state in candidates.items() if state in states), None):
                return f"{following}{condition}"
        return None


class Watch:
    """Watch over a project, which looks again and again and remembers what is dear to find out.

    Args:
        root: the folder that holds dvc.yaml.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._states: dict[str, State] = {}
        self._order: list[str] = []
        self._trouble = ""
        self._last_look = float("-inf")
        self._running: set[str] = set()
        self._finished: set[str] = set()
        self._progress = Progress(self.root)

    def look(self) -> View:
        """Look at the pipeline once."""
        view = View()
        pipeline = processes.pipeline(self.root)
        view.running, view.points = processes.running(self.root, pipeline)
        self._finished = (self._finished | self._running) - view.running.keys()
        self._running = set(view.running)
        if time.monotonic() - self._last_look >= PATIENCE:
            self._find_stale(view.running)
            self._last_look = time.monotonic()
            self._finished = set()
        view.finished = set(self._finished)
        view.stages = self._order or [*pipeline]
        view.states = {name: state for name, state in self._states.items() if name not in view.running}
        view.notes += [self._trouble] if self._trouble else []
        if not view.running:
            view.notes += processes.writers(self.root, pipeline)
        signs = list[float]()
        for name, process in view.running.items():
            for fact, moment in self._progress.of(name, process.since):
                view.facts.append(f"{name}: {fact}")
                signs.append(moment)
        view.sign = max(signs, default=None)
        view.facts += self._progress.cluster()
        view.rollouts = {
            path.parent.name: sum(entry.rollouts for entry in ledger(path))
            for path in sorted(self.root.glob("results/*/ledger.jsonl"))
        }
        view.durations = self._durations()
        return view

    def _find_stale(self, running: Collection[str]) -> None:
        """Ask DVC; where it cannot say, what was known stays."""
        try:
            states = stage_states(self.root, running)
        except (UserError, *UNREADABLE) as error:
            problem = error.problem if isinstance(error, UserError) else str(error)
            message = " ".join(problem.split()).replace(str(self.root), self.root.name)
            self._trouble = f"what is stale cannot be found out now: {clean(message, 160)}"
            return
        self._states = dict[str, State]((stage.name, stage.state) for stage in states)
        self._order, self._trouble = [*self._states], ""

    def _durations(self) -> dict[str, float]:
        durations = dict[str, float]()
        for folder in (self.root / TIMES).glob("*"):
            with suppress(*UNREADABLE):
                newest = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
                durations[folder.name] = float(read_json(newest, JsonObject)["wall_s"])
        return durations
