"""The command that diagnoses the logs of an agent."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from captrain.cli.console import print_all
from captrain.config import Ranking
from captrain.errors import UserError

if TYPE_CHECKING:
    from captrain.config import Selection
    from captrain.interop import Logs

RUNS = 10
"""Labelling runs over logs."""
AnalystName = Literal["programmatic", "openai"]


@dataclass(frozen=True)
class _Judge:
    """A language model that judges: its name, the environment variables that hold endpoint and key, its budget in
    tokens, prices, and whether it is to be asked at all."""

    model: str
    endpoint: str
    key: str
    tokens: int | None
    prices: tuple[float, float] | None
    dry_run: bool


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
    analyst: Annotated[
        AnalystName, typer.Option(help="programmatic: rules; openai: the language model of --model.")
    ] = "programmatic",
    model: Annotated[str, typer.Option(help="The model's name at its endpoint.")] = "",
    endpoint_env: Annotated[
        str, typer.Option(help="Environment variable that holds the endpoint's base URL.")
    ] = "OPENAI_BASE_URL",
    key_env: Annotated[str, typer.Option(help="Environment variable that holds its key.")] = "OPENAI_API_KEY",
    tokens: Annotated[int | None, typer.Option(min=1, help="Budget of the model in tokens, read and written.")] = None,
    prices: Annotated[
        tuple[float, float] | None, typer.Option(help="Money for a million tokens read, and written.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what the model would cost, and ask nothing.")] = False,
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
    from captrain.execution import require_folder
    from captrain.interop import read_logs

    require_folder(out)
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
    if analyst == "openai":
        _judge(logs, selection, out, count, seed, _Judge(model, endpoint_env, key_env, tokens, prices, dry_run))
        return
    diagnosis = diagnose(logs, selection, runs=RUNS, count=count, seed=seed, keep_suspects=keep_suspects)
    publish_diagnosis(diagnosis, out)
    print_all(*diagnosis_summary(diagnosis), f"{out / 'report.md'} has the evidence")


def _judge(logs: "Logs", selection: "Selection", out: Path, count: int, seed: int, settings: _Judge) -> None:
    """Diagnose by a language model: its cost first, then the questions."""
    from pydantic import ValidationError

    from captrain.config import ModelAccess
    from captrain.diagnosis import judge, judged_summary, judging_cost, load_analyst, publish_judged

    if not settings.model:
        raise UserError("--analyst openai needs a model", "name it by --model, as the endpoint knows it")
    read_price, write_price = settings.prices or (None, None)
    try:
        access = ModelAccess(
            endpoint=settings.endpoint,
            key=settings.key,
            tokens=settings.tokens,
            input_price=read_price,
            output_price=write_price,
        )
    except ValidationError as error:  # a key where the name of a variable belongs is not repeated
        options = {"endpoint": "--endpoint-env", "key": "--key-env"}
        name = options.get(str(error.errors()[0]["loc"][0]), "--prices")
        raise UserError(f"{name} names no environment variable", "give a name, such as OPENAI_API_KEY") from None
    print_all(str(judging_cost(logs, RUNS, access)))
    if settings.dry_run:
        return
    judgement = judge(logs, load_analyst(settings.model, access), selection, runs=RUNS, count=count, seed=seed)
    publish_judged(judgement, out)
    print_all(*judged_summary(judgement), f"{out / 'selection.json'} has the account")
