"""Fine-tune the base on the environments' own solutions; it costs no rollout of training."""

from captrain.baselines.solutions import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, environments, pairs -> artifacts/solutions, results/solutions."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
