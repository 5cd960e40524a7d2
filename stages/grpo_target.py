"""Train on the target itself, with as many rollouts as TRACE spends in all."""

from captrain.baselines.grpo_target import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, ledgers of TRACE's side -> artifacts/grpo_target, results/grpo_target."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
