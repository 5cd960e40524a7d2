"""Train the base model from scratch, or from pretrained weights."""

from pathlib import Path

from captrain.records import ProgressBar, publish_json
from captrain.run import entry_point, load_spec
from captrain.training import make_base


@entry_point
def main() -> None:
    """Spec -> artifacts/base, results/base.json."""
    spec, folder = load_spec(), Path("artifacts/base")
    summary = make_base(
        spec.base,
        spec.seed,
        folder,
        spec.machine,
        lambda batches: ProgressBar(batches, what="base", unit="step"),
    )
    publish_json(Path("results/base.json"), summary)


if __name__ == "__main__":
    main()
