"""`captrain serve`: an OpenAI-compatible endpoint over the policy in this process.

Any harness for model servers can use it with the embedded agent and its adapters, and code for vLLM can run without it:
chat completions with tools, log-probabilities, token ids, seed, n and streaming; the list of models; adapters loaded
and unloaded at run time, under vLLM's paths and names. Waiting requests are sampled in one batch; an answer depends on
its request alone. Unsupported requests are refused with 4xx, not ignored.
"""

import asyncio
import errno
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from captrain.agents import LocalPolicy
from captrain.errors import UserError
from captrain.records import JsonObject
from captrain.serving.endpoint import ChatServer
from captrain.serving.openai_schemas import (
    CompletionRequest,
    LoadAdapterRequest,
    StreamOptions,
    UnloadAdapterRequest,
)
from captrain.serving.protection import Protected, Protection, PunctualProtocol, PunctualServer, new_application

GRACE = 2
"""Seconds that running requests get to finish after the process is told to stop."""
CONNECTIONS = 512
"""Most connections. A further one replaces the one that has been idle longest, or is refused if none is idle."""
TOKENS = 512
"""Most tokens of an answer if the request sets no limit."""
BATCH = 64
"""Completions sampled together."""


def streamed(answer: JsonObject, options: StreamOptions) -> Iterator[str]:
    """Yield an answer as server-sent events: for each choice its role and content, its calls, and how it ended.

    The engine samples a batch to its end, so nothing is sent before the answer is complete.
    """
    shared = {key: answer[key] for key in ("id", "created", "model", "system_fingerprint")}

    def event(choices: Sequence[dict[str, object]], **more: object) -> str:
        return f"data: {json.dumps({**shared, 'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n"

    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        extra = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
        delta = {"role": "assistant", "content": message["content"] or ""}
        yield event([{"index": index, "delta": delta, "finish_reason": None, **extra}])
        calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or [])]
        if calls:
            yield event([{"index": index, "delta": {"tool_calls": calls}, "finish_reason": None}])
        yield event([{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}])
    if options.include_usage:
        yield event([], usage=answer["usage"])
    yield "data: [DONE]\n\n"


def application(server: ChatServer, protection: Protection | None = None) -> Protected:
    """Build the HTTP application with its protection."""
    return Protected(routes(server), protection or Protection())


def routes(server: ChatServer) -> FastAPI:
    """Build the HTTP application without protection."""
    app = new_application(lambda: asyncio.to_thread(server.close))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": server.models()}

    @app.post("/v1/chat/completions")
    async def complete(request: CompletionRequest) -> Response:
        answer = await server.complete(request)
        if request.stream:
            return StreamingResponse(streamed(answer, request.stream_options), media_type="text/event-stream")
        return JSONResponse(answer)

    @app.post("/v1/load_lora_adapter")
    def load(request: LoadAdapterRequest) -> dict[str, str]:
        server.load_from_folders(request.lora_name, request.lora_path)
        return {"status": "loaded"}

    @app.post("/v1/unload_lora_adapter")
    def unload(request: UnloadAdapterRequest) -> dict[str, str]:
        server.unload(request.lora_name)
        return {"status": "unloaded"}

    return app


def embedded_server(
    model: Path, name: str, adapters: dict[str, Path], folders: Sequence[Path] | None = None
) -> ChatServer:
    """Build the server over the engine in this process.

    Args:
        model: folder of the model.
        name: name of the served model.
        adapters: name -> folder of an adapter.
        folders: requests may load adapters only from below these folders; None: from anywhere.

    Raises:
        UserError: the model, an adapter or a folder is missing or damaged.
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"--adapters-from: there is no folder {folder}", "name a folder that contains adapters")
    if not model.is_dir():
        raise UserError(
            f"there is no model in {model}", "name a model's folder, or make one with `captrain run base` in a project"
        )
    from transformers.utils import logging

    logging.disable_progress_bar()
    policy = LocalPolicy(model, BATCH, temperature=1.0, max_turns=1, max_tokens=TOKENS)
    return ChatServer(policy, name, adapters, str(model), folders)


def run_application(app: Protected, name: str, host: str, port: int, protection: Protection) -> None:
    """Serve until the process is told to stop; print the address. Running requests get `GRACE` seconds, then a 503.

    Args:
        app: answers requests.
        name: name of the served model.
        host: address to listen on.
        port: 0 for any free port.
        protection: limits of requests.

    Raises:
        UserError: the address cannot be listened on.
    """
    import uvicorn

    channels = listen_all(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        http=PunctualProtocol,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=protection.seconds,
        timeout_graceful_shutdown=GRACE,
    )
    print(f"{name} is served on http://{host}:{channels[0].getsockname()[1]}/v1", flush=True)
    with suppress(KeyboardInterrupt):
        PunctualServer(config).run(channels)


def require_free(host: str, port: int) -> None:
    """Raise UserError if an address cannot be listened on, before anything is loaded."""
    for channel in listen_all(host, port):
        channel.close()


def listen_all(host: str, port: int) -> list[socket.socket]:
    """Listen on all addresses of a host that this machine has, on the same port. Raises as `run_application`."""
    channels: list[socket.socket] = []
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in entries):
            free = channels[0].getsockname()[1] if channels else port
            try:
                channels.append(
                    socket.create_server(
                        (address[0], free, *address[2:]),
                        family=family,
                        dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6(),
                    )
                )
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise  # localhost is ::1 too, even without IPv6
        if not channels:
            raise OSError("this machine does not have its address")
    except (OSError, OverflowError, UnicodeError) as error:
        for channel in channels:
            channel.close()
        raise UserError(
            f"captrain serve cannot listen on {host}, port {port}: "
            f"{str(getattr(error, 'strerror', None) or error).partition(' (while')[0]}",
            "choose another --host or --port",
        ) from None
    return channels


def pair(text: str) -> tuple[str, Path]:
    """Parse an adapter on the command line, given as name=folder.

    Raises:
        ValueError: the text is not name=folder.
    """
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise ValueError(f"{text!r} is not of the form name=folder")
    return name, Path(folder)
