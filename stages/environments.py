"""Synthesize an environment for each selected capability; each must earn its passport."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.config import build, load_spec
from captrain.environments import Synthesizer, brief, publish_all, standard, synthesize
from captrain.execution import entry_point
from captrain.records import Capability, Rollout, load
from captrain.rollouts import Acting


@entry_point
def main() -> None:
    run = load_spec()
    policy = Acting(run.exploring(), Path("artifacts/base"), run.machine)
    benchmark = load_benchmark(run.benchmark, run.machine)
    against = standard(benchmark, run.evaluation.tasks, run.environments)
    synthesizer = build(run.synthesizer, Synthesizer, access=run.machine.asking)
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
    briefs = (brief(capability, benchmark.tools, rollouts) for capability in selected)
    made = [synthesize(one, synthesizer, policy, against, run.machine, run.seed) for one in briefs]
    publish_all(made, Path("results/environments"), Path("artifacts/environments"))


if __name__ == "__main__":
    main()
