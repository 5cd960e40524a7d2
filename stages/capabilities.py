"""Select capabilities from cached labels; say which recipe they speak for."""

from pathlib import Path

import rich

from captrain.capabilities import recommended, said, select, table
from captrain.capabilities.stability import stability
from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.records import Capability, RolloutLabels, load, publish, publish_json, publish_text


@entry_point
def main() -> None:
    chosen, folder = load_spec(), Path("results/capabilities")
    labels = load(Path("artifacts/labels/labels.jsonl"), RolloutLabels)
    candidates = load(Path("results/labels/candidates.jsonl"), Capability)
    given = labels, candidates, chosen.selection
    selected = select(*given, chosen.capabilities.count, chosen.seed)
    publish_json(folder / "selection.json", selected.report)
    publish(folder / "capabilities.jsonl", selected.capabilities)
    publish_text(folder / "stability.csv", stability(*given).to_csv(index=False, float_format="%.6f"))
    publish_json(folder / "recommendation.json", advice := recommended(labels, [c.id for c in selected.capabilities]))
    rich.print(table(selected.report), said(advice))


if __name__ == "__main__":
    main()
