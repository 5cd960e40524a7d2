"""Train on the target itself, with as many rollouts as TRACE spends in all."""

from pathlib import Path

from captrain.baselines.grpo_target import grpo_target
from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.training import publish_adapters, train


@entry_point
def main() -> None:
    """Base, ledgers of TRACE's side -> artifacts/grpo_target, results/grpo_target."""
    spec, jobs = load_spec(), []
    if spec.baselines.grpo_target.run:
        ledgers = [Path(f"results/{stage}/ledger.jsonl") for stage in ("rollouts", "environments", "adapters")]
        jobs = [grpo_target(spec, Path("artifacts/base"), [one for path in ledgers for one in load(path, LedgerEntry)])]
    else:
        print("grpo_target is no part of this experiment (baselines.grpo_target.run)")
    publish_adapters(launch.run(train, jobs, spec.machine, "grpo_target"), "grpo_target", "grpo_target")


if __name__ == "__main__":
    main()
