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
    rollouts, outcomes, spent = play_arms(spec, Path("artifacts/base"), results)
    publish(Path("artifacts/evaluation/rollouts.jsonl"), rollouts)
    ledgers = [results / stage / "ledger.jsonl" for stage in spending_stages()]
    ledger = [entry for path in ledgers for entry in load(path, LedgerEntry)] + spent
    earned, every = (
        read_passports(results / "environments"),
        load(results / "capabilities/capabilities.jsonl", Capability),
    )
    rows = {"ranked": [one.id for one in every if one.id in earned], "controls": controls_of(results / "controls")}
    settings = spec.evaluation.model_dump(include={"resamples", "confidence"})
    publish_evaluation(
        evaluate(outcomes, all_routes(results), ledger, seed=spec.seed, **rows, **settings), results / "evaluation"
    )


if __name__ == "__main__":
    main()
