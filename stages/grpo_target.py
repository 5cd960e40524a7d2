"""Train on the target itself, with as many rollouts as TRACE spends in all."""

from pathlib import Path

from captrain import launch
from captrain.adapters import publish_adapters, train
from captrain.baselines.grpo_target import grpo_target
from captrain.errors import entry_point
from captrain.records import LedgerEntry, load
from captrain.spec import load as load_spec


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
