"""Fine-tune the base on generic agent trajectories; it costs no rollout."""

from captrain.baselines.adp import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, trajectories -> artifacts/adp, results/adp."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
