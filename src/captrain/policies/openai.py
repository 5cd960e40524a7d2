"""Any model behind an OpenAI-compatible endpoint (vLLM, or a hosted one), as the agent or as a simulated user.

Where the endpoint is and what opens it are read from the environment, by the names of two variables, when the first
episode is played; they are no part of what the policy is, and neither is written anywhere. Episodes are played on
threads, one request at a time each. The seed of a request follows from the play's key and the turn, and ids of tool
calls from their positions alone: what is played beside an episode, and what a server calls a call, change nothing.
A fault of the server ends its play with `error`, which is retried; what only the user can mend ends the run.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Annotated, Any

from pydantic import AnyHttpUrl, BaseModel, Field, TypeAdapter, ValidationError

from captrain.chat import guide
from captrain.components import Rate, Variable, variable
from captrain.errors import EnvironmentFault, UserError
from captrain.policies import Play
from captrain.records import Message, digest

NO_ROOM = re.compile(
    r"context[ _](length|size|window)|maximum model length|exceeds? the model|prompt is too long|longer than the model",
    re.IGNORECASE,
)
"""How servers say that a dialogue has outgrown the model; they share no code for it."""
PASSING = (408, 409, 425, 429)
"""Refusals that mean "not now"; so does every status from 500 on."""
TOLD = 500
"""Characters of a server's message that are passed on."""


class Function(BaseModel):
    """A call as the model wrote it."""

    name: str
    arguments: str | dict[str, Any] | None = None


class Call(BaseModel):
    """A tool call."""

    function: Function


class Said(BaseModel):
    """The model's message."""

    content: str | None = None
    tool_calls: list[Call] | None = None


class Choice(BaseModel):
    """An answer, of which one is asked for."""

    message: Said


class Spent(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Completion(BaseModel):
    """What is read of a server's answer. The library itself takes anything for one."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: Spent | None = None


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
    """

    def __init__(
        self, model: Path | None = None, batch: int = 16, *, name: Annotated[str, Field(min_length=1)],
        temperature: Annotated[float, Field(ge=0)], max_turns: Annotated[int, Field(ge=1)],
        max_tokens: Annotated[int, Field(ge=1)], guidance: Sequence[str] = (),
        endpoint: Variable = "OPENAI_BASE_URL", key: Variable = "OPENAI_API_KEY",
        retries: Annotated[int, Field(ge=0)] = 4, timeout: Rate = 120.0,
    ) -> None:  # fmt: skip
        self.batch, self.name, self.temperature = batch, name, temperature
        self.served = name.rpartition("@")[0] or name
        self.max_turns, self.max_tokens, self.guidance = max_turns, max_tokens, list(guidance)
        self.endpoint, self.key, self.retries, self.timeout = variable(endpoint), variable(key), retries, timeout
        self.digest = digest("openai", name, temperature, max_turns, max_tokens, self.guidance)

    def play(self, plays: Sequence[Play]) -> Iterator[Play]:
        """See `Policy.play`.

        Raises:
            UserError: a variable is not set, or the endpoint refuses the key, the model or the form of a request.
        """
        self._client  # noqa: B018  (a variable that is not set is told before any episode is opened)
        waiting, stop = iter(plays), Event()
        with ThreadPoolExecutor(self.batch) as threads:
            running: set[Future[Play]] = {threads.submit(self._episode, p, stop) for p in islice(waiting, self.batch)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
                        # Only now, when the caller has let go of one episode, is another one opened.
                        running |= {threads.submit(self._episode, p, stop) for p in islice(waiting, 1)}
            finally:
                stop.set()

    def _episode(self, play: Play, stop: Event) -> Play:
        if play.adapter:
            raise UserError(
                f"policy openai cannot act with adapter {Path(play.adapter).name}: its endpoint serves {self.name}",
                "act with adapters through policy local, or serve the model with the adapter merged in, under a name",
            )
        if not play.start():
            return play
        play.messages = guide(play.messages, self.guidance)
        while not stop.is_set():
            message = self._answer(play)
            if message is None or not play.advance(message) or play.turns >= self.max_turns:
                break
        return play

    def _answer(self, play: Play) -> Message | None:
        """The model's next message; None where none came: by a fault, which is then the play's error, or because the
        dialogue has outgrown the model, which is the agent's failure."""
        import openai

        messages: Any = sent(play.messages)
        tools: Any = {"tools": play.tools} if play.tools else {}
        try:
            raw: Any = self._client.chat.completions.with_raw_response.create(
                model=self.served, messages=messages, temperature=self.temperature, max_tokens=self.max_tokens,
                seed=int(digest(play.key, play.turns)[:8], 16) >> 1, **tools,
            )  # fmt: skip
        except openai.APIStatusError as error:
            play.error = self._refusal(error)
            return None
        except openai.APIConnectionError as error:
            play.error = self._told(f"{error} {error.__cause__ or ''}")
            return None
        try:
            answer = Completion.model_validate_json(raw.content)
        except ValidationError:
            play.error = self._told(f"answered with no message: {raw.text}")
            return None
        if answer.usage is not None:
            play.prompt_tokens += answer.usage.prompt_tokens or 0
            play.completion_tokens += answer.usage.completion_tokens or 0
        return received(answer.choices[0].message)

    @cached_property
    def _client(self) -> Any:
        import openai

        url = _value(self.endpoint, "the base URL of the endpoint", "such as http://localhost:8000/v1")
        try:
            url = str(TypeAdapter(AnyHttpUrl).validate_python(url))
        except ValidationError:
            raise UserError(
                f"environment variable {self.endpoint} holds no base URL",
                "set it to one that begins with http:// or https://, such as http://localhost:8000/v1",
            ) from None
        return openai.OpenAI(base_url=url, api_key=self._secret, max_retries=self.retries, timeout=self.timeout)

    @property
    def _secret(self) -> str:
        key = _value(self.key, "the key of the endpoint", "or any word for a server that asks for none")
        if not re.fullmatch(r"[!-~]+", key):
            # Told here, because the library's own message about such a header shows it.
            raise UserError(
                f"environment variable {self.key} holds no key: a blank, a line break or a character beyond ASCII",
                "set it to the key alone",
            )
        return key

    def _refusal(self, error: Any) -> str | None:
        """The fault that a refusal by the server is; None where the dialogue has outgrown the model.

        Raises:
            UserError: the same request would be refused again.
        """
        status, body = error.status_code, error.body
        text = str(body["message"] if isinstance(body, dict) and "message" in body else body or error)
        told = self._told(f"{status}: {text}")
        if status in PASSING or status >= 500:
            return told
        if status in (401, 403):
            raise UserError(
                f"the endpoint named by {self.endpoint} refuses the key in {self.key} ({told})",
                f"set {self.key} to a key that may use {self.name}",
            ) from None
        if status == 404:
            raise UserError(
                f"the endpoint named by {self.endpoint} has no model {self.served} ({told})",
                f"set {self.endpoint} to the base URL, which ends in /v1 on most servers, or correct the model's name",
            ) from None
        if NO_ROOM.search(text):
            return None
        raise UserError(
            f"the endpoint named by {self.endpoint} refuses a request to {self.name} ({told})",
            "correct the settings of the policy, or how the model is served (tool calls need a tool parser)",
        ) from None

    def _told(self, text: str) -> str:
        """What may be passed on of a server's message: one line, not too long, without the key."""
        line = " ".join(text.split()).replace(self._secret, "***")
        return f"model server: {line if len(line) <= TOLD else line[:TOLD] + '...'}"


def _value(name: str, what: str, example: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise UserError(
            f"environment variable {name} is not set: policy openai finds {what} there", f"set it, {example}"
        )
    return value


def sent(messages: Sequence[Message]) -> list[Message]:
    """Messages as an endpoint takes them: known fields alone, arguments as JSON text, ids by position.

    Raises:
        EnvironmentFault: a tool message answers no call.
    """
    out: list[Message] = []
    calls, answered = 0, 0
    for message in messages:
        one: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("name"):
            one["name"] = message["name"]
        if message["role"] == "assistant" and (made := message.get("tool_calls")):
            one["tool_calls"] = [_call(f"call_{calls + at}", call["function"]) for at, call in enumerate(made)]
            calls, answered = calls + len(made), calls
        elif message["role"] == "tool":
            if answered == calls:
                raise EnvironmentFault("a tool message answers no call", "return one tool message for each call")
            one["tool_call_id"] = f"call_{answered}"
            answered += 1
        out.append(one)
    return out


def _call(name: str, function: dict[str, Any]) -> dict[str, Any]:
    arguments = parsed(function["arguments"])
    # What was no JSON object becomes one: many servers parse what the model is said to have written.
    text = json.dumps({"": arguments} if isinstance(arguments, str) else arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": text}}


def received(message: Said) -> Message:
    """A message of the model in the shape of `captrain.contract`: arguments as objects, no ids (a server draws them at
    random), no reasoning."""
    calls = [
        {"type": "function", "function": {"name": call.function.name, "arguments": parsed(call.function.arguments)}}
        for call in message.tool_calls or []
    ]
    one: Message = {"role": "assistant", "content": message.content or ""}
    return {**one, "tool_calls": calls} if calls else one


def parsed(given: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """Arguments as an object; the text itself where it is none (see `captrain.contract.calls_of`)."""
    text = given if isinstance(given, str) else json.dumps(given or {})
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text)
        # Half a surrogate pair and NaN pass Python's parser, and could not be written down afterwards.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
