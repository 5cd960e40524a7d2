"""Measure what the sandbox costs an episode: the reference of an environment is played and scored, in it and outside.

python scripts/bench_sandbox.py [FILE] [EPISODES] [--layers rlimits seccomp]
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

from captrain.contract import CheckedEnvironment, load_file
from captrain.environments.sandbox import LAYERS, LEVELS, active_confinement, load_confined
from captrain.errors import UserError
from captrain.records import read_bytes
from captrain.run import entry_point


def seconds(target: CheckedEnvironment, count: int) -> list[float]:
    """Return the seconds of each episode, sorted. The first task only starts what has to be started."""
    taken = []
    for task in target.tasks("training", count + 1):
        begin = perf_counter()
        record = target.play(task, target.reference(task))
        target.score(task, record)
        taken.append(perf_counter() - begin)
    return sorted(taken[1:])


def show(name: str, taken: list[float]) -> None:
    """Print median and ninetieth percentile in milliseconds."""
    middle, high = taken[len(taken) // 2], taken[len(taken) * 9 // 10]
    print(f"{name}: median {1000 * middle:.2f} ms, 90% below {1000 * high:.2f} ms", flush=True)


@partial(entry_point, stage=False)
def main() -> None:
    """Measure outside of the sandbox, and in the strongest one that this machine has.

    Raises:
        UserError: the file does not load, or the number of episodes is not positive.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("results/environments/missing_lookup.py"))
    parser.add_argument("episodes", nargs="?", type=int, default=200)
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=LAYERS, help="of the sandbox; default: all")
    options = parser.parse_args()
    path, count = options.file, options.episodes
    if count < 1:
        raise UserError(f"{count} episodes cannot be measured", "name 1 or more")
    print(f"{path.stem}, {count} episodes")
    show("without", seconds(load_file(path, read_bytes(path, "name an environment file")), count))
    layers = tuple(options.layers)
    try:
        sandbox = active_confinement(layers)
    except UserError as fault:
        print(f"in the sandbox: not measured, because this machine has none: {fault.problem}", file=sys.stderr)
        return
    if sandbox.level != LEVELS[-1]:
        lacking = ", ".join(layer for layer in LAYERS if layer not in sandbox.layers)
        print(f"the sandbox is only {sandbox}: {lacking} did not work here or was left out", file=sys.stderr)
    show(f"in the sandbox, {sandbox}", seconds(load_confined(path, LEVELS[0], layers), count))


if __name__ == "__main__":
    main()
