"""The command that diagnoses the logs of an agent."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain import capabilities, diagnosis, interop
from captrain.benchmarks import load_benchmark, open_worlds
from captrain.cli.console import (
    ENDPOINT,
    KEY,
    MODEL_PANEL,
    Budget,
    EndpointVariable,
    KeyVariable,
    Prices,
    model_access,
    print_all,
)
from captrain.contract import CheckedEnvironment
from captrain.errors import UserError
from captrain.run import (
    Machine,
    Ranking,
    SelectionSettings,
    compose_configuration,
    find_project,
    require_apart,
    require_folder,
)

RUNS = 10
"""Labelling runs on logs."""
READING, FACTS, RULE = "How to read the log", "What else is known", "Which capabilities are selected"
"""Groups of options in the help."""
AnalystName = Literal["programmatic", "openai"]


def diagnose(
    files: Annotated[list[Path], typer.Argument(help="Log files or folders; their formats are detected.")],
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, report.md and the labels; an old diagnosis in it is replaced.")
    ] = Path("diagnosis"),
    scores: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with outcomes: a trace, session, file or task, and its reward.", rich_help_panel=READING
        ),
    ] = None,
    outcome: Annotated[
        str,
        typer.Option(
            help="Field that says whether a rollout passed, such as resolved or metrics.reward.",
            rich_help_panel=READING,
        ),
    ] = "",
    pass_at: Annotated[
        float | None, typer.Option(help="Least reward of a passed rollout; 1 by default.", rich_help_panel=READING)
    ] = None,
    messages: Annotated[
        str,
        typer.Option(help="Field that holds the messages or steps of a dialogue.", rich_help_panel=READING),
    ] = "",
    agent: Annotated[
        str, typer.Option(help="Field that names the agent, if several played.", rich_help_panel=READING)
    ] = "",
    keep_secrets: Annotated[
        bool,
        typer.Option(
            "--keep-secrets",
            help="Keep text that looks like a key; by default it is redacted.",
            rich_help_panel=READING,
        ),
    ] = False,
    benchmark: Annotated[
        str,
        typer.Option(
            help="Benchmark whose world replays the rollouts: tau2, agentdojo, bfcl, servicedesk, toolsandbox, or "
            "one of the project.",
            rich_help_panel=FACTS,
        ),
    ] = "",
    tools_as: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON file that says what tools do: read, write, handover or think.", rich_help_panel=FACTS
        ),
    ] = None,
    clauses: Annotated[
        Path | None,
        typer.Option(help="YAML file with policy clauses to check on the records.", rich_help_panel=FACTS),
    ] = None,
    delta: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Least difference between the error rates of failed and passed rollouts.",
            rich_help_panel=RULE,
        ),
    ] = 0.2,
    coverage: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Least share of failed rollouts that lack the capability.", rich_help_panel=RULE
        ),
    ] = 0.1,
    agreement: Annotated[
        int,
        typer.Option(min=1, max=RUNS, help="Number of labelling runs, of 10, that must agree.", rich_help_panel=RULE),
    ] = 8,
    ranking: Annotated[
        Ranking,
        typer.Option(
            help="Order of the capabilities that meet these thresholds; product is coverage x gap.",
            rich_help_panel=RULE,
        ),
    ] = "product",
    count: Annotated[
        int, typer.Option(min=1, help="Largest number of capabilities to select.", rich_help_panel=RULE)
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the labelling runs.", rich_help_panel=RULE)] = 0,
    analyst: Annotated[
        AnalystName,
        typer.Option(
            help="Who labels the rollouts: rules (programmatic), or the language model of --model (openai).",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "programmatic",
    model: Annotated[str, typer.Option(help="Name of the model at its endpoint.", rich_help_panel=MODEL_PANEL)] = "",
    endpoint_env: EndpointVariable = ENDPOINT,
    key_env: KeyVariable = KEY,
    tokens: Budget = None,
    prices: Prices = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what the model would cost, and ask nothing.", rich_help_panel=MODEL_PANEL
        ),
    ] = False,
) -> None:
    """Diagnose an agent's logs: print and report what it does wrong, how often, and what to do.

    The output folder also gets every cause, label and count as JSON. It works offline, without a model.
    """
    # The threads of numpy's BLAS wait busily, and the matrices here are small. It is not loaded yet.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    require_folder(out)
    require_apart(out)
    if dry_run and analyst != "openai":
        raise UserError(
            "--dry-run prints what a language model would cost, but no model is asked", "add --analyst openai"
        )
    selection = SelectionSettings(
        delta=delta,
        coverage=coverage,
        agreement=agreement,
        confidence=0.95,
        floor=0.0,
        resamples=1000,
        ranking=ranking,
    )
    choices = interop.Choices(outcome, pass_at, messages, agent)
    logs = interop.read_logs(files, scores, keep_secrets=keep_secrets, choices=choices)
    print_all(*logs.notes)
    if analyst == "openai":
        # Print the cost before asking anything.
        if not model:
            raise UserError("--analyst openai needs a model", "add --model NAME, the name of the model at its endpoint")
        access = model_access(endpoint_env, key_env, tokens, prices)
        print_all(str(diagnosis.judging_cost(logs, RUNS, access)))
        if not dry_run:
            lines = diagnosis.judge(logs, model, access, selection, out, runs=RUNS, count=count, seed=seed)
            print_all(*lines, f"{out / 'selection.json'} has the account")
        return
    target, machine = benchmark_of_project(benchmark)
    kinds = diagnosis.read_kinds(tools_as) if tools_as else {}
    tools = [tool["function"]["name"] for tool in (*logs.tools, *(target.declared_tools if target else ()))]
    if unknown := [name for name in kinds if name not in tools]:
        raise UserError(
            f"{tools_as} names {', '.join(unknown)}, which no rollout has",
            f"choose from the tools of the logs: {', '.join(sorted({*tools})) or 'there are none'}",
        )
    with open_worlds("" if target else benchmark, target=target, machine=machine) as worlds:
        found = diagnosis.diagnose(
            logs,
            selection,
            runs=RUNS,
            count=count,
            seed=seed,
            worlds=worlds,
            kinds=kinds,
            clauses=[capabilities.read_clauses(clauses)] if clauses else [],
        )
    advice = diagnosis.advise(found, out)
    diagnosis.publish_diagnosis(found, out, advice)
    unproven = [
        "No cause is proven, because the benchmark that replays these rollouts is missing. Before you diagnose again:",
        f"  {worlds.missing}",
    ]
    lines = [*diagnosis.diagnosis_summary(found, advice), *(unproven if worlds.missing else [])]
    print_all(*lines, f"The whole report: {out / 'report.html'}")


def benchmark_of_project(name: str) -> tuple[CheckedEnvironment | None, Machine | None]:
    """Load the surrounding project's own benchmark of this name, if any, and the machine settings of the project.

    Raises:
        UserError: the benchmark does not load.
    """
    project = find_project(Path.cwd())
    if not name or project is None:
        return None, None
    is_own = (project / f"conf/benchmark/{name}.yaml").is_file()
    spec = compose_configuration([f"benchmark={name}"] if is_own else [], project)[0]
    return load_benchmark(spec.benchmark, spec.machine) if is_own else None, spec.machine
