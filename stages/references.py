"""Fine-tune the base on the environments' own solutions; it costs no rollout of training."""

from captrain import launch
from captrain.adapters import publish_adapters
from captrain.errors import entry_point
from captrain.spec import load


@entry_point
def main() -> None:
    """Base, environments, pairs -> artifacts/references, results/references."""
    spec = load()
    publish_adapters([], "references", "references")
    if not spec.baselines.references.run:
        print("references is not run: baselines.references.run is false")
        return
    from captrain.references import lessons, teach
    from captrain.sft import publish_taught

    for one in launch.run(teach, lessons(spec), spec.machine, "references"):
        publish_taught(one, "references")
        print(f"references: {one.demonstrations} solutions, left out {sum(one.left_out.values())}")


if __name__ == "__main__":
    main()
