"""Fine-tune the base on the environments' own solutions; it costs no rollout of training."""

from captrain.config import load_spec
from captrain.execution import entry_point, launch
from captrain.training import publish_adapters


@entry_point
def main() -> None:
    """Base, environments, pairs -> artifacts/references, results/references."""
    spec = load_spec()
    publish_adapters([], "references", "references")
    if not spec.baselines.references.run:
        print("references is not run: baselines.references.run is false")
        return
    from captrain.baselines import lessons
    from captrain.baselines.reference_sft import teach
    from captrain.training import publish_taught

    for one in launch.run(teach, lessons(spec), spec.machine, "references"):
        publish_taught(one, "references")
        print(f"references: {one.demonstrations} solutions, left out {sum(one.left_out.values())}")


if __name__ == "__main__":
    main()
