"""Train one adapter over all of TRACE's environments."""

from captrain.baselines.mixed import BASELINE
from captrain.config import load_spec
from captrain.execution import entry_point


@entry_point
def main() -> str:
    """Base, environments, ledgers of TRACE's side -> artifacts/mixed, results/mixed."""
    return BASELINE.run(load_spec())


if __name__ == "__main__":
    main()
