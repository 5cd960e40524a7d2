"""A fake chat model on the loopback interface, served at /v1/chat/completions.

The answers come from a function of the request's body, or from a folder of recorded answers:

    with Answering(lambda body: {"verdict": "NA"}) as server:       # a dict is sent as JSON, a str as it is
        server.use(monkeypatch)                                     # sets endpoint and key, shortens pauses
        model = StructuredAnswers(ModelAccess(), name="m", temperature=0.0, max_tokens=99, folder=tmp_path)
        model.ask(questions, "labels")
        assert len(server.requests) == len(questions)               # bodies of all requests, in order of arrival

    Answering(Path("tests/answers/environments"))                   # the file whose name appears in the messages
    Answering(answer, share=0.3)                                    # 30% of requests fail, in the ways of KINDS
    Answering(answer, share=1.0, kinds=("broken",))                 # each request fails twice with 500, then succeeds

A request's body, and how often it came before, decide whether it fails. So the same requests fail in any order. A
request succeeds after `TIMES` failures. `StructuredAnswers` changes a request only after a wrong answer, so 6 retries
are always enough. To send any other reply, the function returns (status, body) or (status, body, headers).
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE

from captrain.records import digest

KINDS = ("limited", "broken", "late", "cut", "wrong")
"""429 with Retry-After, 500, no answer in time, truncated JSON, JSON of another schema."""
TIMES = 2
"""How often one request may fail."""
SECRET = "sk-very-secret-0123456789"

Body = dict[str, Any]
Raw = tuple[int, Any] | tuple[int, Any, dict[str, str]]
Answer = Callable[[Body], str | dict[str, Any] | Raw]


def says(
    content: str | None = "Done.", *calls: tuple[str, str], usage: bool = True, finish: str = "stop",
    tokens: tuple[int, int] = (10, 3),
) -> tuple[int, Body]:  # fmt: skip
    """Return a completion with status 200. Calls are (name, arguments as text); their ids are random, as on real
    servers."""
    made = [
        {"id": f"chatcmpl-tool-{time.time_ns()}", "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in calls
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    body: Body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    body["choices"] = [{"index": 0, "finish_reason": finish, "message": message}]
    read, written = tokens
    if usage:
        body["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return 200, body


def refuses(status: int, message: str, code: str | None = None) -> tuple[int, Body]:
    """Return an error response."""
    return status, {"error": {"message": message, "type": code or "error", "code": code}}


class Answering:
    """The server, as a context manager.

    Args:
        answer: a function of the request's body, or the folder with the recorded answers.
        share: share of requests that fail.
        kinds: the ways in which they fail.
        late: seconds that a late answer takes; use a shorter timeout in the client.
    """

    def __init__(
        self, answer: Answer | Path = lambda body: says(), *, share: float = 0.0, kinds: Sequence[str] = KINDS,
        late: float = PATIENCE,
    ) -> None:  # fmt: skip
        self.answer: Answer = _recorded(answer) if isinstance(answer, Path) else answer
        self.share, self.kinds, self.late = share, kinds, late
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        """Headers of each request, with its path."""
        self.answered: list[Body] = []
        """Bodies of the requests that got a proper answer."""
        self.faults: Counter[str] = Counter()
        self.now = self.most = 0
        """Current and highest number of requests in progress."""
        self._came: Counter[str] = Counter()
        self._lock, self._over = threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {"path": self.path, **{name.lower(): value for name, value in self.headers.items()}}
                reply = server._reply(body, headers)
                if reply is None:
                    self.close_connection = True
                    return
                status, answer, more = reply
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **more}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Loopback(ThreadingHTTPServer):
            request_queue_size = 128

            # Ignore clients that disconnect.
            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self._http = Loopback(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> "Answering":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Point this process and its children at this server, and shorten the pauses between retries."""
        monkeypatch.setenv("OPENAI_BASE_URL", self.url)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        monkeypatch.setattr("captrain.models.answers.PAUSE", 0.01, raising=False)

    def _reply(self, body: Body, headers: dict[str, str]) -> tuple[int, Any, dict[str, str]] | None:
        """Return status, body and headers, or None if the connection is to be dropped."""
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.now += 1
            self.most = max(self.most, self.now)
            fault = self._fault(body)
        try:
            return self._failed(fault, body) if fault else self._answered(body)
        finally:
            with self._lock:
                self.now -= 1

    def _fault(self, body: Body) -> str | None:
        name = digest(body)
        earlier, self._came[name] = self._came[name], self._came[name] + 1
        at = int(digest(name, earlier), 16) / 16**16
        if earlier >= TIMES or at >= self.share:
            return None
        kind = self.kinds[int(at / self.share * len(self.kinds))]
        self.faults[kind] += 1
        return kind

    def _failed(self, kind: str, body: Body) -> tuple[int, Any, dict[str, str]] | None:
        if kind == "late":
            self._over.wait(self.late)
            return None
        if kind == "limited":
            return *refuses(429, "Rate limit reached", "rate_limit_exceeded"), {"Retry-After": "0.02"}
        if kind == "broken":
            return *refuses(500, "The server had an error"), {}
        if kind == "wrong":
            return *says('{"unexpected": true}', tokens=_tokens(body, "")), {}
        text = self._reply_to(body)[1]["choices"][0]["message"]["content"]
        return *says(text[: len(text) // 2], finish="length", tokens=_tokens(body, text)), {}

    def _answered(self, body: Body) -> tuple[int, Any, dict[str, str]]:
        status, answer, *headers = self._reply_to(body)
        if status == 200:
            with self._lock:
                self.answered.append(body)
        return status, answer, headers[0] if headers else {}

    def _reply_to(self, body: Body) -> Raw:
        answer = self.answer(body)
        if isinstance(answer, tuple):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return says(text, tokens=_tokens(body, text))


def _tokens(body: Body, text: str) -> tuple[int, int]:
    """Count words as tokens, so that equal requests and answers always cost the same."""
    return sum(len(message["content"].split()) for message in body["messages"]), len(text.split())


def _recorded(folder: Path) -> Answer:
    """Answer with the file whose stem appears in the messages; the longest stem wins."""
    files = {path.stem: path for path in sorted(folder.iterdir()) if path.is_file()}

    def answer(body: Body) -> str | tuple[int, Any]:
        asked = " ".join(message["content"] for message in body["messages"])
        known = sorted((stem for stem in files if stem in asked), key=len)
        # A 400 is never retried, so the test ends with this message.
        return files[known[-1]].read_text() if known else refuses(400, f"no file of {folder} stands in the request")

    return answer
