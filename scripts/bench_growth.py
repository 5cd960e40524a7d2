"""Growth of time and memory with what is given to captrain: `python scripts/bench.py --growth`.

Work that is linear today is what lets a log of a hundred rollouts and one of a hundred thousand be read by the same
command; a nested scan shows only when the input is large, so it is looked for here. Each measurement is a process of
its own that does what a command or a stage does, files read and written included; data are made before it starts, by
a scripted policy in the service desk or of rollouts that ship, again under other ids. An exponent is the slope of
log(cost) over log(size), by least squares over the larger half of the sizes: 1 is linear, 2 quadratic.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from growth_measures import MEASURES, Measure
from rich.console import Console
from rich.table import Table

MOST = 1.1
"""The largest exponent that is called linear: what is constant bends a line, and caches fill."""
STEPS = 8


@dataclass(frozen=True)
class Cost:
    """Cost of one process: CPU seconds, and its peak memory in MiB."""

    size: int
    seconds: float
    memory: float


def sizes(largest: int, steps: int = STEPS) -> list[int]:
    """List sizes that double, up to the largest."""
    return [max(1, largest >> (steps - step - 1)) for step in range(steps)]


def larger_half(costs: Sequence[Cost]) -> Sequence[Cost]:
    """Select the costs that an exponent is read off: two at least."""
    return costs[len(costs) // 2 :] if len(costs) > 2 else costs


def exponent(costs: Sequence[Cost], value: Callable[[Cost], float]) -> float:
    """Fit the slope of the logarithms over the larger half of the sizes."""
    points = [(math.log(cost.size), math.log(value(cost))) for cost in larger_half(costs)]
    centre = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    spread = sum((x - centre[0]) ** 2 for x, _ in points)
    return sum((x - centre[0]) * (y - centre[1]) for x, y in points) / spread if spread else math.nan


def measure_once(measure: Measure, size: int) -> Cost:
    """Prepare in one process, measure another, by what the system says of it when it has ended. Its peak memory is no
    less than this process had when it started it, so that nothing large is imported here.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(Path(__file__))]
        subprocess.run([*script, "--prepare", measure.name, str(size), folder], check=True)
        work = [*script, "--work", measure.name, str(size), folder]
        command = [sys.executable, "-m", "captrain.cli.app", *measure.command] if measure.command else work
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                output.seek(0)
                raise SystemExit(
                    f"{measure.name} at {size}: exit status {process.returncode}\n{output.read().decode()}"
                )
    return Cost(size, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def growth(names: Sequence[str], largest: int | None, steps: int) -> dict[str, list[Cost]]:
    """Measure the cost of each measure at each size; every one is printed as it comes, to stderr."""
    costs: dict[str, list[Cost]] = {}
    for name in names:
        measure = MEASURES[name]
        for size in sizes(min(measure.largest, largest or measure.largest), steps):
            cost = measure_once(measure, size)
            costs.setdefault(name, []).append(cost)
            print(f"{name} {size:,}: {cost.seconds:.2f} s, {cost.memory:,.0f} MiB", file=sys.stderr, flush=True)
    return costs


def table(costs: dict[str, list[Cost]]) -> Table:
    """Tabulate CPU seconds and peak memory, one row a measure, where the larger half of the sizes begins and at the
    largest."""
    grid = Table(title="growth", title_justify="left")
    grid.add_column("what grows")
    for name in ("from", "to", "CPU s", "CPU s", "exponent", "MiB", "MiB", "exponent"):
        grid.add_column(name, justify="right")
    for name, row in costs.items():
        first, *_, last = larger_half(row)
        grid.add_row(
            f"{name}, {MEASURES[name].unit}",
            *(f"{cost.size:,}" for cost in (first, last)),
            *(f"{cost.seconds:.1f}" for cost in (first, last)),
            f"{exponent(row, lambda cost: cost.seconds):.2f}",
            *(f"{cost.memory:,.0f}" for cost in (first, last)),
            f"{exponent(row, lambda cost: cost.memory):.2f}",
        )
    grid.caption = f"exponents above {MOST:g} are more than linear"
    return grid


def main(arguments: Sequence[str]) -> None:
    """Measure and print; or, in a process that the measuring starts, prepare or do the work of one."""
    parser = argparse.ArgumentParser(description="How time and memory grow with the size of what is given.")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES], help="measure these alone")
    parser.add_argument("--largest", type=int, help="no size above this one")
    parser.add_argument("--steps", type=int, default=STEPS, help="sizes of each, which double")
    parser.add_argument("--prepare", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("an exponent takes two sizes at least")
    if options.prepare:
        name, size, folder = options.prepare
        MEASURES[name].prepare(int(size), Path(folder))
    elif options.work:
        name, size, folder = options.work
        work = MEASURES[name].work
        assert work is not None
        work(int(size), Path(folder))
    else:
        costs = growth(options.only, options.largest, options.steps)
        Console(width=None if os.isatty(1) else 140).print(table(costs))


if __name__ == "__main__":
    main(sys.argv[1:])
