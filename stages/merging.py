"""Make one adapter of TRACE's, by each method."""

from pathlib import Path

from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.training import merge_all, publish_merged


@entry_point
def main() -> None:
    """Adapters, environments, base -> artifacts/merging, results/merging."""
    made = merge_all(load_spec(), Path("artifacts/base"), Path("results"))
    publish_merged(made)
    if not made:
        print("nothing is merged: merging.methods is empty, or there are no adapters")


if __name__ == "__main__":
    main()
