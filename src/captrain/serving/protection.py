"""Checks before anything reads a request: the client may ask, for this server, and sends a complete small request in
time. Work for a request ends when its client is gone.

Every page in a browser on this machine can reach a server on a loopback address, so the server checks the name that it
is asked for by. On any other address it requires a token. A body is read completely before it is parsed, with a limit
on size and time; so are the lines before it. A slow sender keeps nothing open.
"""

import asyncio
import heapq
import hmac
import ipaddress
import itertools
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from captrain.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("", "0.0.0.0", "::")
OPEN_PATHS = ("/health",)
STOPPING = "this server is stopping: ask again"
"""Paths that need no token."""
START = b"HTTP/1.1 "
"""How each answer starts. If a client has closed its side, these bytes are sent ahead to learn whether it is gone."""
PROBE = 0.1
"""Seconds until the first of them; each later pause is twice as long."""
ROOM = 1 << 18
"""Most bytes of further requests on a connection while one is answered."""
HOST = re.compile(r"\[?([^:]*|[\w:.%]+)\]?(:\d*)?")
"""A Host header, or an Origin without its scheme: a name or an address, and a port. Everything before the port is
the name, even where a URL parser would differ."""


@dataclass(frozen=True)
class Protection:
    """Limits of requests.

    token: required of them; "" for none. hosts: names that the server may be asked for by, and of pages that may ask;
    empty for any. most: bytes of a body. seconds: until a request must be complete.
    """

    token: str = ""
    hosts: tuple[str, ...] = ()
    most: int = 8 << 20
    seconds: int = 20


@dataclass
class Client:
    """Who asks: an address, and whether the client has closed its side and may be gone."""

    address: str = ""
    leaving: bool = False


asking: ContextVar[Client] = ContextVar("asking")
"""The client of the request that is answered."""


def protection_of(host: str, token_variable: str = "", names: Sequence[str] = ()) -> Protection:
    """The protection of a server on an address.

    Args:
        host: address to listen on.
        token_variable: environment variable with the token; "" for none.
        names: further names that the server may be asked for by.

    Raises:
        UserError: the variable is not set, or other machines could ask without a token.
    """
    token = os.environ.get(token_variable, "") if token_variable else ""
    if token_variable and not token:
        raise UserError(f"the environment variable {token_variable} is not set", f"export {token_variable}=...")
    address = _address(host)
    if not token and host.lower() != "localhost" and (address is None or not address.is_loopback):
        raise UserError(
            f"whoever reaches {host or 'this machine'} could use the model",
            "name an environment variable that holds a token by --token-env, or listen on 127.0.0.1",
        )
    machine = (host, socket.gethostname()) if host not in WILDCARDS else (socket.gethostname(),)
    return Protection(token, tuple(dict.fromkeys(name.lower() for name in (*LOOPBACK, *machine, *names))))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in a host; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)


def new_application(closing: Callable[[], Awaitable[object]]) -> FastAPI:
    """Build an HTTP application without paths that answers errors in OpenAI's format and awaits `closing` at its
    end."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await closing()

    async def refused(_: Request, error: Exception) -> JSONResponse:
        match error:
            case RequestValidationError():
                first = error.errors()[0]
                return refusal(400, f"{'.'.join(str(part) for part in first['loc'][1:]) or 'body'}: {first['msg']}")
            case HTTPException():
                return refusal(error.status_code, str(error.detail), error.headers)
        return refusal(400, str(error))

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (RequestValidationError, HTTPException, UserError):
        app.add_exception_handler(kind, refused)
    return app


class _Turns:
    """Lets bodies be parsed one at a time, small ones first.

    Parsing a large body takes a tenth of a second, in which the server does nothing else. Between two bodies it sees
    new requests, and clients that are gone.
    """

    def __init__(self) -> None:
        self._taken, self._numbers = False, itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, size: int) -> None:
        """Wait for a turn. It lasts until the caller waits for something else."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        self._taken = True
        loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False


class Protected:
    """An application behind its protection."""

    def __init__(self, app: ASGIApp, protection: Protection) -> None:
        self._app, self._protection, self._turns = app, protection, _Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bodies: list[Message] = []
        answer: ASGIApp = self._app
        try:
            self._require_allowed(dict(scope["headers"]), scope["path"])
            content = await asyncio.wait_for(self._content(receive), self._protection.seconds)
            bodies.append({"type": "http.request", "body": content, "more_body": False})
        except TimeoutError:
            seconds = self._protection.seconds
            answer = refusal(408, f"the request did not come in whole within {seconds} s", {"connection": "close"})
        except asyncio.CancelledError:  # the server stops before the body is whole
            answer = refusal(503, STOPPING, {"retry-after": "1", "connection": "close"})
        except HTTPException as error:
            answer = refusal(error.status_code, error.detail, {"connection": "close"})

        client = scope.get("state", {}).get("client") or Client((scope.get("client") or ("",))[0])
        asking.set(client)

        async def replay() -> Message:
            if not bodies:
                return await receive()
            await self._turns.take(len(bodies[0]["body"]))
            return bodies.pop()

        await _while_waited_for(answer, scope, replay, receive, send)

    def _require_allowed(self, headers: Mapping[bytes, bytes], path: str) -> None:
        """Raise HTTPException for a request to another server, from a foreign page, without the token, with a body of
        two lengths, or of too great a length."""
        header, origin = (headers.get(name, b"").decode("latin-1").strip().lower() for name in (b"host", b"origin"))
        host, page = (
            parts[1] if (parts := HOST.fullmatch(text)) else "" for text in (header, origin.partition("://")[2])
        )
        token, hosts = self._protection.token, self._protection.hosts
        # A foreign page can make a name lead here; with a token an address cannot be abused.
        if hosts and host not in hosts and not (token and _address(host)):
            raise HTTPException(421, f"this server is not {header[:100]}: name it by --allowed-host")
        # A browser sends a page's plain POST to any server, with the page's origin.
        if hosts and origin and page not in hosts:
            raise HTTPException(403, f"pages of {origin[:100]} may not ask: name their host by --allowed-host")
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # Clients send letters beyond ASCII in UTF-8 or Latin-1, and the environment may hold either.
        forms = (bearer.strip(), bearer.strip().decode("latin-1").encode())
        bears = scheme.lower() == b"bearer" and any(
            hmac.compare_digest(form, token.encode(errors="surrogateescape")) for form in forms
        )
        if token and path not in OPEN_PATHS and not bears:
            raise HTTPException(401, "a bearer token is needed, and this is not it")
        if {b"content-length", b"transfer-encoding"} <= headers.keys():
            # A proxy before this server could take another end of the body, and its rest for a request (RFC 9112, 6.3).
            raise HTTPException(400, "a request has either Content-Length or Transfer-Encoding, not both")
        if int(headers.get(b"content-length", b"0")) > self._protection.most:
            raise HTTPException(413, f"a request has at most {self._protection.most} bytes")

    async def _content(self, receive: Receive) -> bytes:
        content, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] != "http.request":
                raise HTTPException(400, "the client has gone")
            content += part.get("body", b"")
            if len(content) > self._protection.most:
                raise HTTPException(413, f"a request has at most {self._protection.most} bytes")
            more = part.get("more_body", False)
        return bytes(content)


async def _while_waited_for(app: ASGIApp, scope: Scope, replay: Receive, receive: Receive, send: Send) -> None:
    """Answer a request until its client is gone, or with 503 if this server stops."""
    begun = finished = False

    async def sending(message: Message) -> None:
        nonlocal begun, finished
        begun, finished = True, message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not finished:
            answering.cancel()

    answering = asyncio.ensure_future(app(scope, replay, sending))
    watching = asyncio.ensure_future(until_gone())
    try:
        await answering
    except asyncio.CancelledError:
        if not watching.done() and not begun:
            headers = {"retry-after": "1", "connection": "close"}
            await refusal(503, STOPPING, headers)(scope, receive, send)
    finally:
        watching.cancel()


class _Ahead:
    """A transport on which the start of an answer may have been sent ahead."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._sent = transport, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write the data without the bytes that were already sent."""
        self._transport.write(data[self._sent :])
        self._sent = 0

    def send_ahead(self) -> bool:
        """Send the next byte of an answer's start; return whether more are left."""
        self._transport.write(START[self._sent : self._sent + 1])
        self._sent += 1
        return self._sent < len(START)


class PunctualProtocol(H11Protocol):
    """A connection with deadlines for its client.

    The lines before a body must arrive within uvicorn's keep-alive time. While an answer is sent, the client must take
    some of it in each such time. If all places are taken, a new connection replaces the one that has waited longest for
    the rest of its request.

    A client that closes its side after its request may wait for the answer, or be gone: both look alike until something
    is written. So the first bytes of the answer are sent ahead, one after another. The system of a client that is gone
    refuses them, and the next one fails.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._ahead = _Ahead(transport)
        self.transport = cast(asyncio.Transport, self._ahead)
        self._asker = Client(self.client[0] if self.client else "")
        self._closed = False
        self.app_state = {**self.app_state, "client": self._asker}
        idle = {
            timer.when(): connection
            for connection in self.connections
            if isinstance(connection, PunctualProtocol)
            and (timer := connection.timeout_keep_alive_task)
            and not connection.transport.get_write_buffer_size()
        }
        if idle and self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            oldest = idle[min(idle)]
            oldest.timeout_keep_alive_task = None  # its place is given only once
            oldest.transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._unset_keepalive_if_required()
        if self._answering:
            # Read on, or the end of the connection would stay unread behind further requests.
            if len(self.conn.trailing_data[0]) > ROOM:
                self.transport.abort()
            self.flow.resume_reading()

    @property
    def _answering(self) -> bool:
        """Whether a complete request is being answered."""
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)

    def eof_received(self) -> bool:  # type: ignore[override]
        """See `asyncio.Protocol`: keep the connection open for the answer to a complete request."""
        if self._answering:
            self._closed = self._asker.leaving = True
            self.loop.call_later(PROBE, self._probe, PROBE)
        return self._answering

    def _probe(self, pause: float) -> None:
        """Send a byte ahead; a client that has taken two of them is still there."""
        if self._answering and not self.cycle.response_started and not self.transport.is_closing():
            self._asker.leaving = pause == PROBE
            if self._ahead.send_ahead():
                self.loop.call_later(2 * pause, self._probe, 2 * pause)

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        if self._closed and not self._answering:
            self.transport.close()
            return
        self._wait()
        self._unset_keepalive_if_required()  # the next request may be there already

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._unset_keepalive_if_required()

    def _unset_keepalive_if_required(self) -> None:
        """See `H11Protocol`: only a complete request ends the wait for it, and none ends the wait for a reader."""
        if self.cycle and not (self.cycle.response_complete or self.cycle.more_body or self.flow.write_paused):
            super()._unset_keepalive_if_required()

    def _wait(self) -> None:
        """Start the deadline: the client must send, or read what is left."""
        super()._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler, self.transport.get_write_buffer_size()
        )

    def timeout_keep_alive_handler(self, before: int = 0) -> None:
        """See `H11Protocol`. A body has its own deadline (`Protected`). A client that has read some of an answer
        since `before` gets more time."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._wait()
        elif size or self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
