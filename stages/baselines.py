"""Train what TRACE is compared with, at as many rollouts as TRACE spends in all."""

from pathlib import Path

from captrain import launch
from captrain.adapters import publish_adapters, train
from captrain.baselines import grpo_target
from captrain.errors import entry_point
from captrain.records import LedgerEntry, load
from captrain.spec import load as load_spec


@entry_point
def main() -> None:
    """Base, ledgers of TRACE's side -> artifacts/baselines, results/baselines."""
    spec = load_spec()
    ledgers = [Path(f"results/{stage}/ledger.jsonl") for stage in ("rollouts", "environments", "adapters")]
    spent = [entry for path in ledgers for entry in load(path, LedgerEntry)]
    jobs = [grpo_target(spec, Path("artifacts/base"), spent)]
    publish_adapters(launch.run(train, jobs, spec.machine, "baselines"), "baselines", "grpo_target")


if __name__ == "__main__":
    main()
