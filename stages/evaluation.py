"""Play the test split with all arms, and compare the methods."""

from pathlib import Path

from captrain.comparison import evaluate_project, publish_evaluation
from captrain.records import publish
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    """Adapters, routes, ledgers -> artifacts/evaluation, results/evaluation."""
    rollouts, evaluation = evaluate_project(load_spec())
    publish(Path("artifacts/evaluation/rollouts.jsonl"), rollouts)
    publish_evaluation(evaluation, Path("results/evaluation"))
    return f"{len(rollouts)} rollouts on the test split"


if __name__ == "__main__":
    main()
