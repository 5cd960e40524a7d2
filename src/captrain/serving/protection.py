"""Protection of the HTTP servers: checks that run before the application reads a request.

- Host: any web page in a browser on this machine can reach a loopback address, so the server checks the host name in
  the request.
- Token: on any other address the client must send a token.
- Size and time: headers and body must arrive completely within limits before they are parsed, so a slow sender cannot
  hold a connection.

The work for a request is cancelled when its client disconnects.
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
from uvicorn.server import Server

from captrain.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("", "0.0.0.0", "::")
OPEN_PATHS = ("/health",)
"""Paths that need no token."""
STOPPING = "this server is stopping: ask again"
START = b"HTTP/1.1 "
"""First bytes of every response. They are sent early, one by one, to test whether a half-closed client is gone."""
PROBE = 0.1
"""Seconds until the first of these bytes is sent. Each later pause is twice as long."""
ROOM = 1 << 18
"""Most bytes of pipelined requests that a connection may send while one request is being answered."""
HOST = re.compile(r"\[?([^:]*|[\w:.%]+)\]?(:\d*)?")
"""A Host header, or an Origin without its scheme: a name or an address, and a port.

Everything before the port counts as the name, even where a URL parser would split it differently.
"""


@dataclass(frozen=True)
class Protection:
    """Limits for requests.

    token: token that a request must carry; "" for none. hosts: allowed host names, in the Host header and as origins of
    web pages; empty allows all. most: largest body in bytes. seconds: time in which a request must arrive completely.
    """

    token: str = ""
    hosts: tuple[str, ...] = ()
    most: int = 8 << 20
    seconds: int = 20


@dataclass
class Client:
    """The client of a request: its address, and whether it has closed its side of the connection and may be gone."""

    address: str = ""
    leaving: bool = False


asking: ContextVar[Client] = ContextVar("asking")
"""The client of the request that is being answered."""


def protection_of(host: str, token_variable: str = "", names: Sequence[str] = ()) -> Protection:
    """Return the protection of a server that listens on an address.

    Args:
        host: address to listen on.
        token_variable: environment variable with the token; "" for none.
        names: further host names that requests may use for this server.

    Raises:
        UserError: the variable is not set, or other machines can reach the host and no variable is named.
    """
    token = os.environ.get(token_variable, "") if token_variable else ""
    if token_variable and not token:
        raise UserError(f"the environment variable {token_variable} is not set", f"export {token_variable}=...")
    address = _address(host)
    if not token and host.lower() != "localhost" and (address is None or not address.is_loopback):
        raise UserError(
            f"anyone who reaches {host or 'this machine'} could use the model",
            "set --token-env to an environment variable that holds a token, or listen on 127.0.0.1",
        )
    machine = (host, socket.gethostname()) if host not in WILDCARDS else (socket.gethostname(),)
    return Protection(token, tuple(dict.fromkeys(name.lower() for name in (*LOOPBACK, *machine, *names))))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a host; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)


def new_application(closing: Callable[[], Awaitable[object]]) -> FastAPI:
    """Build an HTTP application without routes. It reports errors in OpenAI's format, and awaits `closing` on exit."""

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
    """Queue that lets one request body be parsed at a time, small bodies first.

    Parsing a large body blocks the server for a tenth of a second. Between two bodies, the server can accept new
    requests and notice clients that are gone.
    """

    def __init__(self) -> None:
        self._taken, self._numbers = False, itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, size: int) -> None:
        """Wait for a turn. The turn ends when the caller awaits something else."""
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
    """An HTTP application that checks each request (see `Protection`) before it is handled."""

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
        """Raise HTTPException if a request is not allowed.

        Refused are requests with another host name, from a foreign web page, without the token, with a body of two
        different lengths, or with too large a body.
        """
        header, origin = (headers.get(name, b"").decode("latin-1").strip().lower() for name in (b"host", b"origin"))
        host, page = (
            parts[1] if (parts := HOST.fullmatch(text)) else "" for text in (header, origin.partition("://")[2])
        )
        token, hosts = self._protection.token, self._protection.hosts
        # A foreign page can make a host name resolve to this server (DNS rebinding). With a token, IPs are safe.
        if hosts and host not in hosts and not (token and _address(host)):
            raise HTTPException(421, f"this server is not {header[:100]}: allow the name with --allowed-host")
        # A browser sends a page's plain POST to any server, with the page's origin.
        if hosts and origin and page not in hosts:
            raise HTTPException(403, f"pages of {origin[:100]} are refused: allow their host with --allowed-host")
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # Clients send letters beyond ASCII in UTF-8 or Latin-1, and the environment may hold either.
        forms = (bearer.strip(), bearer.strip().decode("latin-1").encode())
        bears = scheme.lower() == b"bearer" and any(
            hmac.compare_digest(form, token.encode(errors="surrogateescape")) for form in forms
        )
        if token and path not in OPEN_PATHS and not bears:
            raise HTTPException(401, "the bearer token is missing or wrong")
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
    """Answer a request. Cancel the work if the client disconnects, and answer 503 if this server stops."""
    begun = finished = is_gone = False

    async def sending(message: Message) -> None:
        nonlocal begun, finished
        begun, finished = True, message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    async def until_gone() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        if not finished:
            answering.cancel()

    answering = asyncio.ensure_future(app(scope, replay, sending))
    watching = asyncio.ensure_future(until_gone())
    try:
        await answering
    except asyncio.CancelledError:
        # `watching` may be done, too: a server that stops cancels all tasks, in any order.
        if not is_gone and not begun:
            headers = {"retry-after": "1", "connection": "close"}
            await refusal(503, STOPPING, headers)(scope, receive, send)
    finally:
        watching.cancel()


class _Ahead:
    """A transport that can send the first bytes of a response early, and then leaves them out of the response."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._sent = transport, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write the data without the bytes that were already sent."""
        self._transport.write(data[self._sent :])
        self._sent = 0

    def send_ahead(self) -> bool:
        """Send the next byte of `START`. Return whether more bytes of it are left."""
        self._transport.write(START[self._sent : self._sent + 1])
        self._sent += 1
        return self._sent < len(START)


class PunctualServer(Server):
    """A server that ends after the requests that it cancels have sent their answers."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, which ends the process without waiting for the tasks that it has cancelled."""
        await super().shutdown(sockets)
        if tasks := {*self.server_state.tasks}:
            await asyncio.wait(tasks, timeout=1)


class PunctualProtocol(H11Protocol):
    """A connection with deadlines for its client.

    The headers of a request must arrive within uvicorn's keep-alive timeout. While a response is sent, the client must
    read some of it within each such timeout. If all connections are in use, a new one replaces the connection that has
    waited longest for the rest of its request.

    A client that closes its side after its request may be waiting for the response or may be gone. The server can only
    tell by writing. So it sends the first bytes of the response early, one after another. If the client is gone, its
    system rejects a byte, and writing the next one fails.
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
            # Keep reading, or pipelined requests would hide the end of the connection.
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
        """Send one byte of the response early. A client that has accepted two of them is still there."""
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
        """See `H11Protocol`. Stops the deadline only if the request is complete and the client reads the response."""
        if self.cycle and not (self.cycle.response_complete or self.cycle.more_body or self.flow.write_paused):
            super()._unset_keepalive_if_required()

    def _wait(self) -> None:
        """Start the deadline by which the client must send its request, or read some of the response."""
        super()._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler, self.transport.get_write_buffer_size()
        )

    def timeout_keep_alive_handler(self, before: int = 0) -> None:
        """See `H11Protocol`. Close the connection unless the client has read some of the response.

        `before` is the number of unread bytes when the deadline was set. Request bodies have their own deadline in
        `Protected`.
        """
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._wait()
        elif size or self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
