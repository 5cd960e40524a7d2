"""Fine-tune the base on the target's solutions of the tasks that the diagnosis saw fail; it costs no rollout of
training."""

from captrain.baselines.failures_sft import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, diagnostic rollouts -> artifacts/failures_sft, results/failures_sft."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
