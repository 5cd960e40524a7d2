"""The base behind vLLM servers of our own, with any adapters of it: token-exact, so that it can be trained through.

The servers are child processes (`captrain.policies.servers`), wherever this process runs. Adapters are loaded under
their content hash, and every answer must come from the model that was asked for. The server says which tokens it read
and wrote, and with which log-probabilities: those of the distribution that it drew from, temperature included, with
nothing cut off. A dialogue is sent as messages, so that the server renders it again for each turn; where that gives
other tokens than were recorded, the play is marked, and what can be learnt from tokens is not learnt from it.

A request that a server fails is sent again, after the server has been started again if need be: it holds the whole
dialogue and its seed, so that nothing of the episode is lost.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Annotated, Any

from pydantic import Field

from captrain.config import Machine, Rate
from captrain.errors import UserError
from captrain.models import Completion, TransientFault, adapter_digest, model_source
from captrain.policies.local import with_hint
from captrain.policies.openai import OpenAIPolicy, request_messages
from captrain.policies.policy import Play
from captrain.policies.servers import Fleet
from captrain.records import Message, digest, file_digest

FAITHFUL = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs")
"""So that a server draws from the model's own distribution at the temperature that is asked for, whatever the model's
files recommend, and gives the log-probabilities of that distribution."""

PAUSE = 0.25
"""Seconds, twice as many after each further fault of a server that says it is healthy."""

_fleets: dict[str, Fleet] = {}
_fleets_lock = threading.Lock()


class VLLMPolicy(OpenAIPolicy):
    """The base of this run, served by vLLM.

    Args:
        model: folder that the base stage has left: the model, or the name of one.
        machine: how the servers are started, and how many episodes are played at once.
        temperature: sampling temperature, 0 is greedy.
        max_turns: assistant turns in one episode.
        max_tokens: tokens in one assistant turn.
        guidance: lines appended to the system prompt.
        tools: vLLM's name for how the model writes tool calls (--tool-call-parser).
        retries: further attempts at a request before its episode is given up, and played again later.
        timeout: seconds for one request.

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
        tools: str = "hermes",
        retries: Annotated[int, Field(ge=0)] = 3,
        timeout: Rate = 600.0,
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
        )
        self.tools, self.retries, self.timeout = tools, retries, timeout
        self.digest = digest("vllm", identity, temperature, max_turns, max_tokens, self.guidance, tools)
        self._machine = machine
        self._names: dict[str, str] = {}
        """Of adapters, by their folders."""
        self._episode_state = threading.local()
        """Of the episode that a thread plays: its replica, and what the model has read and written."""

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for training."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.weights.source, revision=self.weights.revision)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest dialogue that the model takes."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(self.weights.source, revision=self.weights.revision)
        return config.max_position_embeddings

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
        if machine.gpus and multiprocessing.parent_process() is not None:
            raise UserError(
                f"machine.workers = {self._machine.workers} processes would each start the servers of policy vllm, "
                "on the same GPUs",
                "set machine.workers to 1, or machine=slurm, where each job has GPUs of its own",
            )
        revision = ("--revision", self.weights.revision) if self.weights.revision else ()
        settings = (*FAITHFUL, "--enable-auto-tool-choice", "--tool-call-parser", self.tools, *revision)
        if machine.gpus > 1:
            settings += ("--tensor-parallel-size", str(machine.gpus))
        # The path in full: servers and the check of what they serve compare it as text.
        source = self.weights.source if self.weights.in_hub else str(Path(self.weights.source).resolve())
        key = digest(machine, source, self.name, settings, self.timeout)
        with _fleets_lock:
            if key not in _fleets:
                _fleets[key] = Fleet(machine, source, self.name, settings, self.timeout)
            return _fleets[key]

    def close(self) -> None:
        """Stop the servers; they start again when something is played again."""
        self.fleet.close()

    def play(self, plays: Sequence[Play]) -> Iterator[Play]:
        """See `Policy.play`.

        Raises:
            UserError: a server does not start, or serves another model or adapter than the one asked for.
        """
        adapters = {folder: Path(folder).resolve() for folder in {play.adapter for play in plays} if folder}
        names = {folder: adapter_digest(path) for folder, path in adapters.items()}
        self._names.update(names)
        with self.fleet.serving({names[folder]: path for folder, path in adapters.items()}):
            yield from super().play(plays)

    def _prepare(self, plays: Sequence[Play]) -> None:
        """Nothing more: the servers are up."""

    def _episode(self, play: Play, stop: Event) -> Play:
        with self.fleet.replica() as self._episode_state.replica:
            self._episode_state.context = []
            return super()._episode(play, stop)

    def _completed(self, play: Play, **request: Any) -> Completion:
        replica, model = self._episode_state.replica, self._names[play.adapter] if play.adapter else self.name
        if play.hint:
            request["messages"] = request_messages(with_hint(play.messages, play.hint))
        faults = 0
        while True:
            starts = replica.starts
            try:
                completion, _ = replica.chat(
                    model=model, logprobs=True, extra_body={"return_token_ids": True}, **request
                )
                break
            except TransientFault:
                faults += 1
                if faults > self.retries:
                    raise
                replica.mend(starts)
                if replica.starts == starts:
                    time.sleep(PAUSE * 2**faults)
        replica.mark_useful()
        if completion.model != model:
            raise UserError(
                f"policy vllm asked for {model}, and {completion.model} answered", "see what machine.vllm starts"
            )
        self._record(play, completion)
        return completion

    def _record(self, play: Play, completion: Completion) -> None:
        """Append what was read since the last turn, and what was written."""
        choice = completion.choices[0]
        prompt, reply = completion.prompt_token_ids, choice.token_ids
        logprobs = [token.logprob for token in (choice.logprobs and choice.logprobs.content) or []]
        if prompt is None or reply is None or len(logprobs) != len(reply):
            raise UserError(
                "the servers of policy vllm do not show the tokens that they read and write",
                "install vLLM 0.10.2 or later in the environment that machine.vllm.python names",
            )
        if play.retokenised:
            return
        context: list[int] = self._episode_state.context
        if prompt[: len(context)] != context:
            play.retokenised = _difference(context, prompt, play.turns + 1)
            play.token_ids, play.mask, play.logprobs = [], [], []
            return
        follows = prompt[len(context) :]
        if play.hint and not context:
            follows = self._plain(play)
        play.token_ids += follows + reply
        play.mask += [0] * len(follows) + [1] * len(reply)
        play.logprobs += [0.0] * len(follows) + logprobs
        self._episode_state.context = prompt + reply

    def _plain(self, play: Play) -> list[int]:
        """The prompt as it would be without the hint."""
        messages: list[Message] = request_messages(play.messages)
        return self._episode_state.replica.prompt(messages, play.tools)


def _difference(recorded: list[int], prompt: list[int], turn: int) -> str:
    pairs = enumerate(zip(recorded, prompt, strict=False))
    same = next((index for index, (old, new) in pairs if old != new), len(prompt))
    return (
        f"at turn {turn} the server read other tokens than had been read and written before it, from token {same} of "
        f"{len(recorded)} on"
    )
