"""Play the test split with the base and all that can act; compare."""

from pathlib import Path

from captrain.baselines import spending_stages
from captrain.config import load_spec
from captrain.environments import read_passports
from captrain.evaluation import all_routes, controls_of, evaluate, play_arms, publish_evaluation
from captrain.execution import entry_point
from captrain.ledger import LedgerEntry
from captrain.records import Capability, load, publish


@entry_point
def main() -> None:
    """Adapters, routes, ledgers -> artifacts/evaluation, results/evaluation."""
    spec, results = load_spec(), Path("results")
    rollouts, outcomes, entries = play_arms(spec, Path("artifacts/base"), results)
    publish(Path("artifacts/evaluation/rollouts.jsonl"), rollouts)
    ledgers = [results / stage / "ledger.jsonl" for stage in spending_stages()]
    ledger = [entry for path in ledgers for entry in load(path, LedgerEntry)] + entries
    passports = read_passports(results / "environments")
    selected = load(results / "capabilities/capabilities.jsonl", Capability)
    evaluation = evaluate(
        outcomes,
        all_routes(results),
        ledger,
        ranked=[capability.id for capability in selected if capability.id in passports],
        controls=controls_of(results / "controls"),
        resamples=spec.evaluation.resamples,
        confidence=spec.evaluation.confidence,
        seed=spec.seed,
    )
    publish_evaluation(evaluation, results / "evaluation")


if __name__ == "__main__":
    main()
