"""Policy of any model behind an OpenAI-compatible endpoint (vLLM, or a hosted one), as the agent or as a simulated
user.

Where the endpoint is (see `captrain.models`) is no part of what the policy is. Episodes are played on threads, one
request at a time each. The seed of a request follows from the play's key and the turn, and ids of tool calls from
their positions alone: what is played beside an episode, and what a server calls a call, change nothing. A fault of
the server ends its play with `error`, which is retried; what only the user can mend ends the run.
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
        name: of the model, as the endpoint knows it; in name@revision the revision is identity alone, because an
            endpoint serves one.
        temperature: sampling temperature, 0 is greedy.
        max_turns: assistant turns in one episode.
        max_tokens: tokens in one assistant turn.
        guidance: lines appended to the system prompt.
        endpoint: name of the environment variable that holds the base URL.
        key: name of the environment variable that holds the key.
        retries: further attempts at a request, by the library, before its episode is given up.
        timeout: seconds for one request.
        top_p: share that the likeliest tokens have together, of which one is drawn; None: all tokens.
        top_k: number of the likeliest tokens, of which one is drawn, where the endpoint knows it; None: all tokens.
        chat_template_kwargs: further arguments of the chat template, where the endpoint takes them (vLLM, SGLang), such
            as {enable_thinking: false}.
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
                        # Only now, when the caller has let go of one episode, is another one opened.
                        running |= {threads.submit(self._episode, p, stop) for p in islice(pending, 1)}
            finally:
                stop.set()

    @contextmanager
    def _ready(self, plays: Sequence[RunningEpisode]) -> Iterator[None]:
        """Raise what only the user can mend before any episode is opened."""
        self._served.client  # noqa: B018  (it is made of variables that may not be set)
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
        """Ask for the model's next message; None where the dialogue has outgrown the model, which is the agent's
        failure.

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
    """Convert messages to what an endpoint takes: known fields alone, arguments as JSON text, ids by position.

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
                # What was no JSON object becomes one: many servers parse what the model is said to have written.
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
    """Convert a message of the model to the shape of `captrain.contract`: arguments as objects, no ids (a server draws
    them at random), no reasoning."""
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
    """Parse arguments to an object; the text itself where it is none (see `captrain.contract.calls_of`)."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        # Half a surrogate pair and NaN pass Python's parser, and could not be written down afterwards.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
