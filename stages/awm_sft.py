"""Fine-tune the base on solutions of environments that no diagnosis asked for; it costs no rollout."""

from captrain.baselines.awm_sft import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base -> artifacts/awm_sft, results/awm_sft."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
