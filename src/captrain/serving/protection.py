"""Checks of a request before anything reads it: from somebody who may ask, to this server, whole, small, and soon.

A server on a loopback address is reached by every page that a browser on this machine shows, so the name that it is
asked for by is checked; on any other address it asks for a token. A body is taken in whole before it is looked at, up
to a size and within a time, and so are the lines before it: whoever sends slowly keeps nothing open.
"""

import asyncio
import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from captrain.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("", "0.0.0.0", "::")
OPEN_PATHS = ("/health",)
"""Paths that need no token."""


@dataclass(frozen=True)
class Protection:
    """Bounds of requests.

    token: that they must bear; "" for none. hosts: names that the server may be asked for by; empty for any.
    most: bytes of a body. seconds: until a request has come in whole.
    """

    token: str = ""
    hosts: tuple[str, ...] = ()
    most: int = 8 << 20
    seconds: float = 20.0


def protection_of(host: str, token_variable: str = "", names: Sequence[str] = ()) -> Protection:
    """Make the protection of a server on an address.

    Args:
        host: that it listens on.
        token_variable: name of the environment variable that holds the token; "" for none.
        names: further names that it may be asked for by.

    Raises:
        UserError: the variable is not set, or others than this machine could ask without a token.
    """
    token = os.environ.get(token_variable, "") if token_variable else ""
    if token_variable and not token:
        raise UserError(f"the environment variable {token_variable} is not set", f"export {token_variable}=...")
    if not is_loopback(host) and not token:
        raise UserError(
            f"whoever reaches {host or 'this machine'} could use the model",
            "name an environment variable that holds a token by --token-env, or listen on 127.0.0.1",
        )
    machine = (host, socket.gethostname()) if host not in WILDCARDS else (socket.gethostname(),)
    return Protection(token, tuple(dict.fromkeys(name.lower() for name in (*LOOPBACK, *machine, *names))))


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Protected:
    """An application behind its protection."""

    def __init__(self, app: ASGIApp, protection: Protection) -> None:
        self._app, self._protection = app, protection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        body: Message | None = None
        if refusal is None:
            try:
                body = await asyncio.wait_for(self._body(receive), self._protection.seconds)
            except TimeoutError:
                refusal = (408, f"the request did not come in whole within {self._protection.seconds:g} s")
            except OverflowError:
                refusal = (413, f"a request has at most {self._protection.most} bytes")
        if refusal is not None or body is None:
            status, message = refusal or (400, "the client has gone")
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
            await JSONResponse({"error": error}, status, {"connection": "close"})(scope, receive, send)
            return
        bodies = [body]

        async def replay() -> Message:
            return bodies.pop() if bodies else await receive()

        await self._app(scope, replay, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = _name_of(headers.get("host", ""))
        if self._protection.hosts and host not in self._protection.hosts and not self._is_own_address(host):
            return 421, f"this server is not {host[:100]}: name it by --allowed-host"
        token = self._protection.token
        if token and scope["path"] not in OPEN_PATHS:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            # Clients send letters beyond ASCII in UTF-8, and some in Latin-1.
            bearer_bytes, expected = bearer.strip().encode("latin-1"), token.encode()
            forms = (bearer_bytes, _as_utf8(bearer_bytes))
            if scheme.lower() != "bearer" or not any(hmac.compare_digest(form, expected) for form in forms):
                return 401, "a bearer token is needed, and this is not it"
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 12 or int(length) > self._protection.most:
            return 413, f"a request has at most {self._protection.most} bytes"
        return None

    def _is_own_address(self, host: str) -> bool:
        """Return whether the host is a number and requests need a token: names alone can be made to lead elsewhere."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return bool(self._protection.token)

    async def _body(self, receive: Receive) -> Message | None:
        content = bytearray()
        while True:
            part = await receive()
            if part["type"] != "http.request":
                return None
            content += part.get("body", b"")
            if len(content) > self._protection.most:
                raise OverflowError
            if not part.get("more_body", False):
                return {"type": "http.request", "body": bytes(content), "more_body": False}


def _as_utf8(content: bytes) -> bytes:
    return content.decode("latin-1").encode()


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] if name.count(":") <= 1 else name


class PunctualProtocol(H11Protocol):
    """A connection that holds its place only while an answer to it is made: its next request must begin to be answered
    within a time, and its answer must be taken, or it is closed; the one that has waited longest for the rest of its
    request is closed at once where there are as many connections as may be."""

    seconds = 20.0
    queue: ClassVar[dict["PunctualProtocol", None]] = {}
    """Connections without a whole request, in the order in which they began to wait."""
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency and self.queue:
            next(iter(self.queue))._give_up()
        self._expect()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._expect()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._expect()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._stall = self._stall or self.loop.call_later(3 * self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._end_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._cancel()
        self._end_stall()
        self.queue.pop(self, None)
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_begun():
            self._cancel()  # The body has a time of its own: `Protected`.
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._give_up)
        if self._is_whole():
            self.queue.pop(self, None)
        else:
            self.queue.setdefault(self)

    def _is_begun(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_whole(self) -> bool:
        return self._is_begun() and not self.cycle.more_body

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        self._cancel()
        self.queue.pop(self, None)
        if self._is_whole():
            return
        # Closing would wait for a reader of what is left.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
