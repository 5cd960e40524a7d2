"""The sandbox: environments cannot reach anything outside, and faults say what they did."""

import contextlib
import gc
import importlib.util
import itertools
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from support.hostile import HASTY, HOSTILE, MISSED, PAGE, STOPPED, VERDICTS, attacked, program
from support.needs import BARE, further
from support.waiting import until

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.contract import IDLE, CheckedEnvironment, RunningEpisode, load_file
from captrain.environments.sandbox import confined as sandbox
from captrain.environments.sandbox import forkserver
from captrain.environments.sandbox.confined import LAYERS, LEVELS, active_confinement, load_confined
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import TemplateSynthesizer
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import Capability

strong = pytest.mark.needs("seccomp")


def written(folder: Path, text: str, name: str = "written") -> Path:
    path = folder / f"{name}.py"
    path.write_text(f"{text}\n\n{(HOSTILE / 'frame.py').read_text()}")
    return path


def descriptors() -> int:
    """The open files of this process, without those of /proc that another thread may be reading."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += not os.readlink(f"/proc/self/fd/{number}").startswith("/proc/")
    return count


def family() -> set[int]:
    """The running fork servers below this process, and their processes."""
    parents, servers = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, _, state, parent = re.match(r"(\d+) (\(.*\)) (\S) (\d+)", (entry / "stat").read_text()).groups()  # type: ignore[union-attr]
            parents[int(pid)] = int(parent)
            if state != "Z" and b"confinement/server.py" in (entry / "cmdline").read_bytes():
                servers.add(int(pid))
        except (OSError, AttributeError):
            continue

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid in servers if ours(pid)}


def only(pids: set[int]) -> bool:
    """Wait until the family has no other processes than these."""
    return until(lambda: not family() - pids)


@strong
@pytest.mark.parametrize("name", further(VERDICTS, 12))
def test_no_hostile_program_gets_out_and_each_has_its_verdict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "1.5 s" in VERDICTS[name]:
        monkeypatch.setattr(forkserver, "SECONDS", HASTY)
    monkeypatch.chdir(tmp_path)
    before = family()
    path = program(name, tmp_path)
    limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(type=socket.SOCK_DGRAM) as drop:
        listener.settimeout(0.0)
        drop.bind(("127.0.0.1", 0))
        drop.settimeout(0.0)
        port = (listener if name == "connect" else drop).getsockname()[1]
        argument = str(port) if name in ("connect", "datagram") else str(tmp_path / "escaped")
        try:
            verdict = attacked(load_confined(path, "strong, one layer", BARE), argument)
        except EnvironmentFault as fault:
            verdict = fault.problem
            assert verdict.startswith(f"environment hostile ({path}) ") or "does not load" in verdict
            assert verdict.isprintable() and len(verdict) < 800 and str(fault).count("hostile (") <= 1
        assert re.search(VERDICTS[name], verdict), verdict
        for unheard in (listener.accept, lambda: drop.recv(1)):
            with pytest.raises(BlockingIOError):
                unheard()
    assert {*os.listdir(tmp_path)} == {path.name}
    assert not Path("/tmp/escaped").exists()
    assert only(before)
    # Our memory (in kilobytes) does not hold floods or bombs.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limits < 100_000


def test_every_hostile_program_is_in_the_table() -> None:
    assert {path.stem for path in HOSTILE.glob("*.py")} - {"frame"} == {*VERDICTS} and len(VERDICTS) >= 20
    assert sorted(name for names in STOPPED.values() for name in names) == sorted(VERDICTS)


def test_the_page_has_a_row_for_every_hostile_file_as_it_is() -> None:
    programs, _, _ = PAGE.read_text().partition("## Cheats")
    rows = {line.split("`")[1]: line for line in programs.splitlines() if line.startswith("| `")}
    assert {*rows} == {*VERDICTS, *MISSED}
    for layer, names in STOPPED.items():
        assert all(f"| {layer} |" in rows[name] for name in names)
    for name, checks in MISSED.items():
        assert any(check in rows[name] for check in checks)


@strong
def test_an_environment_goes_on_after_each_of_its_faults_in_processes_that_know_nothing_of_them(tmp_path: Path) -> None:
    target = load_confined(program("leave", tmp_path), "strong, one layer", BARE)
    tasks = target.tasks("training", 3)
    survivor = target.open(tasks[0])
    assert survivor.messages
    for task in tasks:
        with pytest.raises(EnvironmentFault, match=r"died \(exit status 0\), asked|died \(exit status 0\) in step on"):
            target.open(task).step(IDLE)
        assert target.score(task, []).reward == 0.25
        assert target.reference(task) == [IDLE]
    assert survivor.messages == [{"role": "user", "content": "Go."}]


FUNCTIONS = """
import os
def attack(argument):
    return ""
class Odd:
    def idle(self, task):
        return [{"role": "assistant", "content": 5}]
    def hint(self, task):
        return ["not", "text"]
    def broken(self, task):
        os._exit(4)
"""


@strong
def test_what_a_file_does_not_define_is_not_there_and_what_it_does_is_confined(tmp_path: Path) -> None:
    plain: Any = load_confined(written(tmp_path, "attack = str"), "basic", BARE).environment
    assert not any(hasattr(plain, name) for name in ("idle", "broken", "hint"))
    assert plain.about == {} and plain.size("training") is None
    path = written(tmp_path, FUNCTIONS, "odd")
    path.write_text(path.read_text().replace("class Environment:", "class Environment(Odd):"))
    target = load_confined(path, "basic", BARE)
    environment: Any = target.environment
    task = target.tasks("training", 1)[0].model_dump()
    for name, verdict in (("idle", "not a list of messages"), ("hint", "not text"), ("broken", "died .exit status 4.")):
        with pytest.raises(EnvironmentFault, match=f"{verdict}.* in {name} on hostile/training/0"):
            getattr(environment, name)(task)


@strong
def test_a_file_says_how_many_tasks_it_has_and_nothing_else_is_a_number_of_tasks(tmp_path: Path) -> None:
    path, header = written(tmp_path, "attack = str", "counted"), "class Environment:\n"
    text = path.read_text()
    for value, size in (("5 if split == 'training' else 0", 5), ("None", None)):
        path.write_text(text.replace(header, f"{header}    def size(self, split):\n        return {value}\n"))
        assert load_confined(path, "basic", BARE).size("training") == size
    for value in ("-1", "True", "2.0", "'5'", "[5]"):
        path.write_text(text.replace(header, f"{header}    def size(self, split):\n        return {value}\n"))
        with pytest.raises(EnvironmentFault, match="not a number of tasks .* in size on split training"):
            load_confined(path, "basic", BARE).size("training")


KEYED = """
import os, random, time
STARTED = time.time_ns()
def attack(argument):
    return f"{os.getpid()} {hash('a') % 1000} {random.random()}"
"""


@strong
def test_keys_reach_episodes_and_unseeded_draws_and_hashes_are_alike_in_all_processes(tmp_path: Path) -> None:
    path = written(tmp_path, KEYED)
    path.write_text(
        path.read_text()
        .replace("def open(self, task):\n        return Episode()", "about = {'version': 3}\n\n"
        "    def open(self, task, key):\n        episode = Episode()\n        episode.messages[0]['content'] = key\n"
        "        return episode")
    )  # fmt: skip
    target, again, here = load_confined(path, "basic", BARE), load_confined(path, "basic", BARE), load_file(path)
    assert target.about == here.about == {"version": 3}
    assert target.fingerprint == here.fingerprint and target.name == here.name
    task = target.tasks("training", 1)[0]
    assert target.open(task, "a key").messages[0]["content"] == "a key"
    said = [one.open(task, "").step(IDLE)[0][0]["content"].split() for one in (target, target, again)]
    assert len({pid for pid, *_ in said}) >= 2
    assert len({(hashed, drawn) for _, hashed, drawn in said}) == 1


def test_all_that_may_be_imported_can_be_and_nothing_else(tmp_path: Path) -> None:
    lines = "\n".join(f"    import {module}" for module in forkserver.MODULES)
    text = f"def attack(argument):\n{lines}\n    import sqlite3\n"
    target = load_confined(written(tmp_path, text), "none", LAYERS)
    with pytest.raises(EnvironmentFault, match="raised ModuleNotFoundError: No module named 'sqlite3' in step"):
        attacked(target, "")


@strong
def test_what_environments_are_made_of_works_in_there(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
import copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, itertools, json, math, operator
import random, re, statistics, string, textwrap, typing, uuid, collections, heapq, bisect, abc, urllib.parse
@dataclasses.dataclass(order=True)
class Row:
    at: datetime.date
    price: decimal.Decimal = decimal.Decimal("1.10")
    tags: list[str] = dataclasses.field(default_factory=list)
class Kind(enum.Enum):
    A = 1
class Point(typing.NamedTuple):
    x: int
def attack(argument):
    rows = [Row(datetime.date(2024, 2, day)) for day in (3, 1, 2)]
    assert copy.deepcopy(sorted(rows))[0].at.isoformat() == "2024-02-01" and Kind(1) is Kind.A and Point(1).x == 1
    assert datetime.datetime.strptime("3 March 2024", "%d %B %Y").strftime("%A") == "Sunday"
    assert datetime.datetime.now().year > 2000 and random.Random(3).randint(0, 9) in range(10)
    assert uuid.uuid5(uuid.NAMESPACE_DNS, "a").version == 5 and uuid.UUID(int=random.Random(1).getrandbits(128))
    assert hashlib.sha256(b"a").hexdigest().startswith("ca97") and f"{decimal.Decimal(10) / 4:.2f}" == "2.50"
    assert statistics.fmean([1, 2]) == 1.5 and fractions.Fraction(1, 3) * 3 == 1 and math.floor(math.tau) == 6
    assert textwrap.shorten("hello world", 7) and re.sub(r"\\d", "", "a1") == "a" and "é".encode("latin-1")
    assert urllib.parse.quote("a b") == "a%20b" and heapq.nsmallest(1, [2, 1]) == [1] and bisect.bisect([1], 1) == 1
    assert random.SystemRandom().random() < 1 and len(str(uuid.uuid4())) == 36
    try:
        raise KeyError("x")
    except KeyError:
        import traceback
        return traceback.format_exc().splitlines()[-1]
"""
    assert attacked(load_confined(written(tmp_path, text), "strong, one layer", BARE), "") == "= KeyError: 'x'"


@strong
@pytest.mark.parametrize("family_of", ["wrong_argument", "missing_lookup"])
def test_a_template_environment_gives_the_same_tasks_plays_and_scores_confined(family_of: str, tmp_path: Path) -> None:
    brief = Brief(Capability(id=family_of, name=family_of, description=""), ServiceDesk().tools)
    path = tmp_path / f"{family_of}.py"
    path.write_text(TemplateSynthesizer().synthesize(brief, []))
    here, there = load_file(path), load_confined(path, "strong, one layer")
    assert (there.fingerprint, there.name, there.tools, there.about) == (
        here.fingerprint, here.name, here.tools, here.about,
    )  # fmt: skip
    tasks = here.tasks("training", 24)
    assert there.tasks("training", 24) == tasks and there.tasks("test", 3) == here.tasks("test", 3)
    for task in tasks:
        actions = here.reference(task)
        assert there.reference(task) == actions
        messages = here.play(task, actions)
        assert there.play(task, actions) == messages
        for said in (messages, messages[:-1], [*messages[:2], IDLE]):
            assert there.score(task, said) == here.score(task, said)
        assert there.floor(task) == here.floor(task)
        for name in ("broken", "hint"):
            ours, theirs = (getattr(one.environment, name, None) for one in (here, there))
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or ours(task.model_dump()) == theirs(task.model_dump())


@strong
def test_rollouts_are_collected_from_the_sandbox_and_nothing_is_left_of_them(letters: Any, tmp_path: Path) -> None:
    before = family()
    target = load_confined(letters(), "strong, one layer")
    tasks = target.tasks("training", 6)
    rollouts = collect(
        ScriptedPolicy(),
        target,
        tasks,
        purpose="training",
        seed=0,
        trials=3,
        journals=tmp_path / "journals",
        quiet=True,
    )
    assert [rollout.outcome for rollout in rollouts] == ["passed"] * 18
    server = family() - before
    assert len(server) in (2, 3, 4)  # bubblewrap's own, the server, and the process that is kept
    del target
    assert only(before)


SPOILT = """
def attack(argument):
    return ""

def scored(task, messages):
    if task["id"].endswith("/1"):
        raise ValueError("no reward today")
    return {"reward": 1.0, "success": True, "parts": {}}
"""


@pytest.mark.parametrize(
    ("each", "said"), [(8, "; it waited 8 s for a processor: run it again when this machine is less busy"), (0, "")]
)
def test_a_verdict_of_time_says_whether_the_machine_was_too_busy_for_this_request(
    each: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = itertools.count(8, each)  # the 8 s lay before
    monkeypatch.setattr(forkserver, "SECONDS", 0.3)
    monkeypatch.setattr(forkserver, "waited", lambda _handle: next(waits))
    with pytest.raises(EnvironmentFault, match=f"within 0.3 s{said} in step on"):
        attacked(load_confined(program("endless_loop", tmp_path), "none"), "")


@pytest.mark.needs("schedstat")
def test_what_a_process_waited_for_a_processor_is_known() -> None:
    spin = "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); time.sleep(.1)\nwhile True: pass"
    pair = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    handles = [os.pidfd_open(process.pid) for process in pair]
    try:
        until(lambda: all(forkserver.waited(handle) > 0.05 for handle in handles))
    finally:
        for process, handle in zip(pair, handles, strict=True):
            process.kill()
            process.wait()
            os.close(handle)
    assert forkserver.waited(-1) == 0


@pytest.mark.parametrize("culprit", ["environment", "captrain"])
def test_a_score_that_raises_leaves_no_process_of_any_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    def bug(*arguments: object) -> None:
        raise KeyError("a bug of ours")

    class AllAtOnce(ScriptedPolicy):
        def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
            for play in plays:
                play.start()
            assert len(family() - before) >= 4
            yield from super().play(plays)

    target = load_confined(written(tmp_path, SPOILT), "strong, one layer")
    tasks = target.tasks("training", 4)
    before = family()
    if culprit == "captrain":
        monkeypatch.setattr(target, "score", bug)
    with pytest.raises((EnvironmentFault, KeyError), match="no reward today in score|a bug of ours") as fault:
        collect(AllAtOnce(), target, tasks, purpose="training", seed=0, journals=tmp_path / "journals", quiet=True)
    # The traceback still refers to the episodes, so garbage collection did not close them.
    assert fault.value.__traceback__ is not None and only(before)


@strong
def test_the_reference_of_a_task_is_asked_for_once_while_there_is_room_and_nobody_can_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "COUNT = []\nattack = str")
    honest = 'return [{"role": "assistant", "content": ""}]'
    counting = 'COUNT.append(task); return [{"role": "assistant", "content": str(len(COUNT))}]'
    path.write_text(path.read_text().replace(honest, counting))
    target = load_confined(path, "basic", BARE)
    one, other, third = target.tasks("training", 3)
    target.reference(one)[0]["content"] = "changed"
    assert [target.reference(task)[0]["content"] for task in (one, other, one)] == ["1", "2", "1"]
    monkeypatch.setattr(sandbox, "CHARACTERS", 1)
    assert [target.reference(task)[0]["content"] for task in (one, third, one)] == ["1", "3", "4"]


@strong
def test_messages_may_have_a_role_that_captrain_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, "attack = str")
    path.write_text(path.read_text().replace('"role": "user"', '"role": "developer"'))
    target = load_confined(path, "basic", BARE)
    assert target.open(target.tasks("training", 1)[0]).messages == [{"role": "developer", "content": "Go."}]
    path.write_text(path.read_text().replace('"role": "developer"', '"role": 5'))
    target = load_confined(path, "basic", BARE)
    with pytest.raises(EnvironmentFault, match="returned something that is not a list of messages"):
        _ = target.open(target.tasks("training", 1)[0]).messages


INTERLEAVED = """
def attack(argument):
    COUNT["n"] += int(argument)
    return str(COUNT["n"])
COUNT = {"n": 0}
"""


@strong
def test_hundreds_of_episodes_are_open_at_once_and_know_nothing_of_each_other(tmp_path: Path) -> None:
    before, files = family(), descriptors()
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer", BARE)
    tasks = target.tasks("training", 256)
    assert len({task.id for task in tasks}) == 256

    def played(at: int, target: CheckedEnvironment = target) -> list[str]:
        episode = target.open(tasks[at])
        said = [episode.step({"role": "user", "content": str(at)})[0][0]["content"] for _ in range(2)]
        opened.append(episode)
        return said

    opened: list[Any] = []
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(played, range(256))) == [[str(at), str(2 * at)] for at in range(256)]
        assert len(family() - before) >= 257
        assert descriptors() - files < 2 * 256 + 20
        assert opened[255].step({"role": "user", "content": "0"})[0][0]["content"]
        list(threads.map(lambda episode: episode.close(), opened))
    assert len(family() - before) <= 3
    opened.clear()
    episode = target.open(tasks[0])
    assert episode.messages and len(family() - before) <= 4
    del episode  # not closed
    target.score(tasks[0], [])
    assert len(family() - before) <= 3
    del target, played
    assert only(before) and descriptors() <= files


@strong
def test_an_episode_that_nobody_closes_leaves_neither_a_dead_process_nor_a_descriptor(tmp_path: Path) -> None:
    before = family()
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer", BARE)
    task = target.tasks("training", 1)[0]
    processes = family() - before
    (server,) = (pid for pid in processes if psutil.Process(pid).ppid() not in processes)
    gc.collect()  # what earlier tests left open is not closed amid this one
    files = descriptors()
    for _ in range(5):
        assert target.open(task).messages
    target.score(task, [])
    assert len(psutil.Process(server).children()) == 1  # the process that is kept; a dead one counts until it is reaped
    assert descriptors() == files


def test_replies_of_a_fork_server_that_come_in_one_piece_or_in_many_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without pidfds, only newlines separate the first two replies.
    folder = shutil.copytree(forkserver.CONFINEMENT, tmp_path / "confinement")
    text = (folder / "server.py").read_text()
    (folder / "server.py").write_text(text.replace("import os\n", "import os\ndel os.pidfd_open\n", 1))
    receive, sizes = socket.recv_fds, [1 << 14, *[7] * 99]

    def receiving(control: socket.socket, size: int, *more: int) -> Any:
        if len(sizes) == 100:
            assert until(lambda: b"error" in control.recv(size, socket.MSG_PEEK))
        return receive(control, sizes.pop(0) if sizes else size, *more)

    monkeypatch.setattr(forkserver, "CONFINEMENT", folder)
    monkeypatch.setattr(socket, "recv_fds", receiving)
    before = family()
    target = load_confined(written(tmp_path, INTERLEAVED), "none", ())
    task = target.tasks("training", 1)[0]
    with contextlib.closing(target.open(task)) as episode:
        assert [episode.step({"role": "user", "content": "2"})[0][0]["content"] for _ in range(2)] == ["2", "4"]
    assert target.score(task, []).reward == 0.25 and len(sizes) < 99
    del target, episode
    assert only(before)


@strong
def test_too_many_open_files_are_a_user_error_with_a_remedy(tmp_path: Path) -> None:
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer", BARE)
    task = target.tasks("training", 1)[0]
    gc.collect()  # what earlier tests left open is not closed amid this one
    taken = {int(number) for number in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in taken)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 8, None)), hard))
    episodes = [target.open(task) for _ in range(20)]
    try:
        with pytest.raises(UserError, match="too many files") as caught:
            [episode.messages for episode in episodes]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.remedy
    assert episodes[-1].messages


@strong
def test_an_episode_costs_milliseconds(tmp_path: Path) -> None:
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer")
    task = target.tasks("training", 1)[0]
    took, interpreters = list[float](), list[float]()
    for _ in range(10):
        begun = time.perf_counter()
        episode = target.open(task)
        episode.step({"role": "user", "content": "1"})
        episode.close()
        took.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", "import json"], check=True)
        interpreters.append(time.perf_counter() - begun)
    # About 0.005 and 0.04 s on an idle machine, because an episode starts no interpreter.
    assert min(took) < min(interpreters), (took, interpreters)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def (", r"does not load: it raised SyntaxError: invalid syntax"),
        ("x = '\0'", "does not load: it raised (ValueError|SyntaxError): .*null"),
        ("(" * 5000, "does not load: it raised (SyntaxError|MemoryError|RecursionError)"),
        ("x = " + "-" * 500_000 + "1", "does not load: it (raised|ended the process)"),
        ("x" + ".x" * 200_000, "does not load: it (raised|ended the process)"),
        ("import numpy", "does not load: it raised ModuleNotFoundError: No module named 'numpy'"),
        ("raise ValueError('a\\nb')", "does not load: it raised ValueError: a b\n"),
        ("raise SystemExit(3)", "does not load: it raised SystemExit: 3"),
        ("class Environment:\n    name = 'x'\n    open = tools = tasks = 0", "lacks score, reference"),
        ("pass", "lacks the class Environment"),
    ],
)
def test_a_file_that_does_not_load_is_a_fault_that_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    before = family()
    with pytest.raises(EnvironmentFault, match=said) as caught:
        load_confined(path, "none", BARE)
    assert str(path) in caught.value.problem and "\n" not in caught.value.problem
    assert only(before)


def test_a_file_that_is_missing_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.py is missing"):
        load_confined(tmp_path / "absent.py", "none")


def test_compiling_without_end_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "SECONDS", 0.05)
    path = tmp_path / "long.py"
    path.write_text("x = [\n" + "(lambda a, b=1: [a for a in b if a]),\n" * 60_000 + "]\n")
    before = family()
    with pytest.raises(EnvironmentFault, match="ended the process that compiled it, or took it more than 0.05 s"):
        load_confined(path, "none", ())
    assert only(before)


@pytest.mark.needs("seccomp", "landlock")
def test_each_level_is_what_its_layers_hold_and_less_than_asked_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "attack = str")
    levels: dict[tuple[str, ...], sandbox.Level] = {
        ("rlimits", "landlock", "seccomp"): "strong",
        ("rlimits", "seccomp"): "strong, one layer",
        ("rlimits", "landlock"): "basic",
        ("rlimits",): "basic",
        ("landlock", "seccomp"): "none",
        (): "none",
    }
    for layers, level in levels.items():
        activity = active_confinement(layers)
        assert (activity.level, activity.layers) == (level, layers)
        assert all(activity.blocked.values()) or not level.startswith("strong")
        for least in LEVELS:
            if LEVELS.index(level) >= LEVELS.index(least):
                continue
            with pytest.raises(UserError, match=f"level `{least}` only, and here it is {level}") as caught:
                load_confined(path, least, layers)
            assert "machine.sandbox" in caught.value.remedy
        target = load_confined(path, level, layers)
        assert target.score(target.tasks("training", 1)[0], []).reward == 0.25
    assert "exposed: reading files" in str(active_confinement(("rlimits",)))
    with pytest.raises(EnvironmentFault, match="hostile"):
        attacked(load_confined(program("read_file", tmp_path), "strong, one layer", BARE), "")
    # At the weakest level the same program succeeds: it is the layers that stop it.
    target = load_confined(program("read_file", tmp_path), "none", ())
    episode = target.open(target.tasks("training", 1)[0])
    assert "root:" in episode.step(IDLE)[0][0]["content"]


@pytest.mark.needs("bubblewrap")
def test_bubblewrap_alone_shows_nothing_of_the_machine_and_a_broken_one_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        active_confinement().level == "strong"
        and active_confinement(("bubblewrap", "rlimits", "seccomp")).level == "strong"
    )
    text = "import os\ndef attack(argument):\n    return ' '.join(sorted(os.listdir('/') + os.listdir('/usr/../home')))"
    with pytest.raises(EnvironmentFault, match="FileNotFoundError.*home"):
        attacked(load_confined(written(tmp_path, text), "none", ("bubblewrap", "rlimits")), "")
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    active_confinement.cache_clear()
    try:
        assert active_confinement().layers == active_confinement(BARE).layers
        with pytest.raises(InfrastructureError, match="does not start: bwrap: No permissions"):
            forkserver.ForkServer(b"", "x", ["bubblewrap"])
    finally:
        active_confinement.cache_clear()


def test_the_interpreter_is_the_one_without_packages_even_in_a_virtual_environment(tmp_path: Path) -> None:
    python, folders = forkserver.interpreter()
    assert sys.prefix != sys.base_prefix, "the tests are run in a virtual environment"
    assert not Path(python).is_relative_to(sys.prefix)
    assert all(folder.is_dir() for folder in folders)
    look = "import sys, importlib.util; print(sys.version_info[:2], importlib.util.find_spec('numpy'), sys.prefix)"
    said = subprocess.run([python, "-I", "-S", "-B", "-c", look], capture_output=True, text=True, check=True).stdout
    assert said.split(") ")[0] + ")" == str(sys.version_info[:2])
    assert said.split(") ")[1].split() == ["None", sys.base_prefix] or Path(said.split()[-1]).samefile(sys.base_prefix)
    text = "import sys\ndef attack(argument):\n    return '\\n'.join([*sys.path, sys.prefix, sys.executable])"
    shown = attacked(load_confined(written(tmp_path, text), "none"), "")
    assert sys.prefix not in shown and "site-packages" not in shown and "captrain" not in shown


HOLDER = """
import os, sys, time
from pathlib import Path
from captrain.environments.sandbox.confined import load_confined
layers = tuple(sys.argv[2].split())
target = load_confined(Path(sys.argv[1]), "none", layers)
task = target.tasks("training", 1)[0]
episodes = [target.open(task) for _ in range(3)]
print(len([episode.messages for episode in episodes]), flush=True)
if sys.argv[3] == "busy":
    import threading
    for episode in episodes:
        threading.Thread(target=episode.step, args=[{"role": "user", "content": ""}], daemon=True).start()
    time.sleep(0.3)
    print("busy", flush=True)
time.sleep(3600 if sys.argv[4] == "killed" else 0)
"""


@pytest.mark.parametrize(("layers", "state"), [(LAYERS, "idle"), (BARE, "busy"), ((), "busy")])
@pytest.mark.parametrize("ending", further(["killed", "over"]))
def test_no_process_outlives_us_not_even_at_work_nor_when_we_are_killed(
    tmp_path: Path, layers: tuple[str, ...], state: str, ending: str
) -> None:
    path = program("endless_loop", tmp_path)
    command = [sys.executable, "-c", HOLDER, str(path), " ".join(layers), state, ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "3\n"
        if state == "busy":
            assert holder.stdout.readline() == "busy\n"
        pids = {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if of(holder.pid, int(entry.name))}
        assert len(pids) >= 4 or ending == "over"
        if ending == "killed":
            holder.send_signal(signal.SIGKILL)
    until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def of(ancestor: int, pid: int) -> bool:
    """Return whether a process descends from another."""
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


@strong
def test_a_fork_of_ours_starts_its_own_server_and_leaves_ours_alone(tmp_path: Path) -> None:
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer", BARE)
    task = target.tasks("training", 1)[0]
    episode = target.open(task)
    assert episode.messages
    before = family()
    child = os.fork()
    if child == 0:
        good = False
        try:
            other = target.open(task)
            good = other.step({"role": "user", "content": "5"})[0][0]["content"] == "5"
            good = good and target.score(task, []).reward == 0.25 and target.reference(task) == [IDLE]
            del other
            episode.close()
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert episode.step({"role": "user", "content": "2"})[0][0]["content"] == "2"
    assert target.score(task, []).reward == 0.25
    assert only(before)


@strong
def test_a_fork_server_that_is_killed_from_outside_is_no_fault_of_the_environment_and_is_replaced(
    tmp_path: Path,
) -> None:
    before = family()
    target = load_confined(written(tmp_path, INTERLEAVED), "strong, one layer", BARE)
    task = target.tasks("training", 1)[0]
    episode = target.open(task)
    assert episode.messages
    processes = family() - before
    (server,) = (pid for pid in processes if psutil.Process(pid).ppid() not in processes)
    os.kill(server, signal.SIGKILL)
    assert only(before)
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="fork server died"):
            episode.step({"role": "user", "content": "1"})
    episode.close()
    assert target.score(task, []).reward == 0.25
    assert target.open(task).step({"role": "user", "content": "1"})[0][0]["content"] == "1"


def filters() -> ModuleType:
    path = forkserver.CONFINEMENT / "confine.py"
    spec = importlib.util.spec_from_file_location("confinement", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decided(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter on a system call and return its verdict."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at = held = 0
    while True:
        operation, yes, no, value = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            held = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x06:
            return value
        else:
            at += yes if (held == value if operation == 0x15 else held >= value) else no


@pytest.mark.parametrize(
    ("machine", "architecture", "openat", "getpid", "fcntl", "ioctl", "prlimit"),
    [("x86_64", 0xC000003E, 257, 39, 72, 16, 302), ("aarch64", 0xC00000B7, 56, 172, 25, 29, 261)],
)
def test_the_filter_allows_what_is_listed_on_its_own_machine_alone(
    machine: str, architecture: int, openat: int, getpid: int, fcntl: int, ioctl: int, prlimit: int
) -> None:
    code = filters().program(machine)
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000

    def call(number: int, *arguments: int) -> int:
        return decided(code, architecture, number, *arguments)

    place = filters().MACHINES[machine][0]
    listed = {numbers[place] for numbers in filters().CALLS.values()} - {None}
    allowed = {number for number in range(2048) if call(number, 0, 99, 1) == allow}
    assert allowed == listed and getpid in allowed and openat not in allowed
    assert {call(number | 0x40000000) for number in range(2048)} == {refuse}
    assert {
        decided(code, other, getpid) for other in (0x40000003, 0xC00000B7, 0xC000003E, 0) if other != architecture
    } == {kill}
    assert [call(fcntl, 3, command) == allow for command in (0, 1, 2, 3, 4, 8, 10, 1030, 1031, 1033)] == [
        True, True, True, True, False, False, False, True, False, False,
    ]  # fmt: skip
    assert [call(ioctl, 1, request) for request in (0x5401, 0x5412, 0x541B)] == [allow, refuse, refuse]
    assert [call(prlimit, 0, 9, new) for new in (0, 1, 1 << 32)] == [allow, refuse, refuse]
    with pytest.raises(OSError, match="riscv64"):
        filters().program("riscv64")


@pytest.mark.parametrize("layers", [(), ("rlimits",)])
def test_the_cost_of_a_weaker_sandbox_is_measured_and_what_it_lacks_is_named(layers: tuple[str, ...]) -> None:
    script, sound = (
        Path(__file__).parents[2] / name for name in ("scripts/bench_sandbox.py", "tests/bad_environments")
    )
    command = [sys.executable, script, sound / "sound.py", "2", "--layers", *layers]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert len(re.findall(r"median [\d.]+ ms", done.stdout)) == 2
    lacking = ", ".join(layer for layer in LAYERS if layer not in layers)
    assert re.fullmatch(rf"the sandbox is only .*: {lacking} did not work here or was left out\n", done.stderr)
