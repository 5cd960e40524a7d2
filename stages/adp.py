"""Fine-tune the base on generic agent trajectories; it costs no rollout."""

from pathlib import Path

from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.training import publish_adapters


@entry_point
def main() -> None:
    """Base, trajectories -> artifacts/adp, results/adp."""
    spec = load_spec()
    if not spec.baselines.adp.run:
        publish_adapters([], "adp", "adp")
        print("adp is not run: baselines.adp.run is false")
        return
    from captrain.baselines import Lesson
    from captrain.baselines.adp import teach
    from captrain.training import publish_taught

    [taught] = launch.run(teach, [Lesson(spec, Path("artifacts/base"))], spec.machine, "adp")
    publish_taught(taught, "adp")
    print(f"adp: {taught.demonstrations} demonstrations, left out {sum(taught.left_out.values())}")


if __name__ == "__main__":
    main()
