"""The model behind the endpoint, without HTTP: its name, its adapters, and the answer to each kind of request.

Chat completions are rendered and parsed like the embedded agent's own turns. Unsupported requests raise
`HTTPException`. Completions are sampled in batches of waiting requests (`captrain.serving.sampling`). An answer depends
on its request alone, never on the rest of the batch, and a failed batch ends no other.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.exceptions import HTTPException

from captrain.agents import EngineRow, LocalPolicy, with_adapter
from captrain.errors import UserError
from captrain.models import TEMPLATE_FAULTS, adapter_digest, is_mixture, load_mixture, load_module, mixture_parts
from captrain.records import JsonObject, Message, digest
from captrain.serving.folders import copy_adapter_below
from captrain.serving.openai_schemas import CompletionRequest, RequestMessage
from captrain.serving.sampling import Sampler, Sampling

LONGEST_TOKEN = 64
"""Assumed characters per token, on average. Longer dialogues are refused before they are tokenized."""


@dataclass(frozen=True)
class ServedAdapter:
    """A served adapter.

    Args:
        folder: the folder that it is loaded from.
        content: digest of its content.
        named: the folder that the user named.
        copy: the folder above a copy for a request. It is removed with the adapter.
    """

    folder: Path
    content: str
    named: Path
    copy: TemporaryDirectory[str] | None = None

    def remove_copy(self) -> None:
        """Remove the adapter's copy, if it has one."""
        if self.copy is not None:
            self.copy.cleanup()


class ChatServer:
    """OpenAI-compatible endpoint over one policy in this process.

    Args:
        policy: the model. Its temperature and limits are the defaults for requests.
        name: name of the model without an adapter.
        adapters: name -> folder of an adapter.
        root: source of the model, as `/v1/models` reports it; "" reports `name`.
        folders: requests may load adapters only from below these folders; None: from anywhere.

    Raises:
        UserError: an adapter is missing or damaged.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        name: str,
        adapters: dict[str, Path],
        root: str = "",
        folders: Sequence[Path] | None = None,
    ) -> None:
        self.policy, self.name, self.root = policy, name, root or name
        self.folders = None if folders is None else [folder.resolve() for folder in folders]
        self.adapters: dict[str, ServedAdapter] = {}
        for adapter, folder in adapters.items():
            self.load(adapter, folder)
        self.sampler = Sampler(policy)

    def close(self) -> None:
        """Finish the waiting requests, and remove the copies of adapters."""
        self.sampler.close()
        for adapter in self.adapters.values():
            adapter.remove_copy()

    def load_from_folders(self, name: str, folder: Path) -> None:
        """Serve an adapter that a request names, from a copy.

        Raises:
            HTTPException: the folder is outside the folders that requests may load from.
            UserError: as `load`.
        """
        if self.folders is None:
            self.load(name, folder)
            return
        holder = TemporaryDirectory(prefix="captrain-adapter-")
        copy = Path(holder.name, "adapter")
        copy.mkdir()
        try:
            copy_adapter_below(self.folders, folder, copy)
            self.load(name, copy)
            self.adapters[name] = replace(self.adapters[name], named=folder, copy=holder)
        except UserError as error:
            raise UserError(error.problem.replace(str(copy), str(folder)), error.remedy) from None
        finally:
            if name not in self.adapters or self.adapters[name].copy is not holder:
                holder.cleanup()

    def unload(self, name: str) -> None:
        """Stop serving an adapter.

        Raises:
            HTTPException: there is no adapter of this name.
        """
        if (adapter := self.adapters.pop(name, None)) is None:
            raise HTTPException(404, f"there is no adapter {name}")
        adapter.remove_copy()

    def load(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name.

        Raises:
            UserError: the folder holds no adapter, or a mixture whose gates decide before each turn; or the name is
                in use.
        """
        if is_mixture(folder) and mixture_parts(folder).decide == "turn":
            raise UserError(
                f"{folder} is a mixture whose gates decide before each turn, but a request is read at once",
                "serve a mixture whose gates decide at the prompt or at each token; `captrain.play` plays this one",
            )
        if name == self.name or name in self.adapters:
            raise UserError(f"there is a model {name} already", "unload it first, or choose another name")
        content = adapter_digest(folder)
        # A damaged adapter is refused now, not at its first request.
        if is_mixture(folder):
            load_mixture(load_module(self.policy.folder, self.policy.precision), folder)
        else:
            with_adapter(self.policy.state, str(folder))
        self.adapters[name] = ServedAdapter(folder, content, folder)

    def models(self) -> list[dict[str, object]]:
        """List the base, then its adapters; `digest` identifies their content."""
        models = [(self.name, self.root, None, self.policy.digest)]
        models += [(name, str(one.named), self.name, one.content) for name, one in self.adapters.items()]
        shared = {"object": "model", "created": 0, "owned_by": "captrain"}
        return [{**shared, **dict(zip(("id", "root", "parent", "digest"), model, strict=True))} for model in models]

    async def complete(self, request: CompletionRequest) -> JsonObject:
        """Answer a request for completions.

        Raises:
            HTTPException: the request cannot be served.
        """
        if unsupported := request.unsupported():
            raise HTTPException(400, f"this server does not support {', '.join(unsupported)}")
        adapter = self.folder_of(request.model)
        tools = request.tools if request.tool_choice == "auto" else []
        prompt = await asyncio.to_thread(self.prompt, request.messages, tools)
        opening = len(prompt)
        if adapter and is_mixture(Path(adapter)) and (before := before_first_turn(request.messages)):
            # The gates decide once, for the whole dialogue: where the model's first turn began.
            opening = len(os.path.commonprefix([prompt, await asyncio.to_thread(self.prompt, before, tools)]))
        wanted = request.max_completion_tokens or request.max_tokens or self.policy.max_tokens
        tokens = min(wanted, self.policy.max_length)
        seed = uuid.uuid4().hex if request.seed is None else str(request.seed)
        sampling = Sampling(
            (adapter, request.temperature, tokens),
            len(prompt),
            request.n,
            lambda index: EngineRow(f"{seed}/{index}", prompt, lambda _: [], opening),
        )
        rows = await asyncio.wrap_future(self.sampler.submit(sampling))
        replies = [row.ids[len(prompt) :] for row in rows]
        answer = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": self.policy.digest,
            "choices": [self._choice(request, tools, index, row, len(prompt)) for index, row in enumerate(rows)],
            "usage": usage(len(prompt), sum(map(len, replies))),
        }
        return {**answer, "prompt_token_ids": prompt} if request.return_token_ids else answer

    def folder_of(self, model: str) -> str:
        """Return the folder of a model's adapter, "" for the base. Raises as `complete`."""
        if model == self.name:
            return ""
        if model not in self.adapters:
            raise HTTPException(404, f"there is no model {model}; there are {', '.join([self.name, *self.adapters])}")
        return str(self.adapters[model].folder)

    def prompt(self, messages: Sequence[RequestMessage], tools: list[JsonObject]) -> list[int]:
        """Render a dialogue to the token ids that the model reads. Raises as `complete`.

        This is slow: call it outside the event loop.
        """
        room = LONGEST_TOKEN * self.policy.max_length
        try:
            dialogue = [message.message() for message in messages]
            if (characters := len(str(dialogue)) + len(str(tools))) > room:
                limit = f"the model's context length of {self.policy.max_length} tokens"
                raise HTTPException(400, f"{characters} characters cannot fit {limit}")
            prompt = self.policy.chat(tools).dialogue(dialogue)
        except TEMPLATE_FAULTS as error:
            raise HTTPException(400, f"the model's chat template does not take these messages: {error}") from None
        if len(prompt) >= self.policy.max_length:
            limit = self.policy.max_length
            raise HTTPException(400, f"{len(prompt)} tokens exceed the model's context length of {limit} tokens")
        return prompt

    def _choice(
        self, request: CompletionRequest, tools: list[JsonObject], index: int, row: EngineRow, start: int
    ) -> JsonObject:
        tokens, tokenizer = row.ids[start:], self.policy.tokenizer
        reply = self.policy.chat(tools).parse(tokens)
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
        finish = "tool_calls" if calls else "stop" if tokens and tokens[-1] in self.policy.ends else "length"
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


def before_first_turn(messages: Sequence[RequestMessage]) -> Sequence[RequestMessage]:
    """Return the messages before the model's first turn."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return messages[: turns[0]] if turns else messages


def usage(prompt: int, reply: int) -> dict[str, int]:
    """Count the tokens of one request."""
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
