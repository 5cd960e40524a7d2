"""Choose an adapter, or the base, for each test task."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.contract import load_file
from captrain.errors import entry_point
from captrain.records import Capability, Rollout, load, publish_text
from captrain.routing import route_tasks
from captrain.spec import load as load_spec


@entry_point
def main() -> None:
    """Environments, passed discovery rollouts -> results/routes/routes.csv."""
    spec = load_spec()
    selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
    targets = {c.id: load_file(Path(f"results/environments/{c.id}.py")) for c in selected}
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = benchmark.tasks("test", spec.evaluation.tasks)
    rollouts = load(Path("artifacts/rollouts/discovery.jsonl"), Rollout)
    table = route_tasks(spec.router, Path("artifacts/base"), targets, rollouts, benchmark, tasks)
    publish_text(Path("results/routes/routes.csv"), table.to_csv(index=False))


if __name__ == "__main__":
    main()
