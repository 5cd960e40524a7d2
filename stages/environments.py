"""Synthesize an environment for each selected capability; each must earn its passport."""

from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.environments.synthesis import synthesize
from captrain.errors import entry_point
from captrain.records import Capability, load, publish, publish_json, publish_text
from captrain.spec import build
from captrain.spec import load as load_spec


@entry_point
def main() -> None:
    """Capabilities, base -> results/environments, artifacts/environments/calibration.jsonl."""
    spec, out = load_spec(), Path("results/environments")
    policy = build(spec.exploring(), model=Path("artifacts/base"), batch=spec.machine.batch)
    benchmark, synthesizer = load_benchmark(spec.benchmark, spec.machine), build(spec.synthesizer)
    selected = load(Path("results/capabilities/capabilities.jsonl"), Capability)
    made = [synthesize(c, synthesizer, policy, benchmark, spec.environments, spec.seed) for c in selected]
    for one in made:
        publish_text(out / f"{one.passport.capability}.py", one.text)
        publish_json(out / f"{one.passport.capability}.passport.json", one.passport)
    publish(out / "ledger.jsonl", [entry for one in made for entry in one.ledger])
    publish(Path("artifacts/environments/calibration.jsonl"), [rollout for one in made for rollout in one.rollouts])


if __name__ == "__main__":
    main()
