"""Play the discovery split with the base."""

from pathlib import Path

from captrain.agents import PolicySource, RolloutBatch, collect_batch, count_outcomes, summarise_rollouts
from captrain.benchmarks import load_benchmark
from captrain.ledger import ledger_entry
from captrain.records import publish, publish_json
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    """Base, benchmark -> artifacts/rollouts/discovery.jsonl, results/rollouts."""
    spec = load_spec()
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = PolicySource(spec.policy, Path("artifacts/base"), spec.machine)
    tasks = target.tasks("discovery", spec.rollouts.tasks)
    trials, retries = spec.rollouts.trials, spec.rollouts.retries
    batch = RolloutBatch("discovery", policy, spec.benchmark, tasks, "diagnosis", spec.seed, trials, retries=retries)
    rollouts = collect_batch(batch, target, "rollouts")
    publish(Path("artifacts/rollouts/discovery.jsonl"), rollouts)
    publish(Path("results/rollouts/ledger.jsonl"), [ledger_entry(rollouts, stage="rollouts", method="trace")])
    publish_json(Path("results/rollouts/summary.json"), summarise_rollouts(rollouts, target))
    return count_outcomes(rollouts, spec.policy.settings().get("max_tokens"))


if __name__ == "__main__":
    main()
