"""`captrain serve`: an OpenAI-compatible endpoint over the policy in this process.

So that any harness that speaks to a model server can talk to the embedded agent and its adapters, and so that what is
written against vLLM can be run without it: chat completions with tools, log-probabilities, token ids, seed, n and
streaming, the list of models, and adapters loaded and unloaded while it runs, under vLLM's paths and names. Requests
that wait at the same time are sampled in one batch; an answer depends on its request alone, never on what is sampled
beside it. What cannot be done is refused with 4xx, not ignored. `python -m captrain.serving.server` takes the arguments
of `vllm serve` that policy vllm gives it.
"""

import argparse
import asyncio
import json
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException

from captrain.errors import UserError
from captrain.execution import entry_point
from captrain.models import adapter_digest, require_recorded
from captrain.policies import EngineRow, LocalPolicy, sample_rows, with_adapter
from captrain.records import JsonObject, Message, digest
from captrain.serving.openai_schemas import (
    CompletionRequest,
    LoadAdapterRequest,
    RequestMessage,
    StreamOptions,
    TokenizeRequest,
    TokenRequest,
    UnloadAdapterRequest,
)
from captrain.serving.protection import Protected, Protection, PunctualProtocol, protection_of

CONNECTIONS = 512
"""At a time; more are refused."""
TOKENS = 512
"""Of an answer, where a request does not say how many at most."""


@dataclass(frozen=True)
class Sampling:
    """One completion to sample; equal `group`s may share a batch: adapter, temperature, tokens at most."""

    group: tuple[str, float, int]
    row: EngineRow
    future: Future[EngineRow] = field(default_factory=Future)


@dataclass(frozen=True)
class Scoring:
    """A prompt whose next token is not sampled: its log-probability for each of some tokens, among these."""

    adapter: str
    prompt: list[int]
    tokens: list[int]
    future: Future[list[float]] = field(default_factory=Future)


@dataclass(frozen=True)
class Limits:
    """What a server takes: tokens of the longest dialogue, and the largest rank of an adapter. None: all that the model
    takes, and any."""

    length: int | None = None
    rank: int | None = None


UNLIMITED = Limits()


class Sampler:
    """Samples completions in batches, on one thread.

    Args:
        policy: whose model, whose batch and whose longest dialogue.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._queue: queue.SimpleQueue[Sampling | Scoring | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, sampling: Sampling) -> Future[EngineRow]:
        """Wait in line; the row is complete when the future is done."""
        self._queue.put(sampling)
        return sampling.future

    def score(self, scoring: Scoring) -> Future[list[float]]:
        """Wait in line; see `Scoring`."""
        self._queue.put(scoring)
        return scoring.future

    def close(self) -> None:
        """Finish what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            queued: list[Sampling | Scoring] = [first]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                queued.append(more)
            for scoring in queued:
                if isinstance(scoring, Scoring):
                    self._score(scoring)
            samplings = [sampling for sampling in queued if isinstance(sampling, Sampling)]
            for group in dict.fromkeys(sampling.group for sampling in samplings):
                alike = [sampling for sampling in samplings if sampling.group == group]
                for start in range(0, len(alike), self.policy.batch):
                    self._sample(group, alike[start : start + self.policy.batch])

    def _score(self, scoring: Scoring) -> None:
        scoring.future.set_result(self.policy.scores(scoring.prompt, scoring.tokens, scoring.adapter))

    def _sample(self, group: tuple[str, float, int], batch: Sequence[Sampling]) -> None:
        adapter, temperature, tokens = group
        try:
            sample_rows(
                self.policy.decoder(adapter),
                [sampling.row for sampling in batch],
                end=self.policy.tokenizer.eos_token_id,
                temperature=temperature,
                max_tokens=tokens,
                max_length=self.policy.max_length,
            )
        except Exception as error:
            # Nobody waits for this thread itself: it goes on, and whoever waits for an answer is told.
            logging.exception("a batch of %d completions failed", len(batch))
            for sampling in batch:
                sampling.future.set_exception(HTTPException(500, f"{type(error).__name__}: {error}"))
            return
        for sampling in batch:
            sampling.future.set_result(sampling.row)


class Server:
    """The endpoint.

    Args:
        policy: the model; its temperature and limits are those of requests that name none.
        name: of the model without adapter.
        adapters: folders of adapters by name.
        root: where the model is from; its name where that is not to be told.
        rank: the largest of an adapter; None: any.
        folders: below which adapters may lie that are loaded while it runs; None: anywhere.

    Raises:
        UserError: an adapter is missing or damaged.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        name: str,
        adapters: dict[str, Path],
        root: str = "",
        rank: int | None = None,
        folders: Sequence[Path] | None = None,
    ) -> None:
        self.policy, self.name, self.root, self.rank = policy, name, root or name, rank
        self._folders = None if folders is None else [folder.resolve() for folder in folders]
        self.adapters: dict[str, tuple[Path, str]] = {}
        for adapter, folder in adapters.items():
            self.load(adapter, folder)
        self.sampler = Sampler(policy)

    def load_allowed(self, name: str, folder: Path) -> None:
        """Serve an adapter that a request names; raises HTTPException where it may not lie there, else as `load`."""
        if self._folders is not None and not any(folder.resolve().is_relative_to(root) for root in self._folders):
            roots = ", ".join(map(str, self._folders)) or "none"
            raise HTTPException(403, f"adapters are loaded from named folders alone (--adapters-from): {roots}")
        self.load(name, folder)

    def load(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name; raises UserError for a folder that holds none, or a name in use."""
        if name == self.name or name in self.adapters:
            raise UserError(f"there is a model {name} already", "unload it first, or choose another name")
        content = adapter_digest(folder)
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if self.rank is not None and rank > self.rank:
            raise UserError(
                f"adapter {name} has rank {rank}, and ranks to {self.rank} are taken", "serve a larger rank"
            )
        with_adapter(self.policy.state, str(folder))  # A damaged one is refused now, not at its first request.
        self.adapters[name] = (folder, content)

    def models(self) -> list[JsonObject]:
        """The base, then its adapters; `digest` is what they are, whatever they are called."""
        models: list[JsonObject] = [{"id": self.name, "root": self.root, "parent": None, "digest": self.policy.digest}]
        models += [
            {"id": name, "root": str(folder), "parent": self.name, "digest": content}
            for name, (folder, content) in self.adapters.items()
        ]
        return [{"object": "model", "created": 0, "owned_by": "captrain", **model} for model in models]

    async def complete(self, request: CompletionRequest) -> JsonObject:
        """Answer a request for completions.

        Raises:
            HTTPException: the request asks for what is not there or cannot be done.
        """
        if unsupported := request.unsupported():
            raise HTTPException(400, f"this server does not support {', '.join(unsupported)}")
        adapter = self._adapter(request.model)
        prompt = self.prompt(request.messages, request.tools if request.tool_choice == "auto" else [])
        tokens = request.max_completion_tokens or request.max_tokens or self.policy.max_tokens
        seed = uuid.uuid4().hex if request.seed is None else str(request.seed)
        samplings = [
            Sampling((adapter, request.temperature, tokens), EngineRow(f"{seed}/{index}", prompt, lambda _: []))
            for index in range(request.n)
        ]
        rows = await asyncio.gather(*(asyncio.wrap_future(self.sampler.submit(sampling)) for sampling in samplings))
        replies = [row.ids[len(prompt) :] for row in rows]
        answer = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": self.policy.digest,
            "choices": [self._choice(request, index, row, len(prompt)) for index, row in enumerate(rows)],
            "usage": usage(len(prompt), sum(map(len, replies))),
        }
        return {**answer, "prompt_token_ids": prompt} if request.return_token_ids else answer

    async def follow(self, request: TokenRequest) -> JsonObject:
        """Answer a request for what follows token ids; raises as `complete` does."""
        adapter, end = self._adapter(request.model), self.policy.tokenizer.eos_token_id
        if {*request.stop_token_ids} - {end}:
            raise HTTPException(400, f"turns end with token {end} alone")
        if len(request.prompt) >= self.policy.max_length:
            raise self._too_long(len(request.prompt))
        if request.allowed_token_ids:
            tokens = request.allowed_token_ids
            scoring = Scoring(adapter, request.prompt, tokens)
            scores = await asyncio.wrap_future(self.sampler.score(scoring))
            best = max(range(len(tokens)), key=lambda index: scores[index])
            reply, logprobs = [tokens[best]], [scores[best]]
            top = [{f"token_id:{token}": score for token, score in zip(tokens, scores, strict=True)}]
        else:
            row = EngineRow(f"{request.seed}/0", request.prompt, lambda _: [])
            group = (adapter, request.temperature, request.max_tokens)
            await asyncio.wrap_future(self.sampler.submit(Sampling(group, row)))
            reply, logprobs = row.ids[len(request.prompt) :], row.logprobs[len(request.prompt) :]
            top = []
        scored = {"token_logprobs": logprobs, "top_logprobs": top}
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [
                {"index": 0, "text": self.policy.tokenizer.decode(reply), "token_ids": reply, "logprobs": scored}
            ],
            "usage": usage(len(request.prompt), len(reply)),
        }

    def _too_long(self, length: int) -> HTTPException:
        limit = self.policy.max_length
        return HTTPException(400, f"{length} tokens exceed the model's context length of {limit} tokens")

    def _adapter(self, model: str) -> str:
        if model == self.name:
            return ""
        if model not in self.adapters:
            raise HTTPException(404, f"there is no model {model}; there are {', '.join([self.name, *self.adapters])}")
        return str(self.adapters[model][0])

    def prompt(self, messages: Sequence[RequestMessage], tools: list[JsonObject]) -> list[int]:
        """The tokens that the model reads of a dialogue; raises as `complete` does."""
        try:
            prompt = self.policy.chat(tools).dialogue([message.message() for message in messages])
        except (TemplateError, TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
            raise HTTPException(400, f"the model's chat template does not take these messages: {error}") from None
        if len(prompt) >= self.policy.max_length:
            raise self._too_long(len(prompt))
        return prompt

    def _choice(self, request: CompletionRequest, index: int, row: EngineRow, start: int) -> JsonObject:
        tokens, tokenizer = row.ids[start:], self.policy.tokenizer
        reply = self.policy.chat([]).parse(tokens)
        message: Message = {"role": "assistant", "content": reply["content"] or None}
        if calls := reply.get("tool_calls"):
            names = digest(tokens, index)
            message["tool_calls"] = [
                {
                    "id": f"call_{names}_{position}",
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for position, call in enumerate(calls)
            ]
        finish = "tool_calls" if calls else "stop" if tokens[-1:] == [tokenizer.eos_token_id] else "length"
        choice = {"index": index, "message": message, "finish_reason": finish}
        if request.logprobs:
            spelled = [tokenizer.decode([token]) for token in tokens]
            choice["logprobs"] = {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in zip(spelled, row.logprobs[start:], strict=True)
                ]
            }
        return {**choice, "token_ids": tokens} if request.return_token_ids else choice


def usage(prompt: int, reply: int) -> dict[str, int]:
    """Tokens of one request."""
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def streamed(answer: JsonObject, options: StreamOptions) -> Iterator[str]:
    """An answer as server-sent events: for each choice its role and content, its calls, and how it ended.

    The engine samples a batch to its end, so that nothing is sent before all of it is there.
    """
    shared = {key: answer[key] for key in ("id", "created", "model", "system_fingerprint")}

    def event(choices: list[JsonObject], **more: object) -> str:
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


def _refusing(app: FastAPI) -> None:
    """Errors in OpenAI's shape."""

    def refusal_of(status: int, message: str) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal_of(400, f"{'.'.join(str(part) for part in first['loc'][1:]) or 'body'}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def refusal(_: Request, error: HTTPException) -> Response:
        return refusal_of(error.status_code, str(error.detail))

    @app.exception_handler(UserError)
    async def mistaken(_: Request, error: UserError) -> Response:
        return refusal_of(400, str(error))


def application(server: Server, protection: Protection | None = None) -> Protected:
    """The HTTP side, behind its protection."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.sampler.close()

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    _refusing(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": server.models()}

    @app.post("/v1/chat/completions")
    async def complete(request: CompletionRequest) -> Response:
        answer = await server.complete(request)
        if request.stream:
            return StreamingResponse(streamed(answer, request.stream_options), media_type="text/event-stream")
        return JSONResponse(answer)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> JsonObject:
        tokens = server.prompt(request.messages, request.tools)
        return {"count": len(tokens), "max_model_len": server.policy.max_length, "tokens": tokens}

    @app.post("/v1/completions")
    async def follow(request: TokenRequest) -> JsonObject:
        return await server.follow(request)

    @app.post("/v1/load_lora_adapter")
    def load(request: LoadAdapterRequest) -> dict[str, str]:
        server.load_allowed(request.lora_name, request.lora_path)
        return {"status": "loaded"}

    @app.post("/v1/unload_lora_adapter")
    def unload(request: UnloadAdapterRequest) -> dict[str, str]:
        if server.adapters.pop(request.lora_name, None) is None:
            raise HTTPException(404, f"there is no adapter {request.lora_name}")
        return {"status": "unloaded"}

    return Protected(app, protection or Protection())


def serve(
    model: Path,
    host: str,
    port: int,
    name: str,
    adapters: dict[str, Path],
    batch: int = 64,
    limits: Limits = UNLIMITED,
    root: str = "",
    *,
    protection: Protection,
    folders: Sequence[Path] | None = (),
) -> None:
    """Serve a model until the process is told to end; requests under way are answered first.

    Args:
        model: its folder.
        host: address to listen on.
        port: 0 for any that is free; the line that is printed when the server is ready names it.
        name: under which the model is served.
        adapters: folders of adapters by name.
        batch: completions sampled together.
        limits: of what is taken.
        root: where the model is said to be from; its folder where that is not given.
        protection: bounds of requests.
        folders: below which adapters may lie that requests name; None: anywhere.

    Raises:
        UserError: the model or an adapter is missing or damaged, or nobody can listen there.
    """
    import uvicorn

    _require_free(host, port)
    require_recorded(model)
    policy = LocalPolicy(model, batch, temperature=1.0, max_turns=1, max_tokens=TOKENS)
    policy.max_length = min(policy.max_length, limits.length or policy.max_length)
    server = Server(policy, name, adapters, root or str(model), limits.rank, folders)

    class Announced(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                bound = self.servers[0].sockets[0].getsockname()[1]
                print(f"{name} is served on http://{host}:{bound}/v1", flush=True)

    PunctualProtocol.seconds = protection.seconds
    config = uvicorn.Config(
        application(server, protection),
        host=host,
        port=port,
        log_level="warning",
        http=PunctualProtocol,
        limit_concurrency=CONNECTIONS,
    )
    with suppress(KeyboardInterrupt):
        Announced(config).run()


def _require_free(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            channel.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"nobody can listen on {host}, port {port}: {reason}", "choose others: --host, --port"
        ) from None


def pair(text: str) -> tuple[str, Path]:
    """An adapter as it is given on a command line, name=folder.

    Raises:
        ValueError: it is not of this form.
    """
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise ValueError(f"{text!r} is not of the form name=folder")
    return name, Path(folder)


@entry_point
def main() -> None:
    """`python -m captrain.serving.server MODEL ...`, as `vllm serve MODEL ...`."""
    parser = argparse.ArgumentParser(
        prog="captrain.serving.server", description="The base of a run behind an endpoint."
    )
    parser.add_argument("model", help="its folder, or its name in the cache of the model hub")
    parser.add_argument("--revision", help="of a model by its name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", help="the folder's path by default")
    parser.add_argument("--lora-modules", nargs="*", type=pair, default=[], metavar="NAME=FOLDER")
    # What is always so here: only these values are taken.
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--tool-call-parser", choices=["hermes"])
    parser.add_argument("--generation-config", choices=["vllm"])
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"])
    parser.add_argument("--dtype", help="computed is in float64, whatever is asked for")
    parser.add_argument("--max-model-len", type=int, help="tokens of the longest dialogue")
    parser.add_argument("--max-lora-rank", type=int, help="largest rank of an adapter")
    parser.add_argument("--max-loras", type=int, help="any number of adapters is taken")
    arguments = parser.parse_args()
    name = arguments.served_model_name or str(arguments.model)
    limits = Limits(arguments.max_model_len, arguments.max_lora_rank)
    adapters, model = dict(arguments.lora_modules), Path(arguments.model)
    if not model.exists():
        from huggingface_hub import snapshot_download

        model = Path(snapshot_download(arguments.model, revision=arguments.revision, local_files_only=True))
    # As with vLLM, whoever starts it says whether requests may name adapters, and then they may lie anywhere.
    updating = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    serve(
        model,
        arguments.host,
        arguments.port,
        name,
        adapters,
        limits=limits,
        root=arguments.model,
        protection=protection_of(arguments.host),
        folders=None if updating else (),
    )


if __name__ == "__main__":
    main()
