"""Policy of the base model and its adapters, served by vLLM. It exchanges token ids, so its rollouts can be trained on.

The servers are child processes of the stage (`captrain.agents.servers`). Adapters are loaded under their content hash,
and captrain checks that each answer comes from the requested model.

A prompt is sent as token ids. After each turn, only the new messages are rendered by the chat template and appended.
Tokens that the model has read or written are never tokenized again. So in the next turn the model reads exactly what it
wrote, including thoughts and odd whitespace, and the recorded log-probabilities belong to the recorded tokens. A
rollout counts the turns for which a fresh rendering of the dialogue would have given other tokens. Tool calls are
parsed by captrain (`captrain.models.chat`). The server returns the sampled tokens and their log-probabilities under the
distribution it sampled from, including the temperature.

A failed request is sent again, if needed after a restart of the server. The request holds the whole dialogue and the
seed, so the episode continues without loss.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

from pydantic import Field

from captrain.agents.local import with_hint
from captrain.agents.openai import OpenAIPolicy
from captrain.agents.policy import ClosedQuestion, outgrown
from captrain.agents.servers import Fleet, Service, VllmServer, fleet_of
from captrain.contract import RunningEpisode
from captrain.errors import UserError
from captrain.models import (
    Chat,
    ContextLengthExceeded,
    TokenCompletion,
    TokenScores,
    TransientFault,
    adapter_digest,
    model_source,
    trusts_code,
)
from captrain.records import JsonObject, Message, digest, file_digest
from captrain.run import Count, Machine, Rate

FAITHFUL = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs")
"""Server arguments for faithful sampling.

The server ignores sampling settings in the model's files, and returns log-probabilities of the distribution it samples
from.
"""

PAUSE = 0.25
"""Seconds before a retry if the server is healthy. Doubled after each further fault."""


class VLLMPolicy(OpenAIPolicy):
    """The base of this run, served by vLLM.

    Args:
        model: output folder of the base stage: the model, or the name of one.
        machine: how servers are started, and how many episodes are played at once.
        temperature: sampling temperature, 0 is greedy.
        max_turns: assistant turns in one episode.
        max_tokens: tokens in one assistant turn.
        guidance: lines appended to the system prompt.
        dtype: of weights and arithmetic. float32 is for models that are trained in it or above.
        max_length: tokens of the longest dialogue; None: what the model takes.
        arguments: further arguments of the servers that change their answers, such as --quantization=fp8.
        retries: further attempts at a request before its episode ends with an error and is played again later.
        timeout: seconds for one request.
        top_p: sample from the likeliest tokens with this total probability; None: all tokens.
        top_k: sample from so many likeliest tokens; None: all tokens.
        chat_template_kwargs: further arguments of the chat template, such as {enable_thinking: false}.

    Raises:
        UserError: the folder holds no model.
    """

    def __init__(
        self,
        model: Path,
        batch: int | None = None,
        machine: Machine | None = None,
        *,
        temperature: Annotated[float, Field(ge=0)],
        max_turns: Annotated[int, Field(ge=1)],
        max_tokens: Annotated[int, Field(ge=1)],
        guidance: Sequence[str] = (),
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        max_length: Count | None = None,
        arguments: Sequence[str] = (),
        retries: Annotated[int, Field(ge=0)] = 3,
        timeout: Rate = 600.0,
        top_p: Annotated[float, Field(gt=0, lt=1)] | None = None,
        top_k: Annotated[int, Field(ge=1)] | None = None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> None:
        self.weights = model_source(model)
        if self.weights.in_hub:
            identity = f"{self.weights.source}@{self.weights.revision or ''}"
            name = self.weights.source
        elif (model / "config.json").exists():
            identity = file_digest(*sorted(path for path in model.iterdir() if path.is_file()))
            name = f"base-{identity}"
        else:
            raise UserError(f"model {model} lacks config.json", "run `dvc repro base` to make it again")
        super().__init__(
            batch=batch or (machine.batch if machine else 64),
            name=name,
            temperature=temperature,
            max_turns=max_turns,
            max_tokens=max_tokens,
            guidance=guidance,
            retries=retries,
            timeout=timeout,
            top_p=top_p,
            top_k=top_k,
            chat_template_kwargs=chat_template_kwargs,
        )
        self.retries, self.timeout = retries, timeout
        self.dtype, self.longest, self.arguments = dtype, max_length, list(arguments)
        decisive = (temperature, max_turns, max_tokens, self.guidance, dtype, max_length, self.arguments)
        self.digest = digest("vllm", identity, *decisive, *self.options.items())
        self._machine = machine
        self._chats: dict[str, Chat] = {}
        self._names: dict[str, str] = {}
        """Folder of an adapter -> its digest."""
        self._episode_state = threading.local()
        """State of the episode that a thread plays: its server, and its tokens so far."""

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        source, revision = self.weights.source, self.weights.revision
        trust = trusts_code(source, revision)
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest dialogue."""
        from transformers import AutoConfig

        source, revision = self.weights.source, self.weights.revision
        config: Any = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trusts_code(source, revision)
        )
        limit: int = config.max_position_embeddings
        return min(limit, self.longest or limit)

    @property
    def fleet(self) -> Fleet:
        """The servers, shared by all policies of this process that need the same ones.

        Raises:
            UserError: `machine.vllm` names no interpreter.
        """
        if self._machine is None or not self._machine.vllm.python:
            raise UserError(
                "policy vllm needs servers, and machine.vllm.python is not set",
                "install vLLM in an environment of its own and set machine.vllm.python to its interpreter",
            )
        machine = self._machine.vllm
        revision = ("--revision", self.weights.revision) if self.weights.revision else ()
        limit = ("--max-model-len", str(self.longest)) if self.longest else ()
        settings = ("--dtype", self.dtype, *limit, *self.arguments, *FAITHFUL, *revision)
        if machine.gpus > 1:
            settings += ("--tensor-parallel-size", str(machine.gpus))
        # The full path: servers report it, and it is compared as text.
        source = self.weights.source if self.weights.in_hub else str(Path(self.weights.source).resolve())
        return fleet_of(Service(machine, source, self.name, settings, self.timeout))

    def close(self) -> None:
        """Stop the servers. They start again when they are next needed."""
        self.fleet.close()

    @contextmanager
    def _ready(self, plays: Sequence[RunningEpisode]) -> Iterator[None]:
        self.tokenizer  # noqa: B018  (load both before threads need them)
        self.max_length  # noqa: B018
        adapters = {folder: Path(folder).resolve() for folder in {play.adapter for play in plays} if folder}
        names = {folder: adapter_digest(path) for folder, path in adapters.items()}
        self._names.update(names)
        with self.fleet.serving({names[folder]: path for folder, path in adapters.items()}):
            yield

    def answer_scores(self, questions: Sequence[ClosedQuestion]) -> list[list[float]]:
        """See `Scorer`.

        Raises:
            UserError: as `play`, or a server keeps failing.
        """
        with self._ready(()), ThreadPoolExecutor(self.batch) as threads:
            try:
                return list(threads.map(self._scores, questions))
            except (TransientFault, ContextLengthExceeded) as fault:
                raise UserError(f"the model did not answer a question ({fault})", "run again") from None

    def _scores(self, question: ClosedQuestion) -> list[float]:
        chat = self.chat([])
        tokens = [chat.encode(answer)[0] for answer in question.answers]
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "allowed_token_ids": tokens}
        settings = {"temperature": 1.0, "max_tokens": 1, "seed": 0, "logprobs": len(tokens)}
        prompt = chat.prompt(question.messages)[1 - self.max_length :]
        with self.fleet.server() as server:
            completion = self._sent(server, self.name, prompt, {**settings, "extra_body": extra})
        [scores] = (completion.choices[0].logprobs or TokenScores()).top_logprobs or [None]
        if scores is None:
            raise UserError("the servers of policy vllm do not show log-probabilities", "install vLLM 0.10.2 or later")
        return [scores[f"token_id:{token}"] for token in tokens]

    def chat(self, tools: list[JsonObject]) -> Chat:
        """Return the dialogue renderer for a set of tools."""
        key = digest(tools)
        if key not in self._chats:
            self._chats[key] = Chat(self.tokenizer, tools, self.options.get("chat_template_kwargs"))
        return self._chats[key]

    def _episode(self, play: RunningEpisode, stop: Event) -> RunningEpisode:
        with self.fleet.server() as self._episode_state.server:
            self._episode_state.context = []
            return super()._episode(play, stop)

    def _answer(self, play: RunningEpisode) -> Message | None:
        chat, context = self.chat(play.tools), self._episode_state.context
        if context:
            play.rerendered += chat.dialogue(play.messages)[: len(play.token_ids)] != play.token_ids
            turns = [index for index, message in enumerate(play.messages) if message["role"] == "assistant"]
            follows = chat.suffix(play.messages[turns[-1] + 1 :], context[-1])
            prompt = context + follows
        else:
            follows = chat.prompt(play.messages)
            prompt = chat.prompt(with_hint(play.messages, play.hint)) if play.hint else follows
        space = self.max_length - len(prompt)
        if space <= 0:
            play.truncated = outgrown(self.max_length, 0 if context else len(prompt))
            return None
        choice = self._continuation(play, prompt, min(self.max_tokens, space)).choices[0]
        reply, scores = choice.token_ids, choice.logprobs
        if reply is None or scores is None or len(scores.token_logprobs) != len(reply):
            raise UserError(
                "the servers of policy vllm do not show the tokens that they write",
                "install vLLM 0.10.2 or later in the environment that machine.vllm.python names",
            )
        play.prompt_tokens += len(prompt)
        play.completion_tokens += len(reply)
        play.token_ids += follows + reply
        play.mask += [0] * len(follows) + [1] * len(reply)
        play.logprobs += [0.0] * len(follows) + scores.token_logprobs
        self._episode_state.context = prompt + reply
        if not chat.ends.intersection(reply[-1:]) and len(reply) >= space:
            play.truncated = outgrown(self.max_length)
            return None
        return chat.parse(reply)

    def _continuation(self, play: RunningEpisode, prompt: Sequence[int], tokens: int) -> TokenCompletion:
        """Ask the episode's model for up to `tokens` tokens."""
        settings = {
            "temperature": self.temperature,
            "max_tokens": tokens,
            "seed": int(digest(play.key, play.turns)[:8], 16) >> 1,
            "logprobs": 0,
        }
        extra = {
            "return_token_ids": True,
            "stop_token_ids": sorted(self.chat(play.tools).ends),
            **{name: value for name, value in self.options.items() if name in ("top_p", "top_k")},
        }
        model = self._names[play.adapter] if play.adapter else self.name
        return self._sent(self._episode_state.server, model, prompt, {**settings, "extra_body": extra})

    def _sent(
        self, server: VllmServer, model: str, prompt: Sequence[int], settings: Mapping[str, object]
    ) -> TokenCompletion:
        """Send one request, with retries.

        Raises:
            TransientFault: all attempts failed.
            ContextLengthExceeded: the prompt is too long for the model.
            UserError: captrain gave up on the server, the server refused the request, or another model answered.
        """
        request, faults = digest(model, list(prompt), settings), 0
        while True:
            starts = server.starts
            try:
                completion = server.complete(prompt, model=model, **settings)
                break
            except TransientFault:
                faults += 1
                server.mend(starts, request)
                if faults > self.retries:
                    raise
                if server.starts == starts:
                    time.sleep(PAUSE * 2**faults)
        server.fruitful = starts
        if completion.model != model:
            raise UserError(
                f"policy vllm asked for {model}, and {completion.model} answered", "check the command in machine.vllm"
            )
        return completion
