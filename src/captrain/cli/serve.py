"""Commands that serve the base and its adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from captrain.cli.console import print_all, project_root
from captrain.errors import UserError

if TYPE_CHECKING:
    from captrain.routing import ConversationRouter
    from captrain.serving import routed as endpoints


def serve(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path("artifacts/base"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    name: Annotated[str, typer.Option("--served-model-name", help="Name of the base in requests.")] = "base",
    adapters: Annotated[
        list[str] | None, typer.Option("--lora-modules", help="Adapter, as name=folder; you can repeat this option.")
    ] = None,
    token_variable: Annotated[
        str, typer.Option("--token-env", help="Environment variable that holds the token that requests must send.")
    ] = "",
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="Further host name of this server, or of pages that may use it; you can repeat this option.",
        ),
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--adapters-from", help="Folder from which requests may load adapters; you can repeat this option."
        ),
    ] = None,
    routed: Annotated[
        bool,
        typer.Option(
            "--route", help="Serve one agent that answers each conversation with the adapter it is routed to."
        ),
    ] = False,
    row: Annotated[
        str,
        typer.Option(
            help="Row of the table that --route plays: trace by the run's router, mixture, or a row with one adapter."
        ),
    ] = "trace",
    upstream: Annotated[
        str, typer.Option(help="Base URL of a vLLM server of the base, used instead of the engine here; needs --route.")
    ] = "",
    upstream_key: Annotated[
        str, typer.Option("--upstream-key-env", help="Environment variable that holds the key of --upstream.")
    ] = "",
) -> None:
    """Serve the base and its adapters behind an OpenAI-compatible endpoint."""
    from captrain.serving import protection as protecting
    from captrain.serving import server

    protection = protecting.protection_of(host, token_variable, hosts or [])
    server.require_free(host, port)
    if routed:
        if adapters or folders:
            raise UserError("--route serves the adapters of the run", "leave out --lora-modules and --adapters-from")
        agent = _routed_agent(model, name, row, upstream, upstream_key)
        server.run_application(agent.application(protection), agent.name, host, port, protection)
        return
    if upstream or upstream_key or row != "trace":
        raise UserError("--row, --upstream and --upstream-key-env need --route", "add --route")
    try:
        modules = dict(server.pair(adapter) for adapter in adapters or [])
    except ValueError as error:
        raise UserError(
            f"--lora-modules: {error}", "write, for example, zips=artifacts/adapters/wrong_argument"
        ) from None
    embedded = server.embedded_server(model, name, modules, folders or [])
    server.run_application(server.application(embedded, protection), name, host, port, protection)


def route(
    message: Annotated[str, typer.Argument(help="The user's first message.")],
) -> None:
    """Print which adapter a conversation would be routed to, and why."""
    adapter, reason = _conversations().choose([{"role": "user", "content": message}])
    print_all(adapter, reason)


def _conversations() -> "ConversationRouter":
    from captrain.routing import ConversationRouter
    from captrain.run import load_spec

    root = project_root()
    spec = load_spec(root / "results/spec.yaml")
    return ConversationRouter(spec, root / "artifacts/base", root / "results", root / "artifacts")


def _routed_agent(model: Path, name: str, row: str, upstream: str, key: str) -> "endpoints.RoutedEndpoint":
    """Build the agent of a row of this project, in front of a server or of the engine in this process."""
    import os

    import httpx2

    from captrain.serving import routed, server

    if key and not os.environ.get(key):
        raise UserError(f"environment variable {key} is not set", f"export {key}=...")
    choose, folder_of, modules = _player_of_row(row, bool(upstream))
    headers = {"authorization": f"Bearer {os.environ[key]}"} if key else {}
    if upstream:
        client = httpx2.AsyncClient(base_url=upstream.rstrip("/") + "/", headers=headers, timeout=routed.PATIENCE)
    else:
        embedded = server.embedded_server(model, name, modules)
        transport = httpx2.ASGITransport(server.routes(embedded))
        client = httpx2.AsyncClient(base_url="http://localhost/v1/", transport=transport, timeout=routed.PATIENCE)
    return routed.RoutedEndpoint(client, choose, folder_of, "captrain", name)


def _player_of_row(row: str, is_vllm: bool) -> "tuple[endpoints.Choose, Callable[[str], Path | None], dict[str, Path]]":
    """Return what answers conversations for a row: the choice of an arm, the arm's folder, and the arms to load now."""
    from captrain.comparison import TRACE, adapter_of_route, adapter_of_row
    from captrain.models import is_mixture

    root = project_root()
    if row == TRACE:
        conversations = _conversations()
        return lambda messages: conversations.choose(messages)[0], lambda arm: adapter_of_route(root, arm), {}
    folder = adapter_of_row(root, row)
    if is_vllm and is_mixture(folder):
        raise UserError(f"vLLM cannot serve row {row}, a mixture of adapters", "leave out --upstream")
    return lambda _: row, lambda _: folder, {row: folder}
