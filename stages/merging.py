"""Merge TRACE's adapters into one, by each method."""

from pathlib import Path

from captrain.records import counted
from captrain.run import entry_point, load_spec
from captrain.training import MERGING_COLUMNS, merge_all, publish_adapters


@entry_point
def main() -> str:
    """Adapters, environments, base -> artifacts/merging, results/merging."""
    adapters = merge_all(load_spec(), Path("artifacts/base"), Path("results"))
    publish_adapters(adapters, "merging", columns=MERGING_COLUMNS, guidance=())
    return (
        counted(len(adapters), "merged adapter")
        if adapters
        else "none: merging.methods is empty, or there are no adapters"
    )


if __name__ == "__main__":
    main()
