"""Choose an adapter, or the base, for each test task."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.environments import load as load_environment
from captrain.environments import passports
from captrain.errors import entry_point
from captrain.records import Capability, Rollout, load, publish_text
from captrain.routing import route_tasks
from captrain.spec import load as load_spec


@entry_point
def main() -> None:
    """Environments, passed discovery rollouts -> results/routes/routes.csv."""
    spec, folder = load_spec(), Path("results/environments")
    earned = passports(folder)
    ranked = [one.id for one in load(Path("results/capabilities/capabilities.jsonl"), Capability) if one.id in earned]
    targets = {name: load_environment(folder, earned[name], spec.machine) for name in ranked}
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = benchmark.tasks("test", spec.evaluation.tasks)
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    table = route_tasks(spec.router, Path("artifacts/base"), targets, rollouts, benchmark, tasks)
    publish_text(Path("results/routes/routes.csv"), table.to_csv(index=False))


if __name__ == "__main__":
    main()
