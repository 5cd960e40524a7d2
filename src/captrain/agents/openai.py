"""Policy of any model behind an OpenAI-compatible endpoint, such as vLLM. It acts as the agent or a simulated user.

The URL of the endpoint (see `captrain.models`) is not part of the policy's identity. Each episode is played on a thread
of its own, one request at a time. The seed of a request depends only on the episode's key and the turn, and the id of a
tool call only on its position. So other episodes and the server's own ids cannot change a rollout. If the server fails,
the episode ends with `error` and is retried. An error that only the user can fix ends the run.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Annotated

from pydantic import Field

from captrain.agents.policy import options
from captrain.contract import RunningEpisode
from captrain.errors import EnvironmentFault, UserError
from captrain.models import ContextLengthExceeded, Endpoint, ReplyMessage, TransientFault, guide
from captrain.records import JsonObject, Message, digest
from captrain.run import Rate, Variable


class OpenAIPolicy:
    """A served model.

    Args:
        model: unused; every policy is built with the folder of the base.
        batch: episodes played at once; changes speed, never results.
        name: name of the model at the endpoint; the revision in name@revision is only part of the identity.
        temperature: sampling temperature, 0 is greedy.
        max_turns: assistant turns in one episode.
        max_tokens: tokens in one assistant turn.
        guidance: lines appended to the system prompt.
        endpoint: name of the environment variable that holds the base URL.
        key: name of the environment variable that holds the key.
        retries: further attempts at a request, by the library, before its episode ends with an error.
        timeout: seconds for one request.
        top_p: sample from the likeliest tokens with this total probability; None: all tokens.
        top_k: sample from so many likeliest tokens, if the endpoint supports it; None: all tokens.
        chat_template_kwargs: further arguments of the chat template, if the endpoint takes them (vLLM, SGLang), such as
            {enable_thinking: false}.
    """

    def __init__(
        self,
        model: Path | None = None,
        batch: int = 16,
        *,
        name: Annotated[str, Field(min_length=1)],
        temperature: Annotated[float, Field(ge=0)],
        max_turns: Annotated[int, Field(ge=1)],
        max_tokens: Annotated[int, Field(ge=1)],
        guidance: Sequence[str] = (),
        endpoint: Variable = "OPENAI_BASE_URL",
        key: Variable = "OPENAI_API_KEY",
        retries: Annotated[int, Field(ge=0)] = 4,
        timeout: Rate = 120.0,
        top_p: Annotated[float, Field(gt=0, lt=1)] | None = None,
        top_k: Annotated[int, Field(ge=1)] | None = None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> None:
        self.batch, self.name, self.temperature = batch, name, temperature
        self.max_turns, self.max_tokens, self.guidance = max_turns, max_tokens, list(guidance)
        self._served = Endpoint(name, endpoint=endpoint, key=key, retries=retries, timeout=timeout)
        self.options = options(top_p=top_p, top_k=top_k, chat_template_kwargs=chat_template_kwargs)
        self.digest = digest("openai", name, temperature, max_turns, max_tokens, self.guidance, *self.options.items())

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        """See `Policy.play`.

        Raises:
            UserError: a variable is not set, or the endpoint refuses the key, the model or the form of a request.
        """
        pending, stop = iter(plays), Event()
        with self._ready(plays), ThreadPoolExecutor(self.batch) as threads:
            running: set[Future[RunningEpisode]] = {
                threads.submit(self._episode, p, stop) for p in islice(pending, self.batch)
            }
            try:
                while running:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
                        # The next episode opens only after the caller has finished with this one.
                        running |= {threads.submit(self._episode, p, stop) for p in islice(pending, 1)}
            finally:
                stop.set()

    @contextmanager
    def _ready(self, plays: Sequence[RunningEpisode]) -> Iterator[None]:
        """Raise errors that the user must fix before any episode opens."""
        self._served.client  # noqa: B018  (raises if its variables are not set)
        if adapter := next((play.adapter for play in plays if play.adapter), ""):
            raise UserError(
                f"policy openai cannot act with adapter {Path(adapter).name}: its endpoint serves {self.name}",
                "act with adapters through policy local or vllm, or serve the model with the adapter merged in, under "
                "a name",
            )
        yield

    def _episode(self, play: RunningEpisode, stop: Event) -> RunningEpisode:
        if not play.start():
            return play
        play.messages = guide(play.messages, self.guidance)
        while not stop.is_set():
            try:
                message = self._answer(play)
            except ContextLengthExceeded as refusal:
                play.truncated = str(refusal)
                break
            except TransientFault as fault:
                play.error = str(fault)
                break
            if message is None or not play.advance(message) or play.turns >= self.max_turns:
                break
        return play

    def _answer(self, play: RunningEpisode) -> Message | None:
        """Ask for the model's next message. None if the dialogue is too long for the model; the rollout then failed.

        Raises:
            ContextLengthExceeded: the endpoint says so.
            TransientFault: the endpoint failed.
        """
        tools: JsonObject = {"tools": play.tools} if play.tools else {}
        completion = self._served.chat(
            messages=request_messages(play.messages),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=int(digest(play.key, play.turns)[:8], 16) >> 1,
            extra_body=self.options,
            **tools,
        )
        prompt, reply = completion.tokens
        play.prompt_tokens += prompt
        play.completion_tokens += reply
        return reply_message(completion.choices[0].message)


def request_messages(messages: Sequence[Message]) -> list[Message]:
    """Convert messages for a request: known fields only, arguments as JSON text, ids by position.

    Raises:
        EnvironmentFault: a tool message answers no call.
    """
    out: list[Message] = []
    calls, results = 0, 0
    for message in messages:
        request: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("name"):
            request["name"] = message["name"]
        if message["role"] == "assistant" and (tool_calls := message.get("tool_calls")):
            request["tool_calls"] = []
            for number, call in enumerate(tool_calls, start=calls):
                name, arguments = call["function"]["name"], parsed_arguments(call["function"]["arguments"])
                # Arguments must be a JSON object, because many servers parse them. Wrap anything else in an object.
                text = json.dumps({"": arguments} if isinstance(arguments, str) else arguments, ensure_ascii=False)
                function = {"name": name, "arguments": text}
                request["tool_calls"].append({"id": f"call_{number}", "type": "function", "function": function})
            calls, results = calls + len(tool_calls), calls
        elif message["role"] == "tool":
            if results == calls:
                raise EnvironmentFault("a tool message answers no call", "return one tool message for each call")
            request["tool_call_id"] = f"call_{results}"
            results += 1
        out.append(request)
    return out


def reply_message(message: ReplyMessage) -> Message:
    """Convert a message of the model to the form of `captrain.contract`: arguments as objects, without the server's
    random ids and without reasoning."""
    calls = [
        {
            "type": "function",
            "function": {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)},
        }
        for call in message.tool_calls or []
    ]
    reply: Message = {"role": "assistant", "content": message.content or ""}
    return {**reply, "tool_calls": calls} if calls else reply


def parsed_arguments(arguments: str | JsonObject | None) -> JsonObject | str:
    """Parse arguments to an object. Return the text if it is not one (see `captrain.contract.calls_of`)."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        # Python's parser accepts lone surrogates and NaN, which cannot be written.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
