"""One URL for the routed agent: each conversation is answered by the adapter of its route, which the answer names."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pandas as pd
import pytest
from starlette.testclient import TestClient
from support.adapters import save_adapter
from support.finished import Captrain
from support.servers import policy, real_machine, replicas

from captrain import play
from captrain.agents.local import LocalPolicy
from captrain.agents.openai import OpenAIPolicy
from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.cli.serve import _routed_agent
from captrain.models import Adapter, Mixture, MixtureParts, adapter_digest, load_module, save_mixture
from captrain.routing.router import opening
from captrain.run import load_spec
from captrain.serving.endpoint import ChatServer
from captrain.serving.protection import Protection
from captrain.serving.routed import HEADER, RoutedEndpoint
from captrain.serving.server import application

INDEX = Path("results/adapters/index.json")
ASK = [{"role": "user", "content": "Say 1."}]
OTHER = [{"role": "user", "content": "Say 2."}]
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tiny, tmp_path_factory.mktemp("adapter"))


def agent(client: httpx2.AsyncClient, adapter: Path, protection: Protection) -> TestClient:
    endpoint = RoutedEndpoint(
        client, lambda messages: "copying" if "2" in messages[0]["content"] else "base",
        lambda arm: None if arm == "base" else adapter, "captrain", "tiny",
    )  # fmt: skip
    return TestClient(endpoint.application(protection), base_url="http://localhost")


@pytest.fixture
def routed(tiny: Path, adapter: Path) -> Iterator[Callable[..., TestClient]]:
    with contextlib.ExitStack() as stack:

        def make(protection: Protection | None = None) -> TestClient:
            policy = LocalPolicy(tiny, batch=4, temperature=1.0, max_turns=4, max_tokens=12)
            app = application(ChatServer(policy, "tiny", {}))
            client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost/v1/")
            return stack.enter_context(agent(client, adapter, protection or Protection()))

        yield make


def complete(client: TestClient, messages: Any = ASK, **more: Any) -> httpx2.Response:
    body = {"model": "captrain", "messages": messages, "temperature": 0, "max_tokens": 4, "seed": 1, **more}
    return client.post("/v1/chat/completions", json=body)


def test_each_conversation_is_answered_by_the_adapter_that_the_header_names(
    routed: Callable[..., TestClient], tiny: Path, adapter: Path
) -> None:
    client = routed()
    first, second = complete(client), complete(client, OTHER, tools=[TOOL])
    assert (first.headers[HEADER], second.headers[HEADER]) == ("base", "copying")
    assert (first.json()["model"], second.json()["model"]) == ("tiny", "copying")
    policy = LocalPolicy(tiny, batch=4, temperature=1.0, max_turns=4, max_tokens=12)
    with TestClient(application(ChatServer(policy, "tiny", {"copying": adapter}))) as plain:
        body = {"model": "copying", "messages": OTHER, "temperature": 0, "max_tokens": 4, "seed": 1, "tools": [TOOL]}
        direct = plain.post("/v1/chat/completions", json=body).json()
    assert second.json()["choices"] == direct["choices"] and second.json()["usage"] == direct["usage"]


def test_streams_are_passed_on_and_models_and_health_are_told(routed: Callable[..., TestClient]) -> None:
    client = routed()
    answer = complete(client, OTHER, stream=True)
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert answer.headers[HEADER] == "copying" and answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]" and json.loads(events[0][6:])["object"] == "chat.completion.chunk"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["captrain"]
    assert client.get("/health").status_code == 200


def test_the_guards_of_the_server_stand_before_it(routed: Callable[..., TestClient]) -> None:
    client = routed(Protection(token="secret", hosts=("localhost",), most=10_000))
    assert complete(client).status_code == 401
    client.headers["authorization"] = "Bearer secret"
    assert complete(client).status_code == 200
    assert complete(client, [{"role": "user", "content": "x" * 20_000}]).status_code == 413
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": "hello"}, 400, "messages: "), ({"messages": ASK, "model": "base"}, 404, "there is captrain"),
        ([1], 400, "body: "),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(
    routed: Callable[..., TestClient], body: Any, status: int, said: str
) -> None:
    answer = routed().post("/v1/chat/completions", json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_json_is_read_whatever_it_is_called(routed: Callable[..., TestClient]) -> None:
    client = routed()
    body = json.dumps({"messages": ASK, "max_tokens": 4})
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    assert client.post("/v1/chat/completions", content="{").status_code == 400


@pytest.mark.parametrize(
    ("more", "said"), [("NaN", "body: "), ('"\\ud800"', "body: "), ('1, "model": "\\ud800"', "there is no model")]
)
def test_what_json_for_the_server_behind_it_cannot_hold_is_refused(
    routed: Callable[..., TestClient], more: str, said: str
) -> None:
    body = f'{{"messages": {json.dumps(ASK)}, "user": {more}}}'
    answer = routed().post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]


def test_a_page_of_others_may_not_ask_and_one_of_this_machine_may(routed: Callable[..., TestClient]) -> None:
    client, content = routed(Protection(hosts=("localhost", "::1"))), json.dumps({"messages": ASK, "max_tokens": 4})
    for origin, status in {
        "http://evil.example": 403, "https://localhost.evil.example:8000": 403, "null": 403, "http://a@localhost": 403,
        "http://localhost:3000": 200, "http://LOCALHOST": 200, "http://[::1]:3000": 200,
    }.items():  # fmt: skip
        headers = {"content-type": "text/plain", "origin": origin}
        assert client.post("/v1/chat/completions", content=content, headers=headers).status_code == status, origin


def test_a_server_behind_it_that_is_down_or_loads_no_adapter_is_told(adapter: Path) -> None:
    def behind(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("models"):
            return httpx2.Response(200, json={"data": [{"id": "tiny"}]})
        if request.url.path.endswith("load_lora_adapter"):
            return httpx2.Response(404, text="not enabled")
        raise httpx2.ConnectError("refused")

    upstream = httpx2.AsyncClient(transport=httpx2.MockTransport(behind), base_url="http://localhost/v1/")
    with agent(upstream, adapter, Protection()) as client:
        down, unloaded = complete(client), complete(client, OTHER)
    assert down.status_code == 502 and "does not answer (ConnectError: refused)" in down.text
    assert unloaded.status_code == 502 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in unloaded.text


def test_every_test_task_is_answered_by_the_adapter_of_the_table_of_routes(
    smoke: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(smoke)
    spec, benchmark = load_spec(Path("results/spec.yaml")), None
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    routes = pd.read_csv("results/routes/routes.csv").set_index("task")["chosen"]
    endpoint = _routed_agent(Path("artifacts/base"), "base", "trace", "", "")
    with TestClient(endpoint.application(Protection()), base_url="http://localhost") as client:
        given = {}
        for task in evaluation_tasks(benchmark, spec.evaluation):
            answer = complete(client, benchmark.open(task).messages, max_tokens=1, tools=benchmark.tools)
            assert answer.status_code == 200, answer.text
            given[task.id] = answer.headers[HEADER]
    assert given == routes.to_dict() and len({*given.values()}) > 1


@pytest.fixture(scope="module")
def with_mixture(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, with a row `mixture` over its adapters."""
    folder = shutil.copytree(smoke, tmp_path_factory.mktemp("mixture") / "run", symlinks=True)
    index = {name: entry for name, entry in json.loads((folder / INDEX).read_text()).items() if entry["path"]}
    parts = {name: Adapter(str(folder / entry["path"]), entry["digest"]) for name, entry in index.items()}
    mixture = Mixture(load_module(folder / "artifacts/base", "float64"), MixtureParts(parts, "global"))
    save_mixture(mixture, folder / "artifacts/mixture/gates")
    content = adapter_digest(folder / "artifacts/mixture/gates")
    row = {"digest": content, "path": "artifacts/mixture/gates", "rollouts": 8, "discarded": 0}
    (folder / "results/mixture/index.json").write_text(json.dumps({"mixture": row}))
    return folder


def test_the_mixture_answers_every_conversation_when_its_row_is_served(with_mixture: Path) -> None:
    spec = load_spec(with_mixture / "results/spec.yaml")
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    asked = [benchmark.open(task).messages for task in benchmark.tasks("test", 3)]
    body = {"temperature": 0, "max_tokens": 4, "seed": 1, "tools": benchmark.tools, "logprobs": True}
    command = [sys.executable, "-c", "from captrain.cli.app import main; main()", "serve", "--port", "0"]
    command += ["--route", "--row", "mixture"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=with_mixture) as process:
        try:
            assert process.stdout is not None
            *_, address = process.stdout.readline().split()
            with httpx2.Client(base_url=f"{address}/", timeout=120) as client:
                answers = [client.post("chat/completions", json={**body, "messages": messages}) for messages in asked]
        finally:
            process.terminate()
    assert [answer.headers[HEADER] for answer in answers] == ["mixture"] * 3
    acting = LocalPolicy(with_mixture / "artifacts/base", batch=4, temperature=1.0, max_turns=4, max_tokens=12)
    server = ChatServer(acting, "base", {"mixture": with_mixture / "artifacts/mixture/gates"})
    with TestClient(application(server), base_url="http://localhost") as plain:
        for messages, answer in zip(asked, answers, strict=True):
            direct, base = (complete(plain, messages, **body, model=model).json() for model in ("mixture", "base"))
            assert answer.json()["choices"] == direct["choices"]
            assert answer.json()["choices"][0]["logprobs"] != base["choices"][0]["logprobs"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--row", "mixture"], "need --route"),
        (["--route", "--row", "mixtur"], "did you mean mixture?"),
        (["--route", "--row", "base"], "no row base has one adapter"),
        (["--route", "--row", "single"], "no single adapter for row single"),
        (["--route", "--row", "gepa"], "no single adapter for row gepa"),
        (["--route", "--row", "mixture", "--upstream", "http://localhost:1/v1"], "vLLM cannot serve row mixture"),
    ],
)
def test_a_row_that_cannot_be_served_is_refused(
    with_mixture: Path, captrain: Captrain, arguments: list[str], said: str
) -> None:
    status, _, err = captrain(with_mixture, "serve", "--port", "0", *arguments)
    assert status == 2 and said in err and "remedy: " in err


def test_the_command_says_which_adapter_a_first_message_would_be_given_and_why(
    smoke: Path, tmp_path: Path, captrain: Captrain
) -> None:
    spec = load_spec(smoke / "results/spec.yaml")
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    routes = pd.read_csv(smoke / "results/routes/routes.csv").set_index("task")["chosen"].to_dict()
    tasks = {routes[task.id]: task for task in evaluation_tasks(benchmark, spec.evaluation)}  # one of each route
    for chosen, task in tasks.items():
        status, out, err = captrain(smoke, "route", opening(benchmark.open(task).messages))
        assert (status, out.splitlines()[0]) == (0, chosen), err
        assert "the nearest known task is of " in out.replace("\n", " ")
    assert len(tasks) > 1
    status, _, err = captrain(tmp_path, "route", "Hello.")
    assert status == 2 and "remedy: " in err


@pytest.mark.needs("vllm")
def test_in_front_of_a_real_vllm_every_task_has_the_adapter_of_its_route_and_rates_are_those_of_the_table(
    smoke: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(smoke)
    spec = load_spec(Path("results/spec.yaml"))
    benchmark, settings = load_benchmark(spec.benchmark, spec.machine), spec.policy.settings()
    sampling = {"temperature": 1.0, "max_turns": int(str(settings["max_turns"])), "max_tokens": 32}
    parser = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    served = policy(Path("artifacts/base"), real_machine(), dtype="float32", arguments=parser, **sampling)
    [replica] = replicas(served)
    replica.ready()
    command = [sys.executable, "-c", "from captrain.cli.app import main; main()", "serve", "--route", "--port", "0"]
    command += ["--upstream", str(replica.client.base_url), "--served-model-name", replica.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            *_, address = process.stdout.readline().split()
            tasks = evaluation_tasks(benchmark, spec.evaluation)
            with httpx2.Client(base_url=f"{address}/", timeout=120) as client:
                body = {"model": "captrain", "max_tokens": 1, "seed": 1, "tools": benchmark.tools}
                answers = [
                    client.post("chat/completions", json={**body, "messages": benchmark.open(task).messages})
                    for task in tasks
                ]
            assert {answer.status_code for answer in answers} == {200}, answers[0].text
            routes = pd.read_csv("results/routes/routes.csv").set_index("task")["chosen"].to_dict()
            assert [answer.headers[HEADER] for answer in answers] == [routes[task.id] for task in tasks]
            monkeypatch.setenv("ROUTED_URL", address)
            monkeypatch.setenv("ROUTED_KEY", "none")
            agent = OpenAIPolicy(name="captrain", endpoint="ROUTED_URL", key="ROUTED_KEY", **sampling)
            rollouts = play(benchmark.environment, agent, tasks=len(tasks), split="test")
        finally:
            process.terminate()
            served.close()
    assert {rollout.outcome for rollout in rollouts} <= {"passed", "failed"}
    rate = sum(rollout.outcome == "passed" for rollout in rollouts) / len(tasks)
    expected = pd.read_csv("results/evaluation/main.csv").set_index("method")["pass_rate"].to_dict()["trace"]
    spread = max(0.05, expected * (1 - expected))
    assert abs(rate - expected) < 4 * (spread * 1.5 / len(tasks)) ** 0.5  # the table's is of two trials
