"""A soak: server and worker pool under mixed load, valid and invalid. Run by `make soak DURATION=600`.

Several threads send requests: valid, invalid, and cut off; workers of the pool also die in the middle. The requests
stop four times. When nothing is running any more, memory, file descriptors and threads are read. A leak adds something
in every quarter of the time. The smallest increase counts, so that no reading on a busy machine is taken for a leak.
Prints a row each, and exits with status 1 if something grew or no request was answered.
"""

import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from captrain.benchmarks import Pool
from captrain.errors import InfrastructureError

TILL = Path(__file__).parents[1] / "tests/workers/contract_worker.py"
THREADS = 4
SLACK = {"memory, MB": 8.0, "descriptors": 2 * THREADS, "threads": 2 * THREADS, "processes": THREADS}
"""Allowed increase per round: workers come and go, and allocators keep some memory."""
ROUNDS = 4
REPLIES = 75
"""Fewest answers in each round, so that a leak per answer adds the same on a slow machine."""
QUIET = 1.0
"""Seconds without work until a process counts as idle."""
PATIENCE = 120.0
"""Seconds that a process may take to become idle, and a round to get its answers."""
CHAT = {"model": "base", "max_tokens": 4, "messages": [{"role": "user", "content": "Say 1."}]}
BODIES: tuple[bytes, ...] = (
    json.dumps(CHAT).encode(),
    json.dumps({**CHAT, "seed": 1, "logprobs": True}).encode(),
    json.dumps({**CHAT, "model": "nobody"}).encode(),
    json.dumps({**CHAT, "max_tokens": -1}).encode(),
    json.dumps({**CHAT, "messages": []}).encode(),
    json.dumps({**CHAT, "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}).encode(),
    json.dumps({**CHAT, "messages": [{"role": "user", "content": "a b 1 " * 300_000}]}).encode(),
    b'{"model": ' + b"[" * 5000,
    b"\xff\xfe",
)
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BEGINNINGS = (b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of glibc that return freed memory at once, so that an idle process holds only what it uses."""
BURSTS = 20
WORDS = 20
"""Longest repetition of a word in our texts."""
SLOW = 32
"""Number of unfinished requests kept open at a time."""


@dataclass
class Readings:
    """Readings of the idle process, one per round, by name; and the outcomes of the requests."""

    values: dict[str, list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def replies(self) -> int:
        """Count the requests that were answered."""
        return self.outcomes["200"] + self.outcomes["answered"]


@contextmanager
def under_load(ask: Callable[[random.Random], str], outcomes: Counter[str], first_seed: int) -> Iterator[None]:
    """Send requests from several threads; count an exception by its name."""
    over, lock = threading.Event(), threading.Lock()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while not over.is_set():
            try:
                outcome = ask(draw)
            except (OSError, http.client.HTTPException, InfrastructureError) as error:
                outcome = type(error).__name__
            with lock:
                outcomes[outcome] += 1

    threads = [threading.Thread(target=work, args=(first_seed + number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def rest(process: psutil.Process) -> None:
    """Wait until a process is idle. Requests whose clients have left are still computed."""
    latest, seconds, since = time.monotonic() + PATIENCE, -1.0, time.monotonic()
    while time.monotonic() < min(since + QUIET, latest):
        time.sleep(QUIET / 10)
        times = process.cpu_times()
        # Ignore a tick or two of housekeeping.
        if times.user + times.system > seconds + 0.02:
            seconds, since = times.user + times.system, time.monotonic()


def watch(process: psutil.Process, ask: Callable[[random.Random], str], seconds: float) -> Readings:
    """Send requests for this long, or until each round has its answers; read the process and its children after each
    round."""
    readings = Readings()
    for number in range(ROUNDS):
        before, since = readings.replies, time.monotonic()
        with under_load(ask, readings.outcomes, number * THREADS):
            time.sleep(seconds / ROUNDS)
            while readings.replies < before + REPLIES and time.monotonic() < since + PATIENCE:
                time.sleep(0.1)
        rest(process)
        children, memory = process.children(recursive=True), process.memory_full_info()
        # The system maps and unmaps file pages as it likes.
        resident = (memory.rss - memory.shared + memory.swap) / (1 << 20)
        for name, value in zip(SLACK, (resident, process.num_fds(), process.num_threads(), len(children)), strict=True):
            readings.values.setdefault(name, []).append(value)
    return readings


def novel(draw: random.Random, count: int) -> bytes:
    """Make a request with a new tool and a new text."""
    name = f"tool_{draw.getrandbits(64):x}"
    tool = {"type": "function", "function": {"name": name, "description": name * WORDS}}
    return json.dumps({**CHAT, "messages": [{"role": "user", "content": f"{name} " * count}], "tools": [tool]}).encode()


def fill(address: int) -> None:
    """Send the largest load once before the first reading, so that buffers have grown."""

    def ask(seed: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", address, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", novel(random.Random(-1 - seed), WORDS), JSON)
        assert connection.getresponse().status == 200
        connection.close()

    with ThreadPoolExecutor(THREADS) as threads:
        for burst in range(BURSTS):
            for future in [threads.submit(ask, THREADS * burst + number) for number in range(THREADS)]:
                future.result()


def soak_server(model: Path, seconds: float) -> Readings:
    """Soak `captrain serve` over HTTP."""
    command = [sys.executable, "-m", "captrain.cli.app", "serve", str(model), "--port", "0"]
    pipe, env = subprocess.PIPE, os.environ | MALLOC
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8", env=env) as server:
        assert server.stdout is not None
        address = next((match[1] for line in server.stdout if (match := re.search(r":(\d+)/v1", line))), "")
        if not address:
            raise SystemExit("captrain serve did not start")
        threading.Thread(target=server.stdout.read, daemon=True).start()

        slow: deque[socket.socket] = deque()

        def ask(draw: random.Random) -> str:
            if draw.random() < 0.1:
                slow.append(socket.create_connection(("127.0.0.1", int(address)), timeout=30))
                slow[-1].sendall(draw.choice(BEGINNINGS))
                if len(slow) > SLOW:
                    slow.popleft().close()
                return "begun and left open"
            connection = http.client.HTTPConnection("127.0.0.1", int(address), timeout=30)
            try:
                path, body = "/v1/chat/completions", draw.choice(BODIES)
                if draw.random() < 0.2:
                    body = novel(draw, draw.randint(1, WORDS))
                elif draw.random() < 0.05:
                    path, body = "/v1/load_lora_adapter", b'{"lora_name": "a", "lora_path": "a\\u0000b"}'
                connection.request("POST", path, body, JSON)
                if draw.random() < 0.1:
                    return "left early"
                return str(connection.getresponse().status)
            finally:
                connection.close()

        fill(int(address))
        readings = watch(psutil.Process(server.pid), ask, seconds)
        server.terminate()
    return readings


def soak_pool(seconds: float) -> Readings:
    """Soak the worker pool in this process with a misbehaving benchmark."""
    pool = Pool("till", [sys.executable, "-S", str(TILL)], processes=2, timeout=5.0)

    def ask(draw: random.Random) -> str:
        session = pool.session(task_id=f"till/{draw.randrange(64)}")
        try:
            word = draw.choice(["Hello.", "Hello.", "Hello.", "!print", "!raise", "!garbage", "!die", "!flood"])
            session.call("step", role="agent", message={"role": "assistant", "content": word})
            return "answered"
        finally:
            if draw.random() < 0.9:  # leave some episodes open
                session.close()

    try:
        return watch(psutil.Process(), ask, seconds)
    finally:
        pool.close()


def main() -> int:
    """Parse the command line, run the soak, and print what grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each")
    parser.add_argument("--model", type=Path, default=Path("artifacts/base"), help="folder of the model to serve")
    options = parser.parse_args()
    soaks = {
        "captrain serve": lambda: soak_server(options.model, options.seconds),
        "pool of workers": lambda: soak_pool(options.seconds),
    }
    table = Table(
        "", "requests", "what came of them", *SLACK, title=f"{options.seconds:g} s each, then at rest (growth)"
    )
    is_sound = True
    for name, soak in soaks.items():
        readings = soak()
        # Smallest increase between rounds.
        growth = {key: min(after - before for before, after in pairwise(readings.values[key])) for key in SLACK}
        cells = [f"{readings.values[key][-1]:.0f} ({growth[key]:+.1f})" for key in SLACK]
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in readings.outcomes.most_common())
        table.add_row(name, str(readings.outcomes.total()), outcomes, *cells)
        is_sound &= bool(readings.replies) and all(growth[key] <= slack for key, slack in SLACK.items())
    with suppress(BrokenPipeError):
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    return int(not is_sound)


if __name__ == "__main__":
    sys.exit(main())
