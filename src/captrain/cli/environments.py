"""Commands for environments and adapters: write, validate, export and publish them."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from captrain import diagnosis, environments, projects
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
    project_root,
)
from captrain.errors import UserError
from captrain.records import counted
from captrain.run import find_project, require_folder, user_outputs

Sandbox = Annotated[
    Literal["strong", "strong, one layer", "basic"] | None,
    typer.Option(help="Weakest level of confinement to accept; machine.sandbox by default."),
]


def synthesize(
    capability: Annotated[str, typer.Argument(help="Id of a cause or capability that the diagnosis found.")],
    out: Annotated[Path, typer.Option(help="Folder for the environment, its passport and its page.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--diagnosis", help="Folder that `captrain diagnose` wrote; the project's own diagnosis by default."
        ),
    ] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON list of the tools' schemas, if the logs have none.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Name of the model that writes the environment; by default a program derives it.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "",
    endpoint_env: EndpointVariable = ENDPOINT,
    key_env: KeyVariable = KEY,
    tokens: Budget = None,
    prices: Prices = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be made and its cost, and make nothing.")
    ] = False,
    sandbox: Sandbox = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also let the project's base play the environment.")
    ] = False,
) -> None:
    """Write an environment that trains a capability found by a diagnosis, and check it.

    The checks are recorded in its passport. The exit status is 1 if one fails.
    """
    require_folder(out)
    access = model_access(endpoint_env, key_env, tokens, prices)
    if folder is None and find_project(Path.cwd()) is None:
        raise UserError(
            "there is no diagnosis to read: --diagnosis is missing, and this folder is not in a project",
            "add --diagnosis DIR, the folder that `captrain diagnose` wrote",
        )
    evidence = diagnosis.read_diagnosis(folder, tools) if folder else diagnosis.read_project_diagnosis(project_root())
    project, base = evidence.project, None
    if project is not None and out.resolve().is_relative_to((project / "results").resolve()):
        raise UserError(f"{out} belongs to the pipeline", "name another folder with --out")
    if calibrate:
        if project is None or not (project / "artifacts/base").exists():
            raise UserError("there is no base to play", "run `dvc repro base` in a project, or leave out --calibrate")
        base = project / "artifacts/base"
    order = diagnosis.order_synthesis(evidence, capability, model, access, sandbox)
    writer = f"{model} is asked: {diagnosis.synthesis_cost(order, access)}" if model else "derived by a program"
    print_all(f"environment for {order.brief.capability.id}, {writer}")
    if dry_run:
        return
    result, path = diagnosis.synthesize_ordered(order, base, out)
    passport = result.best.passport
    if usage := getattr(order.synthesizer, "usage", None):
        print_all(f"The model gave {counted(usage.answers, 'answer')}: {usage}")
    if not result.passed:
        print_all(f"no attempt earned its passport: {passport.complaints()}", f"{path} is the best of them")
        raise typer.Exit(1)
    checks = f"{counted(len(passport.checks), 'check')} passed, {'on' if base else 'without'} the base"
    trained = order.brief.capability
    print_all(f"passport: {checks}", f"{path} trains {trained.id} ({trained.name})")


def validate(
    name: Annotated[
        str, typer.Argument(metavar="FILE|TASKSET", help="Environment file (.py), or a taskset of verifiers.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the passport and its page; by default the file's own folder.")
    ] = None,
    scale: Annotated[
        tuple[float, float],
        typer.Option(help="Lowest and highest reward of an episode of the taskset.", metavar="LOW HIGH"),
    ] = (0.0, 1.0),
    sandbox: Sandbox = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also let the project's base play the environment.")
    ] = False,
) -> None:
    """Check an environment file and write its passport, or probe a taskset of verifiers.

    The exit status is 1 if a check fails.
    """
    file = Path(name)
    is_file = file.suffix == ".py" or (os.path.lexists(file) and not file.is_dir())  # a folder may be a taskset's name
    folder = out or (file.parent if is_file else Path())
    require_folder(folder)
    if is_file:
        passport, report = environments.validate_file(file, project_root(), folder, sandbox, calibrate)
    else:
        passport, report = environments.validate_taskset(name, project_root(), folder, scale)
    print_all(*report)
    if not passport.passed:
        raise typer.Exit(1)


def export_environment(
    name: Annotated[
        str,
        typer.Argument(help="Capability of an environment of the project, or an environment file with a passport."),
    ],
    to: Annotated[Literal["openenv", "verifiers", "trl"], typer.Option(help="Library that the package is for.")],
    out: Annotated[Path, typer.Option(help="New or empty folder for the package.")],
) -> None:
    """Export an environment as a package for training with OpenEnv, verifiers or TRL."""
    require_folder(out)
    files = projects.export_environment(name, project_root(), to, out)
    print_all(f"{out}: {counted(len(files), 'file')}; {out / 'README.md'} says how it is used")


def push(
    kind: Annotated[Literal["adapters", "environments"], typer.Argument(help="What to send.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hub.")],
    dry_run: Annotated[
        Path | None, typer.Option(help="Write the files to this folder instead of sending them.")
    ] = None,
    confirmed: Annotated[bool, typer.Option("--send", help="Send the files; this option is needed to send.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    stage: Annotated[str, typer.Option(help="Stage that trained the adapters, for example solutions.")] = "adapters",
) -> None:
    """Send adapters or environments to the Hugging Face Hub.

    Adapters come with cards and routes, environments with passports."""
    if [*map(bool, repository.split("/"))] != [True, True]:
        raise UserError(f"{repository} is not a repository of the hub", "name it as OWNER/NAME")
    if (dry_run is None) != confirmed:
        raise UserError(
            f"nothing was sent to {repository}",
            "add --dry-run FOLDER to see the files, or --send to send them",
        )
    root = project_root()
    if dry_run is not None:
        with user_outputs(dry_run) as aside:
            files = projects.write_shipment(kind, root, aside, stage)
        print_all(f"{dry_run}: {counted(len(files), 'file')}; nothing was sent")
        return
    with TemporaryDirectory() as folder:
        files = projects.write_shipment(kind, root, Path(folder), stage)
        print_all(f"{projects.send(kind, Path(folder), repository, not public)}: {counted(len(files), 'file')}")
