"""Train one adapter over all of TRACE's environments."""

from pathlib import Path

from captrain.baselines import mixed
from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.training import publish_adapters, train


@entry_point
def main() -> None:
    """Base, environments, ledgers of TRACE's side -> artifacts/mixed, results/mixed."""
    spec, results, jobs = load_spec(), Path("results"), []
    if spec.baselines.mixed.run:
        ledgers = [results / stage / "ledger.jsonl" for stage in ("rollouts", "environments", "adapters")]
        spent = [entry for path in ledgers for entry in load(path, LedgerEntry)]
        jobs = mixed(spec, Path("artifacts/base"), results / "environments", spent)
    else:
        print("mixed is no part of this experiment (baselines.mixed.run)")
    publish_adapters(launch.run(train, jobs, spec.machine, "mixed"), "mixed", "mixed")


if __name__ == "__main__":
    main()
