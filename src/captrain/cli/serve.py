"""The command that serves the base and its adapters."""

from pathlib import Path
from typing import Annotated

import typer

from captrain.errors import UserError


def serve(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path("artifacts/base"),
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    name: Annotated[str, typer.Option("--served-model-name")] = "base",
    adapters: Annotated[list[str] | None, typer.Option("--lora-modules", help="name=folder, repeatable.")] = None,
    token_variable: Annotated[
        str, typer.Option("--token-env", help="Environment variable with the token that requests must bear.")
    ] = "",
    hosts: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Further name of this server, repeatable.")
    ] = None,
    folders: Annotated[
        list[Path] | None, typer.Option("--adapters-from", help="Folder that requests may load from, repeatable.")
    ] = None,
) -> None:
    """Serve the base and its adapters behind an OpenAI-compatible endpoint."""
    from captrain.serving import protection as protecting
    from captrain.serving import server

    protection = protecting.protection_of(host, token_variable, hosts or [])
    try:
        modules = dict(server.pair(adapter) for adapter in adapters or [])
    except ValueError as error:
        raise UserError(f"--lora-modules: {error}", "write name=folder") from None
    server.serve(model, host, port, name, modules, protection=protection, folders=folders or [])
