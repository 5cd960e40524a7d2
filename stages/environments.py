"""Synthesize an environment with a passport for each selected capability."""

from pathlib import Path

from captrain.agents import PolicySource
from captrain.benchmarks import load_benchmark
from captrain.environments import Synthesizer, make_brief, make_standard, publish_environments, synthesize_each
from captrain.records import Capability, Rollout, counted, load
from captrain.run import build, entry_point, load_spec


@entry_point
def main() -> str:
    run = load_spec()
    policy = PolicySource(run.exploring(), Path("artifacts/base"), run.machine)
    benchmark = load_benchmark(run.benchmark, run.machine)
    standard = make_standard(benchmark, run.evaluation.tasks, run.environments)
    synthesizer = build(run.synthesizer, Synthesizer, access=run.machine.asking)
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
    briefs = [make_brief(capability, benchmark.tools, rollouts, run.benchmark) for capability in selected]
    results = synthesize_each(briefs, synthesizer, policy, standard, run.machine, run.seed)
    publish_environments(results, Path("results/environments"), Path("artifacts/environments"))
    passed = sum(result.best.passport.passed for result in results)
    return f"{passed} of {counted(len(briefs), 'environment')} passed all checks"


if __name__ == "__main__":
    main()
