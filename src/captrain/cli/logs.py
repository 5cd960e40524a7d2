"""The command that diagnoses the logs of an agent."""

from pathlib import Path
from typing import Annotated

import typer

from captrain.cli.console import print_all


def diagnose(
    files: Annotated[list[Path], typer.Argument(help="tau2 or ToolSandbox results, or chat JSONL with rewards.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, figures and labels.")],
    delta: Annotated[float, typer.Option(min=0, max=1, help="Least gap between failed and passed rollouts.")] = 0.2,
    coverage: Annotated[float, typer.Option(min=0, max=1, help="Least share of failed rollouts that lack it.")] = 0.1,
    agreement: Annotated[int, typer.Option(min=1, max=10, help="Labelling runs, of 10, that must agree.")] = 8,
    count: Annotated[int, typer.Option(min=1, help="Capabilities selected at most.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.")] = 0,
) -> None:
    """Which capabilities the agent behind these logs lacks: a ranked table, report.md, figures, labels."""
    from captrain.config import Selection
    from captrain.diagnosis import diagnose, diagnosis_summary, publish_diagnosis
    from captrain.interop import read_logs

    selection = Selection(
        delta=delta, coverage=coverage, agreement=agreement, confidence=0.95, floor=0.0, resamples=1000
    )
    diagnosis = diagnose(read_logs(files), selection, runs=10, count=count, seed=seed)
    publish_diagnosis(diagnosis, out)
    print_all(*diagnosis_summary(diagnosis), f"{out / 'report.md'} has the evidence")
