"""The command line: `captrain results | status | watch | verify | show | report | plan | power | jobs | ...`.

Each command reads and prints; `dvc repro` is what runs anything. What a command needs is imported inside it, so that
`captrain --help` answers at once and nothing here but `serve` and `validate --calibrate` ever imports torch. A
`UserError` ends in one message on stderr and exit status 2; `captrain verify` and `validate` exit with 1 when something
does not hold.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from captrain.errors import UserError
from captrain.execution import entry_point

app = typer.Typer(
    name="captrain",
    help="Find the capabilities an agent lacks, train a LoRA adapter for each, route tasks to them. "
    "The pipeline itself runs with `dvc repro`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
show = typer.Typer(help="Rollouts, capabilities, environments and adapters, as lists or one by its id.")
app.add_typer(show, name="show", no_args_is_help=True)

STATES = {
    "fresh": ("green", "up to date"),
    "cached": ("green", "up to date, outputs in DVC's cache"),
    "waiting": ("yellow", "up to date, waits for an earlier stage"),
    "missing": ("yellow", "outputs missing"),
    "stale": ("red", "stale"),
    "never run": ("red", "never run"),
    "running": ("bold green", "runs now"),
    "changing": ("yellow", "changes right now"),
}


def _root() -> Path:
    """The folder of the project: the nearest one upwards that holds dvc.yaml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").exists():
            return folder
    raise UserError(f"there is no dvc.yaml in {here.name}/ or above", "run captrain inside a clone of the repository")


def _print(*parts: RenderableType) -> None:
    # A pipe has no width of its own, and rich would fold tables at 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)


@app.command()
def results(
    spent: Annotated[bool, typer.Option("--spent", help="What each method spent: rollouts, tokens, seconds.")] = False,
) -> None:
    """Pass rates with intervals, paired differences, rollouts spent, and where the figures lie."""
    from captrain.reporting import show as shown

    _print(shown.spent(_root()) if spent else shown.results(_root()))


@app.command()
def status() -> None:
    """Which stages of the pipeline are up to date, stale or missing, and why."""
    from captrain.monitoring import processes, stage_states

    root = _root().resolve()
    running, _ = processes.running(root, processes.pipeline(root))
    states = stage_states(root, running)
    table = Table("stage", "state", "why", title="pipeline", title_justify="left")
    for one in states:
        colour, words = STATES[one.state]
        table.add_row(one.name, Text(words, colour), Text("\n".join(one.reasons)))
    idle = all(one.state in ("fresh", "cached") for one in states)
    busy = any(one.state in ("running", "changing") for one in states)
    words = "`captrain watch` follows what runs" if busy else "`dvc repro` brings the pipeline up to date"
    _print(table, "nothing to do" if idle else words)


@app.command()
def watch(
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait for more.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5.0,
) -> None:
    """Which stage runs, how far it is, and which are to come, until interrupted; changes nothing and takes no lock."""
    from captrain.monitoring import Watch, view

    if once:
        _print(*view.watch_view(Watch(_root()).look()))
    else:
        view.follow(_root(), interval)


@app.command()
def verify() -> None:
    """Whether the committed results were made by the committed code, specification and data (exit status 1 if not)."""
    from captrain.monitoring import verify as check

    found = check(_root())
    _print(*(Text(f"ok           {line}", "green") for line in found.holds))
    _print(*(Text(f"not checked  {line}", "dim") for line in found.unchecked))
    _print(*(Text(f"FAILS        {line}", "red") for line in found.problems))
    if found.problems:
        _print(Text(f"{len(found.problems)} things do not hold: the results are not those of this code and data"))
        raise typer.Exit(1)
    _print(Text("the committed results are those of the committed code, specification and data"))


@app.command()
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
    _print(*diagnosis_summary(diagnosis), f"{out / 'report.md'} has the evidence")


@app.command()
def plan(
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="On top of params.yaml.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs to plan with.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each.")] = 80.0,
    throughput: Annotated[
        tuple[float, float] | None, typer.Option(metavar="READ WRITTEN", help="Tokens a second of each.")
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Of a model whose size is not known, in billions.")] = None,
) -> None:
    """What a run would take, stage by stage, and whether it can run at all (exit status 2 if not). Runs nothing."""
    from captrain.planning import Node, compose_configuration, make_plan, plan_tables

    spec, title = compose_configuration(settings or [], _root())
    work_plan = make_plan(spec, Node(gpus, gpu_memory, throughput, parameters), title)
    _print(*plan_tables(work_plan))
    work_plan.refuse_impossible()


@app.command()
def power(
    base: Annotated[float | None, typer.Option(help="Pass rate to start from.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Tasks that both methods play.")] = None,
    trials: Annotated[int | None, typer.Option(help="Of each task and method.")] = None,
    difference: Annotated[float | None, typer.Option(help="What is to be found, and takes so much.")] = None,
    icc: Annotated[float | None, typer.Option(help="Share of the variance of outcomes between tasks.")] = None,
    shared: Annotated[float | None, typer.Option(help="How far both methods find the same tasks hard.")] = None,
    wanted: Annotated[float, typer.Option("--power", help="Chance to find what is there.")] = 0.8,
    level: Annotated[float, typer.Option(help="Chance to find what is not there.")] = 0.05,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's claims instead.")] = False,
) -> None:
    """What difference a comparison can detect, and what a wanted one takes; what is not given is as it was in
    results/evaluation. Runs nothing."""
    from captrain.planning import PartialDesign, claim_tables, complete_design, design_tables

    folder = _root() / "results/evaluation"
    if paper:
        base, tasks, trials = 0.5, 2, 1  # the paper's own are used: only icc and shared are to be known
    partial = PartialDesign(base, tasks, trials, icc, shared)
    design, source = complete_design(partial, folder, level=level, power=wanted)
    if paper:
        _print(*claim_tables(design.icc, design.shared, level, wanted, source))
    else:
        _print(*design_tables(design, difference, source))


@app.command()
def published() -> None:
    """The paper's numbers beside ours where the same thing was run, and what in them does not agree."""
    from captrain.reporting import shown

    _print(*shown(_root()))


@app.command()
def export(
    files: Annotated[list[Path], typer.Argument(help="Rollouts, JSON lines.")],
    to: Annotated[Literal["inspect", "openai"], typer.Option(help="Inspect logs, or chats in OpenAI's format.")],
    out: Annotated[Path, typer.Option(help="Folder of the logs, or file of the chats.")],
) -> None:
    """Rollouts for other tools: Inspect evaluation logs, or chat JSONL in OpenAI's format."""
    from captrain.interop import export_rollouts

    written = export_rollouts(files, to, out)
    _print(*(str(path) for path in written))


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder of the pages; replaced if it holds a report.")] = Path("report"),
) -> None:
    """The results as pages that open from a disk: tables, capabilities, rollouts, thresholds, ledger, provenance."""
    from captrain.reporting.pages import build

    written = build(_root(), out)
    _print(f"{out / 'index.html'} ({len(written)} files)")


@app.command()
def jobs(id: Annotated[str | None, typer.Argument(metavar="ID", help="Print this one's log.")] = None) -> None:
    """Jobs on the cluster: state, node, elapsed, progress, last line, reason; of one, its log."""
    from captrain.execution import jobs as sent

    if id:
        print(sent.job_log(_root(), id), end="")
    else:
        _print(sent.jobs_table(_root()))


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="An environment file.")],
    out: Annotated[Path | None, typer.Option(help="Folder for passport and page; beside the file by default.")] = None,
    sandbox: Annotated[
        Literal["strong", "strong, one layer", "basic"] | None,
        typer.Option(help="Least level of confinement; machine.sandbox by default."),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Play the base in it, too.")] = False,
) -> None:
    """The passport of any environment file, held against the target (exit status 1 when a check fails)."""
    from captrain.environments import publish_validation, validate_file, validation_report

    folder = out or file.parent
    found = validate_file(file, _root(), folder, sandbox, calibrate)
    publish_validation(found, folder)
    _print(*validation_report(found))
    if not found.passport.passed:
        raise typer.Exit(1)


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path("artifacts/base"),
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="0 for any that is free.")] = 8000,
    name: Annotated[str, typer.Option("--served-model-name")] = "base",
    adapters: Annotated[list[str] | None, typer.Option("--lora-modules", help="name=folder, repeatable.")] = None,
) -> None:
    """The base and its adapters behind an OpenAI-compatible endpoint."""
    from captrain.serving import server as endpoint

    try:
        named = dict(endpoint.pair(one) for one in adapters or [])
    except ValueError as error:
        raise UserError(f"--lora-modules: {error}", "write name=folder") from None
    endpoint.serve(model, host, port, name, named)


Id = Annotated[str | None, typer.Argument(metavar="ID", help="Show this one in full.")]


@show.command()
def rollouts(
    id: Id = None,
    outcome: Annotated[Literal["passed", "failed", "error"] | None, typer.Option(help="List these only.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most so many.")] = 20,
) -> None:
    """Rollouts of diagnosis and evaluation; one in full, with the point where it leaves its reference marked."""
    from captrain.reporting import show as shown

    _print(shown.rollout(_root(), id) if id else shown.rollouts(_root(), outcome, limit))


@show.command()
def capabilities(id: Id = None) -> None:
    """Candidate capabilities with gap, coverage and the reason why each was selected or rejected."""
    from captrain.reporting import show as shown

    _print(shown.capability(_root(), id) if id else shown.capabilities(_root()))


@show.command()
def environments(id: Id = None) -> None:
    """Synthesized environments; one with every check of its passport."""
    from captrain.reporting import show as shown

    _print(shown.environment(_root(), id) if id else shown.environments(_root()))


@show.command()
def adapters(id: Id = None) -> None:
    """Trained adapters by content hash; one with its model card."""
    from captrain.reporting import show as shown

    _print(shown.adapter(_root(), id) if id else shown.adapters(_root()))


@entry_point
def main() -> None:
    """Entry point of the `captrain` command."""
    app()


if __name__ == "__main__":
    main()
