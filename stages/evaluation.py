"""Play the test split with the base and all that can act; compare."""

from pathlib import Path

from captrain.comparison import evaluate_project, publish_evaluation
from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.records import publish


@entry_point
def main() -> str:
    """Adapters, routes, ledgers -> artifacts/evaluation, results/evaluation."""
    rollouts, evaluation = evaluate_project(load_spec())
    publish(Path("artifacts/evaluation/rollouts.jsonl"), rollouts)
    publish_evaluation(evaluation, Path("results/evaluation"))
    return f"{len(rollouts)} rollouts on the test split"


if __name__ == "__main__":
    main()
