"""The embedded server in vLLM's place: `python stand_in.py MODEL ...` takes the arguments that policy vllm gives `vllm
serve`.

Beside chat completions it continues token ids and scores the tokens that may come next.
"""

import argparse
import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from captrain.agents import EngineRow, LocalPolicy
from captrain.errors import UserError
from captrain.models import adapter_config
from captrain.records import JsonObject
from captrain.run import entry_point
from captrain.serving.endpoint import ChatServer, usage
from captrain.serving.protection import Protected, protection_of
from captrain.serving.sampling import Sampler, Sampling
from captrain.serving.server import BATCH, TOKENS, pair, routes, run_application


class TokenRequest(BaseModel):
    """A request for what follows token ids, in vLLM's words: sampled, or with `allowed_token_ids` one of these, and the
    log-probabilities of each among them."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: Annotated[list[int], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)]
    seed: int
    logprobs: Annotated[int, Field(ge=0)]
    return_token_ids: Literal[True]
    return_tokens_as_token_ids: bool = False
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []


class ClosedRow(EngineRow):
    """A prompt whose next token is one of some: the log-probability of each among them."""

    def __init__(self, prompt: list[int], tokens: list[int]) -> None:
        super().__init__("", prompt, lambda _: [])
        self.tokens, self.scores = tokens, list[float]()


class TokenSampler(Sampler):
    """Sampler that also scores."""

    def sample(self, group: tuple[str, float, int], rows: Sequence[EngineRow]) -> None:
        """See `Sampler.sample`."""
        closed = [row for row in rows if isinstance(row, ClosedRow)]
        for row in closed:
            row.scores = self.policy.scores(row.ids, row.tokens, group[0])
        if not closed:
            super().sample(group, rows)


class TokenServer(ChatServer):
    """ChatServer that continues token ids.

    Args:
        policy, name, adapters, root: see `ChatServer`.
        rank: the largest of an adapter; None: any.
        folders: see `ChatServer`.
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
        self.rank = rank
        super().__init__(policy, name, adapters, root, folders)
        self.sampler.close()
        self.sampler = TokenSampler(policy)

    def load(self, name: str, folder: Path) -> None:
        """See `ChatServer.load`."""
        rank = adapter_config(folder)["r"]
        if self.rank is not None and rank > self.rank:
            raise UserError(f"adapter {name} has rank {rank}, and ranks to {self.rank} are taken", "serve a larger one")
        super().load(name, folder)

    async def follow(self, request: TokenRequest) -> JsonObject:
        """Answer a request for what follows token ids."""
        adapter, ends, limit = self.folder_of(request.model), self.policy.ends, self.policy.max_length
        if {*request.stop_token_ids} - ends:
            raise HTTPException(400, f"turns end with tokens {sorted(ends)} alone")
        if len(request.prompt) >= limit:
            raise HTTPException(400, f"{len(request.prompt)} tokens exceed the model's context length of {limit}")
        vocabulary = self.policy.config.vocab_size
        if unknown := [token for token in (*request.prompt, *request.allowed_token_ids) if not 0 <= token < vocabulary]:
            raise HTTPException(400, f"there is no token {unknown[0]}: the model has those from 0 to {vocabulary - 1}")
        tokens = request.allowed_token_ids
        made = ClosedRow(request.prompt, tokens) if tokens else EngineRow(f"{request.seed}/0", request.prompt, _nothing)
        # Apart from those that are sampled, whom its failure is not to end.
        group = (adapter, request.temperature, 0 if tokens else request.max_tokens)
        sampling = Sampling(group, len(request.prompt), 1, lambda _: made)
        [row] = await asyncio.wrap_future(self.sampler.submit(sampling))
        if isinstance(row, ClosedRow):
            best = max(range(len(tokens)), key=lambda index: row.scores[index])
            reply, logprobs = [tokens[best]], [row.scores[best]]
            top = [{f"token_id:{token}": score for token, score in zip(tokens, row.scores, strict=True)}]
        else:
            reply, logprobs, top = row.ids[len(request.prompt) :], row.logprobs[len(request.prompt) :], []
        choice = {"index": 0, "text": self.policy.tokenizer.decode(reply), "token_ids": reply}
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [{**choice, "logprobs": {"token_logprobs": logprobs, "top_logprobs": top}}],
            "usage": usage(len(request.prompt), len(reply)),
        }


def _nothing(turn: list[int]) -> list[int]:
    return []


def token_routes(server: TokenServer) -> FastAPI:
    """The application of the embedded server, and vLLM's path for token ids."""
    app = routes(server)

    @app.post("/v1/completions")
    async def follow(request: TokenRequest) -> JsonObject:
        return await server.follow(request)

    return app


@partial(entry_point, stage=False)
def main() -> None:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(prog="stand_in.py")
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
    name, model = arguments.served_model_name or arguments.model, Path(arguments.model)
    if not model.exists():
        from huggingface_hub import snapshot_download

        model = Path(snapshot_download(arguments.model, revision=arguments.revision, local_files_only=True))
    policy = LocalPolicy(model, BATCH, temperature=1.0, max_turns=1, max_tokens=TOKENS)
    policy.max_length = min(policy.max_length, arguments.max_model_len or policy.max_length)
    # As with vLLM, whoever starts it says whether requests may name adapters, and then they may lie anywhere.
    updating = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    adapters, rank = dict(arguments.lora_modules), arguments.max_lora_rank
    app = token_routes(TokenServer(policy, name, adapters, arguments.model, rank, None if updating else ()))
    protection = protection_of(arguments.host)
    run_application(Protected(app, protection), name, arguments.host, arguments.port, protection)


if __name__ == "__main__":
    main()
