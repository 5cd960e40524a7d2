"""Synthesize environments that need two capabilities at once; they cost no rollouts."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.environments import PairEnvironments, Synthesizer, make_standard, publish_pairs, synthesize_pairs
from captrain.records import Capability, Rollout, RolloutLabels, counted, load
from captrain.run import build, entry_point, load_spec


@entry_point
def main() -> str:
    """Labels, capabilities, discovery rollouts -> results/pairs, artifacts/pairs."""
    run, pairs = load_spec(), PairEnvironments([], {})
    if run.pairs.count:
        labels = load(Path("artifacts/labels/labels.jsonl"), RolloutLabels)
        selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
        rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
        standard = make_standard(load_benchmark(run.benchmark, run.machine), run.evaluation.tasks, run.environments)
        synthesizer = build(run.synthesizer, Synthesizer, access=run.machine.asking)
        settings = (run.pairs.count, synthesizer, standard, run.machine, run.seed, run.benchmark)
        pairs = synthesize_pairs(labels, selected, rollouts, *settings)
    publish_pairs(pairs, Path("results/pairs"), Path("artifacts/pairs"))
    passed = sum(outcome["environment"] for outcome in pairs.account.values())
    return counted(passed, "pair environment") if run.pairs.count else "no pair environments: pairs.count is 0"


if __name__ == "__main__":
    main()
