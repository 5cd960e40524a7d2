"""Commands about environments and adapters: written, examined, and taken out of the project."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from captrain import diagnosis, environments, projects
from captrain.cli.console import (
    ENDPOINT,
    KEY,
    Budget,
    EndpointVariable,
    KeyVariable,
    Prices,
    model_access,
    print_all,
    project_root,
)
from captrain.errors import UserError
from captrain.run import require_folder, user_outputs

Sandbox = Annotated[
    Literal["strong", "strong, one layer", "basic"] | None,
    typer.Option(help="Least level of confinement; machine.sandbox by default."),
]


def synthesize(
    capability: Annotated[str, typer.Argument(help="A cause or capability that the diagnosis found, by its id.")],
    out: Annotated[Path, typer.Option(help="Folder for the environment, its passport and its page.")],
    folder: Annotated[
        Path | None,
        typer.Option("--diagnosis", help="Folder that captrain diagnose wrote; else the project's own capabilities."),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of the tools' schemas, where the logs had none.")
    ] = None,
    model: Annotated[str, typer.Option(help="A language model that writes it; else a program derives it.")] = "",
    endpoint_env: EndpointVariable = ENDPOINT,
    key_env: KeyVariable = KEY,
    tokens: Budget = None,
    prices: Prices = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be made and what it costs, and make nothing.")] = False,
    sandbox: Sandbox = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Play the project's base in it, too.")] = False,
) -> None:
    """Write an environment that trains a capability which a diagnosis found, with its passport (exit status 1 if it
    earns none)."""
    require_folder(out)
    access = model_access(endpoint_env, key_env, tokens, prices)
    evidence = diagnosis.read_diagnosis(folder, tools) if folder else diagnosis.read_project_diagnosis(project_root())
    project, base = evidence.project, None
    if project is not None and out.resolve().is_relative_to((project / "results").resolve()):
        raise UserError(f"{out} belongs to the pipeline", "name another folder with --out")
    if calibrate:
        if project is None or not (project / "artifacts/base").exists():
            raise UserError("there is no base to play", "run `dvc repro base` in a project, or leave --calibrate out")
        base = project / "artifacts/base"
    order = diagnosis.order_synthesis(evidence, capability, model, access, sandbox)
    writer = f"{model} is asked: {diagnosis.synthesis_cost(order, access)}" if model else "derived by a program"
    print_all(f"environment for {order.brief.capability.id}, {writer}")
    if dry_run:
        return
    result, path = diagnosis.synthesize_ordered(order, base, out)
    passport = result.best.passport
    if usage := getattr(order.synthesizer, "usage", None):
        print_all(f"asked: {usage.answers} answers, {usage}")
    if not result.passed:
        print_all(f"no attempt earned its passport: {passport.complaints()}", f"{path} is the best of them")
        raise typer.Exit(1)
    checks = f"{len(passport.checks)} checks passed, {'on' if base else 'without'} the base"
    print_all(f"passport: {checks}", f"{path} trains {order.brief.capability.name}")


def validate(
    file: Annotated[Path, typer.Argument(help="An environment file.")],
    out: Annotated[Path | None, typer.Option(help="Folder for passport and page; beside the file by default.")] = None,
    sandbox: Sandbox = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Play the base in it, too.")] = False,
) -> None:
    """Make out the passport of any environment file, held against the target (exit status 1 when a check fails)."""
    folder = out or file.parent
    require_folder(folder)
    passport, report = environments.validate_file(file, project_root(), folder, sandbox, calibrate)
    print_all(*report)
    if not passport.passed:
        raise typer.Exit(1)


def export_environment(
    name: Annotated[str, typer.Argument(help="Capability of an environment, or an environment file with a passport.")],
    to: Annotated[Literal["openenv", "verifiers", "trl"], typer.Option(help="Whose package.")],
    out: Annotated[Path, typer.Option(help="Folder of the package; new or empty.")],
) -> None:
    """Export an environment as a package that trains elsewhere: OpenEnv, verifiers or TRL."""
    require_folder(out)
    files = projects.export_environment(name, project_root(), to, out)
    print_all(f"{out}: {len(files)} files; {out / 'README.md'} says how it is used")


def push(
    kind: Annotated[Literal["adapters", "environments"], typer.Argument(help="What to send.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub.")],
    dry_run: Annotated[Path | None, typer.Option(help="Write what would be sent into this folder.")] = None,
    confirmed: Annotated[bool, typer.Option("--send", help="Send it. Without this word nothing is sent.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Let all see a repository that is made.")] = False,
    stage: Annotated[str, typer.Option(help="Stage that has trained them, such as solutions.")] = "adapters",
) -> None:
    """Send adapters with their cards, digests and routes, or environments with their passports, to the Hugging Face
    Hub."""
    if [*map(bool, repository.split("/"))] != [True, True]:
        raise UserError(f"{repository} is no repository of the hub", "name it as OWNER/NAME")
    if (dry_run is None) != confirmed:
        raise UserError(
            f"nothing was sent to {repository}",
            "say --dry-run FOLDER to see what would be, or --send to send it",
        )
    root = project_root()
    if dry_run is not None:
        with user_outputs(dry_run) as aside:
            files = projects.write_shipment(kind, root, aside, stage)
        print_all(f"{dry_run}: {len(files)} files, of which nothing was sent")
        return
    with TemporaryDirectory() as folder:
        files = projects.write_shipment(kind, root, Path(folder), stage)
        print_all(f"{projects.send(kind, Path(folder), repository, not public)}: {len(files)} files")
