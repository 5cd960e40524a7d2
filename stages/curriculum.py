"""Train one adapter on a curriculum from targeted environments to the target."""

from captrain.baselines.curriculum import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> None:
    """Base, labels, environments, pairs, ledgers of TRACE's side -> artifacts/curriculum, results/curriculum."""
    BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
