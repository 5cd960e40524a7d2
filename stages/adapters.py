"""Train one adapter for each environment."""

from pathlib import Path

from captrain import launch
from captrain.adapters import capability_jobs, publish_adapters, train
from captrain.errors import entry_point
from captrain.spec import load


@entry_point
def main() -> None:
    """Environments, base -> artifacts/adapters, results/adapters."""
    spec = load()
    jobs = capability_jobs(spec, Path("artifacts/base"), Path("results/environments"))
    trained = launch.run(train, jobs, spec.machine, "adapters")
    publish_adapters(trained, "adapters", "trace")


if __name__ == "__main__":
    main()
