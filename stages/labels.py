"""Label the diagnostic rollouts with every candidate capability, in several runs."""

from pathlib import Path

from captrain import spec
from captrain.benchmarks import load_benchmark
from captrain.capabilities.faults import fault_of
from captrain.capabilities.labelling import label_runs
from captrain.errors import entry_point
from captrain.records import Rollout, load, publish


@entry_point
def main() -> None:
    chosen = spec.load()
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    tools = load_benchmark(chosen.benchmark, chosen.machine).tools
    candidates, labels = label_runs(spec.build(chosen.analyst), rollouts, tools, chosen.labels.runs, chosen.seed)
    publish(Path("artifacts/labels/labels.jsonl"), labels)
    publish(Path("results/labels/candidates.jsonl"), candidates)
    faults = sum(fault_of(rollout) is not None for rollout in rollouts)
    print(f"{len(rollouts)} rollouts, {faults} of them faults and left out; {len(candidates)} candidate capabilities")


if __name__ == "__main__":
    main()
