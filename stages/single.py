"""Train all of TRACE's budget on the first capability."""

from captrain.baselines.single import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, environments, ranking, ledgers of TRACE's side -> artifacts/single, results/single."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
