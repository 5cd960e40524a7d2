"""Fine-tune the base on generic agent trajectories; it costs no rollout."""

from pathlib import Path

from captrain import launch
from captrain.adapters import publish_adapters
from captrain.errors import entry_point
from captrain.spec import load


@entry_point
def main() -> None:
    """Base, trajectories -> artifacts/adp, results/adp."""
    spec = load()
    if not spec.baselines.adp.run:
        publish_adapters([], "adp", "adp")
        print("adp is not run: baselines.adp.run is false")
        return
    from captrain.baselines.adp import Lesson, teach
    from captrain.sft import publish_taught

    [taught] = launch.run(teach, [Lesson(spec, Path("artifacts/base"))], spec.machine, "adp")
    publish_taught(taught, "adp")
    print(f"adp: {taught.demonstrations} demonstrations, left out {sum(taught.left_out.values())}")


if __name__ == "__main__":
    main()
