"""The command that sends adapters and environments to the Hugging Face Hub."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from captrain.cli.console import print_all, project_root


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
    from captrain.errors import UserError
    from captrain.execution import user_outputs
    from captrain.projects import send, write_shipment

    if (dry_run is None) != confirmed:
        raise UserError(
            f"nothing was sent to {repository}",
            "say --dry-run FOLDER to see what would be, or --send to send it",
        )
    root = project_root()
    if dry_run is not None:
        with user_outputs(dry_run) as aside:
            shipment = write_shipment(kind, root, aside, stage)
        print_all(f"{dry_run}: {len(shipment.files)} files, of which nothing was sent")
        return
    with TemporaryDirectory() as folder:
        shipment = write_shipment(kind, root, Path(folder), stage)
        print_all(f"{send(shipment, repository, not public)}: {len(shipment.files)} files")
