"""Work in processes: results in order, exceptions unchanged, and no processes left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.waiting import alive, until

from captrain.errors import EnvironmentFault, UserError
from captrain.records import JsonObject, publish_text
from captrain.run import launch
from captrain.run.machine import VLLM, Accelerate, Machine, ModelAccess
from captrain.training import processes


def machine(workers: int) -> Machine:
    return Machine(workers=workers, batch=1)


def slow_square(number: int) -> tuple[int, int]:
    time.sleep(0.2 if number == 0 else 0)
    return number**2, os.getpid()


def refuse(number: int) -> int:
    if number == 1:
        raise UserError("one is out of stock", "take two")
    if number == 2:
        raise EnvironmentFault("two raised", "mend it")
    return number


def threads_of(_: int) -> tuple[str | None, str | None]:
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS")


@pytest.mark.parametrize("workers", [1, 2])
def test_results_have_the_order_of_the_items(workers: int) -> None:
    results = launch.run(slow_square, range(6), machine(workers), "squares")
    assert [square for square, _ in results] == [0, 1, 4, 9, 16, 25]
    processes = {process for _, process in results}
    assert processes == {os.getpid()} if workers == 1 else os.getpid() not in processes and len(processes) <= 2


def test_no_items_give_no_results() -> None:
    assert launch.run(slow_square, [], machine(2), "squares") == []


def test_a_worker_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.run(threads_of, [0, 1], machine(2), "threads") == [("1", "1")] * 2


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("items", "kind", "problem", "remedy"),
    [([0, 1, 2], UserError, "one is out of stock", "take two"), ([0, 2], EnvironmentFault, "two raised", "mend it")],
)
def test_exceptions_of_workers_reach_the_caller_unchanged(
    workers: int, items: list[int], kind: type[UserError], problem: str, remedy: str
) -> None:
    with pytest.raises(UserError) as error:
        launch.run(refuse, items, machine(workers), "refusals")
    assert type(error.value) is kind and (error.value.problem, error.value.remedy) == (problem, remedy)
    assert str(error.value) == f"{problem}\n  remedy: {remedy}"


def die_once(item: tuple[Path, int]) -> int:
    """Kill the first worker with the second item, or every such worker if the file is a folder."""
    path, number = item
    if number == 1 and not path.is_file():
        if not path.exists():
            path.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_killed_workers_items_start_again_and_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run(die_once, [(tmp_path / "died", number) for number in range(6)], machine(2), "squares") == [
        0, 1, 4, 9, 16, 25,
    ]  # fmt: skip
    assert "a worker process of squares died; its items start again" in capfd.readouterr().err


def test_repeatedly_dying_workers_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a worker process of squares died 3 times"):
        launch.run(die_once, [(tmp_path, number) for number in range(3)], machine(2), "squares")


SLEEPERS = """
import os, pathlib, time
from captrain.run import launch
from captrain.records import JsonObject, publish_json
from captrain.training import processes
from captrain.run.machine import VLLM, Accelerate, Machine, ModelAccess

def sleep(number):
    pathlib.Path(f"pid-{number}").write_text(str(os.getpid()))
    time.sleep(3600)

if __name__ == "__main__":
    launch.run(sleep, [0, 1], Machine(workers=2, batch=1), "sleepers")
"""


@pytest.mark.needs("proc")
def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    running = subprocess.Popen([sys.executable, "sleepers.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    workers = [int(file.read_text()) for file in files]
    assert len({*workers, running.pid}) == 3 and all(alive(worker) for worker in workers)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    until(lambda: not any(alive(worker) for worker in workers))


SLOW_STAGE = """
import os, pathlib, time
from captrain.run import entry_point, launch
from captrain.run.machine import Machine

def sleep(number):
    pathlib.Path(f"pid-{number}").write_text(str(os.getpid()))
    time.sleep(3600)

@entry_point
def main():
    pathlib.Path("pid-stage").write_text(str(os.getpid()))
    launch.run(sleep, range(6), Machine(workers=2, batch=1), "sleepers")

if __name__ == "__main__":
    main()
"""
RUN_PIPELINE = """
from pathlib import Path
from functools import partial
from captrain.projects import run_pipeline
from captrain.run import entry_point

partial(entry_point, stage=False)(lambda: run_pipeline(Path()))()
"""


@pytest.mark.needs("proc")
@pytest.mark.parametrize(
    ("command", "signalled"),
    [
        (["env", "SHELL=/bin/bash", sys.executable, "-c", RUN_PIPELINE], os.kill),
        (["env", "SHELL=/bin/sh", sys.executable, "-c", RUN_PIPELINE], os.kill),
        ([sys.executable, "-c", RUN_PIPELINE], os.killpg),
        ([str(Path(sys.executable).parent / "dvc"), "repro"], os.killpg),
    ],
    ids=["captrain alone", "captrain alone, behind a shell that stays", "captrain in a terminal", "dvc in a terminal"],
)
def test_an_interrupt_ends_the_pipeline_its_stage_and_its_workers_at_once(
    command: list[str], signalled: Callable[[int, int], None], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_STAGE)
    (tmp_path / "dvc.yaml").write_text("""
stages: {quick: {cmd: echo 1 > one, outs: [one]}, slow: {cmd: python slow.py, deps: [one], outs: [never]}}
""")
    subprocess.run([Path(sys.executable).parent / "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
    )  # fmt: skip
    files = [tmp_path / f"pid-{name}" for name in ("stage", 0, 1)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    began = time.monotonic()
    signalled(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode and "finished work is kept" in said and "Traceback" not in said
    until(lambda: not any(alive(int(file.read_text())) for file in files))
    assert [*yaml.safe_load((tmp_path / "dvc.lock").read_text())["stages"]] == ["quick"]
    assert time.monotonic() - began < 10  # a tenth of a second on a quiet machine


@pytest.mark.needs("proc")
def test_short_stages_are_written_to_the_lock_file_together_and_restored_if_a_kill_comes_first(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("""
stages:
  first: {cmd: echo first >> ran && cp ran one, deps: [begin], outs: [one]}
  second:
    cmd: test ! -e dvc.lock && (test -e go || kill -9 $CAPTRAIN_PIPELINE) && cp one two
    deps: [one]
    outs: [two]
  third: {cmd: test -e three, deps: [two], outs: [three: {persist: true}]}
""")
    (tmp_path / "begin").touch()
    subprocess.run([Path(sys.executable).parent / "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)

    def run() -> int:
        return subprocess.run([sys.executable, "-c", RUN_PIPELINE], cwd=tmp_path, stderr=subprocess.DEVNULL).returncode

    def locked() -> list[str]:
        return [*yaml.safe_load((tmp_path / "dvc.lock").read_text())["stages"]]

    assert run() == -signal.SIGKILL
    assert not (tmp_path / "dvc.lock").exists()
    (tmp_path / "go").touch()
    assert run() == 2  # the third stage fails
    assert (tmp_path / "ran").read_text() == "first\n"
    assert locked() == ["first", "second"]
    (tmp_path / "three").touch()
    assert run() == 0
    assert locked() == ["first", "second", "third"]
    status = subprocess.run(
        [Path(sys.executable).parent / "dvc", "status"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "up to date" in status.stdout


SLOW_IMPORTS = """
import os, pathlib, time
pathlib.Path("pid-stage").write_text(str(os.getpid()))
while not pathlib.Path("imported").exists():
    time.sleep(0.05)
"""


@pytest.mark.needs("proc")
@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-c", RUN_PIPELINE], [str(Path(sys.executable).parent / "dvc"), "repro"]],
    ids=["captrain", "dvc"],
)
def test_a_stage_whose_pipeline_ended_during_its_imports_ends(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_IMPORTS + SLOW_STAGE)
    (tmp_path / "dvc.yaml").write_text("stages: {slow: {cmd: python slow.py, outs: [never]}}\n")
    subprocess.run([Path(sys.executable).parent / "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PATH": path}, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid-stage"
    until(lambda: pid.exists() and bool(pid.read_text()))
    running.kill()
    running.wait()
    (tmp_path / "imported").touch()
    until(lambda: not alive(int(pid.read_text())))


@pytest.mark.parametrize(
    ("folder", "environment", "is_quiet"),
    [("stages", {"DVC_STAGE": "base"}, True), ("stages", {}, False), ("mine", {"DVC_STAGE": "mine"}, False)],
    ids=["stage", "no pipeline", "a user's own stage"],
)
def test_an_interrupt_during_the_imports_of_a_stage_prints_no_traceback_and_other_programs_keep_theirs(
    folder: str, environment: dict[str, str], is_quiet: bool, tmp_path: Path
) -> None:
    program = tmp_path / folder / "base.py"
    program.parent.mkdir()
    program.write_text("import captrain, time\nprint('imported', flush=True)\ntime.sleep(60)")
    others = {name: value for name, value in os.environ.items() if name != "DVC_STAGE"}
    running = subprocess.Popen(
        [sys.executable, str(program)],
        env=others | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
    )
    assert running.stdout is not None and running.stdout.readline() == "imported\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == -signal.SIGINT  # a shell says 130
    assert ("Traceback" not in said) == is_quiet


BUNDLED_STAGE = """
import os, pathlib, time
pathlib.Path("pid-stage").write_text(str(os.getpid()))
import captrain
pathlib.Path("imported").touch()
if MOMENT == "imports":
    time.sleep(3600)
"""


@pytest.mark.needs("proc")
@pytest.mark.parametrize("moment", ["imports", "work"])
def test_an_interrupt_ends_a_stage_and_its_workers_under_a_dvc_that_is_no_python_program(
    moment: str, tmp_path: Path
) -> None:
    # DVC's packages for Linux bring a program of their own. This one is Python under another name.
    program = tmp_path / "bundle" / "dvc"
    program.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), program)
    (program.parent / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    project = tmp_path / "project"
    publish_text(project / "stages/slow.py", BUNDLED_STAGE.replace("MOMENT", repr(moment)) + SLOW_STAGE)
    publish_text(project / "dvc.yaml", "stages: {slow: {cmd: python stages/slow.py, outs: [never]}}\n")
    subprocess.run([Path(sys.executable).parent / "dvc", "init", "-q", "--no-scm"], cwd=project, check=True)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = subprocess.Popen(
        [program, "-c", "import sys; from dvc.cli import main; sys.exit(main(['repro']))"],
        cwd=project, env=environment, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
    )  # fmt: skip
    files = [project / "imported"] if moment == "imports" else [project / f"pid-{name}" for name in (0, 1)]
    until(lambda: all(file.exists() and (file.name == "imported" or file.read_text()) for file in files))
    assert Path(f"/proc/{running.pid}/exe").readlink().name == "dvc"
    pids = [int(file.read_text()) for file in project.glob("pid-*")]
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode and "failed to reproduce 'slow'" in said and "Traceback" not in said
    until(lambda: not any(alive(pid) for pid in pids))


EIGHT: dict[str, Any] = {"gpus": 8, "batch": 1, "vllm": VLLM(gpus=2), "asking": ModelAccess(gpus=2)}


def process(number: int) -> int:
    return os.getpid()


def layout(machine: Machine) -> tuple[str | None, int]:
    began = Path(os.environ["BEGAN"])
    (began / str(os.getpid())).touch()
    until(lambda: len([*began.iterdir()]) == int(os.environ["AT_ONCE"]))  # each worker has an item
    return os.environ.get("CUDA_VISIBLE_DEVICES"), launch.gpu_sets(machine)


@pytest.mark.parametrize(
    ("processes", "items", "devices", "places"),
    [(1, 4, ["0", "1", "2", "3"], 1), (1, 2, ["0,1", "2,3"], 2), (2, 2, ["0,1", "2,3"], 1), (1, 3, ["0", "1", "2"], 1)],
)
def test_trainings_at_once_have_each_gpus_of_their_own_and_all_of_them_where_there_are_few(
    processes: int, items: int, devices: list[str], places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    accelerate = Accelerate(processes=processes, strategy="fsdp" if processes > 1 else "none")
    node = Machine(workers=0, accelerate=accelerate, **EIGHT)
    assert node.workers == 4 // processes
    monkeypatch.setenv("BEGAN", str(tmp_path))
    monkeypatch.setenv("AT_ONCE", str(items))
    assert sorted(launch.run(layout, [node] * items, node, "layouts")) == [(gpus, places) for gpus in devices]
    monkeypatch.setenv("AT_ONCE", str(items + 1))
    assert launch.run(layout, [node], node, "layouts") == [(None, 4 // processes)]
    # Items that may start servers run one after another, each on all GPUs for training.
    served = node.model_copy(update={"vllm": VLLM(python="python", gpus=2)})
    assert launch.run(layout, [served], served, "layouts") == [(None, 4 // processes)]
    assert launch.run(process, [0, 1], served, "layouts") == [os.getpid()] * 2


def train(machine: Machine, workspace: Path) -> JsonObject:
    raise NotImplementedError


def test_a_training_that_is_alone_has_the_processes_of_all_places_that_its_step_divides_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[int]()

    def run(config: Path, order: Path, log: Path, machine: Machine) -> int:
        ran.append(machine.accelerate.processes)
        assert order.exists()
        log.write_text("", encoding="utf-8")
        (tmp_path / processes.RESULT).write_text("{}", encoding="utf-8")
        return 0

    monkeypatch.setattr(processes, "_run", run)
    for gpus in (8, 16):  # two serve and two belong to the endpoint
        node = Machine(workers=0, accelerate=Accelerate(processes=2, strategy="ddp"), **{**EIGHT, "gpus": gpus})
        processes.fit("divided", node, (10, "portions"), train, dict, tmp_path)
    assert ran == [2, 10]
