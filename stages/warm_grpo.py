"""Train the adapter of `adp` on the target, with as many rollouts as TRACE spends in all."""

from captrain.baselines.warm_grpo import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, adapter of adp, ledgers of TRACE's side -> artifacts/warm_grpo, results/warm_grpo."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
