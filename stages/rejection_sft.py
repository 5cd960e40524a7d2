"""Fine-tune on what passed of its own rollouts on the target, with as many as TRACE spends in all."""

from captrain.baselines.rejection_sft import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, ledgers of TRACE's side -> artifacts/rejection_sft, results/rejection_sft."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
