"""Select capabilities from cached labels."""

from pathlib import Path

from rich.console import Console

from captrain import spec
from captrain.capabilities.selection import select, table
from captrain.capabilities.stability import stability
from captrain.errors import entry_point
from captrain.records import Capability, RolloutLabels, load, publish, publish_json, publish_text


@entry_point
def main() -> None:
    chosen = spec.load()
    labels = load(Path("artifacts/labels/labels.jsonl"), RolloutLabels)
    candidates = load(Path("results/labels/candidates.jsonl"), Capability)
    selected = select(labels, candidates, chosen.selection, chosen.capabilities.count, chosen.seed)
    publish_json(Path("results/capabilities/selection.json"), selected.report)
    publish(Path("results/capabilities/capabilities.jsonl"), selected.capabilities)
    runs = stability(labels, candidates, chosen.selection)
    publish_text(Path("results/capabilities/stability.csv"), runs.to_csv(index=False, float_format="%.6f"))
    Console().print(table(selected.report))
    if not selected.capabilities:
        print("no capability was selected: the reasons are in results/capabilities/selection.json")


if __name__ == "__main__":
    main()
