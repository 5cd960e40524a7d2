"""Test whether each adapter repairs the failures labelled with its capability."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.capabilities import Analyst
from captrain.comparison import measure_causality, publish_causality
from captrain.records import publish, publish_json
from captrain.run import build, entry_point, load_spec


@entry_point
def main() -> None:
    """What the rows played, capabilities -> artifacts/causality, results/causality."""
    spec, folder = load_spec(), Path("results/causality")
    tools = load_benchmark(spec.benchmark, spec.machine).tools
    analyst = build(spec.analyst, Analyst, access=spec.machine.asking)
    labels, causality = measure_causality(analyst, tools, spec)
    publish(Path("artifacts/causality/labels.jsonl"), labels)
    publish_causality(causality, folder)
    if (account := getattr(analyst, "usage", None)) is not None:
        publish_json(folder / "asked.json", account)


if __name__ == "__main__":
    main()
