"""Train the embedded base model."""

from pathlib import Path

from tqdm import tqdm

from captrain.base.train import train_base
from captrain.errors import entry_point
from captrain.records import publish_json
from captrain.spec import load


@entry_point
def main() -> None:
    """Spec -> artifacts/base, results/base.json."""
    spec = load()
    summary = train_base(spec.base, spec.seed, Path("artifacts/base"), lambda batches: tqdm(batches, unit="step"))
    publish_json(Path("results/base.json"), summary)


if __name__ == "__main__":
    main()
