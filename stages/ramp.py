"""Train one adapter on a ramp from targeted environments to the target."""

from pathlib import Path

from captrain.baselines import ramped
from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.training import publish_adapters, train


@entry_point
def main() -> None:
    """Base, labels, environments, pairs, ledgers of TRACE's side -> artifacts/ramp, results/ramp."""
    spec, jobs = load_spec(), []
    if spec.baselines.ramp.run:
        ledgers = [Path(f"results/{stage}/ledger.jsonl") for stage in ("rollouts", "environments", "adapters")]
        jobs = ramped(spec, Path(), [one for path in ledgers for one in load(path, LedgerEntry)])
    else:
        print("ramp is no part of this experiment (baselines.ramp.run)")
    publish_adapters(launch.run(train, jobs, spec.machine, "ramp"), "ramp", "ramp")


if __name__ == "__main__":
    main()
