"""Train the adapters of the controls, and route test tasks among them."""

from pathlib import Path

from captrain.comparison import publish_controls, run_controls
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    """Selection, environments, base -> artifacts/controls, results/controls."""
    spec, results, lines = load_spec(), Path("results"), ["no controls: controls.run is false"]
    if spec.controls.run:
        lines = run_controls(spec, Path("artifacts/base"), results, Path("artifacts"))
    else:
        publish_controls({}, [], [], results / "controls")
    return "; ".join(lines) or "results/controls, artifacts/controls"


if __name__ == "__main__":
    main()
