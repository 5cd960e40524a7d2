"""The embedded server, over HTTP and through the real client."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import uvicorn
from support.adapters import save_adapter
from support.servers import STAND_IN
from support.stand_in import TokenServer, main, token_routes
from support.waiting import PATIENCE, until

from captrain.agents.local import LocalPolicy
from captrain.agents.openai import OpenAIPolicy
from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file
from captrain.serving.endpoint import ChatServer
from captrain.serving.server import application

NAME = "tiny"
ASK = [{"role": "system", "content": "Talk."}, {"role": "user", "content": "Say 1."}]


def local(model: Path, temperature: float = 1.0) -> LocalPolicy:
    return LocalPolicy(model, batch=16, temperature=temperature, max_turns=4, max_tokens=12)


@contextmanager
def serving(server: ChatServer) -> Iterator[str]:
    """The URL of a running server."""
    app = token_routes(server) if isinstance(server, TokenServer) else application(server)
    runner = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}/v1"
    runner.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tiny, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def url(tiny: Path) -> Iterator[str]:
    with serving(ChatServer(local(tiny), NAME, {})) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    anything: Any = {"model": NAME, "messages": ASK, "max_tokens": 12, **more}
    return client.chat.completions.create(**anything)


def core(answer: Any) -> list[Any]:
    """Return what a request decides of its answer."""
    return [(c.index, c.message.content, c.message.tool_calls, c.finish_reason) for c in answer.choices]


def test_64_clients_at_once_get_what_each_would_get_alone(client: openai.OpenAI) -> None:
    asked = [{"seed": seed, "messages": [*ASK[:1], {"role": "user", "content": f"Say {seed}."}]} for seed in range(64)]
    alone = [core(ask(client, **one)) for one in asked]
    with ThreadPoolExecutor(64) as threads:
        together = [core(answer) for answer in threads.map(lambda one: ask(client, **one), asked)]
    assert together == alone
    assert len({str(one) for one in alone}) > 32


@pytest.mark.parametrize("kind", ["letters", "servicedesk"])
def test_a_served_agent_plays_as_the_same_agent_in_process(
    kind: str, tiny: Path, url: str, letters: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    target = load_file(letters()) if kind == "letters" else CheckedEnvironment(ServiceDesk(), "desk", "code")
    served = OpenAIPolicy(name=NAME, temperature=0.0, max_turns=4, max_tokens=12)

    def dialogues(policy: Any) -> dict[str, list[Any]]:
        plays = [RunningEpisode(task.id, target.open(task)) for task in target.tasks("training", 6)]
        return {play.key: play.messages for play in policy.play(plays)}

    # A special token that the model itself writes comes back to the server as text, and is one no longer.
    inside, over_http = dialogues(local(tiny, temperature=0.0)), dialogues(served)
    plain = [key for key, messages in inside.items() if "<|" not in str(messages)]
    assert len(plain) >= 2 and [over_http[key] for key in plain] == [inside[key] for key in plain]


def test_equal_seeds_give_equal_answers_and_each_choice_its_own(client: openai.OpenAI) -> None:
    three = core(ask(client, seed=7, n=3))
    assert three == core(ask(client, seed=7, n=3))
    assert three[0] == core(ask(client, seed=7))[0]
    assert len({str(one[1]) for one in three}) > 1
    assert core(ask(client)) != core(ask(client)) or core(ask(client)) != core(ask(client))


def test_log_probabilities_and_token_ids_are_the_engines(client: openai.OpenAI, tiny: Path) -> None:
    answer = ask(client, seed=3, logprobs=True, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    policy = local(tiny)
    prompt = policy.chat([]).prompt(ASK)
    assert answer.prompt_token_ids == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)

    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    with torch.inference_mode():
        logits = loaded(torch.tensor([prompt + choice.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected, abs=1e-6)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client, seed=5, n=2)
    texts, ends, used = {0: "", 1: ""}, {}, None
    for chunk in ask(client, seed=5, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        used = chunk.usage or used
    assert texts == {choice.index: choice.message.content or "" for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert used is not None and used.total_tokens == whole.usage.total_tokens


def test_a_dialogue_with_calls_is_read_as_the_template_writes_it(client: openai.OpenAI, tiny: Path) -> None:
    tools = ServiceDesk().tools
    call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "#12"}'}}
    told = [*ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **call}]}]
    told.append({"role": "tool", "tool_call_id": "a", "content": "{}"})
    answer = ask(client, messages=told, tools=tools, seed=1, extra_body={"return_token_ids": True})
    chat = local(tiny).chat(tools)
    made = {"type": "function", "function": {"name": "get_order", "arguments": {"order_id": "#12"}}}
    turn = chat.turn({"role": "assistant", "content": "", "tool_calls": [made]})
    assert answer.prompt_token_ids == chat.prompt(ASK) + turn + chat.suffix([{"role": "tool", "content": "{}"}])


def test_adapters_come_and_go_by_name(tiny: Path, adapter: Path) -> None:
    with serving(ChatServer(local(tiny), NAME, {})) as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        plain = core(ask(client, seed=2))
        with pytest.raises(openai.NotFoundError, match="there is no model skilled; there are tiny"):
            ask(client, model="skilled")
        load = {"lora_name": "skilled", "lora_path": str(adapter)}
        client.post("/load_lora_adapter", body=load, cast_to=object)
        assert [model.id for model in client.models.list()] == [NAME, "skilled"]
        assert core(ask(client, seed=2, model="skilled")) != plain
        assert core(ask(client, seed=2)) == plain
        with pytest.raises(openai.BadRequestError, match="there is a model skilled already"):
            client.post("/load_lora_adapter", body=load, cast_to=object)
        client.post("/unload_lora_adapter", body={"lora_name": "skilled"}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            ask(client, model="skilled")
        with pytest.raises(openai.NotFoundError, match="no adapter"):
            client.post("/unload_lora_adapter", body={"lora_name": "skilled"}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="is missing"):
            client.post("/load_lora_adapter", body={**load, "lora_path": str(tiny)}, cast_to=object)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "order " * 9000}]}, "context length"),
        ({"temperature": 3.0}, "temperature"),
        ({"n": 0}, "n: "),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0.5}, "does not support top_p"),
        ({"stop": ["x"]}, "does not support stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "does not support response_format"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(client: openai.OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **change)
    assert says in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"model": "tiny"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_a_400(client: openai.OpenAI, body: bytes) -> None:
    answer = client._client.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["{", "null", "[1]", "", '{"a": NaN}', "{" * 300])
def test_malformed_arguments_in_a_dialogue_are_no_fault_of_the_server(client: openai.OpenAI, arguments: str) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    told = [*ASK, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert ask(client, messages=told, seed=1).choices


def test_settings_at_which_nothing_changes_are_taken(client: openai.OpenAI) -> None:
    plain = core(ask(client, seed=1))
    assert core(ask(client, seed=1, top_p=1.0, presence_penalty=0.0, user="me", stop=[])) == plain


def test_content_in_parts_is_their_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " 1."}]
    assert core(ask(client, seed=1, messages=[ASK[0], {"role": "user", "content": parts}])) == core(ask(client, seed=1))


def test_a_model_that_fails_is_an_error_of_the_server_and_it_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = local(tiny)
    with serving(ChatServer(policy, NAME, {})) as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)

        def broken(adapter: str) -> Any:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(policy, "decoder", broken)
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client)
            assert json.loads(caught.value.response.text)["error"]["message"] == "RuntimeError: out of memory"
        assert ask(client).choices


def command(tiny: Path, *more: str) -> subprocess.Popen[str]:
    """The command, as policy vllm gives it."""
    line = [sys.executable, STAND_IN, str(tiny), "--port", "0", *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_takes_vllms_arguments_says_when_it_is_ready_and_ends_after_what_it_has_begun(
    tiny: Path, adapter: Path
) -> None:
    given = ["--served-model-name", NAME, "--enable-lora", "--lora-modules", f"skilled={adapter}"]
    given += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    process = command(tiny, *given, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    assert process.stdout is not None
    *_, address = process.stdout.readline().split()
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    listed: Any = list(client.models.list())
    assert [(one.id, one.root) for one in listed] == [(NAME, str(tiny)), ("skilled", str(adapter))]
    with ThreadPoolExecutor(3) as threads:
        server = psutil.Process(process.pid)
        idle = server.cpu_times().user
        begun = [threads.submit(ask, client, max_tokens=60, seed=seed, n=128) for seed in range(3)]
        until(lambda: server.cpu_times().user > idle + 0.1)  # more than the requests take to be read
        process.send_signal(signal.SIGTERM)
        assert [len(request.result(PATIENCE).choices) for request in begun] == [128] * 3
    assert process.wait(PATIENCE) in (0, -signal.SIGTERM)


def test_a_server_that_is_told_to_stop_ends_within_three_seconds(tiny: Path) -> None:
    process = command(tiny, "--served-model-name", NAME)
    assert process.stdout is not None and process.stderr is not None
    *_, address = process.stdout.readline().split()
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(ask, client, max_tokens=1000, temperature=seed / 9, n=128) for seed in range(9)]
        server = psutil.Process(process.pid)
        idle = server.cpu_times().user
        until(lambda: server.cpu_times().user > idle + 1)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM and time.monotonic() - begun < 4
        refused = [request.exception(PATIENCE) for request in waiting]
    told = [str(error) for error in refused if error is not None]
    assert told and all("503 - this server is stopping: ask again" in one for one in told)
    assert "Traceback" not in process.stderr.read()


def test_a_server_that_stops_answers_whoever_has_not_sent_all_and_its_log_has_no_traceback(tiny: Path) -> None:
    process = command(tiny, "--served-model-name", NAME)
    assert process.stdout is not None and process.stderr is not None
    *_, address = process.stdout.readline().split()
    place = urlsplit(address)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 1000\r\n"
    with socket.create_connection((str(place.hostname), place.port or 0), timeout=PATIENCE) as client:
        client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in client.recv(1000)  # it has the head, and waits for the rest
        client.sendall(b"{")
        process.send_signal(signal.SIGTERM)
        assert b"503" in client.recv(1000)
    process.wait(PATIENCE)
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--no-such-argument"], "unrecognized arguments: --no-such-argument"),
        (["--lora-modules", "skilled"], "invalid pair value: 'skilled'"),
        (["--generation-config", "auto"], "invalid choice: 'auto'"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(
    tiny: Path, given: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [STAND_IN, str(tiny), *given])
    with pytest.raises(SystemExit):
        main()
    assert says in capsys.readouterr().err


def continuation(**more: Any) -> dict[str, Any]:
    request = {"model": NAME, "prompt": [1, 2], "max_tokens": 1, "seed": 0, "logprobs": 1, "return_token_ids": True}
    return {**request, **more}


@pytest.mark.parametrize("more", [{"prompt": [1, 10**6]}, {"allowed_token_ids": [10**6]}, {"allowed_token_ids": [-1]}])
def test_tokens_that_the_model_has_not_are_refused_and_others_answered_afterwards(tiny: Path, more: Any) -> None:
    with serving(TokenServer(local(tiny), NAME, {})) as url:
        refusal = httpx.post(f"{url}/completions", json=continuation(**more), timeout=PATIENCE)
        assert refusal.status_code == 400 and "there is no token" in refusal.text
        answer = httpx.post(f"{url}/completions", json=continuation(allowed_token_ids=[3, 4]), timeout=PATIENCE)
        assert answer.status_code == 200


def test_a_closed_question_that_fails_is_answered_and_ends_no_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = local(tiny)
    with monkeypatch.context() as patch, serving(TokenServer(policy, NAME, {})) as address:
        patch.setattr(policy, "scores", lambda *_: 1 / 0)
        failure = httpx.post(f"{address}/completions", json=continuation(allowed_token_ids=[3]), timeout=PATIENCE)
        assert failure.status_code == 500 and "ZeroDivisionError" in failure.text
        assert httpx.post(f"{address}/completions", json=continuation(), timeout=PATIENCE).status_code == 200
