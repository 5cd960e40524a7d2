"""Train in environments that no diagnosis asked for, with as many rollouts as TRACE spends in all."""

from pathlib import Path

from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import LedgerEntry, budget
from captrain.records import load
from captrain.training import publish_adapters, train


@entry_point
def main() -> None:
    """Base, ledgers of TRACE's side -> artifacts/awm, results/awm."""
    spec, jobs = load_spec(), []
    if spec.baselines.awm.run:
        from captrain.baselines import places, untargeted

        ledgers = [Path(f"results/{stage}/ledger.jsonl") for stage in ("rollouts", "environments", "adapters")]
        total = budget([entry for path in ledgers for entry in load(path, LedgerEntry)])
        jobs = [untargeted(spec, Path("artifacts/base"), places(spec, Path("results/awm")), total)]
    publish_adapters(launch.run(train, jobs, spec.machine, "awm"), "awm", "awm")
    print(f"awm: {jobs[0].rollouts} rollouts" if jobs else "awm is not run: baselines.awm.run is false")


if __name__ == "__main__":
    main()
