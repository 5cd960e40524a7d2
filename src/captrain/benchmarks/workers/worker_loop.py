"""The loop of a benchmark worker: JSON lines in, JSON lines out, in the benchmark's own environment.

A benchmark's pins conflict with ours, so it runs as a child process in a virtual environment of its own; this file and
the workers beside it are all that runs there, on the standard library (Python 3.9 or later) and the benchmark alone.
One request a line `{"id", "op", ...}`, one reply a line `{"id", "ok", "result" | "error": {"type", "message",
"retryable"}}`; one request at a time, in the main thread. An error of type BadRequest says that our side asked for
something that does not exist; any other is the benchmark's own exception, which must never become a score.
"""

import inspect
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

LONGEST = 2000
"""Characters kept of an error message."""
GRACE = 1.0
"""Seconds that a request may still take when nobody is left to read the reply."""


class BadRequest(Exception):
    """The request asks for something that does not exist, or that is not of the protocol."""


def protect() -> TextIO:
    """Take standard output for replies alone: whatever else prints from now on goes to standard error.

    To be called before the benchmark is imported, because imports print, too.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return replies


def serve(operations: Mapping[str, Callable[..., object]], replies: TextIO) -> None:
    """Answer requests until `shutdown` or the end of standard input, which comes when our process is gone.

    Args:
        operations: by name; a request's other fields are their keyword arguments, and they return JSON.
        replies: what `protect` returned.
    """
    operations = {**operations, "shutdown": lambda: {}}
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A private copy: a benchmark that reads standard input must not eat requests, nor its children keep it open.
    source = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    operation = None
    while operation != "shutdown" and (line := requests.get()):
        number: object = None
        try:
            number, operation, arguments = _parsed(line)
            reply = _success(number, _run(operations, operation, arguments))
        except (Exception, SystemExit) as error:
            # SystemExit, too: a benchmark's command-line code must not end the worker.
            reply = _failure(number, error)
        replies.write(reply + "\n")
        replies.flush()


def _read(source: int, requests: "queue.SimpleQueue[bytes]") -> None:
    """Hand on whole lines. In a thread of its own, so that a worker whose request never ends still notices that our
    process is gone, and ends, too."""
    partial = b""
    while chunk := os.read(source, 1 << 16):
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            requests.put(line + b"\n")
    requests.put(b"")
    time.sleep(GRACE)
    os._exit(1)


def _parsed(line: bytes) -> "tuple[object, str, dict[str, object]]":
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise BadRequest("not an object")
    return request.pop("id", None), str(request.pop("op", None)), request


def _run(operations: Mapping[str, Callable[..., object]], operation: str, arguments: "dict[str, object]") -> object:
    if operation not in operations:
        raise BadRequest(f"there is no operation {operation!r}")
    try:
        inspect.signature(operations[operation]).bind(**arguments)
    except TypeError as wrong:
        raise BadRequest(f"{operation}: {wrong}") from None
    return operations[operation](**arguments)


def _success(number: object, result: object) -> str:
    # ASCII throughout: a lone surrogate in a tool result must not break the stream.
    return json.dumps({"id": number, "ok": True, "result": result}, allow_nan=False)


def _failure(number: object, error: BaseException) -> str:
    bad_request = isinstance(error, BadRequest)
    description = {"type": "BadRequest" if bad_request else type(error).__name__, "message": str(error)[:LONGEST]}
    return json.dumps({"id": number, "ok": False, "error": {**description, "retryable": not bad_request}})
