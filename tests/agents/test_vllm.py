"""Policy vllm and its servers: real processes, with captrain's own server in place of vLLM."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.adapters import lora, save_adapter
from support.needs import further
from support.servers import SETTINGS, machine, policy, replicas, servers
from support.taught import learn
from support.training import GRPO, POLICY, inside, passport
from support.waiting import until

from captrain.agents.collection import collect, summarise_rollouts
from captrain.agents.local import LocalPolicy
from captrain.agents.policy import ClosedQuestion
from captrain.agents.servers import FRUITLESS, VllmServer, fleets, server_environment
from captrain.agents.vllm import VLLMPolicy
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file
from captrain.errors import UserError
from captrain.models.endpoint import TokenChoice, TokenCompletion, TokenScores, TransientFault
from captrain.models.lora import Adapter, adapter_digest, compose
from captrain.run import compose_spec
from captrain.run.components import Component
from captrain.run.machine import VLLM
from captrain.training.jobs import EnvironmentFile, Job, TrainingEnvironment
from captrain.training.runs import train
from captrain.training.workspace import publish_adapters

Letters = Callable[..., Path]
YES = {"role": "assistant", "content": "yes"}


def local(model: Path, **settings: Any) -> LocalPolicy:
    return LocalPolicy(model, 8, **{**SETTINGS, **settings})


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put logs into a folder; at the end no server runs."""
    with inside(tmp_path_factory.mktemp("place")) as folder:
        yield folder
        for fleet in fleets.values():
            fleet.close()
        assert servers() == []


@pytest.fixture(scope="module")
def fluent(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after some training: it writes words as its tokenizer would, unlike a random one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from captrain.models.chat import Chat

    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("fluent") / "model")
    chat, model = Chat(AutoTokenizer.from_pretrained(tiny), []), AutoModelForCausalLM.from_pretrained(tiny)
    rows = []
    for task in range(6):
        said = [{"role": "system", "content": "Talk."}, {"role": "user", "content": f"Say {task}."}]
        ids = chat.prompt(said)
        mask = [0] * len(ids)
        for more in (2, 1, 0):
            turn, suffix = chat.turn(YES), chat.suffix([{"role": "user", "content": f"Go on, {more} more."}])
            ids, mask = ids + turn + suffix, mask + [1] * len(turn) + [0] * len(suffix)
        rows.append((ids, mask))
    learn(model, rows, 60, 5e-3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    folder = save_adapter(tiny, tmp_path_factory.mktemp("adapter"))
    return Adapter(str(folder), adapter_digest(folder))


def played(
    policy: Any, target: CheckedEnvironment, folder: Path, adapter: Adapter | None = None, tasks: int = 8
) -> list[Any]:
    """Play some tasks; return their rollouts without usage and policy."""
    found = collect(
        policy, target, target.tasks("training", tasks), purpose="training", seed=0, adapter=adapter, retries=1,
        journals=folder, quiet=True,
    )  # fmt: skip
    return [one.model_copy(update={"policy": "", "id": "", "usage": None}) for one in found]


def equal(some: list[Any], others: list[Any]) -> None:
    """Assert equal records, up to the last digits of log-probabilities."""
    for one, other in zip(some, others, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)
        assert one.model_copy(update={"logprobs": []}) == other.model_copy(update={"logprobs": []})


def single(letters: Letters) -> CheckedEnvironment:
    """Letters with one turn each."""
    path = letters("single")
    path.write_text(path.read_text().replace("1 + i % 3", "1"))
    return load_file(path)


def test_rollouts_equal_those_of_the_local_policy_to_the_token(fluent: Path, letters: Letters, tmp_path: Path) -> None:
    target, folder = load_file(letters()), weak_adapter(fluent, tmp_path)
    adapter = Adapter(str(folder), adapter_digest(folder))
    both = []
    for acting in (None, adapter):
        served = played(policy(fluent), target, tmp_path / "served", acting)
        assert all(one.mask for one in served) and {len(one.messages) for one in served} == {3, 5, 7}
        assert all(len(one.token_ids) == len(one.mask) == len(one.logprobs) for one in served)
        equal(served, played(local(fluent), target, tmp_path / "alone", acting))
        both.append(served)
    assert max(abs(a - b) for a, b in zip(both[0][2].logprobs, both[1][2].logprobs, strict=True)) > 1e-4


def weak_adapter(model: Path, folder: Path) -> Path:
    """An adapter that changes log-probabilities but hardly the text."""
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file

    saved = save_adapter(model, folder / "weak")
    tensors = load_tensors(saved / "adapter_model.safetensors")
    weaker = {name: one * 0.1 if "lora_B" in name else one for name, one in tensors.items()}
    save_file(weaker, saved / "adapter_model.safetensors")
    return saved


def test_episodes_are_spread_over_the_servers_and_stay_on_one(
    tiny: Path, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[int]] = {}
    completed = VLLMPolicy._continuation

    def noted(self: VLLMPolicy, play: RunningEpisode, *request: Any) -> Any:
        asked.setdefault(play.key, []).append(self._episode_state.server.number)
        return completed(self, play, *request)

    monkeypatch.setattr(VLLMPolicy, "_continuation", noted)
    target = load_file(letters())
    plays = [RunningEpisode(task.id, target.open(task)) for task in target.tasks("training", 12)]
    acting = policy(tiny)
    assert len(list(acting.play(plays))) == 12
    assert all(len({*numbers}) == 1 for numbers in asked.values())
    by_replica = [sum(numbers[0] == number for numbers in asked.values()) for number in (0, 1)]
    assert min(by_replica) >= 3
    assert {server_of(one) for one in replicas(acting)} <= {*servers()}


def test_an_adapter_is_served_under_its_content_hash_while_it_is_needed(
    tiny: Path, adapter: Adapter, letters: Letters, tmp_path: Path
) -> None:
    acting, target = policy(tiny), single(letters)
    played(acting, target, tmp_path / "one", adapter, tasks=2)
    other = weak_adapter(tiny, tmp_path)
    second = Adapter(str(other), adapter_digest(other))
    assert listed(acting) == [[acting.name, adapter.digest]] * 2
    played(acting, target, tmp_path / "two", second, tasks=2)
    assert listed(acting) == [[acting.name, second.digest]] * 2


def test_an_adapter_in_use_is_served_although_its_folder_is_gone(
    tiny: Path, adapter: Adapter, letters: Letters, tmp_path: Path
) -> None:
    acting, target = policy(tiny, machine(replicas=1)), single(letters)
    weak = weak_adapter(tiny, tmp_path)
    other = {adapter_digest(weak): weak}
    first, second = (shutil.copytree(adapter.folder, tmp_path / name) for name in ("first", "second"))
    expected = played(acting, target, tmp_path / "one", Adapter(str(first), adapter.digest), tasks=2)
    [replica] = replicas(acting)
    with acting.fleet.serving({adapter.digest: first}):
        with acting.fleet.serving({adapter.digest: second}):
            shutil.rmtree(second)
        shutil.rmtree(first)
        with acting.fleet.serving(other):
            assert {adapter.digest, *other} == {*replica.adapters}
        os.kill(server_of(replica), signal.SIGKILL)  # a restarted server loads its adapters again
        replica.mend(replica.starts)
        equal(played(acting, target, tmp_path / "two", adapter, tasks=2), expected)
    with acting.fleet.serving(other):
        [place] = replica.adapters.values()
        assert [*place.parent.iterdir()] == [place] and place.name in other
    acting.close()
    assert replica.adapters == {} and not place.parent.exists()


def test_a_lost_answer_to_an_unload_is_an_error_only_if_the_adapter_stays(
    tiny: Path, adapter: Adapter, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting, control, reached = policy(tiny, machine(replicas=1)), VllmServer._control, True

    def lossy(self: VllmServer, path: str, *some: Any, **more: Any) -> str:
        unloads = path == "/v1/unload_lora_adapter"
        text = control(self, path, *some, **more) if reached or not unloads else ""
        if unloads:
            raise TransientFault("model server: the answer is lost")
        return text

    monkeypatch.setattr(VllmServer, "_control", lossy)
    weak = weak_adapter(tiny, tmp_path)
    other = {adapter_digest(weak): weak}
    with acting.fleet.serving({adapter.digest: Path(adapter.folder)}):
        [replica] = replicas(acting)
    with acting.fleet.serving(other):
        assert {*replica.adapters} == {*other} and listed(acting) == [[acting.name, *other]]
    reached = False
    with pytest.raises(UserError, match="does not let go of .* the answer is lost") as failed:
        played(acting, single(letters), tmp_path, adapter)
    assert "max_lora_rank" not in failed.value.remedy and {*replica.adapters} == {adapter.digest, *other}
    acting.close()


def listed(policy: VLLMPolicy) -> list[list[str]]:
    """The models that each server lists."""
    return [[one["id"] for one in json.loads(it._control("/v1/models"))["data"]] for it in replicas(policy)]


def test_a_name_with_other_content_is_refused(tiny: Path, adapter: Adapter, letters: Letters, tmp_path: Path) -> None:
    other = weak_adapter(tiny, tmp_path)
    acting = policy(tiny)
    with acting.fleet.serving({}):
        for replica in replicas(acting):
            replica._control("/v1/load_lora_adapter", {"lora_name": adapter.digest, "lora_path": str(other)})
    with pytest.raises(UserError, match=f"serves .*weak .* as {adapter.digest}, and asked was"):
        played(acting, single(letters), tmp_path, adapter)
    for replica in replicas(acting):
        replica._control("/v1/unload_lora_adapter", {"lora_name": adapter.digest})


def test_an_answer_of_another_model_is_refused(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = VllmServer.complete

    def another(self: VllmServer, *some: Any, **request: Any) -> Any:
        return complete(self, *some, **request).model_copy(update={"model": "other"})

    monkeypatch.setattr(VllmServer, "complete", another)
    with pytest.raises(UserError, match="asked for base-.*, and other answered"):
        played(policy(tiny), single(letters), tmp_path)


def test_a_killed_server_is_restarted_and_nothing_is_lost(
    fluent: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, acting, folder = load_file(letters()), policy(fluent), weak_adapter(fluent, tmp_path)
    adapter = Adapter(str(folder), adapter_digest(folder))
    undisturbed = played(acting, target, tmp_path / "undisturbed", adapter)
    assert all(one.token_ids for one in undisturbed)
    begun = [one.starts for one in replicas(acting)]
    completed, victims, lock = VLLMPolicy._continuation, [server_of(replicas(acting)[0])], threading.Lock()

    def deadly(self: VLLMPolicy, play: RunningEpisode, *request: Any) -> Any:
        with lock:
            if play.turns == 1 and victims:
                os.kill(victims.pop(), signal.SIGKILL)
        return completed(self, play, *request)

    monkeypatch.setattr(VLLMPolicy, "_continuation", deadly)
    disturbed = played(acting, target, tmp_path / "disturbed", adapter)
    assert not victims and [one.starts for one in replicas(acting)] == [begun[0] + 1, begun[1]]
    equal(disturbed, undisturbed)
    assert {one.outcome for one in disturbed} <= {"passed", "failed"} and not any(one.retries for one in disturbed)


def test_a_hanging_server_is_restarted(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.agents.servers.HEALTH", 0.5)
    acting, target = policy(tiny), single(letters)
    whole = played(acting, target, tmp_path / "whole", tasks=2)
    replica = replicas(acting)[0]
    monkeypatch.setattr(replica, "timeout", 1.0)
    replica.__dict__.pop("client")
    connections = [connection for connection in psutil.net_connections("tcp4") if connection.laddr]
    listening = {row.laddr.port: row.pid for row in connections if row.laddr and row.status == psutil.CONN_LISTEN}
    pid = listening[replica.port]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    starts = replica.starts
    equal(played(acting, target, tmp_path / "again", tasks=2), whole)
    assert replica.starts == starts + 1


def server_of(replica: VllmServer) -> int:
    """The server's process."""
    [pid] = [
        pid
        for pid in servers()
        if f"--port\0{replica.port}\0" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    ]
    return pid


NOISY = "print('(Worker) ERROR RuntimeError: no offset', *(f'leaked {number}' for number in range(31)), sep=chr(10))"
BROKEN = "import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(3)"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["-c", BROKEN], r"server 0 of policy vllm died \(exit status 3\):\n    CUDA out of memory"),
        (["-c", "import time; time.sleep(60)"], r"is not healthy after 0\.6 seconds"),
        (["-c", NOISY], r"died \(exit status 0\):\n    RuntimeError: no offset\n    leaked 11\n"),
    ],
)
def test_a_server_that_never_becomes_healthy_ends_the_run_with_its_last_log_lines(
    tiny: Path, letters: Letters, tmp_path: Path, command: list[str], says: str
) -> None:
    patience = 0.6 if "time" in command[-1] else 30.0
    acting = policy(tiny, machine(command=command, replicas=1, start_timeout=patience))
    with pytest.raises(UserError, match=says) as refused:
        played(acting, single(letters), tmp_path)
    assert "machine.vllm" in refused.value.remedy and not list(tmp_path.glob("*.jsonl"))[0].read_text()


FATAL = """
import http.server, json, os, sys

named = sys.argv[sys.argv.index("--served-model-name") + 1]

class Fatal(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": named, "root": sys.argv[2]}]}).encode())

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if sys.argv[1] in ("0", str(prompt)):
            os._exit(7)
        self.send_response(200)
        self.end_headers()
        choice = {"token_ids": [258], "logprobs": {"token_logprobs": [-1.0]}}
        self.wfile.write(json.dumps({"model": named, "choices": [choice]}).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Fatal).serve_forever()
"""


def test_a_server_that_dies_of_every_request_is_given_up(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    acting = policy(tiny, machine(command=["-c", FATAL, "0"], replicas=1), retries=9)
    with pytest.raises(UserError, match="died 3 times while it answered one and the same request"):
        played(acting, single(letters), tmp_path, tasks=1)


def test_a_server_that_dies_of_one_request_is_given_up_although_it_answers_others(
    tiny: Path, letters: Letters, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = single(letters)
    fatal = policy(tiny).chat([]).prompt(list(target.open(target.tasks("training", 3)[2]).messages))
    acting = policy(tiny, machine(command=["-c", FATAL, str(fatal)], replicas=1), batch=1, retries=1)
    with pytest.raises(UserError, match="died 3 times while it answered one and the same request"):
        played(acting, target, tmp_path, tasks=5)
    # The second attempt sends the same request, with answers to others in between.
    assert capfd.readouterr().err.count("it is started again") == 2
    [journal] = tmp_path.glob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 4


def test_a_server_that_answers_between_its_starts_is_not_given_up(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    acting = policy(tiny, machine(command=["-c", FATAL, "never"], replicas=1))
    [replica], fleet = replicas(acting), acting.fleet
    before = replica.starts
    for attempt in range(FRUITLESS + 2):
        played(acting, single(letters), tmp_path / str(attempt), tasks=1)
        replica._kill()
    assert replica.starts == before + FRUITLESS + 2
    for _ in range(FRUITLESS):
        with fleet.serving({}):
            replica._kill()
    with pytest.raises(UserError, match="was started 3 times and never answered a request"), fleet.serving({}):
        pass
    replica.stop()


def test_loading_an_adapter_is_retried_once(tiny: Path, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    control, mend, failing = VllmServer._control, VllmServer.mend, list[bool]()

    def flaky(self: VllmServer, path: str, *some: Any, **settings: Any) -> str:
        if path == "/v1/load_lora_adapter" and failing and failing.pop():
            raise TransientFault("model server: busy")
        return control(self, path, *some, **settings)

    monkeypatch.setattr(VllmServer, "_control", flaky)
    acting = policy(tiny, machine(replicas=1), dtype="float32")
    [replica], needed = replicas(acting), {adapter.digest: Path(adapter.folder)}
    failing[:] = [True, True]
    with pytest.raises(UserError, match="does not take adapter"), acting.fleet.serving(needed):
        pass
    assert replica.adapters == {} and not failing

    def useless(self: VllmServer, *some: Any) -> None:
        raise UserError("useless", "")

    failing[:] = [True]
    monkeypatch.setattr(VllmServer, "mend", useless)
    with pytest.raises(UserError, match="useless"), acting.fleet.serving(needed):
        pass
    assert replica.adapters == {} and not failing
    failing[:] = [True]
    monkeypatch.setattr(VllmServer, "mend", mend)
    with acting.fleet.serving(needed):
        assert {*replica.adapters} == {*needed} and listed(acting) == [[acting.name, adapter.digest]]
    assert replica.starts == 1 and not failing
    acting.close()


class Slow(BaseHTTPRequestHandler):
    """A slow server that answers completions with "payment required"."""

    def do_GET(self) -> None:
        self._say(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(402)

    def _say(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()
        time.sleep(0.6)
        self.wfile.write(b"whole")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_control_request_has_its_own_timeout_and_missing_credit_is_a_refusal(tiny: Path, tmp_path: Path) -> None:
    fleet = policy(tiny).fleet
    with HTTPServer(("127.0.0.1", 0), Slow) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()

        def server(timeout: float) -> VllmServer:
            one = VllmServer(fleet.service._replace(timeout=timeout), 0)
            one.listen(listening.server_port, tmp_path)
            return one

        assert server(0.2)._control("/health") == "whole"
        with pytest.raises(TransientFault):
            server(0.2)._control("/health", timeout=0.3)
        with pytest.raises(UserError, match="has no credit left"):
            server(30.0).complete([1])
        listening.shutdown()


def test_a_missing_interpreter_is_reported_before_the_first_play(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    for python, says in (("", "machine.vllm.python is not set"), ("/nowhere/python", "is not an interpreter")):
        with pytest.raises(UserError, match=says):
            played(policy(tiny, machine(python=python)), single(letters), tmp_path)
    with pytest.raises(UserError, match="lacks config.json"):
        policy(tmp_path)


def test_servers_take_adapters_of_the_trainers_rank(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    spec = compose_spec("default", 0, ["trainer.rank=24"], root / "conf")
    assert spec.machine.vllm.max_lora_rank == 24
    write = "import sys; sys.exit(' '.join(sys.argv[sys.argv.index('--max-lora-rank'):]))"
    for rank, arguments, expected in (
        (24, [], "--max-lora-rank 32 --max-loras 1 --"),
        (24, ["--max-lora-rank=64"], "--max-lora-rank=64"),  # the last argument wins
        (600, [], "vLLM takes adapters up to 512"),
    ):
        settings = machine(command=["-c", write], replicas=1, max_lora_rank=rank, arguments=arguments)
        with pytest.raises(UserError, match=expected):
            played(policy(tiny, settings), single(letters), tmp_path, tasks=1)


def test_an_adapter_of_too_high_a_rank_is_refused_before_the_first_start(
    tiny: Path, letters: Letters, tmp_path: Path
) -> None:
    members = {name: lora(tiny, tmp_path / name, seed, r=8) for seed, name in enumerate(("one", "two"))}
    both = compose(members, {"one": 1.0, "two": 1.0}, tmp_path / "composed")
    for adapters, refused in ((1, True), (2, False)):
        acting = policy(tiny, machine(replicas=1, max_lora_rank=8, max_loras=adapters))
        if refused:
            with pytest.raises(UserError, match="has rank 16, and servers of policy vllm are started for 8") as error:
                played(acting, single(letters), tmp_path, both)
            assert "machine.vllm.max_loras" in error.value.remedy and replicas(acting)[0].starts == 0
        else:
            assert played(acting, single(letters), tmp_path, both)
        acting.close()


def test_closed_questions_are_scored_as_by_the_local_policy(fluent: Path) -> None:
    questions = [
        ClosedQuestion([{"role": "user", "content": f"Which of {count}?"}], tuple("ABCDEFGH"[:count]))
        for count in (2, 5, 8)
    ]
    served, alone = policy(fluent).answer_scores(questions), local(fluent).answer_scores(questions)
    for ours, theirs in zip(alone, served, strict=True):
        assert theirs == pytest.approx(ours, rel=0, abs=1e-9)
        assert sum(math.exp(score) for score in theirs) == pytest.approx(1)


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"max_length": 64}, {"arguments": ["--quantization=fp8"]}])
def test_settings_that_change_answers_are_in_the_digest_and_given_to_the_servers(
    tiny: Path, changed: dict[str, Any]
) -> None:
    plain, other = policy(tiny, dtype="float32"), policy(tiny, **{"dtype": "float32", **changed})
    assert plain.digest != other.digest
    settings = " ".join(replicas(other)[0].service.settings)
    assert {"dtype": "--dtype bfloat16", "max_length": "--max-model-len 64", "arguments": "--quantization=fp8"}[
        next(iter(changed))
    ] in settings
    assert other.max_length == changed.get("max_length", plain.max_length)


def test_a_dialogue_that_is_too_long_ends_as_in_the_local_policy(fluent: Path, letters: Letters) -> None:
    target = load_file(letters())
    [task] = target.tasks("training", 3)[2:]
    alone = local(fluent)
    [whole] = alone.play([RunningEpisode(task.id, target.open(task))])
    for limit in (len(whole.token_ids) - 1, whole.mask.index(1) + 1, 4):
        alone.max_length = limit
        [ours] = alone.play([RunningEpisode(task.id, target.open(task))])
        [served] = policy(fluent, max_length=limit).play([RunningEpisode(task.id, target.open(task))])
        assert ours.truncated and ours.truncated == served.truncated
        assert (ours.turns, ours.token_ids, ours.mask) == (served.turns, served.token_ids, served.mask)


def test_servers_end_with_the_process_that_started_them(tiny: Path, tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from support.servers import machine, policy, replicas, servers
acting = policy(Path({str(tiny)!r}), machine(replicas=1, python=sys.executable))
with acting.fleet.serving({{}}):
    print(*servers(), flush=True)
    time.sleep(3600)
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    [server] = map(int, child.stdout.readline().split())
    child.kill()
    child.wait()
    until(lambda: not Path(f"/proc/{server}").exists())


def test_written_tokens_are_read_again_and_never_rendered(
    fluent: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, acting, complete = load_file(letters()), policy(fluent), VllmServer.complete
    chat, task = acting.chat([]), target.tasks("training", 3)[2]
    [plain] = acting.play([RunningEpisode(task.id, target.open(task))])
    # Spell a word that is one token letter by letter.
    word = next(text for text, _ in sorted(acting.tokenizer.get_vocab().items()) if re.fullmatch("[a-z]{4,}", text))
    odd, prompts = [*(token for letter in word for token in chat.encode(letter)), chat.end], list[list[int]]()
    assert len(odd) > len(chat.encode(word)) + 1 and chat.parse(odd)["content"] == word

    def oddly(self: VllmServer, prompt: list[int], **request: Any) -> TokenCompletion:
        prompts.append(prompt)
        scores = TokenScores(token_logprobs=[-1.0] * len(odd))
        return TokenCompletion(
            model=complete(self, prompt, **request).model, choices=[TokenChoice(token_ids=odd, logprobs=scores)]
        )

    monkeypatch.setattr(VllmServer, "complete", oddly)
    [play] = acting.play([RunningEpisode(task.id, target.open(task))])
    first, second, third = prompts
    assert second[: len(first) + len(odd)] == first + odd and third[: len(second) + len(odd)] == second + odd
    assert play.token_ids == third + odd and sum(play.mask) == 3 * len(odd)
    assert [message["content"] for message in play.messages if message["role"] == "assistant"] == [word] * 3
    # Turns for which rendering the dialogue anew gives other tokens.
    assert (plain.turns, plain.rerendered, play.turns, play.rerendered) == (3, 0, 3, 2)
    [rollout] = collect(
        acting, target, [task], purpose="training", seed=0, journals=tmp_path, quiet=True
    )  # fmt: skip
    assert rollout.rerendered == 2 and summarise_rollouts([rollout], target)["rerendered_turns"] == 2


def test_requests_hold_sampling_options_and_prompts_follow_the_template_arguments(
    fluent: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(fluent, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(files("trl").joinpath("chat_templates/qwen3.jinja").read_text())
    target, complete, sent = load_file(letters()), VllmServer.complete, list[tuple[list[int], dict[str, Any]]]()

    def told(self: VllmServer, prompt: list[int], **request: Any) -> TokenCompletion:
        sent.append((list(prompt), request["extra_body"]))
        # The server in place of vLLM samples from all tokens.
        extra = {name: value for name, value in request["extra_body"].items() if name not in ("top_p", "top_k")}
        return complete(self, prompt, **request | {"extra_body": extra})

    monkeypatch.setattr(VllmServer, "complete", told)
    task = target.tasks("training", 3)[2]
    acting = policy(folder, top_p=0.9, top_k=7, chat_template_kwargs={"enable_thinking": False})
    [play] = acting.play([RunningEpisode(task.id, target.open(task))])
    acting.close()
    assert len(sent) == play.turns == 3
    assert all({"top_p": 0.9, "top_k": 7}.items() <= extra.items() for _, extra in sent)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert [tokenizer.decode(prompt).endswith(header) for prompt, _ in sent] == [True] * 3
    changed = [{}, {"top_p": 0.9}, {"top_k": 7}, {"chat_template_kwargs": {"enable_thinking": True}}]
    assert len({acting.digest, *(policy(folder, **one).digest for one in changed)}) == 5
    assert policy(folder, top_p=None, top_k=None, chat_template_kwargs=None).digest == policy(folder).digest


def test_a_hint_is_read_and_not_recorded(fluent: Path, letters: Letters) -> None:
    target = load_file(letters())

    def hinted(policy: Any, hint: str) -> list[RunningEpisode]:
        plays = [RunningEpisode(task.id, target.open(task), hint=hint) for task in target.tasks("training", 3)]
        return sorted(policy.play(plays), key=lambda play: play.key)

    served, alone = hinted(policy(fluent), "Only letters."), hinted(local(fluent), "Only letters.")
    for one, other in zip(served, alone, strict=True):
        assert (one.token_ids, one.mask, one.messages) == (other.token_ids, other.mask, other.messages)
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)
    assert served[0].logprobs != hinted(policy(fluent), "")[0].logprobs


def test_a_server_that_shows_no_tokens_is_refused(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = VllmServer.complete

    def hidden(self: VllmServer, *some: Any, **request: Any) -> TokenCompletion:
        completion = complete(self, *some, **request)
        return completion.model_copy(update={"choices": [TokenChoice()]})

    monkeypatch.setattr(VllmServer, "complete", hidden)
    with pytest.raises(UserError, match="do not show the tokens"):
        played(policy(tiny), single(letters), tmp_path)


def test_servers_take_the_last_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
    two = VLLM(gpus=2, replicas=2)
    assert [server_environment(two, at)["CUDA_VISIBLE_DEVICES"] for at in (0, 1)] == ["9,7", "6,5"]
    assert server_environment(VLLM(gpus=0), 0)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7,9"
    with pytest.raises(UserError, match="asks for 3 x 2 GPUs, and 5 are visible"):
        server_environment(VLLM(gpus=2, replicas=3), 0)


def job(base: Path, environment: Path, target: str, **changes: Any) -> Job:
    sampling = {**POLICY, **changes.pop("policy", {})}
    recipe = Component.model_validate(
        {"_target_": "captrain.training.recipe.GRPO", **GRPO, **changes.pop("trainer", {})}
    )
    acting = Component.model_validate({"_target_": f"captrain.agents.{target}", **sampling})
    settings: dict[str, Any] = {"name": "single", "rollouts": 16, "seed": 0, "machine": machine(), **changes}
    place = TrainingEnvironment("single", EnvironmentFile(environment.parent, passport(environment)))
    return Job(base=base, policy=acting, trainer=recipe, environments=(place,), **settings)


@pytest.fixture
def environment(letters: Letters) -> Path:
    """Letters with one turn each, and a hint."""
    path = letters("single")
    text = path.read_text().replace("1 + i % 3", "1")
    path.write_text(f'{text}\n    def hint(self, task):\n        return "Only letters."\n')
    return path


@pytest.mark.parametrize("hints", further([0.5, 0.0]))
def test_grpo_through_servers_begins_at_ratio_one_and_serves_each_step_its_own_adapter(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hints: float
) -> None:
    import torch

    from captrain.training.grpo import PolicyTrainer

    apart: list[float] = []
    names: list[list[str]] = []
    made = PolicyTrainer._generate_and_score_completions

    def compared(self: Any, inputs: Any) -> Any:
        batch = made(self, inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].shape[1]
        now = self._get_per_token_logps_and_entropies(self.model, ids, seen, width)[0].detach()
        learnt = batch["tool_mask"] * batch["completion_mask"]
        assert learnt.sum() > 0
        apart.append(((now - batch["old_per_token_logps"]) * learnt).abs().max().item())
        names.extend(listed(policy(tiny, **POLICY))[:1])
        return batch

    monkeypatch.setattr(PolicyTrainer, "_generate_and_score_completions", compared)
    with inside(tmp_path / "work"):
        one = train(job(tiny, environment, "vllm.VLLMPolicy", trainer={"hints": hints}))
        assert sorted(path.name for path in one.folder.iterdir()) == [
            "README.md", "adapter_config.json", "adapter_model.safetensors"
        ]  # fmt: skip
        config = json.loads((one.folder / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"]) == ("LORA", 4) and adapter_digest(one.folder) == one.digest
    # With and without hints, before and after an update, the sampler equals the trained policy.
    assert len(apart) == 2 and max(apart) < 1e-4
    (base, first), (_, second) = names
    assert base.startswith("base-") and first != second
    assert (one.rollouts, one.errors, len(one.history)) == (16, 0, 2)


@pytest.mark.parametrize(("cap", "hints"), further([(None, 0.0), (1.5, 0.5), (1.5, 0.0)], 2))
def test_the_mismatch_of_server_and_trainer_is_measured_and_corrected_by_truncated_ratios(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: float | None, hints: float
) -> None:
    """The server reports lower probabilities than the trainer: by e for the first token, by 2 for the others."""
    import torch

    from captrain.training.grpo import PolicyTrainer

    ratios, rows = list[torch.Tensor](), list[torch.Tensor]()
    continuation, made = VLLMPolicy._continuation, PolicyTrainer._generate_and_score_completions

    def off(self: VLLMPolicy, *request: Any) -> TokenCompletion:
        completion = continuation(self, *request)
        [choice] = completion.choices
        assert choice.logprobs is not None
        scores = [score - (0.7 if index else 1.0) for index, score in enumerate(choice.logprobs.token_logprobs)]
        logprobs = choice.logprobs.model_copy(update={"token_logprobs": scores})
        return completion.model_copy(update={"choices": [choice.model_copy(update={"logprobs": logprobs})]})

    def noted(self: Any, inputs: Any) -> Any:
        batch = made(self, inputs)
        if cap is not None:
            learnt = (batch["tool_mask"] * batch["completion_mask"]).bool()
            ratios.append(batch["importance_sampling_ratio"][learnt])
            rows.append(batch["importance_sampling_ratio"][learnt.any(1)].amax(1))
        return batch

    monkeypatch.setattr(VLLMPolicy, "_continuation", off)
    monkeypatch.setattr(PolicyTrainer, "_generate_and_score_completions", noted)
    with inside(tmp_path / "work"):
        one = train(job(tiny, environment, "vllm.VLLMPolicy", trainer={"importance_cap": cap, "hints": hints}))
        publish_adapters([one], "adapters")
        columns = Path("results/adapters/history.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
        assert columns[-4:] == ["mismatch", "mismatch_largest", "effective_tokens", "rerendered"]
    for step in one.history:
        assert step.mismatch and step.effective_tokens
        assert 0.7 < step.mismatch < 1.0 and step.mismatch_largest == pytest.approx(1.0, abs=1e-4)
        assert 0.9 < step.effective_tokens < 1.0 and step.rerendered == 0
    if cap is not None:
        # All ratios reach the cap, except in hinted rollouts, which are not corrected.
        values = torch.cat(ratios)
        assert ((values - cap).abs() < 1e-6).logical_or((values - 1).abs() < 1e-6).all()
        assert bool((torch.cat(rows) == 1).any()) == (hints > 0)


def test_an_error_is_drawn_again_counted_and_never_trained_on(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, failed = VLLMPolicy._answer, []

    def once(self: VLLMPolicy, play: RunningEpisode) -> Any:
        if play.key.endswith("/2") or always:
            failed.append(play.key)
            play.error = "model server: 500"
            return None
        return answer(self, play)

    monkeypatch.setattr(VLLMPolicy, "_answer", once)
    always = False
    with inside(tmp_path / "work"):
        one = train(job(tiny, environment, "vllm.VLLMPolicy", rollouts=8))
        assert (one.rollouts, one.errors, len(failed)) == (8, 2, 2)
        entry = one.ledger("adapters", "trace")
        assert (entry.rollouts, entry.errors) == (10, 2)
        always = True
        with pytest.raises(UserError, match=r"ended in an infrastructure error \(model server: 500\)"):
            train(job(tiny, environment, "vllm.VLLMPolicy", rollouts=8, seed=1))


def test_a_budget_is_met_exactly_whatever_fails(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fails one request in eight, and a task that always fails."""
    answer, asked = VLLMPolicy._answer, count(1)
    played, failed = list[str](), list[str]()

    def unreliable(self: VLLMPolicy, play: RunningEpisode) -> Any:
        hopeless = "/training/1/" in play.key
        if hopeless or next(asked) % 8 == 0:
            failed.append(play.key)
            play.error = "model server: 500"
            return None
        played.append(play.key)
        return answer(self, play)

    monkeypatch.setattr(VLLMPolicy, "_answer", unreliable)
    with inside(tmp_path / "work"):
        one = train(job(tiny, environment, "vllm.VLLMPolicy", rollouts=30, trainer={"max_error_share": 0.5}))
    assert [step.rollouts for step in one.history] == [8, 16, 24, 30]
    assert sum("/training/1/" in key for key in failed) == 4 * 3
    assert (len(played), one.errors) == (30, len(failed))
    # Its group is replaced by one of a task beyond the planned ones.
    assert {int(key.split("/")[3]) for key in played} == {0, 2, 3, 4, 5, 6, 7, 9}
    entry = one.ledger("adapters", "trace")
    assert (entry.rollouts - entry.errors, entry.errors) == (30, one.errors)


def test_a_policy_at_an_endpoint_cannot_be_trained_through(tiny: Path, environment: Path, tmp_path: Path) -> None:
    with (
        inside(tmp_path / "work"),
        pytest.raises(UserError, match="training needs the weights") as refused,
    ):
        train(job(tiny, environment, "openai.OpenAIPolicy", policy={"name": "some/model"}))
    assert "policy=vllm" in refused.value.remedy
