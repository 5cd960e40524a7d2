"""Commands before a run: what it costs, what it can show, and what the machine lacks."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from captrain import comparison, planning
from captrain.cli.console import print_all, project_root
from captrain.errors import UserError
from captrain.run import compose_configuration

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings that override params.yaml.")
]


def plan(
    settings: Settings = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs to plan with.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="Memory of one GPU, in GiB.")] = 80.0,
    throughput: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="READ WRITTEN", help="Tokens that one GPU reads and writes in a second."),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Size of the model in billions of parameters, if captrain does not know it.")
    ] = None,
    price: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="READ WRITTEN", help="Price of a million tokens at the agent's own endpoint."),
    ] = None,
) -> None:
    """Estimate what a run costs, stage by stage, and check whether it can run.

    This command runs no stage. The exit status is 2 if the run is impossible.
    """
    spec, title = compose_configuration(settings or [], project_root())
    node = planning.Node(gpus, gpu_memory, throughput, parameters, price, planning.machine_speed())
    work_plan = planning.make_plan(spec, node, title)
    print_all(*planning.plan_tables(work_plan))
    work_plan.refuse_impossible()


def power(
    base: Annotated[float | None, typer.Option(min=0, max=1, help="Pass rate of the first method.")] = None,
    tasks: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Number of tasks that both methods play.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, max=10_000, help="Trials of each task with each method.")] = None,
    difference: Annotated[float | None, typer.Option(min=-1, max=1, help="Difference in pass rate to detect.")] = None,
    icc: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the variance of outcomes that lies between tasks.")
    ] = None,
    shared: Annotated[
        float | None, typer.Option(min=0, max=1, help="Correlation of task difficulty between the methods.")
    ] = None,
    chance: Annotated[
        float, typer.Option("--power", min=0.01, max=0.999, help="Chance to detect a real difference.")
    ] = 0.8,
    level: Annotated[
        float, typer.Option(min=0.0001, max=0.5, help="Chance to report a difference that is not real.")
    ] = 0.05,
) -> None:
    """Compute which difference a comparison can detect, or how many tasks a difference needs.

    This command runs no stage. Values that you leave out come from results/evaluation.
    """
    if difference is not None and not 1e-6 <= abs(difference) <= 1:
        raise UserError(
            f"--difference must lie in [-1, 1] and not be 0, got {difference:g}", "give, for example, --difference .05"
        )
    folder = project_root() / "results/evaluation"
    fields = {"base": base, "tasks": tasks, "trials": trials, "icc": icc, "shared": shared}
    design, source = comparison.complete_design(fields, folder, level=level, power=chance)
    print_all(*comparison.design_tables(design, difference, source))


def doctor(
    settings: Settings = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Run the commands that only a GPU can test.")] = False,
    play: Annotated[
        int, typer.Option(min=0, max=1000, help="Let the agent play this many discovery tasks; it must pass some.")
    ] = 0,
) -> None:
    """Check that this machine has what a run needs, and print a remedy for everything missing.

    It downloads nothing and asks an endpoint for one short answer. The exit status is 1 if something is missing.
    """
    root = project_root()
    spec, title = compose_configuration(settings or [], root)
    if gpu:
        results = planning.run_on_gpus(planning.GPU_COMMANDS, root)
    else:
        results = planning.examine_machine(spec, root, planning.Node())
    if play:
        results.append(planning.examine_agent(spec, root, play))
    states = {True: Text("ok", "green"), False: Text("missing", "red"), None: Text("not visible", "yellow")}
    table = Table("what", "", "seen", "remedy", title=f"doctor: {title}", title_justify="left")
    for result in results:
        table.add_row(result.subject, states[result.passed], result.detail, result.remedy)
    print_all(table)
    if any(result.passed is False for result in results):
        raise typer.Exit(1)
