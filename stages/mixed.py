"""Train one adapter over all of TRACE's environments."""

from pathlib import Path

from captrain import launch
from captrain.adapters import publish_adapters, train
from captrain.baselines.mixtures import mixed
from captrain.errors import entry_point
from captrain.records import LedgerEntry, load
from captrain.spec import load as load_spec


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
