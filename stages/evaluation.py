"""Play the test split with the base, every adapter and the baseline; compare."""

from pathlib import Path

import pandas as pd

from captrain.arms import play_arms
from captrain.errors import entry_point
from captrain.evaluation import evaluate, write
from captrain.records import LedgerEntry, load, publish
from captrain.spec import load as load_spec


@entry_point
def main() -> None:
    """Adapters, routes, ledgers -> artifacts/evaluation, results/evaluation."""
    spec = load_spec()
    rollouts, outcomes, spent = play_arms(spec, Path("artifacts/base"), Path("results"))
    publish(Path("artifacts/evaluation/rollouts.jsonl"), rollouts)
    stages = ("rollouts", "environments", "adapters", "baselines")
    ledger = [entry for s in stages for entry in load(Path(f"results/{s}/ledger.jsonl"), LedgerEntry)] + spent
    routes = pd.read_csv("results/routes/routes.csv", keep_default_na=False)
    settings = spec.evaluation.model_dump(include={"resamples", "confidence"})
    write(evaluate(outcomes, routes, ledger, seed=spec.seed, **settings), Path("results/evaluation"))


if __name__ == "__main__":
    main()
