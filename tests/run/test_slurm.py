"""Work on a real Slurm cluster: submitted once, found again after crashes, with the same results as here."""

import inspect
import json
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment
from support.cluster.pipeline import MACHINE
from support.cluster.slurm import Cluster, running
from support.cluster.work import Chore, chore, refuse
from support.stages import command_of
from support.waiting import PATIENCE, until
from support.warm import warm_commands
from typer.testing import CliRunner

from captrain.agents.collection import PolicySource, RolloutBatch, collect_shard
from captrain.cli.app import app
from captrain.comparison.arms import Arm, ArmBatch, play_batch
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.models.lora import Adapter
from captrain.records import Task, digests, publish_json, publish_text
from captrain.run import compose_spec, jobs, launch, load_spec, publish_spec, slurm
from captrain.run.components import Component
from captrain.run.fingerprint import fingerprint, identity_of
from captrain.run.jobs import ALIVE, JOBS
from captrain.run.machine import Accelerate, Machine, Slurm
from captrain.training import train
from captrain.training.base.training import train_base

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
Run = Callable[..., list[Any]]
SMALL = ["base.steps=60", "adapters.rollouts=40"]
WHOLE = b'{"type": "UserError", "message": "one is out of stock", "remedy": "take two"}'
ENVIRONMENTS = ["wrong_argument", "wrong_record"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes; skips tests without the daemons or root."""
    with running(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository whose jobs can import the tests' functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "GRACE", 0.5)
    return tmp_path


@pytest.fixture
def home(cluster: Cluster, here: Path) -> Iterator[Cluster]:
    """The cluster, in an empty repository, and empty again afterwards."""
    yield cluster
    cluster.clear()


def pipeline(*names: str, moment: str = "") -> subprocess.Popen[str]:
    """Start a pipeline in its own process."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "support.cluster.pipeline", *names], env={**os.environ, "MOMENT": moment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def spoke(one: subprocess.Popen[str]) -> bool:
    """Return whether a pipeline has submitted or found its jobs, which it prints first, unless it ends."""
    assert one.stdout is not None
    return bool(select.select([one.stdout], [], [], 0)[0])


def runs() -> list[str]:
    """The names of all started chores, with repetitions."""
    return sorted(Path("runs").read_text(encoding="utf-8").split()) if Path("runs").exists() else []


def sent() -> list[str]:
    """All jobs of this repository that Slurm accepted."""
    return [attempt.job for submission in jobs.submissions() for attempt in submission.attempts()]


class Background:
    """A call of launch.run in a thread."""

    def __init__(self, function: Any, items: list[Any], machine: Machine, label: str) -> None:
        self.outcome: Any = None
        self.thread = threading.Thread(target=self._run, args=(function, items, machine, label), daemon=True)
        self.thread.start()

    def _run(self, *arguments: Any) -> None:
        try:
            self.outcome = launch.run(*arguments)
        except Exception as error:
            self.outcome = error

    def result(self) -> Any:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def shown() -> str:
    """Print `captrain jobs`."""
    console = Console(width=200, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(jobs.jobs_table(Path()))
    return console.export_text()


def row(job: str) -> list[str]:
    """The cells of a job's row."""
    [line] = [line for line in shown().splitlines() if f" {job} " in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.needs("slurm")
def test_items_run_once_as_one_array_and_return_in_order(home: Cluster) -> None:
    items = [Chore(name) for name in ("a", "b", "c")]
    begun = time.monotonic()
    assert launch.run(chore, items, MACHINE, "chores") == [("A", "1"), ("B", "1"), ("C", "1")]
    print(f"three jobs took {time.monotonic() - begun:.1f} s")
    array = sent()[0].partition("_")[0]
    assert sent() == [f"{array}_0", f"{array}_1", f"{array}_2"]
    # Results are reused in another order, with other items, and with other machine settings.
    assert MACHINE.slurm is not None
    other = MACHINE.model_copy(update={"slurm": MACHINE.slurm.model_copy(update={"minutes": 7}), "batch": 9})
    assert launch.run(chore, [Chore("d"), *reversed(items)], other, "chores") == [
        ("D", "1"), ("C", "1"), ("B", "1"), ("A", "1")
    ]  # fmt: skip
    assert runs() == ["a", "b", "c", "d"] and len(sent()) == 4
    # One item is a job, not an array.
    assert sent()[3].isdigit() and row(sent()[3])[2] == "finished"


@pytest.mark.needs("slurm")
@pytest.mark.parametrize(
    ("moment", "submissions"),
    [
        ("before sbatch", 2), ("after sbatch, before the job has its work", 2), ("while waiting", 1),
        ("before publishing", 1),
    ],
)  # fmt: skip
def test_a_killed_pipeline_finds_its_jobs_again(home: Cluster, moment: str, submissions: int) -> None:
    if moment == "before publishing":
        Path("go").touch()
    assert pipeline("a", "b", moment=moment).wait(PATIENCE) == -signal.SIGKILL
    assert not Path("done.json").exists()
    again = pipeline("a", "b")
    # A job that has ended already is neither waited for nor listed.
    until(lambda: spoke(again))
    Path("go").touch()
    said, problem = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, problem
    assert json.loads(Path("done.json").read_text(encoding="utf-8")) == [["A", "1"], ["B", "1"]]
    assert runs() == ["a", "b"] and len(sent()) == 2
    assert len(jobs.submissions()) == submissions
    ours = {submission.name for submission in jobs.submissions()}
    listed = home.say("squeue", "--noheader", "--array", "--states=all", "--format=%j").split()
    # A job without work ends by itself.
    assert sum(name in ours for name in listed) == (4 if moment.startswith("after") else 2)
    assert ("waiting for earlier jobs" in said) == (submissions == 1 and moment != "before publishing")


@pytest.mark.needs("slurm")
def test_two_pipelines_at_once_share_their_jobs(home: Cluster) -> None:
    both = [pipeline("a", "b", "c"), pipeline("a", "b", "c")]
    until(lambda: runs() == ["a", "b", "c"] and all(spoke(one) for one in both))
    Path("go").touch()
    assert [one.wait(PATIENCE) for one in both] == [0, 0]
    said = [one.communicate()[0] for one in both]
    assert sorted("submitted a, b, c as job" in text for text in said) == [False, True]
    assert sorted("waiting for earlier jobs" in text for text in said) == [False, True]
    assert runs() == ["a", "b", "c"] and len(sent()) == 3


@pytest.mark.needs("slurm")
def test_only_the_killed_job_is_submitted_again(home: Cluster) -> None:
    waiting = Background(chore, [Chore("a", "go"), Chore("b", "go"), Chore("c", "go"), Chore("d", "go")], MACHINE, "x")
    until(lambda: runs() == ["a", "b", "c", "d"])
    first = sent()
    os.kill(int(Path("pid-a").read_text(encoding="utf-8")), signal.SIGKILL)
    home.say("scancel", "--signal=KILL", first[1])
    home.say("scancel", first[2])
    until(lambda: runs() == ["a", "a", "b", "b", "c", "c", "d"])
    assert "submitted 2 times" in shown()
    Path("go").touch()
    assert [name for name, _ in waiting.result()] == ["A", "B", "C", "D"]
    assert len(sent()) == 7 and runs().count("d") == 1


@pytest.mark.needs("slurm")
def test_an_item_with_dying_jobs_fails_and_the_others_finish(home: Cluster) -> None:
    assert MACHINE.slurm is not None
    never = MACHINE.model_copy(update={"slurm": MACHINE.slurm.model_copy(update={"resubmissions": 0})})
    waiting = Background(chore, [Chore("a", "never"), Chore("b", "go")], never, "chores")
    until(lambda: runs() == ["a", "b"])
    os.kill(int(Path("pid-a").read_text(encoding="utf-8")), signal.SIGKILL)
    until(lambda: slurm.states([sent()[0]])[sent()[0]].name not in ALIVE)
    Path("go").touch()
    with pytest.raises(UserError) as error:
        waiting.result()
    said = rf"chores a: job {sent()[0]} ended without a result \(failed on n\d\), and its last line is: 1 of 5: at a; "
    assert re.fullmatch(f"{said}machine.slurm.resubmissions = 0 allows no further job", error.value.problem)
    assert f"captrain jobs {sent()[0]}" in error.value.remedy
    assert launch.run(chore, [Chore("b", "go")], never, "chores") == [("B", "1")] and runs() == ["a", "b"]


@pytest.mark.needs("slurm")
def test_preempted_and_timed_out_jobs_are_requeued_and_resume(home: Cluster) -> None:
    names = ("told", "requeued", "late")
    waiting = Background(chore, [Chore(name, "never", once=True) for name in names], MACHINE, "chores")
    until(lambda: runs() == sorted(names))
    told, requeued, late = sent()
    # Preemption with notice, preemption without notice, and a time limit.
    home.say("scancel", "--signal=USR2", told)
    home.say("scontrol", "requeue", requeued)
    home.say("scontrol", "update", f"JobId={late}", "TimeLimit=1")
    assert [name for name, _ in waiting.result()] == ["TOLD", "REQUEUED", "LATE"]
    assert runs() == sorted([*names, *names]) and sent() == [told, requeued, late]
    for job in (told, late):
        assert jobs.job_log(Path(), job).count("Calling checkpoint method") == 1
    # Its earlier output is kept.
    assert jobs.job_log(Path(), requeued).count(" of 5: at requeued") == 2


@pytest.mark.needs("slurm")
def test_exceptions_of_jobs_reach_the_pipeline_unchanged(home: Cluster) -> None:
    Path("go").touch()
    failing = pipeline("good", "scarce", "fine")
    _, problem = failing.communicate(timeout=PATIENCE)
    assert failing.returncode == 2
    assert problem.splitlines()[-2:] == ["error: one is out of stock", "  remedy: take two"]
    assert "Traceback" not in problem and runs() == ["fine", "good"]
    until(lambda: slurm.states([sent()[1]])[sent()[1]].name == "FAILED")
    with pytest.raises(EnvironmentFault, match="two raised"):
        launch.run(refuse, [Chore("faulty"), Chore("broken")], MACHINE, "chores")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: three by nothing") as error:
        launch.run(refuse, [Chore("broken")], MACHINE, "chores")
    # The traceback is also known here.
    assert 'raise ZeroDivisionError("three by nothing")' in error.value.__notes__[0]
    # Both pipelines submitted the failing item, because failures are not kept.
    assert len(sent()) == 3 + 2 + 1
    assert [row(job)[2] for job in (sent()[0], sent()[1])] == ["finished", "failed"]
    assert row(sent()[1])[-1] == "one is out of stock" and row(sent()[-1])[5] == "ZeroDivisionError: three by nothing"
    assert "Traceback" not in jobs.job_log(Path(), sent()[1]) and "Traceback" in jobs.job_log(Path(), sent()[-1])


@pytest.mark.needs("slurm")
def test_jobs_are_shown_with_state_last_line_and_reason(home: Cluster) -> None:
    assert MACHINE.slurm is not None
    all_gpus = MACHINE.model_copy(update={"slurm": MACHINE.slurm.model_copy(update={"gpus": 2})})
    waiting = Background(chore, [Chore(name, "go") for name in ("a", "b", "c")], all_gpus, "chores")
    until(lambda: len(runs()) == 2)
    until(lambda: row(sent()[2])[2] == "pending" and row(sent()[2])[-1] in ("Resources", "Priority"))
    job, item, state, node, elapsed, line, reason = row(sent()[0])
    assert (job, item, state, node) == (sent()[0], "chores a", "running", "n1") and elapsed.startswith("0:")
    assert (line, reason) == ("1 of 5: at a", "")
    assert {row(one)[3] for one in sent()} == {"n1", "n2", ""}
    Path("go").touch()
    waiting.result()
    assert [row(one)[2] for one in sent()] == ["finished"] * 3
    with pytest.raises(UserError, match="there is no job 99999 here"):
        jobs.job_log(Path(), "99999")


@pytest.mark.needs("slurm")
def test_a_rejected_job_is_one_message(home: Cluster) -> None:
    assert MACHINE.slurm is not None
    wrong = MACHINE.model_copy(update={"slurm": MACHINE.slurm.model_copy(update={"partition": "nowhere"})})
    with pytest.raises(UserError, match="sbatch refused chores: .*invalid partition") as error:
        launch.run(chore, [Chore("a")], wrong, "chores")
    assert "machine.slurm" in error.value.remedy
    assert launch.run(chore, [Chore("a")], MACHINE, "chores") == [("A", "1")]


@pytest.mark.needs("slurm")
def test_adapters_trained_as_jobs_are_those_trained_here_though_one_is_preempted(
    home: Cluster, tiny: Path, tmp_path: Path
) -> None:
    from support.training import job

    from captrain.training.jobs import TrainingEnvironment
    from captrain.training.runs import train

    # While the file `hold` exists, a process stops within its third step. Each process records its scores, which a
    # benchmark can do here, but a confined environment cannot.
    holding = Component.model_validate({"_target_": "support.cluster.holding.Letters"})
    places = {"environments": (TrainingEnvironment("letters", holding, 2),)}
    Path("hold").touch()
    items = [
        job(tiny, tmp_path / "letters.py", name="long", rollouts=48, **places),
        job(tiny, tmp_path / "letters.py", name="short", seed=1, rollouts=8, **places),
    ]
    machine = Machine(launcher="slurm", slurm=Slurm(memory="1500MB", minutes=30), workers=1, batch=1)
    waiting = Background(train, items, machine, "adapters")
    # Only for the long training; the short one has a single step.
    until(lambda: list(Path().glob(".cache/adapters/*/checkpoints/checkpoint-4/history.json")))
    home.say("scontrol", "requeue", sent()[0])
    until(lambda: jobs.job_log(Path(), sent()[0]).count("Starting with JobEnvironment") == 2)
    Path("hold").unlink()
    trained = waiting.result()
    # The two steps in the checkpoint were not played again.
    processes = Path("scored").read_text(encoding="utf-8").split()
    assert processes.count(processes[-1]) == 48 - 16 and len(set(processes)) == 3 and len(sent()) == 2
    (tmp_path / "local").mkdir()
    os.chdir(tmp_path / "local")
    alone = launch.run(train, items, Machine(workers=1, batch=1), "adapters")
    assert [(one.name, one.digest, one.history) for one in trained] == [
        (one.name, one.digest, one.history) for one in alone
    ]


@pytest.mark.needs("slurm")
def test_two_nodes_train_an_adapter_with_the_bytes_of_one_node(home: Cluster, tiny: Path, tmp_path: Path) -> None:
    from support.training import job

    from captrain.training.jobs import TrainingEnvironment
    from captrain.training.runs import train

    noting = Component.model_validate({"_target_": "support.cluster.holding.Letters"})
    places = {"environments": (TrainingEnvironment("letters", noting, 2),)}
    one = job(tiny, tmp_path / "letters.py", rollouts=16, trainer={"epochs": 1}, **places)
    trained = []
    for nodes in (2, 1):
        folder = tmp_path / f"nodes-{nodes}"
        folder.mkdir()
        os.chdir(folder)
        machine = Machine(
            launcher="slurm", slurm=Slurm(memory="1500MB", minutes=30, nodes=nodes, resubmissions=0), workers=1,
            batch=1, accelerate=Accelerate(processes=2, strategy="fsdp"),
        )  # fmt: skip
        trained += launch.run(train, [replace(one, machine=machine)], machine, "adapters")
        scored = Path("nodes").read_text(encoding="utf-8").split()
        # Each process plays its rollouts on its own node.
        assert {name: scored.count(name) for name in scored} == ({"n1": 8, "n2": 8} if nodes == 2 else {"n1": 16})
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    trained.append(train(one))
    assert len({one.digest for one in trained}) == 1 and all(one.history == trained[0].history for one in trained)
    assert [one.errors for one in trained] == [0, 0, 0] and trained[0].history[0].informative > 0


@pytest.mark.needs("slurm")
def test_killed_nodes_resume_from_the_checkpoint_to_the_same_bytes(home: Cluster, tiny: Path, tmp_path: Path) -> None:
    from support.training import job

    from captrain.training.jobs import TrainingEnvironment
    from captrain.training.runs import train

    holding = Component.model_validate({"_target_": "support.cluster.holding.Letters"})
    places = {"environments": (TrainingEnvironment("letters", holding, 2),)}
    one = job(tiny, tmp_path / "letters.py", rollouts=24, trainer={"epochs": 1}, **places)
    machine = Machine(
        launcher="slurm", slurm=Slurm(memory="1500MB", minutes=30, nodes=2), workers=1,
        batch=1, accelerate=Accelerate(processes=2, strategy="fsdp"),
    )  # fmt: skip
    Path("hold").write_text("8", encoding="utf-8")  # each node has played half of two steps, and is in the third
    waiting = Background(train, [replace(one, machine=machine)], machine, "adapters")
    until(lambda: list(Path().glob(".cache/adapters/*/checkpoints*/checkpoint-2/history.json")))
    home.say("scontrol", "requeue", sent()[0])
    until(lambda: jobs.job_log(Path(), sent()[0]).count("Starting with JobEnvironment") == 2)
    Path("hold").unlink()
    [killed] = waiting.result()
    scored = Path("nodes").read_text(encoding="utf-8").split()
    # Steps in the checkpoint were not played again; the third step may have started.
    assert 24 <= len(scored) < 24 + 8 and {*scored} == {"n1", "n2"}
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    whole = train(one)
    assert (killed.digest, killed.history, killed.errors) == (whole.digest, whole.history, 0)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, committed: Path) -> Path:
    """A project of experiment smoke with a little-trained base and two environments of this repository."""
    folder = tmp_path_factory.mktemp("smoke")
    chosen = compose_spec("smoke", 0, SMALL, ROOT / "conf")
    publish_spec(chosen, folder / "results/spec.yaml")
    train_base(chosen.base, chosen.seed, folder / "artifacts/base", lambda batches: batches)
    for path in sorted((committed / "results/environments").iterdir()):
        if path.stem.partition(".")[0] in ENVIRONMENTS:
            publish_text(folder / "results/environments" / path.name, path.read_text())
    return folder


def staged(stage: str, folder: Path) -> str:
    """Run a stage like the pipeline; return its output."""
    done = subprocess.run(
        [warm_commands() / "python", *command_of(stage, ROOT)], cwd=folder, text=True, timeout=PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def left(folder: Path, stage: str) -> dict[str, bytes]:
    """All outputs of a stage, by path."""
    places = [folder / "artifacts" / stage, folder / "results" / stage]
    files = [path for place in places for path in sorted(place.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.needs("slurm")
def test_diagnosis_and_the_adapters_of_smoke_are_byte_for_byte_the_same_from_jobs(home: Cluster, smoke: Path) -> None:
    shutil.copytree(smoke, here := Path.cwd(), dirs_exist_ok=True)
    settings = [*SMALL, "machine=slurm", "machine.slurm.memory=1000MB", "machine.slurm.minutes=30"]
    publish_spec(compose_spec("smoke", 0, settings, ROOT / "conf"), here / "results/spec.yaml")
    for stage in ("rollouts", "adapters"):
        assert "submitted" in staged(stage, here)
        staged(stage, smoke)
        assert left(here, stage) == left(smoke, stage) != {}
    diagnosis, training = jobs.submissions()
    assert diagnosis.items == [f"discovery {shard} of 4" for shard in (1, 2, 3, 4)]
    assert training.items == ENVIRONMENTS
    assert [len(submission.attempts()) for submission in (diagnosis, training)] == [4, 2]
    journals = [len(list((folder / ".cache/rollouts").glob("*.jsonl"))) for folder in (here, smoke)]
    assert journals == [4, 1]
    # If the stage's outputs are missing, the jobs' results are reused.
    shutil.rmtree(here / "artifacts/rollouts")
    assert "submitted" not in staged("rollouts", here) and left(here, "rollouts") == left(smoke, "rollouts")


@pytest.mark.needs("slurm")
def test_an_environment_calibrated_by_jobs_gets_the_same_passport(home: Cluster, smoke: Path) -> None:
    from captrain.benchmarks.loading import load_benchmark
    from captrain.environments.evidence import make_standard
    from captrain.environments.synthesis import SynthesisResult, synthesize
    from captrain.environments.synthesizer import Brief
    from captrain.environments.templates import TemplateSynthesizer
    from captrain.records import Capability

    chosen = load_spec(smoke / "results/spec.yaml")
    target = load_benchmark(chosen.benchmark, chosen.machine)
    against = make_standard(target, 5, chosen.environments.model_copy(update={"rounds": 1}))
    name = "wrong_record"
    wanted = Brief(Capability(id=name, name=name, description="."), target.tools, [])

    def made(machine: Machine) -> SynthesisResult:
        policy = PolicySource(chosen.exploring(), smoke / "artifacts/base", machine)
        return synthesize(wanted, TemplateSynthesizer(), policy, against, machine, 0)

    assert MACHINE.slurm is not None
    slurm = MACHINE.slurm.model_copy(update={"memory": "1000MB"})
    away = made(MACHINE.model_copy(update={"slurm": slurm}))
    assert jobs.submissions()[0].label == "calibration" and len(sent()) == 3
    assert away.rollouts and away == made(chosen.machine) and len(sent()) == 3


@pytest.mark.needs("slurm")
def test_a_silent_controller_is_not_a_dead_job(home: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: Any) -> Any:
        Path("asked").touch()
        raise InfrastructureError("connection refused")

    with monkeypatch.context() as patch:
        waiting = Background(chore, [Chore("a", "go")], MACHINE, "chores")
        until(lambda: runs() == ["a"])
        patch.setattr(slurm, "states", silent)
        until(lambda: Path("asked").exists())
        [job] = sent()
        Path("go").touch()
        assert waiting.result() == [("A", "1")]
    until(lambda: slurm.states([job])[job].name == "COMPLETED")
    unheard = str(int(job) + 1)
    found = slurm.states([job, unheard])
    assert found[job].node in ("n1", "n2") and found[unheard].name == "GONE"


def test_missing_slurm_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(UserError, match="sbatch is not installed here") as error:
        launch.run(chore, [Chore("a")], MACHINE, "chores")
    assert "machine=local" in error.value.remedy
    assert jobs.jobs_table(here).row_count == 0


def test_jobs_on_disk_are_shown_without_slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    JOBS.mkdir(parents=True)
    both = jobs.Submission(name="sub", label="chores", keys=["x", "y"], items=["a", "b"], at="2020-01-01T00:00:00")
    publish_json(JOBS / "sub" / jobs.RECORD, both)
    for index in range(2):
        (JOBS / f"sub/7_{index}{jobs.SUBMITTED}").touch()
    (JOBS / "results").mkdir()
    (JOBS / "results/x.jsonl").touch()
    (JOBS / "sub/7_1_0_log.out").write_text("begun\nx:  30%|███   | 3/10 [00:01]\rsubmitit INFO of its own\n")
    assert row("7_0")[1:3] == ["chores a", "finished"]
    assert row("7_1")[1:6] == ["chores b", "unknown", "", "", "x:  30%|███   | 3/10 [00:01]"]
    assert "Slurm does not answer" in shown()


@pytest.mark.parametrize(
    ("changes", "file", "said"),
    [
        ({}, "7_9", "chores a"),
        ({}, "a_b", "chores a"),
        ({"keys": [], "items": []}, "7_0", ""),
        ({"items": ["a", "b"]}, "7_0", "it has 1 keys and 2 items"),
        ({"name": "../../elsewhere"}, "7_0", "no slash"),
    ],
    ids=["further task", "no number", "no items", "differing counts", "path"],
)
def test_a_folder_of_jobs_that_was_altered_is_listed_or_refused_in_one_message(
    changes: dict[str, Any], file: str, said: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    submission = {"name": "sub", "label": "chores", "keys": ["x"], "items": ["a"], "at": "2020-01-01T00:00:00"}
    publish_json(JOBS / "sub" / jobs.RECORD, {**submission, **changes})
    for name in ("7_0", file):
        (JOBS / f"sub/{name}{jobs.SUBMITTED}").touch()
    try:
        assert said in shown()
    except UserError as refusal:
        assert said in refusal.problem and refusal.remedy


def test_a_key_depends_on_content_not_on_machine_or_path(here: Path) -> None:
    from captrain.training.jobs import Job, TrainingEnvironment
    from captrain.training.runs import train

    def item(base: Path, machine: Machine, **changes: Any) -> Job:
        one = Job(
            name="a",
            base=base,
            policy=Component.model_validate({"_target_": "captrain.x", "heat": 1.0}),
            trainer=Component.model_validate({"_target_": "captrain.y"}),
            environments=(TrainingEnvironment("z", Component.model_validate({"_target_": "captrain.z"})),),
            rollouts=8,
            seed=0,
            machine=machine,
        )
        return replace(one, **changes)

    (here / "base").mkdir()
    (here / "base/model").write_text("weights")
    shutil.copytree(here / "base", here / "moved")
    small, large = Machine(workers=1, batch=1), Machine(workers=8, batch=64, sandbox="basic")
    key = fingerprint(train, item(here / "base", small))
    assert key == fingerprint(train, item(here / "moved", large))
    hotter = Component.model_validate({"_target_": "captrain.x", "heat": 1.1})
    for changes in ({"seed": 1}, {"rollouts": 16}, {"policy": hotter}, {"name": "b"}):
        assert fingerprint(train, item(here / "base", small, **changes)) != key
    (here / "base/model").write_text("other weights")
    assert fingerprint(train, item(here / "base", small)) != key
    assert identity_of(here / "nothing") == "missing"

    chosen = compose_spec("smoke", 0, [], TESTS.parent / "conf")
    batch = ArmBatch((Arm("base"),), here / "base", chosen)
    acting, tasks = PolicySource(chosen.policy, here / "base", small), [Task(id="1", split="test", data={})]
    part = RolloutBatch("a", acting, chosen.benchmark, tasks, "evaluation", 0)
    assert fingerprint(collect_shard, replace(part, name="b", policy=replace(acting, machine=large))) == fingerprint(
        collect_shard, part
    )
    for changes in ({"seed": 1}, {"trials": 2}, {"tasks": []}, {"adapter": Adapter("somewhere", "abc")}):
        assert fingerprint(collect_shard, replace(part, **changes)) != fingerprint(collect_shard, part), changes
    for override, same in (("labels.runs=9", True), ("machine.batch=3", True), ("evaluation.trials=3", False)):
        other = compose_spec("smoke", 0, [override], TESTS.parent / "conf")
        assert (fingerprint(play_batch, replace(batch, spec=other)) == fingerprint(play_batch, batch)) == same, override


def test_a_key_depends_only_on_the_code_that_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from captrain.run import fingerprint

    package = shutil.copytree(fingerprint.PACKAGE, here / "captrain", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "PACKAGE", package)

    def digest(module: str = "training/runs.py") -> str:
        return digests.digest(fingerprint.reached_code([package / module]))

    def append(name: str, text: str) -> None:
        (package / name).write_text((package / name).read_text() + text)

    before = digest()
    for name in ("cli/app.py", "reporting/figures.py", "run/spec.py", "run/slurm.py", "run/launch.py"):
        append(name, "print()\n")
        assert digest() == before, name
    # Imports at the top, within functions and transitive ones, and components, which are named but not imported.
    reached = ("training/runs.py", "training/grpo.py", "models/chat.py", "records/files.py", "agents/engine.py")
    for name in (*reached, "benchmarks/servicedesk.py", "environments/templates/pair.py.txt"):
        append(name, "print()\n")
        assert digest() != before, name
        before = digest()
    # Comments and functions that nothing names do not count, except where a file is also read as text.
    append("models/chat.py", "\n\n# A comment.\n\ndef unnamed() -> None:\n    print(1)\n")
    assert digest() == before
    append("benchmarks/servicedesk.py", "# A comment.\n")
    assert digest() != before
    # A module and a folder of data may share a name.
    before, name = digest("environments/synthesizer.py"), "environments/templates.py"
    append(name, "print()\n")
    assert digest("environments/synthesizer.py") != before
    # And data.
    before, name = digest("comparison/baselines/rounds.py"), "capabilities/prompts/labelling.md"
    append(name, "\n")
    assert digest("comparison/baselines/rounds.py") != before


def test_a_project_parses_the_code_behind_a_key_again_only_after_a_file_of_captrain_changed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from captrain.run import fingerprint

    installed, file_of = fingerprint.PACKAGE, inspect.getfile
    package = shutil.copytree(installed, here / "captrain", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "PACKAGE", package)
    monkeypatch.setattr(inspect, "getfile", lambda code: str(package / Path(file_of(code)).relative_to(installed)))
    starts, parse = list[Path](), fingerprint.reached_code
    monkeypatch.setattr(fingerprint, "reached_code", lambda files: starts.extend(files) or parse(files))

    def key(function: Callable[..., object]) -> str:
        fingerprint.code_digest.cache_clear()  # as in a new process
        return fingerprint.code_digest(function)

    first, other = key(play_batch), key(train)
    assert (key(play_batch), len(starts)) == (first, 3)  # outside of a project nothing is kept
    (here / "dvc.yaml").touch()
    assert (key(play_batch), key(train), len(starts)) == (first, other, 5)
    assert (key(play_batch), key(train), len(starts)) == (first, other, 5)
    (package / "ledger.py").write_text((package / "ledger.py").read_text() + "print()\n")
    assert (key(play_batch) != first, len(starts)) == (True, 6)
    for kept in (here / ".cache/code").iterdir():
        kept.write_text(kept.read_text().split()[0])  # damaged
    assert (key(train), len(starts)) == (key(train), 7)
    fingerprint.code_digest.cache_clear()


def test_a_result_is_invalid_after_its_files_change(here: Path) -> None:
    (here / "adapter").mkdir()
    (here / "adapter/weights").write_text("fine")
    work = slurm.Work(_folder, Chore("a"), "key", JOBS / "sub", requeues=1)
    assert slurm.stored_result(_folder, "key") is None
    work()
    assert slurm.stored_result(_folder, "key") == ({"folder": Path("adapter")},)
    work()
    assert runs() == ["a"]
    (here / "adapter/weights").write_text("altered")
    assert slurm.stored_result(_folder, "key") is None
    (JOBS / "results/key.jsonl").write_bytes(b"\x80")
    assert slurm.stored_result(_folder, "key") is None


def _folder(item: Chore) -> dict[str, Path]:
    chore(item)
    return {"folder": Path("adapter")}


def _stubborn(_: Any) -> str:
    """Catches every exception."""
    with suppress(Exception):
        signal.raise_signal(signal.SIGUSR2)
    return "went on"


@pytest.mark.parametrize(("minutes", "countdown", "queued"), [(5, 2, [1]), (5, 1, [0]), (5, 0, []), (60, 0, [0])])
def test_requeues_are_limited(
    here: Path, monkeypatch: pytest.MonkeyPatch, minutes: int, countdown: int, queued: list[int]
) -> None:
    # A job of 60 minutes that is warned in its first minute was preempted, so it is always queued again.
    monkeypatch.setattr(slurm, "ENDING", threading.Event())
    again: list[int] = []
    environment = SlurmJobEnvironment()
    monkeypatch.setattr(environment, "_requeue", again.append)
    work = slurm.Work(_stubborn, "a", "key", JOBS / "sub", requeues=2)
    delayed = DelayedSubmission(work)
    delayed.set_timeout(minutes, countdown)
    numbers = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    try:
        environment._handle_signals(JobPaths(here, "1"), delayed)
        with pytest.raises(SystemExit) as ended:
            delayed.result()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert again == queued and slurm.stored_result(_stubborn, "key") is None
    said = "not queued again: 2 times are the limit (machine.slurm.requeues)"
    assert (said == ended.value.code) == (not queued)


class Trap:
    """Unpickling one makes the file `code ran`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (Path("code ran"),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:1],
        WHOLE[:-2],
        b"\0" * 4096,
        pickle.dumps(Trap()),
        b"cno_such_module\nX\n.",
        b'{"type": "UserError"}',
    ],
)
def test_a_failure_is_data_and_a_damaged_one_is_ignored(
    here: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    submitted(here, monkeypatch, Chore("a"))
    [attempt] = jobs.submissions()[0].attempts()
    path = attempt.folder / f"{attempt.key}.failure"
    path.write_bytes(content)
    Path("dvc.yaml").touch()
    shell = CliRunner().invoke(app, ["jobs"])
    assert shell.exit_code == 0 and attempt.job in shell.output and not Path("code ran").exists()
    assert attempt.failure() is None
    path.write_bytes(WHOLE)
    failure = attempt.failure()
    assert failure is not None and str(failure.exception()) == str(UserError("one is out of stock", "take two"))
    # Neither is a result of a job unpickled.
    (JOBS / f"results/{attempt.key}.jsonl").parent.mkdir(exist_ok=True)
    (JOBS / f"results/{attempt.key}.jsonl").write_bytes(content)
    assert slurm.stored_result(chore, attempt.key) is None and not Path("code ran").exists()


def test_state_is_flushed_to_disk_before_it_counts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    slurm.Work(chore, Chore("a"), "whole", JOBS / "sub", requeues=1)()
    with pytest.raises(SystemExit):
        slurm.Work(refuse, Chore("scarce"), "failed", JOBS / "sub", requeues=1)()
    submitted(here, monkeypatch, Chore("a"))
    names = ["whole.jsonl", "failed.failure", jobs.RECORD]
    for name, path in zip(names, flushed, strict=True):
        assert name in Path(path).name != name  # still the temporary file


def test_submissions_are_ordered_by_time_across_time_zones(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, zone in (("first", "UTC-14"), ("second", "UTC+12"), ("third", "UTC-14")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        submitted(here, monkeypatch, Chore(name))
    monkeypatch.delenv("TZ")
    time.tzset()
    assert [submission.items for submission in jobs.submissions()] == [["first"], ["second"], ["third"]]


def submitted(here: Path, monkeypatch: pytest.MonkeyPatch, item: Chore) -> None:
    """Submit a job to a Slurm that accepts it and does not list it."""
    for name in ("sbatch", "squeue", "srun"):
        (here / name).write_text('#!/bin/sh\necho "Submitted batch job 12"\n')
        (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    assert MACHINE.slurm is not None
    slurm.Dispatch(chore, [item], MACHINE.slurm, "chores")._send()


def test_exceptions_during_a_requeue_are_no_failures(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "ENDING", threading.Event())

    def ended(item: Any) -> None:
        if item == "told":
            work.checkpoint()
        # Like submitit's handler, if Slurm ends the process that requeues the job.
        raise subprocess.CalledProcessError(-signal.SIGTERM, ["scontrol", "requeue"])

    here.joinpath("jobs").mkdir()
    work = slurm.Work(ended, "told", "told", here / "jobs", requeues=1)
    with pytest.raises(SystemExit):
        work()
    assert not (here / "jobs/told.failure").exists()
    assert "CalledProcessError" in capsys.readouterr().out
    monkeypatch.setattr(slurm, "ENDING", threading.Event())
    with pytest.raises(SystemExit):
        slurm.Work(ended, "not told", "other", here / "jobs", requeues=1)()
    assert (here / "jobs/other.failure").exists()
