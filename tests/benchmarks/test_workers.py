"""Workers: a benchmark in a process of its own may do anything and costs at most its own episodes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.scripted import CONF

from captrain.agents.collection import collect, pass_rate
from captrain.agents.scripted import Script, ScriptedPolicy, by_the_book
from captrain.benchmarks import load_benchmark
from captrain.benchmarks.pool import WORKERS, Pool, Session, workers_code
from captrain.benchmarks.simulation import ScoreDict, TaskDict, WorkerBenchmark
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.errors import InfrastructureError, UserError
from captrain.ledger import ledger_entry
from captrain.records import Message, Rollout
from captrain.run import compose_spec

WORKER = Path(__file__).parents[1] / "workers" / "contract_worker.py"
PATIENT = 30.0
HASTY = 2.0
"""Timeouts in seconds. A busy machine must answer within the short one, too."""
MakePool = Callable[..., Pool]


@pytest.fixture
def pool() -> Iterator[MakePool]:
    """Make pools of toy workers, which are closed at the end."""
    pools: list[Pool] = []

    def make(
        processes: int = 1, timeout: float = PATIENT, command: Sequence[object] | None = None, **more: Any
    ) -> Pool:
        words = [str(word) for word in command or (sys.executable, WORKER)]
        pools.append(Pool("till", words, processes=processes, timeout=timeout, **more))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def agent(session: Session, content: str = "", *calls: int) -> dict[str, Any]:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [tool_call("add", {"amount": amount})["tool_calls"][0] for amount in calls]
    return dict(session.call("step", role="agent", message=message))


def total(session: Session, amount: int) -> str:
    """Ring up an amount; return the total that the worker answers."""
    return agent(session, "", amount)["messages"][0]["content"]


def turns(session: Session) -> Iterator[list[Message]]:
    """Play an episode to its end, one request at a time, the user included."""
    seen: dict[str, Any] = dict(session.opening)
    while not seen["done"]:
        if seen["turn"] == "user":
            said = seen["user_messages"][-1]["content"].removeprefix("Say: ")
            seen = dict(session.call("step", role="user", message={"role": "user", "content": said}))
        else:
            wish = seen["messages"][-1]["content"]
            seen = agent(session, "", int(wish.removeprefix("Please add ").rstrip(".")))
            yield seen["messages"]
            seen = agent(session, "Done.")
        yield seen["messages"]


def pid_of(session: Session) -> int:
    opening: dict[str, Any] = {**session.opening}
    return opening["pid"]


def running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")


def gone(pids: Sequence[int], within: float) -> bool:
    deadline = time.monotonic() + within
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


def test_interleaved_episodes_in_two_workers_equal_those_played_one_after_another(pool: MakePool) -> None:
    """Eight threads play 32 episodes."""
    tasks = [{"task_id": f"till/{i}", "seed": i, "user": "client"} for i in range(32)]
    alone, both = pool(processes=1), pool(processes=2)
    expected = []
    for task in tasks:
        session = alone.session(**task)
        expected.append([*turns(session)])
        session.close()
    assert len({str(messages) for messages in expected}) > 20

    def interleaved(mine: Sequence[Session]) -> list[list[list[Message]]]:
        heard: list[list[list[Message]]] = [[] for _ in mine]
        playing = [(messages, turns(session)) for messages, session in zip(heard, mine, strict=True)]
        while playing:
            for place in reversed(range(len(playing))):
                messages, episode = playing[place]
                try:
                    messages.append(next(episode))
                except StopIteration:
                    del playing[place]
        return heard

    with ThreadPoolExecutor(8) as threads:
        sessions = list(threads.map(lambda task: both.session(**task), tasks))
        assert sorted(Counter(map(pid_of, sessions)).values()) == [16, 16]
        heard = list(threads.map(interleaved, [sessions[at::8] for at in range(8)]))
        assert [heard[at % 8][at // 8] for at in range(32)] == expected
        list(threads.map(Session.close, sessions))
    assert both.call("stats")["episodes"] == alone.call("stats")["episodes"] == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("!die", r"died \(exit status 3\).*last words: Aargh"),
        ("!kill", r"died \(signal 9\)"),
        ("!interrupt", r"died.*last words: KeyboardInterrupt"),
        ("!truncate", "printed what is not a reply"),
        ("!garbage", "printed what is not a reply: b'Downloading"),
        ("!ahead", "answered request .*, which was not made"),
        ("!hang", "did not answer step within 2 s"),
        pytest.param("!late 2.5", "did not answer step within 2 s", marks=pytest.mark.needs("minutes")),
    ],
)
def test_a_lost_worker_costs_only_its_own_episodes_and_is_replaced(pool: MakePool, command: str, said: str) -> None:
    workers = pool(processes=2, timeout=HASTY if "did not answer" in said else PATIENT)
    victim, other, neighbour, distant = sessions = [workers.session(task_id="till/5", seed=i) for i in range(4)]
    pids = [pid_of(session) for session in sessions]
    assert pids == [pids[0], pids[1]] * 2 and pids[0] != pids[1]
    total(victim, 1)
    with pytest.raises(InfrastructureError, match=said):
        agent(victim, command)
    for session in (victim, neighbour):
        with pytest.raises(InfrastructureError, match="the till worker that held this episode"):
            total(session, 1)
        session.close()
    assert total(other, 4) == "4" and total(distant, 2) == "2"
    after = workers.session(task_id="till/5", seed=9)
    assert pid_of(after) not in pids and not running(pids[0])
    if command.startswith("!late"):
        time.sleep(0.6)
    assert total(after, 3) == "3" and total(after, 3) == "6"


def test_a_worker_that_dies_while_idle_is_replaced_before_the_next_request(pool: MakePool) -> None:
    workers = pool()
    first = workers.call("stats")["pid"]
    os.kill(first, signal.SIGKILL)
    assert gone([first], 5)
    time.sleep(0.1)
    assert workers.call("stats")["pid"] != first


@pytest.mark.parametrize("command", ["!print", "!flood", "!read"])
def test_prints_and_reads_of_a_benchmark_do_not_touch_the_protocol(pool: MakePool, command: str) -> None:
    session = pool(timeout=5).session(task_id="till/5")
    total(session, 1)
    assert agent(session, command)["messages"] == []
    assert total(session, 1) == "2"


@pytest.mark.parametrize(
    ("command", "said"),
    [("!raise", "till raised LookupError in step: the drawer"), ("!exit", "till raised SystemExit")],
)
def test_an_exception_of_a_benchmark_is_an_infrastructure_error_and_the_worker_lives_on(
    pool: MakePool, command: str, said: str
) -> None:
    session = pool().session(task_id="till/5")
    with pytest.raises(InfrastructureError, match=said):
        agent(session, command)
    assert total(session, 1) == "1"


def test_results_that_are_not_json_are_errors_and_odd_text_arrives(pool: MakePool) -> None:
    workers = pool()
    for what in ("nan", "set"):
        with pytest.raises(InfrastructureError, match="ValueError|TypeError"):
            workers.call("say", what=what)
    assert workers.call("say", what="surrogate") == "caf\udce9"
    assert len(workers.call("say", what="large")) == 1_000_000
    assert workers.call("do", command="", padding="caf\udce9 " + "y" * 3_000_000)["pid"]


def test_a_second_reply_or_a_reply_to_an_interrupted_request_is_dropped(pool: MakePool) -> None:
    session = pool().session(task_id="till/5")
    agent(session, "!twice")
    assert total(session, 1) == "1"
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            agent(session, "!late 0.5")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert total(session, 1) == "2"


def test_waiting_for_a_turn_does_not_count_against_the_timeout(pool: MakePool) -> None:
    workers = pool(timeout=HASTY)
    with ThreadPoolExecutor(4) as threads:
        pids = list(threads.map(lambda _: workers.call("do", command="!late 0.25")["pid"], range(4)))
    assert len(set(pids)) == 1


def test_a_stateless_request_goes_to_the_least_busy_worker(pool: MakePool) -> None:
    workers = pool(processes=2)
    assert len({workers.call("stats")["pid"] for _ in range(3)}) == 1, "no second one starts without need"
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(workers.call, "do", command="!late 2")
        time.sleep(0.1)
        quick = workers.call("stats")["pid"]
        assert not slow.done()
        assert slow.result()["pid"] != quick


def test_an_episode_opens_in_the_worker_with_the_fewest_open_ones(pool: MakePool) -> None:
    workers = pool(processes=2)
    sessions = [workers.session(task_id="till/1") for _ in range(6)]
    for session in sessions[1::2]:
        session.close()
    with pytest.raises(UserError):
        workers.session(task_id="till/none")
    assert [pid_of(workers.session(task_id="till/1")) for _ in range(3)] == [pid_of(sessions[1])] * 3


def test_a_request_queued_for_a_lost_worker_goes_to_the_next(pool: MakePool) -> None:
    workers = pool(timeout=HASTY)
    session = workers.session(task_id="till/5")
    with ThreadPoolExecutor(2) as threads:
        lost = threads.submit(agent, session, "!hang")
        time.sleep(0.3)
        waiting = threads.submit(workers.call, "stats")
        assert waiting.result()["pid"] != pid_of(session)
        assert isinstance(lost.exception(), InfrastructureError)


def test_a_worker_that_stops_reading_cannot_delay_a_long_request(pool: MakePool) -> None:
    workers = pool(timeout=HASTY)
    os.kill(workers.call("stats")["pid"], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(InfrastructureError, match="did not answer do within 2 s"):
        workers.call("do", command="", padding="y" * 3_000_000)
    assert time.monotonic() - begun < 10
    assert workers.call("stats")["episodes"] == 0


def test_a_worker_that_never_stops_printing_has_the_same_timeout_as_one_that_hangs(pool: MakePool) -> None:
    late = json.dumps({"id": 0, "ok": True, "result": {}}).encode() + b"\n"
    endless = f"import os\nwhile True: os.write(1, {late!r} * 1500)"
    with pytest.raises(UserError, match=r"did not answer hello within 0\.3 s"):
        pool(command=[sys.executable, "-c", endless], start_timeout=0.3).call("hello")


@pytest.mark.parametrize(
    ("name", "mode", "why"),
    [
        ("absent", None, "No such file"),
        ("text", 0o644, "Permission"),
        (".", None, "Permission"),
        ("text", 0o755, "Exec format error"),
    ],
)
def test_a_path_that_is_no_interpreter_is_a_user_error(
    pool: MakePool, tmp_path: Path, name: str, mode: int | None, why: str
) -> None:
    path = tmp_path / name
    if mode is not None:
        path.write_text("not a program\n")
        path.chmod(mode)
    with pytest.raises(UserError, match=why) as caught:
        pool(command=[path, WORKER]).call("hello")
    assert str(path) in caught.value.problem and "machine.benchmarks.till.python" in caught.value.remedy


@pytest.mark.parametrize(
    ("at_import", "said"),
    [
        ("!import", "exit status 1.*\n.*No module named 'a_module_that_is_not_there'"),
        ("!exit", "exit status 1.*\n.*usage: till"),
        ("!hang", "did not answer hello within 0.3 s"),
        ("!garbage", "printed what is not a reply"),
    ],
)
def test_a_benchmark_that_does_not_import_is_one_user_error(pool: MakePool, at_import: str, said: str) -> None:
    start = 0.3 if at_import == "!hang" else PATIENT
    workers = pool(processes=2, start_timeout=start, env={"CONTRACT_IMPORT": at_import})
    with ThreadPoolExecutor(4) as threads:
        faults = [threads.submit(workers.session, task_id="till/1").exception() for _ in range(4)]
    assert {type(fault) for fault in faults} == {UserError} and len(set(map(str, faults))) == 1
    with pytest.raises(UserError, match=f"(?s){said}") as caught:
        workers.call("hello")
    assert "machine.benchmarks.till.python" in caught.value.remedy and sys.executable in caught.value.problem


RAISING = """
import worker_loop

class BadRequest(Exception):
    pass

class NoTask(worker_loop.BadRequest):
    pass

def hello():
    pass

def theirs():
    raise BadRequest("400")

def ours():
    raise NoTask("there is none")

worker_loop.serve([hello, theirs, ours], worker_loop.protect())
"""


def raising(pool: MakePool, folder: Path, source: str) -> Pool:
    """A pool of workers with this source."""
    shutil.copy(WORKERS / "worker_loop.py", folder)
    (folder / "worker.py").write_text(source)
    return pool(command=[sys.executable, folder / "worker.py"])


def test_a_packages_own_bad_request_is_its_exception_and_not_our_refusal(pool: MakePool, tmp_path: Path) -> None:
    workers = raising(pool, tmp_path, RAISING)
    with pytest.raises(InfrastructureError, match="till raised BadRequest in theirs: 400"):
        workers.call("theirs")
    with pytest.raises(UserError, match="benchmark till refused ours: there is none"):
        workers.call("ours")


def test_a_worker_that_refuses_hello_says_why_whatever_it_is_asked(pool: MakePool, tmp_path: Path) -> None:
    refusing = RAISING.replace("def hello():\n    pass", 'def hello():\n    raise NoTask("nothing is installed")')
    workers = raising(pool, tmp_path, refusing)
    for _ in range(2):
        with pytest.raises(UserError, match="benchmark till refused hello: nothing is installed") as caught:
            workers.call("theirs")
        assert "machine.benchmarks.till.python" in caught.value.remedy


def test_a_request_for_what_does_not_exist_is_a_user_error_and_the_worker_lives_on(pool: MakePool) -> None:
    workers = pool()
    pid = workers.call("stats")["pid"]
    for request in ({"op": "reset", "task_id": "till/none"}, {"op": "dance"}, {"op": "stats", "loudly": True}):
        with pytest.raises(UserError, match="benchmark till refused") as caught:
            workers.call(**request)
        assert "machine.benchmarks.till.python" in caught.value.remedy
    with pytest.raises(UserError):
        workers.session(task_id="till/none")
    assert workers.call("stats")["pid"] == pid


def test_lines_that_are_not_requests_are_refused_and_the_loop_goes_on() -> None:
    lines = [
        "not JSON", "[1]", '{"id": 4}', '{"id": 5, "op": "dance"}', '{"id": 6, "op": "close"}',
        '{"id": 7, "op": "say", "what": "nan"}', '{"id": 8, "op": "close", "episode": "x"}',
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(WORKER)], input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=10,
        check=True,
    )  # fmt: skip
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    errors = [reply["error"]["type"] if not reply["ok"] else None for reply in replies]
    assert [reply["id"] for reply in replies] == [None, None, None, 5, 6, 7, 8]
    assert errors == ["JSONDecodeError", "TypeError", "KeyError", "BadRequest", "BadRequest", "ValueError", None]


def test_a_worker_gets_its_own_settings_and_none_of_our_python(pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/somewhere/else")
    monkeypatch.setenv("TILL_OPEN", "yes")
    environ = pool(env={"TILL_DATA": "/data"}).call("environ")["environ"]
    ours = {name: value for name, value in environ.items() if name.startswith(("PYTHON", "VIRTUAL_ENV", "TILL"))}
    assert ours == {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TILL_OPEN": "yes", "TILL_DATA": "/data"}


def test_nothing_starts_before_it_is_needed_and_nothing_runs_after_close(pool: MakePool) -> None:
    pool(command=["/nowhere"])
    workers = pool(processes=2)
    sessions = [workers.session(task_id="till/1") for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(agent, sessions[0], "!hang")
        time.sleep(0.2)
        workers.close()
        assert not any(running(pid_of(session)) for session in sessions)
        assert isinstance(busy.exception(), InfrastructureError)
    for session in sessions * 2:
        session.close()


HOLDER = """
import sys, threading, time
from captrain.benchmarks.pool import Pool
pool = Pool("till", [sys.executable, sys.argv[1]], processes=2, timeout=60)
first, second = (pool.session(task_id="till/1") for _ in range(2))
hang = {"role": "assistant", "content": "!hang"}
threading.Thread(target=first.call, args=["step"], kwargs={"role": "agent", "message": hang}, daemon=True).start()
time.sleep(0.2)
print(first.opening["pid"], second.opening["pid"], flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("killed", [True, False])
def test_no_worker_outlives_our_process_even_if_it_is_busy_and_we_are_killed(killed: bool) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(WORKER), "60" if killed else "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    with holder:
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 2 and (not killed or all(map(running, pids)))
        if killed:
            holder.kill()
    assert gone(pids, 5)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ("benchmark=bfcl", "captrain benchmark install bfcl"),
        ("benchmark=agentdojo", "captrain benchmark install agentdojo"),
        ("benchmark=tau2", "the package called tau2 on the public index is something else"),
        ("benchmark=toolsandbox", "as its README says"),
        ("benchmark=verifiers benchmark.taskset=desk", "captrain benchmark install verifiers"),
    ],
)
def test_a_benchmark_that_is_not_installed_is_missed_with_the_first_task_and_the_remedy_is_named(
    settings: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no benchmark is installed
    composed = compose_spec("default", 0, settings.split(), CONF)
    target = load_benchmark(composed.benchmark, composed.machine)
    with pytest.raises(UserError) as raised:
        target.tasks("test", 1)
    assert advice in raised.value.remedy and "python names no interpreter" in raised.value.problem


@pytest.mark.parametrize(
    ("benchmark", "setting", "said"),
    [
        ("tau2", "domains=[]", "benchmark.domains"),
        ("tau2", "domains=[telecom]", "benchmark.domains"),
        ("tau2", "version=2.0", "benchmark.version"),
        ("tau2", "max_steps=1", "benchmark.max_steps"),
        ("tau2", "discovery=1.0", "benchmark.discovery"),
        ("tau2", "user=gpt", "benchmark.user"),
        ("toolsandbox", "categories=[]", "benchmark.categories"),
        ("toolsandbox", "categories=[cooking]", "benchmark.categories"),
        ("toolsandbox", "clock=noon", "benchmark.clock"),
        ("toolsandbox", "discovery=1.0", "benchmark.discovery"),
        ("verifiers", "turns=0 benchmark.taskset=x", "benchmark.turns"),
    ],
)
def test_an_impossible_setting_is_refused_when_it_is_composed(benchmark: str, setting: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        compose_spec("default", 0, f"benchmark={benchmark} benchmark.{setting}".split(), CONF)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("benchmark=bfcl benchmark.discovery=0.7 benchmark.training=0.3", "leaves nothing to test on"),
        ("benchmark=verifiers benchmark.taskset=x benchmark.discovery=0.8", "leaves nothing to test on"),
        ("benchmark=verifiers benchmark.taskset=x benchmark.scale=[1.0,1.0]", "is empty"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_when_the_benchmark_is_made(settings: str, said: str) -> None:
    composed = compose_spec("default", 0, settings.split(), CONF)
    with pytest.raises(UserError, match=said):
        load_benchmark(composed.benchmark, composed.machine)


class Till(WorkerBenchmark):
    """The toy benchmark as an environment of the contract."""

    name = "till"

    def __init__(self, pool: Pool, names: Sequence[str]) -> None:
        super().__init__(None)
        self.pool, self.names = pool, names
        self.tools: list[dict[str, Any]] = []

    def tasks(self, split: str, count: int) -> list[dict[str, Any]]:
        return [{"id": name, "split": split, "data": {"kind": "till"}} for name in self.names[:count]]

    def location(self, task: TaskDict) -> dict[str, str]:
        return {"task_id": task["id"]}


class Together(ScriptedPolicy):
    """Opens all episodes, then plays them in turns."""

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        left = [(play, iter((self.script or by_the_book)(play))) for play in plays if play.start()]
        while left:
            for play, actions in list(left):
                action = next(actions, None)
                if action is None or not play.advance(action):
                    left.remove((play, actions))
        yield from plays


def rollouts_of(
    till: Till, folder: Path, times: dict[str, int], policy: type[ScriptedPolicy] = ScriptedPolicy
) -> list[Rollout]:
    """Play all tasks with an agent that rings up what is wanted.

    Args:
        till: the environment.
        folder: of the journals.
        times: task -> how many of its rollouts begin with "!die".
        policy: how the episodes are played.
    """
    lock, remaining = threading.Lock(), dict(times)

    def clerk(play: RunningEpisode) -> Iterator[Message]:
        task = play.key.split("/", 1)[1].rsplit("/", 1)[0]
        with lock:
            sick = remaining.get(task, 0) > 0
            remaining[task] = remaining.get(task, 0) - sick
        if sick:
            yield {"role": "assistant", "content": "!die"}
        while (wish := play.messages[-1]["content"]).startswith("Please add"):
            yield tool_call("add", {"amount": int(wish.removeprefix("Please add ").rstrip("."))})
            yield {"role": "assistant", "content": "Next."}

    script: Script = clerk  # pyright: ignore[reportAssignmentType]
    target = CheckedEnvironment(till, "tests", "0")  # pyright: ignore[reportArgumentType]
    tasks = target.tasks("discovery", len(till.names))
    return collect(policy(script=script), target, tasks, purpose="diagnosis", seed=0, journals=folder, quiet=True)


@pytest.mark.parametrize("policy", [ScriptedPolicy, Together])
def test_episodes_that_lose_their_worker_are_retried_and_counted_and_never_failed(
    pool: MakePool, tmp_path: Path, policy: type[ScriptedPolicy]
) -> None:
    names = [f"till/{i}" for i in range(6)]
    rollouts = rollouts_of(Till(pool(processes=2), names), tmp_path, {"till/2": 1}, policy)
    assert [rollout.outcome for rollout in rollouts] == ["passed"] * 6
    retries = {rollout.task.id: rollout.retries for rollout in rollouts}
    # If all are opened together, every second episode is in the worker that dies.
    lost = ["till/0", "till/2", "till/4"] if policy is Together else ["till/2"]
    assert retries == {name: int(name in lost) for name in names}
    entry = ledger_entry(rollouts, stage="rollouts", method="target")
    assert (entry.rollouts, entry.errors) == (6 + len(lost), len(lost))


def test_episodes_whose_worker_always_dies_are_errors_and_do_not_count_in_the_pass_rate(
    pool: MakePool, tmp_path: Path
) -> None:
    names = ["till/0", "!die", "till/1", "!garbage", "till/2", "!kill", "till/3", "till/4"]
    rollouts = rollouts_of(Till(pool(processes=2), names), tmp_path, {"till/1": 99})
    outcomes = [rollout.outcome for rollout in rollouts]
    assert outcomes == ["passed", "error", "error", "error", "passed", "error", "passed", "passed"]
    assert pass_rate(rollouts) == 1.0
    for rollout in rollouts:
        if rollout.outcome == "error":
            assert rollout.score is None and rollout.retries == 2
            assert rollout.error is not None and "a till worker" in rollout.error


def test_an_episode_that_always_loses_its_worker_to_a_neighbour_passes_alone(pool: MakePool, tmp_path: Path) -> None:
    till = Till(pool(processes=1), ["till/0", "till/1", "till/2"])
    rollouts = rollouts_of(till, tmp_path, {"till/1": 99}, Together)
    assert [rollout.outcome for rollout in rollouts] == ["passed", "error", "passed"]
    assert [rollout.retries for rollout in rollouts] == [2, 2, 2]


def test_a_grader_that_dies_makes_an_error_and_not_a_failure(pool: MakePool, tmp_path: Path) -> None:
    class Fragile(Till):
        def score(self, task: TaskDict, messages: list[Message]) -> ScoreDict:
            with contextlib.suppress(KeyError):
                self.pool.call("do", command={"till/1": "!die"}[task["id"]])
            return super().score(task, messages)

    rollouts = rollouts_of(Fragile(pool(), ["till/0", "till/1", "till/2"]), tmp_path, {})
    assert [rollout.outcome for rollout in rollouts] == ["passed", "error", "passed"]


TIMED = """
import time, worker_loop
worker_loop.PATIENCE = 0.2
with worker_loop.patience():
    time.sleep(0.5)
try:
    with worker_loop.patience():
        while True: pass
except TimeoutError:
    raise SystemExit(7)
"""


def test_a_call_has_seconds_of_cpu_and_not_of_the_clock() -> None:
    """A busy machine must not change scores."""
    assert subprocess.run([sys.executable, "-c", TIMED], cwd=WORKERS, timeout=120).returncode == 7


REPLAYED = """
import record_replay

class Episode(record_replay.ReplayableEpisode):
    turns, taken, open = 9, [], 0

    def __init__(self, place, user="scripted"):
        self.messages = [{"role": "user", "content": "Begin."}]
        Episode.open += 1

    def answer(self, message):
        self.taken.append(message["content"])
        if len(self.taken) > 1:
            raise LookupError("the second one breaks")
        return [{"role": "user", "content": "Well?"}]

    def verdict(self):
        return {"reward": 1.0, "parts": {}}

    def close(self):
        Episode.open -= 1

def outcome(function, *values):
    Episode.taken = []
    try:
        return function(*values)
    except Exception as error:
        return type(error).__name__, len(Episode.taken), Episode.open

def survey():
    pass

record = [("user", "Begin."), ("assistant", "a"), ("user", "Well?"), ("assistant", "b")]
operations = {function.__name__: function for function in record_replay.operations(survey, Episode)}
for place in (0, 2, None):
    messages = [{"role": role, "content": text + "!" * (index == place)} for index, (role, text) in enumerate(record)]
    print(outcome(operations["evaluate"], "t/0", messages))
print(outcome(operations["evaluate"], "t/0", messages[:2]))
print(outcome(lambda: operations["idle"](place="t/0")))
"""


def test_a_record_is_replayed_until_an_answer_differs_and_no_episode_stays_open() -> None:
    done = subprocess.run([sys.executable, "-c", REPLAYED], cwd=WORKERS, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "('NotRepeatable', 0, 0)",
        "('NotRepeatable', 1, 0)",
        "('LookupError', 2, 0)",
        "{'reward': 1.0, 'parts': {}}",
        "('LookupError', 2, 0)",
    ], done.stderr


def test_a_workers_digest_covers_what_its_script_imports_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(WORKERS, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("captrain.benchmarks.pool.WORKERS", tmp_path)
    packages = ("verifiers", "tau2", "bfcl")
    before = {package: workers_code(package) for package in packages}
    changing = {
        "record_replay.py": {"verifiers"},
        "captrain_harness.py": {"verifiers"},
        "tau2_replay.py": {"tau2"},
        "agentdojo_worker.py": set[str](),
        "worker_loop.py": {*packages},
    }
    for name, concerned in changing.items():
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{text}\n# changed\n")
        assert {package for package in packages if workers_code(package) != before[package]} == concerned, name
        (tmp_path / name).write_text(text)
