"""Train TRACE's adapters: one for each environment, or whatever the trainer makes of them."""

from pathlib import Path

from captrain.config import build, load_spec
from captrain.execution import entry_point, launch
from captrain.training import GRPO, publish_adapters, train


@entry_point
def main() -> None:
    """Environments, base -> artifacts/adapters, results/adapters."""
    spec = load_spec()
    jobs = build(spec.trainer, GRPO).jobs(spec, Path())
    publish_adapters(launch.run(train, jobs, spec.machine, "adapters"), "adapters", "trace")


if __name__ == "__main__":
    main()
