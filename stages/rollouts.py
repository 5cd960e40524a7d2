"""Roll out the base on the discovery split."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.ledger import spent
from captrain.records import publish, publish_json
from captrain.rollouts import Acting, Part, played, summary


@entry_point
def main() -> None:
    """Base, benchmark -> artifacts/rollouts/discovery.jsonl, results/rollouts."""
    spec = load_spec()
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = Acting(spec.policy, Path("artifacts/base"), spec.machine)
    part = Part(
        "discovery", policy, spec.benchmark, target.tasks("discovery", spec.rollouts.tasks), "diagnosis", spec.seed,
        trials=spec.rollouts.trials, retries=spec.rollouts.retries,
    )  # fmt: skip
    found = played(part, target, "rollouts")
    publish(Path("artifacts/rollouts/discovery.jsonl"), found)
    publish(Path("results/rollouts/ledger.jsonl"), [spent(found, stage="rollouts", method="trace")])
    publish_json(Path("results/rollouts/summary.json"), summary(found, target))


if __name__ == "__main__":
    main()
