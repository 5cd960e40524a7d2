"""Train the embedded base model."""

from pathlib import Path

from tqdm import tqdm

from captrain.benchmarks import train_base
from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.records import publish_json


@entry_point
def main() -> None:
    """Spec -> artifacts/base, results/base.json."""
    spec = load_spec()
    folder, threads = Path("artifacts/base"), spec.machine.workers
    summary = train_base(spec.base, spec.seed, folder, lambda batches: tqdm(batches, unit="step"), threads)
    publish_json(Path("results/base.json"), summary)


if __name__ == "__main__":
    main()
