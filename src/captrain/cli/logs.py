"""The command that diagnoses the logs of an agent."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain import capabilities, diagnosis, interop
from captrain.benchmarks import load_benchmark, open_worlds
from captrain.cli.console import (
    ENDPOINT,
    KEY,
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
AnalystName = Literal["programmatic", "openai"]


def diagnose(
    files: Annotated[list[Path], typer.Argument(help="Log files in any format that docs/formats.md lists.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.html and the labels.")],
    delta: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least difference between the error rates of failed and passed rollouts."),
    ] = 0.2,
    coverage: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of failed rollouts that lack the capability.")
    ] = 0.1,
    agreement: Annotated[
        int, typer.Option(min=1, max=RUNS, help="Number of labelling runs, of 10, that must agree.")
    ] = 8,
    ranking: Annotated[
        Ranking, typer.Option(help="Order of the capabilities that meet the rule; product is coverage x gap.")
    ] = "product",
    count: Annotated[int, typer.Option(min=1, help="Largest number of capabilities to select.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resamples.")] = 0,
    scores: Annotated[
        Path | None,
        typer.Option(help="CSV of outcomes: a trace, session, file or task, and its reward."),
    ] = None,
    outcome: Annotated[
        str, typer.Option(help="Field that says whether a rollout passed, such as resolved or metrics.reward.")
    ] = "",
    pass_at: Annotated[float | None, typer.Option(help="Least reward of a passed rollout; by default 1.")] = None,
    messages: Annotated[str, typer.Option(help="Field that holds the messages or steps of a dialogue.")] = "",
    agent: Annotated[str, typer.Option(help="Field that names the agent, if several played.")] = "",
    keep_secrets: Annotated[
        bool, typer.Option(help="Write text that looks like a key as it is; by default it is redacted.")
    ] = False,
    benchmark: Annotated[str, typer.Option(help="Benchmark of the tasks: a known one, or one of the project.")] = "",
    tools_as: Annotated[
        Path | None, typer.Option(help="YAML or JSON that maps tools to read, write, handover or think.")
    ] = None,
    clauses: Annotated[Path | None, typer.Option(help="YAML of policy clauses that can be checked on records.")] = None,
    analyst: Annotated[
        AnalystName, typer.Option(help="Who labels: programmatic uses rules, openai the language model of --model.")
    ] = "programmatic",
    model: Annotated[str, typer.Option(help="Name of the model at its endpoint.")] = "",
    endpoint_env: EndpointVariable = ENDPOINT,
    key_env: KeyVariable = KEY,
    tokens: Budget = None,
    prices: Prices = None,
    dry_run: Annotated[bool, typer.Option(help="Print what the model would cost, and ask nothing.")] = False,
) -> None:
    """Diagnose an agent's logs: why its rollouts failed and what it lacks. Writes causes, a ranking and reports."""
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
            raise UserError("--analyst openai needs a model", "name it by --model, as the endpoint knows it")
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
            f"name tools of the logs: {', '.join(sorted({*tools})) or 'there are none'}",
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
    unproven = [f"causes are not proven: `{worlds.missing}`, and diagnose again"] if worlds.missing else []
    print_all(*diagnosis.diagnosis_summary(found, advice), *unproven, f"The whole report: {out / 'report.html'}")


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
