"""The command that diagnoses the logs of an agent."""

from pathlib import Path
from typing import Annotated

import typer

from captrain.cli.console import print_all
from captrain.config import Ranking
from captrain.errors import UserError

RUNS = 10
"""Labelling runs over logs."""


def diagnose(
    out: Annotated[Path, typer.Option(help="Folder for report.md, figures and labels.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Logs of any format that docs/diagnose.md lists.")] = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option(help="In place of logs: JSONL of labels made elsewhere; repeatable, a run each."),
    ] = None,
    delta: Annotated[float, typer.Option(min=0, max=1, help="Least gap between failed and passed rollouts.")] = 0.2,
    coverage: Annotated[float, typer.Option(min=0, max=1, help="Least share of failed rollouts that lack it.")] = 0.1,
    agreement: Annotated[int, typer.Option(min=1, help="Labelling runs, of 10 for logs, that must agree.")] = 8,
    ranking: Annotated[
        Ranking, typer.Option(help="Order of those that meet the rule; product: coverage x gap.")
    ] = "product",
    count: Annotated[int, typer.Option(min=1, help="Capabilities selected at most.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.")] = 0,
    scores: Annotated[Path | None, typer.Option(help="CSV of trace_id,reward: spans hold no reward.")] = None,
    keep_suspects: Annotated[bool, typer.Option(help="Contrast rollouts of suspect references, too.")] = False,
) -> None:
    """Why the rollouts in these logs failed, and what the agent lacks: causes, a ranking, report.md, figures."""
    from captrain.config import Selection
    from captrain.diagnosis import (
        diagnose,
        diagnose_labels,
        diagnosis_summary,
        label_summary,
        publish_diagnosis,
        publish_label_diagnosis,
        read_labels,
    )
    from captrain.interop import read_logs

    if bool(files) == bool(labels):
        raise UserError("captrain diagnose reads logs or labels, one of the two", "name files, or --labels FILE")
    selection = Selection(
        delta=delta,
        coverage=coverage,
        agreement=agreement,
        confidence=0.95,
        floor=0.0,
        resamples=1000,
        ranking=ranking,
    )
    if labels:
        verdict = diagnose_labels(read_labels(labels), selection, count, seed)
        publish_label_diagnosis(verdict, out)
        print_all(*label_summary(verdict), f"{out / 'selection.json'} has the account")
        return
    if agreement > RUNS:
        raise UserError(f"--agreement {agreement} of {RUNS} labelling runs", f"say at most {RUNS}")
    logs = read_logs(files or [], scores)
    diagnosis = diagnose(logs, selection, runs=RUNS, count=count, seed=seed, keep_suspects=keep_suspects)
    publish_diagnosis(diagnosis, out)
    print_all(*diagnosis_summary(diagnosis), f"{out / 'report.md'} has the evidence")
