"""Train TRACE's adapters, one per environment."""

from pathlib import Path

from captrain.records import counted
from captrain.run import entry_point, launch, load_spec
from captrain.training import LIBRARIES, capability_jobs, publish_adapters, train


@entry_point
def main() -> str:
    """Environments, base -> artifacts/adapters, results/adapters."""
    spec = load_spec()
    jobs = capability_jobs(spec, Path("artifacts/base"), Path("results/environments"))
    publish_adapters(launch.run(train, jobs, spec.machine, "adapters", LIBRARIES), "adapters", "trace")
    return counted(len(jobs), "adapter")


if __name__ == "__main__":
    main()
