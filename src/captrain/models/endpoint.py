"""A client of an OpenAI-compatible endpoint. It sends single requests and classifies errors.

URL and API key are read from two environment variables at the first request. They are not part of a model's identity
and are never written to a file. There are three kinds of errors: temporary (`TransientFault`), the request is too long
for the model (`ContextLengthExceeded`), or only the user can fix it (`UserError`). The policy `openai` and the
structured answers of analysts and synthesizers use this client.
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
"""Phrases in error messages that mean that a dialogue is too long. Servers have no common error code for this."""
NO_CREDIT = re.compile(
    r"insufficient[ _](quota|balance|credit|funds)|billing_(hard_limit|not_active)|credit balance is too low",
    re.IGNORECASE,
)
"""Phrases in error messages that mean that no credit is left. Servers send them with the status of a temporary error.

"Billing" alone is not such a phrase, because messages about rate limits also link to the billing page.
"""
TRANSIENT = (408, 409, 425, 429)
"""Status codes of temporary errors, in addition to all codes from 500 on."""
EXCERPT = 500
"""Characters of a server's message that are shown."""
LARGEST = 1 << 26
"""Largest decompressed answer in bytes. Large answers with log-probabilities have a few megabytes."""
PACKINGS = ("identity", "gzip", "deflate")
"""Accepted content encodings: a chunk in one of these decompresses to a few megabytes at most."""


class TransientFault(InfrastructureError):
    """A temporary error: the same request may succeed later. `pause` is the server's Retry-After, in seconds."""

    pause = 0.0


class ContextLengthExceeded(Exception):
    """The request is too long for the model."""


class ReplyFunction(BaseModel):
    """Name and arguments of a call, as the model wrote them."""

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
    """One answer; requests ask for one."""

    message: ReplyMessage
    finish_reason: str | None = None


class CompletionUsage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Completion(BaseModel):
    """The fields of an answer that are used, validated here because the library accepts anything."""

    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: CompletionUsage | None = None
    model: str | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens read and written; 0 if the server does not report them."""
        return (self.usage.prompt_tokens or 0, self.usage.completion_tokens or 0) if self.usage else (0, 0)


class TokenScores(BaseModel):
    """Log-probabilities of the written tokens, and of the likeliest token in each place, by "token_id:N"."""

    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class TokenChoice(BaseModel):
    """Continuation of a prompt of token ids."""

    token_ids: list[int] | None = None
    logprobs: TokenScores | None = None


class TokenCompletion(BaseModel):
    """The fields that are used of an answer to a prompt of token ids."""

    choices: Annotated[list[TokenChoice], Field(min_length=1)]
    model: str | None = None


Answer = TypeVar("Answer", bound=BaseModel)


class Endpoint:
    """A served model.

    Args:
        name: the endpoint's name of the model, or name@revision. The revision only identifies results and is not sent.
        endpoint: name of the environment variable with the base URL.
        key: name of the environment variable with the API key.
        retries: number of retries by the `openai` library.
        timeout: seconds for one request.
    """

    proxied = True
    """Whether to use the proxy from the environment variables."""

    def __init__(self, name: str, *, endpoint: str, key: str, retries: int, timeout: float) -> None:
        self.name, self.served = name, name.rpartition("@")[0] or name
        self.endpoint, self.key, self.retries, self.timeout = variable(endpoint), variable(key), retries, timeout

    def chat(self, answer: type[BaseModel] | None = None, **request: Any) -> Completion:
        """Send one request.

        Args:
            answer: the class whose JSON schema the answer must have.
            **request: messages and settings; `model` for another model of the same server.

        Raises:
            TransientFault: an error of the server or the network, or an answer without a message.
            ContextLengthExceeded: the request is too long for the model.
            UserError: a variable is not set, or the same request would fail again.
        """
        chat = self.client.chat.completions.with_raw_response
        if answer is None:
            return self._answered(Completion, chat.create, request)
        # `parse` makes the schema strict.
        return self._answered(Completion, chat.parse, {"response_format": answer, **request})

    def complete(self, prompt: Sequence[int], **request: object) -> TokenCompletion:
        """Continue a prompt of token ids by vLLM's extension of OpenAI's interface. Raises as `chat`.

        Args:
            prompt: token ids.
            **request: settings; those that OpenAI does not know in `extra_body`.
        """
        create = self.client.completions.with_raw_response.create
        return self._answered(TokenCompletion, create, {"prompt": list(prompt), **request})

    def _answered(self, kind: type[Answer], send: Callable[..., Any], request: Mapping[str, object]) -> Answer:
        text = self._sent(send, **{"model": self.served, **request}).text
        try:
            # Answers are stored: remove the key if a server echoes it.
            return kind.model_validate_json(without(text, self._secret))
        except ValidationError:
            raise TransientFault(self._excerpt(f"answered with no message: {text}")) from None

    def _sent(self, send: Callable[..., Any], **request: object) -> Any:
        """Send a request with a method of the `openai` client. Return the raw answer."""
        import openai

        try:
            return send(**request)
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APIConnectionError as error:
            raise TransientFault(self._excerpt(f"{error} {error.__cause__ or ''}")) from None

    @cached_property
    def client(self) -> "openai.OpenAI":
        """The `openai` client. It aborts an answer that is too large or takes too long, because servers may never stop.

        Raises:
            UserError: a variable is not set, or its URL or key is invalid.
        """
        import httpx2
        import openai

        class Bounded(openai.DefaultHttpxClient):
            def send(self, request: httpx2.Request, **_: object) -> httpx2.Response:
                start, body = time.monotonic(), bytearray()
                limit = request.extensions["timeout"]["read"]  # a single request may have another one
                # Do not follow redirects, because their answers would be read without a limit.
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
                f"environment variable {self.endpoint} is not a base URL",
                "set it to one that begins with http:// or https://, such as http://localhost:8000/v1",
            ) from None

    @property
    def _secret(self) -> str:
        key = _value(self.key, "the key of the endpoint", "or any word for a server that asks for none")
        if not re.fullmatch(r"[!-~]+", key):
            # Check the key here, because the library's own error would show it.
            raise UserError(
                f"environment variable {self.key} is not a key: it has a blank, a line break or a non-ASCII character",
                "set it to the key, without anything else",
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
                f"add credit, or set {self.key} to a key that has some; finished work is kept",
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
        """Return the error for a request that the server refused and the user must fix."""
        if status in (401, 403):
            return UserError(
                f"the endpoint named by {self.endpoint} refuses the key in {self.key} ({message})",
                f"set {self.key} to a key that may use {self.name}",
            )
        if status < 400:
            return UserError(
                f"the endpoint named by {self.endpoint} redirects requests, which are not followed ({message})",
                f"set {self.endpoint} to the base URL of the target, which ends in /v1 on most servers",
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
        """Shorten a server's message to one printable line without the key."""
        line = redacted(plain(" ".join(text.split())), self._secret)
        return f"model server: {line if len(line) <= EXCERPT else line[:EXCERPT] + '...'}"


def _value(name: str, content: str, example: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise UserError(f"environment variable {name} is not set: it is {content}", f"set it, {example}")
    return value
