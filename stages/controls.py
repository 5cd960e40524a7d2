"""Train the adapters of the controls, and route test tasks among them."""

from pathlib import Path

from captrain.comparison import TRACE, publish_controls, run_controls
from captrain.records import publish_text, read_text
from captrain.run import entry_point, load_spec


@entry_point
def main() -> str:
    """Selection, environments, base -> artifacts/controls, results/controls."""
    spec, results, lines = load_spec(), Path("results"), ["no controls: controls.run is false"]
    if spec.controls.run:
        lines = run_controls(spec, Path("artifacts/base"), results, Path("artifacts"))
        # Controls act with TRACE's adapters, too, on tasks that TRACE does not play with them.
        for name in ("index.json", "routes.csv", "compositions.json"):
            publish_text(results / "controls" / TRACE / name, read_text(results / "routes" / name))
    else:
        publish_controls({}, [], [], results / "controls")
    return "; ".join(lines) or "results/controls, artifacts/controls"


if __name__ == "__main__":
    main()
