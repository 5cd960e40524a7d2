"""Synthesize environments that demand two capabilities at once; they cost no rollout."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.config import build, load_spec
from captrain.environments import Pairs, Synthesizer, publish_pairs, standard, synthesize_pairs
from captrain.execution import entry_point
from captrain.records import Capability, Rollout, RolloutLabels, load


@entry_point
def main() -> None:
    """Labels, capabilities, discovery rollouts -> results/pairs, artifacts/pairs."""
    run, made = load_spec(), Pairs([], {})
    if run.pairs.count:
        labels = load(Path("artifacts/labels/labels.jsonl"), RolloutLabels)
        selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
        rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
        against = standard(load_benchmark(run.benchmark, run.machine), run.evaluation.tasks, run.environments)
        asked = build(run.synthesizer, Synthesizer, access=run.machine.asking)
        made = synthesize_pairs(labels, selected, rollouts, run.pairs.count, asked, against, run.machine, run.seed)
    publish_pairs(made, Path("results/pairs"), Path("artifacts/pairs"))
    earned = sum(one["environment"] for one in made.account.values())
    print(f"{earned} pair environments" if run.pairs.count else "no pair environments: pairs.count is 0")


if __name__ == "__main__":
    main()
