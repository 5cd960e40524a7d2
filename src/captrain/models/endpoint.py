"""A model behind an OpenAI-compatible endpoint: where it is, one request to it, and what its refusals mean.

Where the endpoint is and what opens it are read from the environment, by the names of two variables, when the first
request is sent; they are no part of what a model is, and neither is written anywhere. A refusal is one of three: a
fault that passes (`TransientFault`), a request that has outgrown the model (`ContextLengthExceeded`), or what only the
user can mend (`UserError`). The policy `openai` and the structured answers of analysts and synthesizers stand on this.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AnyHttpUrl, BaseModel, Field, TypeAdapter, ValidationError

from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, plain, redacted, without
from captrain.run import variable

if TYPE_CHECKING:
    import openai

CONTEXT_EXCEEDED = re.compile(
    r"context[ _](length|size|window)|maximum model length|exceeds? the model|prompt is too long|longer than the model",
    re.IGNORECASE,
)
"""Phrases by which servers say that a dialogue has outgrown the model; they share no code for it."""
NO_CREDIT = re.compile(
    r"insufficient[ _](quota|balance|credit|funds)|billing_(hard_limit|not_active)|credit balance is too low",
    re.IGNORECASE,
)
"""Phrases by which servers say that nothing is left to spend, under the status of a passing fault.

"Billing" alone is not among them: messages about limits that do pass point to the page where to pay for more.
"""
TRANSIENT = (408, 409, 425, 429)
"""Refusals that mean "not now"; so does every status from 500 on."""
EXCERPT = 500
"""Characters of a server's message that are passed on."""
LARGEST = 1 << 26
"""Bytes of an answer once it is unpacked; the largest with log-probabilities have some millions."""
PACKINGS = ("identity", "gzip", "deflate")
"""Codings of which a piece unpacks to megabytes at most."""


class TransientFault(InfrastructureError):
    """A fault of the server that passes: the same request may succeed later. `pause` has the seconds for which the
    server asks to be left alone."""

    pause = 0.0


class ContextLengthExceeded(Exception):
    """The request has outgrown the model."""


class ReplyFunction(BaseModel):
    """A call as the model wrote it."""

    name: str
    arguments: str | JsonObject | None = None


class ReplyToolCall(BaseModel):
    """A tool call."""

    function: ReplyFunction


class ReplyMessage(BaseModel):
    """The model's message."""

    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ReplyToolCall] | None = None


class CompletionChoice(BaseModel):
    """An answer, of which one is asked for."""

    message: ReplyMessage
    finish_reason: str | None = None


class CompletionUsage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Completion(BaseModel):
    """Fields that are read of a server's answer, checked here because the library accepts any."""

    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: CompletionUsage | None = None
    model: str | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens read and written; 0 where the server does not say."""
        return (self.usage.prompt_tokens or 0, self.usage.completion_tokens or 0) if self.usage else (0, 0)


class TokenScores(BaseModel):
    """Log-probabilities of what was written: of each token, and of the likeliest in its place, by "token_id:N"."""

    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class TokenChoice(BaseModel):
    """Continuation of a prompt of token ids."""

    token_ids: list[int] | None = None
    logprobs: TokenScores | None = None


class TokenCompletion(BaseModel):
    """Fields that are read of an answer to a prompt of token ids."""

    choices: Annotated[list[TokenChoice], Field(min_length=1)]
    model: str | None = None


Answer = TypeVar("Answer", bound=BaseModel)


class Endpoint:
    """A served model.

    Args:
        name: of the model, as the endpoint knows it; in name@revision the revision is identity alone, because an
            endpoint serves one.
        endpoint: name of the environment variable that holds the base URL.
        key: name of the environment variable that holds the key.
        retries: further attempts at a request, by the library.
        timeout: seconds for one request.
    """

    proxied = True
    """True if it is asked through the proxy that the environment names for it."""

    def __init__(self, name: str, *, endpoint: str, key: str, retries: int, timeout: float) -> None:
        self.name, self.served = name, name.rpartition("@")[0] or name
        self.endpoint, self.key, self.retries, self.timeout = variable(endpoint), variable(key), retries, timeout

    def chat(self, answer: type[BaseModel] | None = None, **request: Any) -> Completion:
        """Send one request.

        Args:
            answer: the model whose JSON schema the answer must have.
            **request: messages and settings; `model` where it is another one of the same server.

        Raises:
            TransientFault: a fault of the server or of the way to it, or an answer that holds no message.
            ContextLengthExceeded: the request has outgrown the model.
            UserError: a variable is not set, or the same request would be refused again.
        """
        chat = self.client.chat.completions.with_raw_response
        if answer is None:
            return self._answered(Completion, chat.create, request)
        # The library makes the schema a strict one.
        return self._answered(Completion, chat.parse, {"response_format": answer, **request})

    def complete(self, prompt: Sequence[int], **request: object) -> TokenCompletion:
        """Continue a prompt of token ids, and return the ids; raises as `chat` does. It asks for what vLLM has beyond
        OpenAI's interface.

        Args:
            prompt: what the model reads, which is no text that would have to be rendered or tokenized again.
            **request: settings; those that OpenAI does not know in `extra_body`.
        """
        create = self.client.completions.with_raw_response.create
        return self._answered(TokenCompletion, create, {"prompt": list(prompt), **request})

    def _answered(self, kind: type[Answer], send: Callable[..., Any], request: Mapping[str, object]) -> Answer:
        text = self._sent(send, **{"model": self.served, **request}).text
        try:
            # Answers are kept: a server that echoes the key, in whatever spelling, must not have it written down.
            return kind.model_validate_json(without(text, self._secret))
        except ValidationError:
            raise TransientFault(self._excerpt(f"answered with no message: {text}")) from None

    def _sent(self, send: Callable[..., Any], **request: object) -> Any:
        """Send a request by a function of the library, and return the answer as it is."""
        import openai

        try:
            return send(**request)
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APIConnectionError as error:
            raise TransientFault(self._excerpt(f"{error} {error.__cause__ or ''}")) from None

    @cached_property
    def client(self) -> "openai.OpenAI":
        """The library's client, once the variables are known to be set. It reads each answer whole, and gives up one
        that is too large or comes too slowly, however steadily: whoever serves them may send without end.

        Raises:
            UserError: a variable is not set, or holds no URL, or no key.
        """
        import httpx2
        import openai

        class Bounded(openai.DefaultHttpxClient):
            def send(self, request: httpx2.Request, **_: object) -> httpx2.Response:
                start, body = time.monotonic(), bytearray()
                limit = request.extensions["timeout"]["read"]  # A single request may be given another one.
                # Redirections are not followed: their answers would be read unbounded.
                with closing(super().send(request, stream=True, follow_redirects=False)) as answer:
                    if answer.headers.get("content-encoding", "identity") not in PACKINGS:
                        raise httpx2.ReadError("the answer is packed in a way that was not asked for", request=request)
                    for piece in answer.iter_bytes():
                        body += piece
                        if len(body) > LARGEST:
                            raise httpx2.ReadError(f"the answer has more than {LARGEST >> 20} MiB", request=request)
                        if time.monotonic() - start > limit:
                            raise httpx2.ReadTimeout(f"the answer takes more than {limit:g} s", request=request)
                coded = ("content-encoding", "content-length", "transfer-encoding")
                headers = [pair for pair in answer.headers.multi_items() if pair[0].lower() not in coded]
                return httpx2.Response(answer.status_code, headers=headers, content=bytes(body), request=request)

        url, secret = self._url(), self._secret
        http = Bounded(headers={"Accept-Encoding": "gzip"}, trust_env=self.proxied)
        return openai.OpenAI(
            base_url=url, api_key=secret, max_retries=self.retries, timeout=self.timeout, http_client=http
        )

    def _url(self) -> str:
        url = _value(self.endpoint, "the base URL of the endpoint", "such as http://localhost:8000/v1")
        try:
            return str(TypeAdapter(AnyHttpUrl).validate_python(url))
        except ValidationError:
            raise UserError(
                f"environment variable {self.endpoint} holds no base URL",
                "set it to one that begins with http:// or https://, such as http://localhost:8000/v1",
            ) from None

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

    def _refusal(self, error: "openai.APIStatusError") -> Exception:
        status, body = error.status_code, error.body
        text = str(body["message"] if isinstance(body, dict) and "message" in body else body or "without a reason")
        if status < 400:
            text = f"to {error.response.headers.get('location', 'nowhere')}"
        message = self._excerpt(f"{status}: {text}")
        if status == 402 or (status == 429 and NO_CREDIT.search(f"{body} {text}")):
            return UserError(
                f"the endpoint named by {self.endpoint} has no credit left for the key in {self.key} ({message})",
                f"add credit, or set {self.key} to a key that has some; what is whole is kept",
            )
        if status in TRANSIENT or status >= 500:
            fault = TransientFault(message)
            asked_for = error.response.headers.get("retry-after", "0").strip()
            # Seconds, or an HTTP date.
            if re.fullmatch(r"\d+(\.\d+)?", asked_for):
                fault.pause = float(asked_for)
            else:
                with suppress(ValueError, OverflowError):
                    fault.pause = max(0.0, parsedate_to_datetime(asked_for).timestamp() - time.time())
            return fault
        if status >= 400 and status not in (401, 403, 404) and CONTEXT_EXCEEDED.search(text):
            return ContextLengthExceeded(message)
        return self._mistake(status, message)

    def _mistake(self, status: int, message: str) -> UserError:
        """Word a refusal that stands until the user mends something."""
        if status in (401, 403):
            return UserError(
                f"the endpoint named by {self.endpoint} refuses the key in {self.key} ({message})",
                f"set {self.key} to a key that may use {self.name}",
            )
        if status < 400:
            return UserError(
                f"the endpoint named by {self.endpoint} redirects requests, which is not followed ({message})",
                f"set {self.endpoint} to the base URL of that place, which ends in /v1 on most servers",
            )
        if status == 404:
            return UserError(
                f"the endpoint named by {self.endpoint} has no model {self.served} ({message})",
                f"set {self.endpoint} to the base URL, which ends in /v1 on most servers, or correct the model's name",
            )
        return UserError(
            f"the endpoint named by {self.endpoint} refuses a request to {self.name} ({message})",
            "correct the settings of the model, or how it is served (tool calls need a tool parser, answers of a given "
            "form a server that takes response_format)",
        )

    def _excerpt(self, text: str) -> str:
        """Shorten a server's message to one line without a key, fit to be passed on."""
        line = redacted(plain(" ".join(text.split())), self._secret)
        return f"model server: {line if len(line) <= EXCERPT else line[:EXCERPT] + '...'}"


def _value(name: str, content: str, example: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise UserError(f"environment variable {name} is not set: it holds {content}", f"set it, {example}")
    return value
