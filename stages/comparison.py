"""Join what the rows of the evaluation played, and compare the methods."""

from pathlib import Path

from captrain.comparison import compare_rows, publish_evaluation
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    """Rows of the evaluation, routes, ledgers -> results/evaluation."""
    evaluation = compare_rows(load_spec())
    publish_evaluation(evaluation, Path("results/evaluation"))
    return f"{len(evaluation.main)} methods compared"


if __name__ == "__main__":
    main()
