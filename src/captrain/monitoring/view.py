"""The view of a running pipeline as it is shown: drawn again and again on a terminal, elsewhere a line a change."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from captrain.monitoring.progress import clock
from captrain.monitoring.watch import AHEAD, View, Watch


def span(seconds: float) -> str:
    """Word a length of time."""
    minutes, odd = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {odd} s" if minutes else f"{odd} s"


def _headlines(view: View) -> list[str]:
    lines = [
        f"{name} runs since {clock(process.since)} (process {process.pid})"
        + (f"; last time it took {span(view.durations[name])}" if name in view.durations else "")
        for name, process in view.running.items()
    ]
    following = view.following()
    if lines:
        lines += [f"next: {following}"] if following else []
    elif following:
        lines = [f"no stage runs; `dvc repro` would begin with {following}"]
    else:
        lines = ["no stage runs; nothing is left to do" if view.states else "no stage runs"]
    points = [f"point {point.name}: {point.stage}, since {clock(point.since)}" for point in view.points]
    return [*lines, *points, *view.notes]


def lines(view: View) -> list[str]:
    """Write the view in lines of which each changes only when what it says does."""
    fresh = [name for name in view.stages if view.states.get(name) in ("fresh", "cached")]
    count = [f"{len(fresh)} of {len(view.stages)} stages are done"] if view.states else []
    return [*_headlines(view), *view.facts, *count]


def watch_view(view: View) -> list[RenderableType]:
    """Draw the view: what runs and how far it is, then all stages."""
    parts: list[RenderableType] = [Text(line, "bold" if view.running else "") for line in _headlines(view)]
    parts += [Text(f"  {line}") for line in view.facts]
    if view.running:
        sign = span(view.time - view.sign) + " ago" if view.sign else "nothing was left behind yet"
        parts.append(Text(f"  last sign of progress: {sign}", "dim"))
    table = Table("stage", "state", title_justify="left")
    table.add_column("rollouts spent", justify="right")
    table.add_column("last took", justify="right")
    for name in view.stages:
        colour, words = _state_of(view, name)
        rollouts, duration = view.rollouts.get(name), view.durations.get(name)
        old = "dim" if colour in ("yellow", "red", "bold green") else ""
        table.add_row(
            Text(name),
            Text(words, colour),
            Text(f"{rollouts:,}" if rollouts is not None else "", old),
            Text(span(duration) if duration is not None else "", old),
        )
    return [*parts, table]


def _state_of(view: View, name: str) -> tuple[str, str]:
    """Return colour and words of a stage's state."""
    if name in view.running:
        return "bold green", f"runs, for {span(view.time - view.running[name].since)}"
    if name in view.finished:
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
                    live.update(Group(*watch_view(watch.look())), refresh=True)
                    time.sleep(interval)
        before: list[str] = []
        while True:
            now = lines(watch.look())
            for line in now:
                if line not in before:
                    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
            before = now
            time.sleep(interval)
