"""Train on the target itself with the settings of TRACE's own trainer, and as many rollouts as TRACE spends in all."""

from captrain.baselines.grpo_untuned import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, ledgers of TRACE's side -> artifacts/grpo_untuned, results/grpo_untuned."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
