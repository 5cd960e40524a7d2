"""Select capabilities from the labels and, with `selection.proof`, by replay."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.capabilities import select, stability_table
from captrain.diagnosis import needed_causes
from captrain.records import Capability, Rollout, RolloutLabels, counted, load, publish, publish_json, publish_text
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    spec, folder, needs = load_spec(), Path("results/capabilities"), None
    labels = load(Path("artifacts/labels/labels.jsonl"), RolloutLabels)
    candidates = load(Path("results/labels/candidates.jsonl"), Capability)
    if spec.selection.proof is not None:
        rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
        needs = needed_causes(rollouts, load_benchmark(spec.benchmark, spec.machine), spec.machine)
    selected = select(labels, candidates, spec.selection, spec.capabilities.count, spec.seed, needs)
    publish_json(folder / "selection.json", selected.report)
    publish(folder / "capabilities.jsonl", selected.capabilities)
    publish_text(folder / "stability.csv", stability_table(selected.report).to_csv(index=False, float_format="%.6f"))
    names = "".join(f" {capability.id}" for capability in selected.capabilities)
    return f"{len(selected.capabilities)} of {counted(len(candidates), 'candidate')} selected:{names or ' none'}"


if __name__ == "__main__":
    main()
