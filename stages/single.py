"""Train all of TRACE's budget on the first capability."""

from pathlib import Path

from captrain.baselines import single
from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import LedgerEntry
from captrain.records import Capability, load
from captrain.training import publish_adapters, train


@entry_point
def main() -> None:
    """Base, environments, ranking, ledgers of TRACE's side -> artifacts/single, results/single."""
    spec, results, jobs = load_spec(), Path("results"), []
    if spec.baselines.single.run:
        ledgers = [results / stage / "ledger.jsonl" for stage in ("rollouts", "environments", "adapters")]
        spent = [entry for path in ledgers for entry in load(path, LedgerEntry)]
        ranked = load(results / "capabilities/capabilities.jsonl", Capability)
        jobs = single(spec, Path("artifacts/base"), results / "environments", ranked, spent)
    else:
        print("single is no part of this experiment (baselines.single.run)")
    publish_adapters(launch.run(train, jobs, spec.machine, "single"), "single", "single")


if __name__ == "__main__":
    main()
