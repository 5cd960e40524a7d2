"""Commands that say beforehand what a run takes and what it can show; they run nothing."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from captrain import comparison, planning
from captrain.cli.console import print_all, project_root
from captrain.errors import UserError
from captrain.run import compose_configuration


def plan(
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="On top of params.yaml.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs to plan with.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each.")] = 80.0,
    throughput: Annotated[
        tuple[float, float] | None, typer.Option(metavar="READ WRITTEN", help="Tokens a second of each.")
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Of a model whose size is not known, in billions.")] = None,
    price: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="READ WRITTEN", help="Of a million tokens at the agent's own endpoint."),
    ] = None,
) -> None:
    """Say what a run would take, stage by stage, and whether it can run at all (exit status 2 if not). Runs nothing."""
    spec, title = compose_configuration(settings or [], project_root())
    node = planning.Node(gpus, gpu_memory, throughput, parameters, price)
    work_plan = planning.make_plan(spec, node, title)
    print_all(*planning.plan_tables(work_plan))
    work_plan.refuse_impossible()


def power(
    base: Annotated[float | None, typer.Option(min=0, max=1, help="Pass rate to start from.")] = None,
    tasks: Annotated[int | None, typer.Option(min=2, max=1_000_000, help="Tasks that both methods play.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, max=10_000, help="Of each task and method.")] = None,
    difference: Annotated[
        float | None, typer.Option(min=-1, max=1, help="What is to be found, and takes so much.")
    ] = None,
    icc: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the variance of outcomes between tasks.")
    ] = None,
    shared: Annotated[
        float | None, typer.Option(min=0, max=1, help="How far both methods find the same tasks hard.")
    ] = None,
    chance: Annotated[float, typer.Option("--power", min=0.01, max=0.999, help="Chance to find what is there.")] = 0.8,
    level: Annotated[float, typer.Option(min=0.0001, max=0.5, help="Chance to find what is not there.")] = 0.05,
) -> None:
    """Say which difference a comparison can detect, and what a wanted one takes; what is not given is as it was in
    results/evaluation. Runs nothing."""
    if difference is not None and not 1e-6 <= abs(difference) <= 1:
        raise UserError(
            f"--difference must lie in [-1, 1] and not be 0, got {difference:g}", "give, for example, --difference .05"
        )
    folder = project_root() / "results/evaluation"
    fields = {"base": base, "tasks": tasks, "trials": trials, "icc": icc, "shared": shared}
    design, source = comparison.complete_design(fields, folder, level=level, power=chance)
    print_all(*comparison.design_tables(design, difference, source))


def doctor(
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="On top of params.yaml.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Run what only GPUs can show, where there is one.")] = False,
    play: Annotated[
        int, typer.Option(min=0, max=1000, help="Discovery tasks that the agent plays, to see it pass.")
    ] = 0,
) -> None:
    """Say whether this machine has what a run needs, each lack with its remedy (exit status 1 if any).

    Starts and downloads nothing, and of an endpoint one short answer is asked, unless --play has the agent play.
    """
    root = project_root()
    spec, title = compose_configuration(settings or [], root)
    if gpu:
        findings = planning.run_on_gpus(planning.GPU_COMMANDS, root)
    else:
        findings = planning.examine_machine(spec, root, planning.Node())
    findings += [planning.examine_agent(spec, root, play)] if play else []
    states = {True: Text("ok", "green"), False: Text("lacking", "red"), None: Text("not seen", "yellow")}
    table = Table("what", "", "seen", "remedy", title=f"doctor: {title}", title_justify="left")
    for finding in findings:
        table.add_row(finding.subject, states[finding.passed], finding.detail, finding.remedy)
    print_all(table)
    if any(finding.passed is False for finding in findings):
        raise typer.Exit(1)
