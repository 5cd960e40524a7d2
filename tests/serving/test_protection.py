"""Protection of the embedded server: who may ask it, for what, and how slowly."""

import asyncio
import json
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from support.adapters import lora, save_adapter
from support.waiting import PATIENCE, until

from captrain.agents.engine import DenseDecoder
from captrain.agents.local import LocalPolicy
from captrain.errors import UserError
from captrain.models import adapter_digest
from captrain.serving import sampling
from captrain.serving.endpoint import ChatServer
from captrain.serving.protection import Protected, Protection, PunctualProtocol, protection_of
from captrain.serving.server import application, listen_all

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Say 1."}], "max_tokens": 2}


@contextmanager
def running(app: ASGIApp, protection: Protection, places: int = 512) -> Iterator[uvicorn.Server]:
    """A running server, with so many places for connections."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="critical",
        http=PunctualProtocol,
        limit_concurrency=places,
        timeout_keep_alive=protection.seconds,
        lifespan="off",
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive()
            time.sleep(0.01)
        [listening] = runner.servers[0].sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        yield runner
    finally:
        runner.should_exit = runner.force_exit = True
        thread.join(10)


@contextmanager
def serving(server: ChatServer, protection: Protection, places: int = 512) -> Iterator[tuple[str, int]]:
    """The address of a running endpoint."""
    with running(application(server, protection), protection, places) as runner:
        yield address_of(runner)


def address_of(runner: uvicorn.Server) -> tuple[str, int]:
    return runner.servers[0].sockets[0].getsockname()


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tiny, tmp_path_factory.mktemp("adapters") / "good")


@pytest.fixture(scope="module")
def server(tiny: Path, adapter: Path) -> ChatServer:
    policy = LocalPolicy(tiny, batch=16, temperature=1.0, max_turns=4, max_tokens=12)
    return ChatServer(policy, "tiny", {}, folders=[adapter.parent])


PROTECTION = Protection(token="secret", hosts=("127.0.0.1",), most=100_000, seconds=60)


@pytest.fixture(scope="module")
def address(server: ChatServer) -> Iterator[tuple[str, int]]:
    with serving(server, PROTECTION) as place:
        yield place


def send(place: tuple[str, int], head: str, body: bytes = b"", pieces: int = 1, pause: float = 0.0) -> bytes:
    """Send raw lines and a body in pieces, and return what comes back."""
    with socket.create_connection(place, timeout=PATIENCE) as channel:
        channel.sendall(head.encode())
        step = -(-len(body) // pieces) if body else 0
        try:
            for start in range(0, len(body), step or 1):
                channel.sendall(body[start : start + step])
                time.sleep(pause)
        except OSError:
            pass
        answer = b""
        try:
            while chunk := channel.recv(1 << 16):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def request(place: tuple[str, int], path: str, body: object = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer to a JSON body."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "127.0.0.1", "Authorization": "Bearer secret", "Connection": "close", **headers}
    lines = {name.replace("_", "-"): value for name, value in lines.items()}
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    top, _, text = send(place, head + "\r\n", content).partition(b"\r\n\r\n")
    return int(top.split()[1]), text.decode()


def test_a_token_is_asked_for_and_health_is_open(address: tuple[str, int]) -> None:
    assert request(address, "/v1/models")[0] == 200
    for wrong in ("", "Bearer wrong", "Basic secret", "secret"):
        assert request(address, "/v1/models", Authorization=wrong)[0] == 401
        assert request(address, "/v1/chat/completions", ASK, Authorization=wrong)[0] == 401
    assert request(address, "/health", Authorization="")[0] == 200


def test_a_name_that_leads_here_from_a_page_of_others_is_not_this_server(address: tuple[str, int]) -> None:
    assert request(address, "/v1/models", Host="evil.example")[0] == 421
    assert request(address, "/v1/models", Host="127.0.0.1:8000")[0] == 200
    for host in ("evil.example@127.0.0.1", "127.0.0.1/x", "127.0.0.1:80/x", "127.0.0.1#evil", "127.0.0.1?", "[::1]\\x"):
        assert request(address, "/v1/models", Host=host)[0] == 421
    for host in ("::1", "[::1]", "[::1]:8000"):  # with a token, any number
        assert request(address, "/v1/models", Host=host)[0] == 200


def test_a_body_has_a_size_whatever_it_says_of_itself(address: tuple[str, int]) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"
    assert b" 413 " in send(address, f"{head}Content-Length: 100001\r\n\r\n")
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    assert b" 413 " in send(address, f"{head}Transfer-Encoding: chunked\r\n\r\n", chunk * 10, pieces=10)


def test_a_request_with_two_lengths_is_refused_and_its_rest_is_no_further_request(address: tuple[str, int]) -> None:
    lines = "Host: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"
    rest = f"0\r\n\r\nGET /v1/models HTTP/1.1\r\n{lines}\r\n".encode()
    lengths = f"Content-Length: {len(rest)}\r\nTransfer-Encoding: chunked\r\n"
    answer = send(address, f"POST /v1/chat/completions HTTP/1.1\r\n{lines}{lengths}\r\n", rest)
    assert answer.count(b"HTTP/1.1 ") == 1 and b" 400 " in answer and b"not both" in answer


def test_who_sends_slowly_keeps_nothing_open(server: ChatServer) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"
    with serving(server, replace(PROTECTION, seconds=1)) as place:
        # Neither is whole when it is answered, or left.
        assert b" 408 " in send(place, f"{head}Content-Length: 1000\r\n\r\n", b" " * 20, pieces=20, pause=0.1)
        assert send(place, "GET /v1/models HTTP/1.1\r\nHost: ", b"127.0.0.1" * 9, pieces=30, pause=0.1) == b""
    with serving(server, PROTECTION) as place:
        assert request(place, "/v1/models")[0] == 200


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": {}},
        {"function": {"name": "a b"}},
        {"function": {"name": "look\x1b[31m"}},
        {"function": {"name": "look", "parameters": []}},
        {"function": {"name": "look", "parameters": {"type": "array"}}},
        {"function": {"name": "look", "parameters": {"properties": {"id": 3}}}},
        {"function": {"name": "look", "parameters": {"required": "id"}}},
        {"type": "shell", "function": {"name": "look"}},
    ],
)
def test_what_is_no_schema_of_a_tool_is_refused(address: tuple[str, int], tool: object) -> None:
    status, text = request(address, "/v1/chat/completions", {**ASK, "tools": [tool]})
    assert status == 400 and "tools.0" in text


def test_no_body_is_a_fault_of_the_server(address: tuple[str, int]) -> None:
    deep: object = []
    for _ in range(500):
        deep = [deep]
    bodies = [deep, {**ASK, "messages": [{"role": "user", "content": "\ud800"}]}, {**ASK, "tools": [{"function": {
        "name": "look", "parameters": {"properties": {"a": {"x": deep}}}}}]}, {**ASK, "seed": 10**300}]  # fmt: skip
    assert all(request(address, "/v1/chat/completions", body)[0] < 500 for body in bodies)
    raw = "[" * 50_000
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
    )
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    assert b" 400 " in send(address, head, raw.encode())


def damaged(adapter: Path, folder: Path, kind: str) -> Path:
    shutil.copytree(adapter, folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    first = sorted(tensors)[0]
    if kind == "no weights":
        tensors = {}
    elif kind == "not finite":
        tensors[first][0, 0] = float("nan")
    elif kind == "type":
        tensors = {name: tensor.to(torch.int32) for name, tensor in tensors.items()}
    elif kind == "shape":
        tensors = {name: torch.cat([tensor, tensor], -1 if "lora_A" in name else 0) for name, tensor in tensors.items()}
    elif kind == "rank":
        tensors[first] = tensors[first][:1]
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no weights", "has no weights"),
        ("not finite", "has weights that are not finite"),
        ("type", "has weights of type torch.int32"),
        ("shape", "is for another model"),
        ("rank", "and its tensors are of rank"),
    ],
)
def test_an_adapter_that_cannot_be_one_is_refused_in_one_message(
    address: tuple[str, int], adapter: Path, kind: str, words: str
) -> None:
    folder = damaged(adapter, adapter.parent / kind.replace(" ", "-"), kind)
    status, text = request(address, "/v1/load_lora_adapter", {"lora_name": kind.split()[0], "lora_path": str(folder)})
    assert status == 400 and words in text and "Traceback" not in text


def test_adapters_come_from_named_folders_alone(address: tuple[str, int], adapter: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(adapter, tmp_path / "elsewhere")
    (adapter.parent / "link").symlink_to(elsewhere)
    for folder in (elsewhere, adapter.parent / "link", f"{adapter.parent}/../elsewhere"):
        row = {"lora_name": "one", "lora_path": str(folder)}
        assert request(address, "/v1/load_lora_adapter", row)[0] == 403
    assert request(address, "/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter)})[0] == 200


@pytest.mark.parametrize("part", ["folder", "file", "parent"])
def test_a_link_that_is_swapped_in_while_an_adapter_is_read_loads_nothing_from_elsewhere(
    server: ChatServer, tiny: Path, adapter: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    elsewhere, root = Path(lora(tiny, tmp_path / "elsewhere/good", 3).folder), tmp_path / "root"
    assert adapter_digest(elsewhere) != adapter_digest(adapter)
    own = Path(shutil.copytree(adapter, root / "inner/good"))
    place = {"folder": own, "file": own / "adapter_model.safetensors", "parent": own.parent}[part]
    target = elsewhere.parent if part == "parent" else elsewhere / place.relative_to(own)
    aside, over = tmp_path / "aside", threading.Event()

    def swap() -> None:
        while not over.is_set():
            place.rename(aside)
            place.symlink_to(target)
            time.sleep(0.0005)
            place.unlink()
            aside.rename(place)
            time.sleep(0.0005)

    swapping = threading.Thread(target=swap)
    guarded, loaded = ChatServer(server.policy, "tiny", {}, folders=[root]), Counter[str]()
    swapping.start()
    try:
        for number in range(60):
            try:
                guarded.load_from_folders(str(number), own)
                loaded[guarded.adapters[str(number)].content] += 1
            except (HTTPException, UserError) as error:
                loaded[type(error).__name__] += 1
    finally:
        over.set()
        swapping.join()
    assert loaded[adapter_digest(elsewhere)] == 0 and loaded[adapter_digest(adapter)] > 0
    # What is used later is what was checked.
    shutil.rmtree(own)
    [name] = [*guarded.adapters][:1]
    assert adapter_digest(Path(guarded.folder_of(name))) == adapter_digest(adapter)
    guarded.unload(name)
    assert len([*(tmp_path / "copies").iterdir()]) == len(guarded.adapters)
    guarded.close()
    assert not [*(tmp_path / "copies").iterdir()]


def test_others_than_this_machine_need_a_token(monkeypatch: pytest.MonkeyPatch, captrain, tmp_path: Path) -> None:
    assert protection_of("127.0.0.1").token == ""
    for host in ("0.0.0.0", "::", "192.0.2.1", ""):
        with pytest.raises(UserError, match="anyone who reaches"):
            protection_of(host)
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert protection_of("0.0.0.0", "MY_TOKEN").token == "secret"
    status, _, err = captrain(tmp_path, "serve", "nowhere", "--host", "0.0.0.0")
    assert status == 2 and err.startswith("error: anyone who reaches 0.0.0.0 could use the model\n  remedy: ")
    status, _, err = captrain(tmp_path, "serve", "nowhere", "--token-env", "NO_SUCH")
    assert status == 2 and "NO_SUCH is not set" in err
    assert captrain(tmp_path, "serve", "nowhere", "--port", "70000")[0] == 2


def test_a_port_that_is_taken_is_one_message(captrain, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = captrain(tmp_path, "serve", "nowhere", "--port", str(port))  # said before a model is read
    assert status == 2
    assert err.startswith(f"error: captrain serve cannot listen on 127.0.0.1, port {port}: Address already in use\n")


def test_every_address_of_a_host_is_listened_on_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["127.0.0.1", "127.0.0.1", "192.0.2.1", "127.0.0.2"]  # one twice, and one that is not of this machine
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with ExitStack() as stack:
        names = [stack.enter_context(channel).getsockname() for channel in listen_all("many.example", 0)]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"] and names[0][1] == names[1][1] > 0
    with socket.create_server(("127.0.0.2", 0)) as taken, pytest.raises(UserError, match="already in use"):
        listen_all("many.example", taken.getsockname()[1])
    del entries[:2], entries[1:]
    with pytest.raises(UserError, match=r"cannot listen on many\.example, port 0: "):
        listen_all("many.example", 0)


@pytest.mark.needs("ipv6")
def test_the_address_of_all_takes_ipv4_too() -> None:
    [channel] = listen_all("::", 0)
    with channel, socket.create_connection(("127.0.0.1", channel.getsockname()[1]), timeout=PATIENCE):
        pass


def test_a_token_may_hold_letters_beyond_ascii(server: ChatServer) -> None:
    with serving(server, Protection(token="gehe\u00efm-\u65e5", hosts=("127.0.0.1",), seconds=1)) as place:
        head = "GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer "
        assert b" 200 " in send(place, f"{head}gehe\u00efm-\u65e5\r\n\r\n")
        for wrong in ("gehe?m-?", "geheim", "gehe\u00efm-?"):
            assert b" 401 " in send(place, f"{head}{wrong}\r\n\r\n")
    # One that the environment holds in Latin-1 is read with a surrogate.
    for token, forms in (("gehe\u00efm", ("latin-1", "utf-8")), ("gehe\udcefm", ("latin-1",))):
        with serving(server, Protection(token=token, hosts=("127.0.0.1",), seconds=1)) as place:
            for form in forms:
                with socket.create_connection(place, timeout=PATIENCE) as channel:
                    channel.sendall(f"{head}gehe\u00efm\r\n\r\n".encode(form))
                    assert b" 200 " in channel.recv(1 << 16)


def test_a_prompt_that_is_far_too_long_is_refused_unread_and_keeps_nobody_waiting(server: ChatServer) -> None:
    with serving(server, Protection(seconds=20)) as place:
        for content in ("a b 1 " * 320_000, "a b 1 " * 20_000):
            long = {**ASK, "messages": [{"role": "user", "content": content}]}
            outcome: list[int] = []
            asking = threading.Thread(
                target=lambda body=long, into=outcome: into.append(request(place, "/v1/chat/completions", body)[0])
            )
            asking.start()
            began = time.process_time()
            while asking.is_alive():
                assert request(place, "/health")[0] == 200
            assert outcome == [400] and time.process_time() - began < 5
    chat = server.policy.chat([])
    assert chat._encoded.cache_info().currsize <= chat._encoded.cache_info().maxsize == 2048  # type: ignore[operator]


def test_a_server_keeps_the_renderers_of_few_sets_of_tools(server: ChatServer) -> None:
    for number in range(40):
        server.policy.chat([{"type": "function", "function": {"name": f"tool_{number}"}}])
    assert server.policy._chats.cache_info().currsize == 16


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEAD, id="half of a head"),
        pytest.param(HEAD + b"Content-Length: 100\r\n\r\n{", id="a body's beginning"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", id="a chunk"),
        pytest.param(MODELS, id="a request, and nothing after it"),
        pytest.param(MODELS + HEAD + b"Content-Length: 100\r\n\r\n{", id="a request, and another's beginning"),
    ],
)
def test_connections_that_send_slowly_take_no_place_from_one_that_asks(part: bytes, server: ChatServer) -> None:
    with serving(server, Protection(seconds=20), 20) as place, ExitStack() as stack:
        for _ in range(60):
            channel = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
            with suppress(OSError):  # one that has been closed by then
                channel.sendall(part)
        time.sleep(0.5)
        assert [request(place, "/v1/models")[0] for _ in range(5)] == [200] * 5


def test_the_places_of_idle_connections_free_themselves(server: ChatServer) -> None:
    with serving(server, Protection(seconds=1), 20) as place, ExitStack() as stack:
        channels = [stack.enter_context(socket.create_connection(place, timeout=PATIENCE)) for _ in range(20)]
        assert [channel.recv(1) for channel in channels] == [b""] * 20
        assert request(place, "/v1/models")[0] == 200


def test_a_connection_that_is_answered_keeps_its_place_however_long_it_takes() -> None:
    begun: list[Scope] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope)
        await asyncio.sleep(1.5)
        await Response("done")(scope, receive, send)

    with running(slow, Protection(seconds=1), 20) as runner, ExitStack() as stack:
        asking = stack.enter_context(socket.create_connection(address_of(runner), timeout=PATIENCE))
        asking.sendall(MODELS + MODELS)  # The second one waits for the first one's answer.
        for number in (1, 2):
            until(lambda number=number: len(begun) == number)
            for _ in range(30):
                stack.enter_context(socket.create_connection(address_of(runner), timeout=PATIENCE))
            answer = b""
            while not answer.endswith(b"done"):
                answer += (part := asking.recv(1 << 16))
                assert part


@pytest.mark.parametrize("after", [b"", b"Connection: close\r\n"], ids=["kept alive", "closed after it"])
@pytest.mark.parametrize("parts", [1, 50], ids=["whole", "in parts"])
def test_an_answer_that_nobody_takes_is_given_up(parts: int, after: bytes) -> None:
    begun: list[Scope] = []

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope)
        chunks = [b"x" * 60_000] * parts
        answer = StreamingResponse(iter(chunks)) if parts > 1 else Response(chunks[0])
        await answer(scope, receive, send)

    with running(large, Protection(seconds=1)) as runner, socket.socket() as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        channel.connect(address_of(runner))
        channel.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + after + b"\r\n")
        until(lambda: begun)
        until(lambda: not runner.server_state.connections)


@pytest.mark.parametrize(
    ("size", "streams", "after"),
    [
        pytest.param(400_000, False, b"", id="whole, kept alive"),
        pytest.param(400_000, False, b"Connection: close\r\n", id="whole, closed after it"),
        pytest.param(800_000, True, b"", id="a stream"),
    ],
)
def test_an_answer_that_is_taken_slowly_and_steadily_is_taken_whole(size: int, streams: bool, after: bytes) -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        content = b"x" * size
        await (StreamingResponse(iter([content])) if streams else Response(content))(scope, receive, send)

    with running(large, Protection(seconds=1), 3) as runner, ExitStack() as stack, socket.socket() as channel:
        channel.settimeout(PATIENCE)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        channel.connect(address_of(runner))
        channel.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + after + b"\r\n")
        answer = channel.recv(4096)
        for _ in range(10):  # They get no place of one that is answered.
            stack.enter_context(socket.create_connection(address_of(runner), timeout=PATIENCE))
        while answer.count(b"x") < size:
            time.sleep(0.02)  # some 200 kB in a second, and all in more than an answer that is left is given
            answer += (part := channel.recv(4096))
            assert part


def test_an_adapter_s_path_that_is_none_and_one_to_a_device_are_refused(server: ChatServer, adapter: Path) -> None:
    linked = adapter.parent / "linked"
    shutil.copytree(adapter, linked)
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to("/dev/zero")
    with serving(server, Protection(seconds=20)) as place:
        for path in ("a\0b", "x" * 5000, f"{adapter.parent}/{'y' * 300}", str(linked)):
            status, text = request(place, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            assert status in (400, 403) and "Traceback" not in text
        assert "no regular file" in text


@pytest.fixture
def slow(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make each step of the engine take 20 ms, and completions end with their last token alone; return the rows of
    each step."""
    steps, forward = list[int](), DenseDecoder.forward

    def wait(decoder: DenseDecoder, ids: torch.Tensor, due: Sequence[int]) -> torch.Tensor:
        steps.append(len(due))
        time.sleep(0.02)
        return forward(decoder, ids, due)

    monkeypatch.setattr(DenseDecoder, "forward", wait)
    monkeypatch.setattr(LocalPolicy, "ends", frozenset())
    return steps


def asking(n: int = 1, tokens: int = 2, temperature: float = 1.0) -> bytes:
    """A request for completions."""
    body = json.dumps({**ASK, "n": n, "max_tokens": tokens, "temperature": temperature, "seed": 1}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


def answer_of(channel: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and content of the next answer."""
    answer = HTTPResponse(channel)
    answer.begin()
    return answer.status, dict(answer.getheaders()), json.loads(answer.read())


def close(channel: socket.socket) -> None:
    channel.close()


def reset(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    channel.close()


def ask_further_and_close(channel: socket.socket) -> None:
    """Hide the end of the connection behind a further request."""
    channel.sendall(asking(4, 400))
    time.sleep(0.02)
    channel.close()


def close_its_side_and_wait(channel: socket.socket) -> None:
    """Be gone only after the server has learnt that the client still waits."""
    channel.shutdown(socket.SHUT_WR)
    threading.Timer(0.5, channel.close).start()


@pytest.mark.parametrize("leave", [close, reset, ask_further_and_close, close_its_side_and_wait])
def test_requests_of_clients_that_are_gone_are_not_computed(
    server: ChatServer, slow: list[int], leave: Callable[[socket.socket], None]
) -> None:
    with serving(server, Protection(seconds=20)) as place, socket.create_connection(place, PATIENCE) as honest:
        for number in range(20):
            channel = socket.create_connection(place, timeout=PATIENCE)
            channel.sendall(asking(4, 400, 2 - number / 100))  # 8 s each
            time.sleep(0.01)
            leave(channel)
        begun = time.monotonic()
        honest.sendall(asking())
        assert answer_of(honest)[0] == 200 and time.monotonic() - begun < 2
        until(lambda: not server.sampler._waiting)
        before = len(slow)
        time.sleep(0.5)
        assert len(slow) - before < 25 and time.monotonic() - begun < 8


def test_large_bodies_are_parsed_one_at_a_time_and_hold_no_small_request_up() -> None:
    parsed: list[int] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        parsed.append(len((await receive())["body"]))
        time.sleep(parsed[-1] / 1_000_000)
        await Response("done")(scope, receive, send)

    protection = Protection(seconds=20)
    with running(Protected(slow, protection), protection) as runner, ExitStack() as stack:
        channels = list[socket.socket]()
        for size in [200_000] * 40 + [2]:
            channels.append(stack.enter_context(socket.create_connection(address_of(runner), timeout=PATIENCE)))
            head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n"
            channels[-1].sendall(head.encode() + b" " * size)
        answer = HTTPResponse(channels[-1])
        answer.begin()
        assert answer.status == 200 and len(parsed) < 10
        stack.close()
        begun = len(parsed)
        time.sleep(2)
        assert len(parsed) - begun < 5  # the others are gone


@pytest.mark.parametrize("tokens", [2, 60, 150], ids=["at once", "in a second", "in some seconds"])
def test_a_client_that_closes_its_side_after_its_request_is_answered(
    server: ChatServer, slow: list[int], tokens: int
) -> None:
    with serving(server, Protection(seconds=20)) as place, socket.create_connection(place, PATIENCE) as channel:
        channel.sendall(asking(tokens=tokens) + asking(tokens=2))
        channel.shutdown(socket.SHUT_WR)
        answers = b""
        while part := channel.recv(1 << 16):
            answers += part
    assert answers.startswith(b"HTTP/1.1 200 OK\r\n") and answers.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert len(slow) >= tokens


def test_a_flood_from_one_address_delays_others_and_small_requests_by_one_batch(
    server: ChatServer, slow: list[int]
) -> None:
    with serving(server, Protection(seconds=20)) as place, ExitStack() as stack:
        for number in range(20):
            channel = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
            channel.sendall(asking(8, 12, 2 - number / 100))  # 0.24 s each
        time.sleep(0.1)
        for source, n, tokens in (("127.0.0.1", 1, 2), ("127.0.0.2", 8, 12)):
            other = stack.enter_context(socket.create_connection(place, PATIENCE, (source, 0)))
            begun = time.monotonic()
            other.sendall(asking(n, tokens))
            assert answer_of(other)[0] == 200 and time.monotonic() - begun < 2


def test_a_full_queue_refuses_the_largest_request_and_says_when_to_ask_again(
    server: ChatServer, slow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "WAITING", 3)
    with serving(server, Protection(seconds=20)) as place, ExitStack() as stack:
        channels = [stack.enter_context(socket.create_connection(place, timeout=PATIENCE)) for _ in range(6)]
        for number, channel in enumerate(channels):
            channel.sendall(asking(1 if number == 4 else 8, 12, 2 - number / 100))
            time.sleep(0.02)
        answers = [answer_of(channel) for channel in channels]
    # The first is sampled at once, three wait, and a smaller one takes the place of the last.
    assert [status for status, *_ in answers] == [200, 200, 200, 503, 200, 503]
    _, headers, content = answers[3]
    assert headers["retry-after"] == "1" and "3 requests are waiting, which is the max" in content["error"]["message"]
