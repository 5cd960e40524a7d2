"""Results of a run as records or pandas frames, for notebooks: `captrain.load_main()`.

Each loader takes the root of a project and reads the files of one stage; it computes nothing new. A missing file is a
`UserError` that names the file and the stage. The package imports this module when a loader is first used.
"""

from pathlib import Path
from typing import Literal

import pandas as pd

from captrain.capabilities import read_selection
from captrain.comparison import acting_stages, arm_indices, evaluation_table, played, published, spending_stages
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import Capability, Passport, Rollout, RolloutLabels, load, read_json, read_table
from captrain.run import Spec, repro
from captrain.run import spec as specification

Root = Path | str
ROLLOUTS = {
    "diagnosis": "artifacts/rollouts/discovery.jsonl",
    "calibration": "artifacts/environments/calibration.jsonl",
}
"""Files of rollouts by purpose. Those of the evaluation are in a folder for each row (`captrain.comparison.PLAYED`)."""


def load_spec(root: Root = ".") -> Spec:
    """Load the specification that made the results.

    >>> captrain.load_spec().evaluation.trials
    2
    """
    return specification.load_spec(Path(root) / "results/spec.yaml")


def load_rollouts(
    root: Root = ".", purpose: Literal["diagnosis", "calibration", "evaluation"] = "diagnosis"
) -> list[Rollout]:
    """Load the complete rollouts of one purpose: messages, tokens, score.

    >>> rollout = captrain.load_rollouts()[0]
    >>> rollout.outcome, len(rollout.messages)
    ('failed', 3)
    """
    if purpose == "evaluation":
        return [play.rollout for play in played(Path(root))]
    return load(Path(root) / ROLLOUTS[purpose], Rollout)


def load_labels(root: Root = ".") -> pd.DataFrame:
    """Load the labels, a row for each verdict: run, rollout, outcome, count, capability, verdict, evidence, message.

    `count` says how often the resample of the run drew the rollout.

    >>> captrain.load_labels().groupby("verdict").size().to_dict()
    {'LACKING': 1, 'NA': 1}
    """
    rows = [
        (row.run, row.rollout, row.outcome, row.count, name, label.verdict, label.evidence, label.message)
        for row in load(Path(root) / "artifacts/labels/labels.jsonl", RolloutLabels)
        for name, label in row.labels.items()
    ]
    columns = ["run", "rollout", "outcome", "count", "capability", "verdict", "evidence", "message"]
    return pd.DataFrame(rows, columns=columns).astype({"message": "Int64"})


def load_selection(root: Root = ".") -> pd.DataFrame:
    """Load the candidates in the order of the selection: id, name, gap with interval, coverage, error rates, runs that
    retain it, and the reason for its selection or rejection.

    >>> captrain.load_selection()[["id", "gap"]].values.tolist()
    [['wrong_record', 0.5]]
    """
    return pd.DataFrame(read_selection(Path(root) / "results")["candidates"]).drop(columns="per_run", errors="ignore")


def load_capabilities(root: Root = ".") -> list[Capability]:
    """Load the selected capabilities, best first.

    >>> [one.id for one in captrain.load_capabilities()]
    ['wrong_record']
    """
    return load(Path(root) / "results/capabilities/capabilities.jsonl", Capability)


def load_passports(root: Root = ".") -> dict[str, Passport]:
    """Load the passports of all environments by capability, passed or not.

    >>> {name: passport.passed for name, passport in captrain.load_passports().items()}
    {'wrong_record': True}
    """
    folder = _required(root, "results/environments", "environments")
    passports = [read_json(path, Passport) for path in sorted(folder.glob("*.passport.json"))]
    return {passport.capability: passport for passport in passports}


def load_adapters(root: Root = ".") -> pd.DataFrame:
    """Load the adapters and prompts of all stages: stage, name, digest, path, rollouts, discarded.

    >>> captrain.load_adapters()[["stage", "name"]].values.tolist()
    [['adapters', 'wrong_record']]
    """
    rows = [
        {"stage": stage, "name": name, **row.model_dump(exclude_unset=True)}
        for stage, index in arm_indices(Path(root)).items()
        for name, row in index
    ]
    return pd.DataFrame(rows).drop(columns=["guidance", "checkpoints"], errors="ignore")


def load_history(root: Root = ".") -> pd.DataFrame:
    """Load the training history, a row for each step: stage, adapter, step, rollouts so far, reward, success, share of
    informative groups.

    >>> captrain.load_history()["reward"].round(2).tolist()
    [0.4, 0.6]
    """
    paths = {stage: Path(root) / "results" / stage / "history.csv" for stage in acting_stages()}
    _required(root, "results/adapters/history.csv", "adapters")
    histories = {stage: path for stage, path in paths.items() if path.exists() and path.stat().st_size > 1}
    # `words`: a kind or an arm may be called "none" or "NA", here and in the routes.
    tables = [read_table(path, words=True).assign(stage=stage) for stage, path in histories.items()]
    return pd.concat(tables, ignore_index=True)


def load_routes(root: Root = ".") -> pd.DataFrame:
    """Load the routes, a row for each task: task, kind, and the arm that each router chooses. `chosen` is the
    configured router.

    >>> captrain.load_routes()["chosen"].tolist()
    ['wrong_record']
    """
    return read_table(_required(root, "results/routes/routes.csv", "routes"), words=True)


def load_outcomes(root: Root = ".") -> pd.DataFrame:
    """Load the outcomes of the evaluation, a row for each rollout: rollout, task, kind, arm, trial, outcome, reward,
    prompt and completion tokens.

    An arm is "base" or the name of an adapter, a prompt or a composition of adapters.

    >>> captrain.load_outcomes().pivot(index="task", columns="arm", values="reward").to_dict("records")
    [{'base': 0.0, 'wrong_record': 1.0}]
    """
    rows = [
        {
            "rollout": play.rollout.id,
            **play.outcome.model_dump(include={"task", "kind", "arm", "trial", "outcome", "reward"}),
            "prompt_tokens": play.rollout.usage.prompt_tokens,
            "completion_tokens": play.rollout.usage.completion_tokens,
        }
        for play in played(Path(root))
    ]
    return pd.DataFrame(rows).astype({"reward": float})


def load_main(root: Root = ".") -> pd.DataFrame:
    """Load the main table, a row for each method: pass rate, interval, pass^k, mean reward, tasks, errors, rollouts
    spent.

    >>> captrain.load_main().set_index("method")["pass_rate"].to_dict()
    {'base': 0.25, 'trace': 0.5}
    """
    return evaluation_table(Path(root) / "results/evaluation", "main")


def load_differences(root: Root = ".") -> pd.DataFrame:
    """Load the paired differences: first, second, difference with interval, and its test.

    >>> captrain.load_differences()[["first", "second", "difference"]].values.tolist()
    [['trace', 'base', 0.25]]
    """
    return evaluation_table(Path(root) / "results/evaluation", "differences")


def load_kinds(root: Root = ".") -> pd.DataFrame:
    """Load the main table by kind of task.

    >>> captrain.load_kinds()["kind"].unique().tolist()
    ['pick']
    """
    return evaluation_table(Path(root) / "results/evaluation", "kinds")


def load_ledger(root: Root = ".") -> pd.DataFrame:
    """Load the rollouts that diagnosis, calibration and training spent: stage, purpose, method, item, rollouts,
    discarded, errors, tokens.

    Evaluation costs all methods the same and is in results/evaluation/ledger.csv.

    >>> int(captrain.load_ledger()["rollouts"].sum())
    320
    """
    _required(root, "results/rollouts/ledger.jsonl", "rollouts")
    paths = [Path(root) / "results" / stage / "ledger.jsonl" for stage in spending_stages()]
    entries = [entry for path in paths if path.exists() for entry in load(path, LedgerEntry)]
    return pd.DataFrame([entry.model_dump() for entry in entries])


def load_published(root: Root = ".") -> pd.DataFrame:
    """Load the numbers that the paper published, with ours if the same thing was run.

    >>> frame = captrain.load_published()
    >>> frame.query("what == 'tau2' and method == 'trace' and at == 'all'")["published"].tolist()
    [47.0]
    """
    return published.table(Path(root))


def _required(root: Root, name: str, stage: str) -> Path:
    path = Path(root) / name
    if not path.exists():
        raise UserError(f"{path} is missing", f"run `{repro(stage, Path(root))}` to make it")
    return path
