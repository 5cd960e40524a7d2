"""Measure what the sandbox costs an episode: the reference of an environment is played and scored, in it and outside.

python scripts/bench_sandbox.py [FILE] [EPISODES]
"""

import sys
from pathlib import Path
from time import perf_counter

from captrain.contract import CheckedEnvironment, load_file
from captrain.environments.sandbox import active_confinement, load_confined


def seconds(target: CheckedEnvironment, count: int) -> list[float]:
    """Return the seconds of each episode, sorted. The first task only starts what has to be started."""
    taken = []
    for task in target.tasks("training", count + 1):
        begin = perf_counter()
        record = target.play(task, target.reference(task))
        target.score(task, record)
        taken.append(perf_counter() - begin)
    return sorted(taken[1:])


def main() -> None:
    """Print median and ninetieth percentile of both, in milliseconds."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "results/environments/missing_lookup.py")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    outside, inside = (
        seconds(load_file(path, path.read_bytes()), count),
        seconds(load_confined(path, "strong, one layer"), count),
    )
    print(f"{path.stem}, {count} episodes, sandbox {active_confinement()}")
    for name, taken in (("without", outside), ("in the sandbox", inside)):
        print(f"{name}: median {1000 * taken[count // 2]:.2f} ms, 90% below {1000 * taken[count * 9 // 10]:.2f} ms")


if __name__ == "__main__":
    main()
