"""Optimise the system prompt, with as many rollouts as TRACE spends in all."""

import sys
from pathlib import Path

from captrain.baselines import optimise, publish_gepa
from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.ledger import LedgerEntry, budget
from captrain.records import load


@entry_point
def main() -> None:
    """Base, ledgers of TRACE's side -> results/gepa."""
    # The folder of a script comes first on the path, and this one would hide the library of its name.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    spec, found = load_spec(), None
    if spec.baselines.gepa.run:
        ledgers = [Path(f"results/{stage}/ledger.jsonl") for stage in ("rollouts", "environments", "adapters")]
        total = budget([entry for path in ledgers for entry in load(path, LedgerEntry)])
        found = optimise(spec, Path("artifacts/base"), total)
    publish_gepa(found, Path("results/gepa"))
    print("\n".join(["gepa:", *found.chosen.lines]) if found else "gepa is not run: baselines.gepa.run is false")


if __name__ == "__main__":
    main()
