"""Train one adapter on a ramp from targeted environments to the target."""

from pathlib import Path

from captrain import launch
from captrain.adapters import publish_adapters, train
from captrain.errors import entry_point
from captrain.ramp import ramped
from captrain.records import LedgerEntry, load
from captrain.spec import load as load_spec


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
