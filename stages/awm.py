"""Train in environments that no diagnosis asked for, with as many rollouts as TRACE spends in all."""

from captrain.baselines.awm import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, ledgers of TRACE's side -> artifacts/awm, results/awm."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
