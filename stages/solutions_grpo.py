"""Train the adapter of `solutions` on the target, with the rollouts that TRACE has left."""

from captrain.baselines.solutions_grpo import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, adapter of solutions, ledgers of TRACE's side -> artifacts/solutions_grpo, results/solutions_grpo."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
