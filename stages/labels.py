"""Label the diagnostic rollouts with every candidate capability, in several runs."""

from pathlib import Path

from captrain.benchmarks import load_benchmark, open_worlds
from captrain.capabilities import Analyst, label_runs, measure_agreement
from captrain.records import Rollout, counted, load, publish, publish_json
from captrain.run import build, entry_point, load_spec


@entry_point
def main() -> str:
    spec = load_spec()
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    target, runs = load_benchmark(spec.benchmark, spec.machine), spec.labels.runs
    analyst, tools = build(spec.analyst, Analyst, access=spec.machine.asking), target.declared_tools
    with open_worlds(target=target, machine=spec.machine) as worlds:
        candidates, labels = label_runs(analyst, rollouts, tools, runs, spec.seed, spec.labels.resample, worlds)
    publish(Path("artifacts/labels/labels.jsonl"), labels)
    publish(Path("results/labels/candidates.jsonl"), candidates)
    publish_json(Path("results/labels/agreement.json"), measure_agreement(analyst, labels, rollouts, tools))
    if (account := getattr(analyst, "usage", None)) is not None:
        publish_json(Path("results/labels/asked.json"), account)
    faults = len(rollouts) - len({row.rollout for row in labels})
    return f"{counted(len(rollouts), 'rollout')}, {faults} left out as faulty; {counted(len(candidates), 'candidate')}"


if __name__ == "__main__":
    main()
