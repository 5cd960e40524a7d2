"""Small inputs that ask for huge, endless or slow work are refused quickly, with the reason."""

import gzip
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zstandard
from support.waiting import PATIENCE

from captrain.capabilities import Toolbox, bare_view
from captrain.errors import UserError
from captrain.interop import read_logs
from captrain.interop.logs import inspect
from captrain.models import Endpoint, TransientFault
from captrain.records import JsonObject, Rollout, Score, Task, parse_yaml

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{last}, *{last}, *{last}, *{last}]\n"
    for last, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
YAML = {
    "aliases of aliases": (LAUGHS, "aliases make too much"),
    "itself": ("a: &a [*a]\n", "nested too deeply"),
    "itself by name": ("&a\nb: *a\n", "nested too deeply"),
    "depth": ("[" * 300 + "]" * 300, "nested too deeply"),
    "a key twice": ("seed: 1\nexperiment: x\nseed: 2\n", "names seed twice"),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_would_become_endless_is_refused(name: str) -> None:
    text, reason = YAML[name]
    with pytest.raises(UserError, match=reason):
        parse_yaml(text, dict[str, object], "spec.yaml")


def test_yaml_with_an_anchor_is_read() -> None:
    text = "base: &base {a: 1}\nmine:\n  <<: *base\n  b: *base\n"
    assert parse_yaml(text, dict[str, object], "f") == {"base": {"a": 1}, "mine": {"a": 1, "b": {"a": 1}}}


def archive(path: Path, sample: JsonObject, packed: bytes | None = None) -> Path:
    """Make an Inspect log of one sample, or of `packed` bytes in zstd."""
    with zipfile.ZipFile(path, "w") as log:
        log.writestr("header.json", json.dumps({"version": 2, "eval": {}}))
        log.writestr("samples/1_epoch_1.json", json.dumps(sample) if packed is None else packed)
        good = {"messages": [{"role": "user", "content": "Hi"}], "scores": {"a": {"value": "C"}}}
        log.writestr("samples/2_epoch_1.json", json.dumps(good))
    if packed is not None:
        data = path.read_bytes()
        for sign, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            start = [i for i in range(len(data)) if data.startswith(sign, i)][1] + place
            data = data[:start] + b"\x5d\x00" + data[start + 2 :]
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda content: (
                content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
                .replace(b"\x14\x00\x00\x00\x08", b"\x14\x00\x01\x00\x08")
                .replace(b"\x14\x00\x00\x00\x00", b"\x14\x00\x01\x00\x00")
            ),
            "it is encrypted",
        ),
        (lambda content: content[:-30], "it is cut off"),
        (lambda content: content[:50], "it is cut off"),
    ],
)
def test_an_encrypted_or_cut_off_archive_is_named_so(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "log.eval", {})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"the archive cannot be read: {reason}"):
        read_logs([path])


@pytest.mark.parametrize("name", ["log.eval", "log.zip"])
def test_an_archive_with_a_damaged_directory_is_refused_in_one_message(name: str, tmp_path: Path) -> None:
    path = archive(tmp_path / name, {})
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x00"))
    with pytest.raises(UserError, match=r"cannot be (unpacked|read)"):
        read_logs([path])


def test_attachments_that_are_referred_to_without_end_cost_one_sample(tmp_path: Path) -> None:
    content = "attachment://ab " * 12_000
    sample = {"messages": [{"role": "user", "content": content}], "attachments": {"ab": "x" * 1_000_000}}
    logs = read_logs([archive(tmp_path / "log.eval", sample)])
    assert len(logs.rollouts) == 1
    assert "attachments come to more than 64 MiB" in logs.skipped[0].reason


@pytest.mark.parametrize(("member", "reason"), [("bomb", "more than 1 MiB"), ("damaged", "cannot be unpacked")])
def test_a_member_in_zstd_costs_one_sample(
    member: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "MOST", 1 << 20)
    packed = zstandard.ZstdCompressor().compress(b" " * (1 << 23)) if member == "bomb" else b"\x28\xb5\x2f\xfdxxxxxxxx"
    logs = read_logs([archive(tmp_path / "log.eval", {}, packed)])
    assert len(logs.rollouts) == 1 and reason in logs.skipped[0].reason


@contextmanager
def serving(send: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve the answers of a function; yield the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            try:
                send(self)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 16))


PACKED = gzip.compress(b" " * (1 << 24))


def packed(handler: BaseHTTPRequestHandler) -> None:
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(PACKED)))
    handler.end_headers()
    handler.wfile.write(PACKED)


def other(handler: BaseHTTPRequestHandler) -> None:
    handler.send_header("Content-Encoding", "zstd")
    handler.end_headers()


def trickling(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("send", "reason"),
    [(endless, "more than 1 MiB"), (packed, "more than 1 MiB"), (other, "not asked for"), (trickling, "timed out")],
)
def test_an_answer_without_end_is_a_fault_of_the_endpoint(
    send: Callable[[BaseHTTPRequestHandler], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.models.endpoint.LARGEST", 1 << 20)
    with serving(send) as url:
        monkeypatch.setenv("URL_OF_TEST", url)
        monkeypatch.setenv("KEY_OF_TEST", "none")
        timeout = 0.6 if send is trickling else PATIENCE
        endpoint = Endpoint("m", endpoint="URL_OF_TEST", key="KEY_OF_TEST", retries=0, timeout=timeout)
        with pytest.raises(TransientFault, match=reason):
            endpoint.chat(messages=[{"role": "user", "content": "Hi"}])


def test_references_of_thousands_of_calls_are_compared_in_moments() -> None:
    def turn(number: int) -> JsonObject:
        call = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": {"id": f"#{number}"}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    count = 2000
    rollout = Rollout(
        id="r", environment="e", task=Task(id="t", split="discovery", data={}), trial=0, purpose="diagnosis",
        policy="p", outcome="failed", score=Score(reward=0, success=False),
        messages=[turn(number) for number in reversed(range(1, count))],
        reference=[turn(number) for number in range(count)],
    )  # fmt: skip
    begin = time.process_time()
    [due] = bare_view(rollout, Toolbox([], {"get_order": "read"})).due_lookups
    assert time.process_time() - begin < 5 and due.arguments == {"id": "#0"}
