"""How time and memory grow with the input of captrain: `python scripts/bench.py --growth`.

Linear work lets the same command read a log of a hundred rollouts and one of a hundred thousand. A nested scan shows
only with large inputs, so this script looks for one. Each measurement is a process that runs one command, including
its reading and writing. The data are copies of the example rollouts under other ids, made beforehand. The exponent is
the slope of log(cost) over log(size), by least squares over the larger half of the sizes: 1 is linear, 2 quadratic.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import linear_regression

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "docs/examples/servicedesk.jsonl"
TRIALS = 4
RUNS = 10
LARGEST = 100_000
MOST = 1.1
"""Largest exponent that counts as linear. Constant costs and filling caches bend the line."""
STEPS = 8


@dataclass(frozen=True)
class Measure:
    """One command to measure against the number of rollouts. `prepare` makes its data, `command` are captrain's
    arguments."""

    name: str
    prepare: Callable[[int, Path], None]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """CPU seconds and peak memory (MiB) of one process."""

    size: int
    seconds: float
    memory: float


def shipped_rows() -> list[dict[str, object]]:
    """Read the example rollouts as lines of a chat log."""
    return [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]


def copies(size: int) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield copies of the example rollouts, numbered, with the trials of a task side by side."""
    rows = shipped_rows()
    for number in range(size):
        row = rows[number % len(rows)]
        place = number // (TRIALS * len(rows)) * len(rows) + number % len(rows)
        yield number, {**row, "task_id": f"task-{place:06d}", "trial": number // len(rows) % TRIALS}


def prepare_chats(size: int, folder: Path) -> None:
    """Write a chat log, one rollout per line, like `captrain export`."""
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:
        for _, row in copies(size):
            file.write(json.dumps(row) + "\n")


def write_rollouts(size: int, path: Path) -> None:
    """Write discovery rollouts in the project's own format."""
    from captrain.interop import read_logs
    from captrain.records import digest

    with tempfile.TemporaryDirectory() as folder:
        prepare_chats(len(shipped_rows()), Path(folder))
        rollouts = [*read_logs([Path(folder) / "log.jsonl"]).rollouts]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, row in copies(size):
            rollout = rollouts[number % len(rollouts)]
            task = rollout.task.model_copy(update={"id": str(row["task_id"])})
            update = {"id": digest("growth", number)[:12], "task": task, "trial": row["trial"]}
            file.write(rollout.model_copy(update=update).model_dump_json(exclude_defaults=True) + "\n")


def prepare_project(size: int, folder: Path) -> None:
    """Make a project with the committed results, and with equally many discovery and evaluation rollouts."""
    from captrain.capabilities import ProgrammaticAnalyst, label_runs
    from captrain.comparison import BASE, PLAYED, TRACE
    from captrain.records import Rollout, digest, load, read_index

    shutil.copytree(ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("sweeps", "studies"))
    for name in ("dvc.yaml", "dvc.lock"):
        shutil.copy(ROOT / name, folder / name)
    adapters = read_index(folder / "results/adapters/index.json")
    arms = [(BASE, None), *((name, entry.digest) for name, entry in adapters.items())]
    discovery, tests = folder / "artifacts/rollouts/discovery.jsonl", folder / PLAYED / TRACE / "rollouts.jsonl"
    write_rollouts(size // 2, discovery)
    write_rollouts(size - size // 2, tests)
    lines = [*islice(discovery.open(), len(shipped_rows()))]
    (folder / "seed.jsonl").write_text("".join(lines), encoding="utf-8")
    with (
        tests.with_suffix(".tmp").open("w", encoding="utf-8") as file,
        tests.with_name("outcomes.jsonl").open("w", encoding="utf-8") as outcomes,
        tests.open(encoding="utf-8") as rollouts,
    ):
        for number, line in enumerate(rollouts):
            row, (arm, adapter) = json.loads(line), arms[number // len(lines) % len(arms)]
            row["task"] |= {"id": f"test/{row['task']['id']}", "split": "test"}
            row |= {
                "id": digest("test", number)[:12],
                "adapter": adapter,
                "purpose": "evaluation",
            }
            file.write(json.dumps(row) + "\n")
            outcome = {"task": row["task"]["id"], "kind": "", "arm": arm, "stage": "adapters" if adapter else ""}
            outcome |= {"trial": row["trial"], "outcome": row["outcome"], "reward": row["score"]["reward"]}
            outcomes.write(json.dumps(outcome) + "\n")
    tests.with_suffix(".tmp").replace(tests)
    rollouts = load(folder / "seed.jsonl", Rollout)
    _, rows = label_runs(ProgrammaticAnalyst(), rollouts, [], 1, 0)
    labels_of = {row.rollout: row for row in rows}
    (folder / "artifacts/labels").mkdir(parents=True)
    with (folder / "artifacts/labels/labels.jsonl").open("w", encoding="utf-8") as file:
        for run in range(RUNS):
            for number in range(size // 2):
                row = labels_of[rollouts[number % len(rollouts)].id]
                update = {"run": run, "rollout": digest("growth", number)[:12]}
                file.write(row.model_copy(update=update).model_dump_json(exclude_defaults=True) + "\n")


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("chat log", prepare_chats, ("diagnose", "log.jsonl", "--out", "out")),
        Measure("report", prepare_project, ("report", "--out", "out")),
    )
}


def sizes(largest: int, steps: int = STEPS) -> list[int]:
    """List sizes that double, up to the largest."""
    return [max(1, largest >> (steps - step - 1)) for step in range(steps)]


def larger_half(costs: Sequence[Cost]) -> Sequence[Cost]:
    """Return the costs that the exponent is computed from: at least two."""
    return costs[len(costs) // 2 :] if len(costs) > 2 else costs


def exponent(costs: Sequence[Cost], value: Callable[[Cost], float]) -> float:
    """Fit the slope of the logarithms over the larger half of the sizes."""
    half = larger_half(costs)
    return linear_regression([math.log(cost.size) for cost in half], [math.log(value(cost)) for cost in half]).slope


def measure_once(measure: Measure, size: int) -> Cost:
    """Prepare the data in one process and measure another one, with the system's accounting after its end.

    A process's peak memory is at least that of its parent at the start, so this module imports nothing large.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(Path(__file__)), "--prepare", measure.name, str(size), folder]
        subprocess.run(script, check=True)
        command = [sys.executable, "-m", "captrain.cli.app", *measure.command]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                output.seek(0)
                text = output.read().decode()
                raise SystemExit(f"{measure.name} at {size}: exit status {process.returncode}\n{text}")
    return Cost(size, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main(arguments: Sequence[str]) -> None:
    """Measure and print; each cost goes to stderr at once. In a child process: prepare."""
    parser = argparse.ArgumentParser(description="How time and memory grow with the size of what is given.")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES], help="measure these alone")
    parser.add_argument("--largest", type=int, default=LARGEST, help="no size above this one")
    parser.add_argument("--steps", type=int, default=STEPS, help="sizes of each, which double")
    parser.add_argument("--prepare", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("an exponent takes two sizes at least")
    if options.prepare:
        name, size, folder = options.prepare
        MEASURES[name].prepare(int(size), Path(folder))
        return
    table = Table(title="growth", title_justify="left")
    table.add_column("what grows")
    for name in ("from", "to", "CPU s", "CPU s", "exponent", "MiB", "MiB", "exponent"):
        table.add_column(name, justify="right")
    for name in options.only:
        costs = list[Cost]()
        for size in sizes(options.largest, options.steps):
            cost = measure_once(MEASURES[name], size)
            costs.append(cost)
            print(f"{name} {size:,}: {cost.seconds:.2f} s, {cost.memory:,.0f} MiB", file=sys.stderr, flush=True)
        first, *_, last = larger_half(costs)
        table.add_row(
            f"{name}, rollouts",
            *(f"{cost.size:,}" for cost in (first, last)),
            *(f"{cost.seconds:.1f}" for cost in (first, last)),
            f"{exponent(costs, lambda cost: cost.seconds):.2f}",
            *(f"{cost.memory:,.0f}" for cost in (first, last)),
            f"{exponent(costs, lambda cost: cost.memory):.2f}",
        )
    table.caption = f"exponents above {MOST:g} are more than linear"
    Console(width=None if os.isatty(1) else 140).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
