"""Roll out the base on the discovery split."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.errors import entry_point
from captrain.policies import load_policy
from captrain.records import publish, publish_json
from captrain.rollouts import collect, spent, summary
from captrain.spec import load


@entry_point
def main() -> None:
    """Base, benchmark -> artifacts/rollouts/discovery.jsonl, results/rollouts."""
    spec = load()
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = load_policy(spec.policy, Path("artifacts/base"), spec.machine, batch=spec.machine.batch)
    found = collect(
        policy, target, target.tasks("discovery", spec.rollouts.tasks), purpose="diagnosis", seed=spec.seed,
        trials=spec.rollouts.trials, retries=spec.rollouts.retries,
    )  # fmt: skip
    publish(Path("artifacts/rollouts/discovery.jsonl"), found)
    publish(Path("results/rollouts/ledger.jsonl"), [spent(found, stage="rollouts", method="trace")])
    publish_json(Path("results/rollouts/summary.json"), summary(found, target))


if __name__ == "__main__":
    main()
