"""View of a pipeline while it runs: sleeping processes, files made by hand, and a real training."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from rich.console import Console
from support.answering import Answering
from support.training import ROOT, kill, project, synthesized
from support.training import stage as run_stage

from captrain.baselines import baselines
from captrain.baselines.training import GRPOBaseline
from captrain.cli import app
from captrain.config import ModelAccess, compose_spec, publish_spec
from captrain.errors import InfrastructureError
from captrain.execution import jobs
from captrain.execution.jobs import State
from captrain.ledger import LedgerEntry
from captrain.models import Question, StructuredAnswers
from captrain.monitoring import view, watch
from captrain.monitoring.progress import Progress
from captrain.monitoring.view import follow, lines, watch_view
from captrain.monitoring.watch import Watch
from captrain.records import Capability, Purpose, Rollout, Score, Task, publish, publish_json, publish_text

PIPELINE = """
stages:
  rollouts:
    cmd: python stages/rollouts.py
    deps: [stages/rollouts.py]
    plots:
      - results/rollouts: {cache: false}
  adapters:
    cmd: python stages/adapters.py
    deps: [results/rollouts, stages/adapters.py]
    plots:
      - results/adapters: {cache: false}
"""
SPEC = """
rollouts: {tasks: 5, trials: 2}
adapters: {rollouts: 640}
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose stages sleep, and of which none has run."""
    folder = tmp_path / "project"
    publish_text(folder / ".dvc/config", "[core]\n    analytics = false\n    no_scm = true\n")
    publish_text(folder / "dvc.yaml", PIPELINE)
    publish_text(folder / "results/spec.yaml", SPEC)
    for name in ("rollouts", "adapters"):
        publish_text(folder / f"stages/{name}.py", "import time\ntime.sleep(300)\n")
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python in a folder; it is ended after the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def run(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, *arguments], cwd=folder))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.wait()


def line(name: str, outcome: str) -> str:
    score = None if outcome == "error" else Score(reward=1.0, success=outcome == "passed")
    said = [{"role": "assistant", "content": 'It said "outcome":"passed".', "outcome": "passed"}]
    return Rollout.model_validate(
        {
            "id": name, "environment": "desk", "task": Task(id=name, split="discovery", data={"outcome": "error"}),
            "trial": 0, "purpose": "diagnosis", "policy": "p", "messages": said, "score": score, "outcome": outcome,
            "error": 'a fault with "outcome":"passed"' if outcome == "error" else None,
        }
    ).model_dump_json(exclude_defaults=True) + "\n"  # fmt: skip


def journal(root: Path, text: str, name: str = "0123") -> Path:
    path = root / f".cache/rollouts/{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path.with_suffix(".lock"), "")
    with path.open("a") as file:
        file.write(text)
    return path


def row(step: int, place: str = "wrong_record") -> dict[str, object]:
    return {
        "step": step, "rollouts": 40 * step, "reward": 0.5, "success": 0.25, "informative": 0.8, "discarded": 0,
        "places": {place: 5},
    }  # fmt: skip


def checkpoint(root: Path, steps: int, at: float, name: str = "aaaa", place: str = "wrong_record") -> None:
    path = root / f".cache/adapters/{name}/checkpoints/checkpoint-{2 * steps}/history.json"
    publish_text(path, json.dumps([row(step, place) for step in range(1, steps + 1)]))
    os.utime(path, (at, at))


def begun(root: Path, at: float, name: str = "aaaa") -> None:
    path = root / f".cache/adapters/{name}/lock"
    publish_text(path, "")
    os.utime(path, (at, at))


def drawn(watch: Watch) -> str:
    console = Console(width=160)
    with console.capture() as said:
        console.print(*watch_view(watch.look()), sep="\n")
    return said.get()


def state(out: str, name: str) -> str:
    return next(one.split("│")[2].strip() for one in out.splitlines() if one.startswith(f"│ {name}"))


def contents(root: Path) -> dict[str, bytes]:
    # What DVC notes of its own when it is asked anything lies there.
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_relative_to(root / ".dvc/tmp"))
    return {str(path): path.read_bytes() for path in files}


def test_where_nothing_runs_it_says_so_and_what_would_run_next_and_changes_nothing(root: Path) -> None:
    before = contents(root)
    out = drawn(Watch(root))
    assert "no stage runs; `dvc repro` would begin with rollouts" in out
    assert state(out, "rollouts") == "to come (never run)"
    assert contents(root) == before


def test_the_stage_whose_process_is_here_runs_with_its_count_and_pass_rate(root: Path, start: Start) -> None:
    process = start(root, "stages/rollouts.py")
    journal(root, line("a", "passed") + line("b", "failed") + line("c", "error") + line("d", "passed")[:-20])
    out = drawn(Watch(root))
    assert "rollouts runs since " in out and f"(process {process.pid})" in out
    assert "rollouts: 3 of at most 10 rollouts, pass rate 0.500, 1 errors" in out
    assert "next: adapters" in out and "last sign of progress: " in out
    assert state(out, "rollouts").startswith("runs, for ") and state(out, "adapters").startswith("to come")


def test_a_journal_of_an_earlier_run_is_not_progress(root: Path, start: Start) -> None:
    path = journal(root, line("a", "passed"))
    os.utime(path.with_suffix(".lock"), (time.time() - 100, time.time() - 100))
    start(root, "stages/rollouts.py")
    out = drawn(Watch(root))
    assert "1 of at most" not in out and "nothing was left behind yet" in out


def test_rate_and_end_are_of_what_grew_while_it_was_watched(root: Path, start: Start) -> None:
    start(root, "stages/rollouts.py")
    journal(root, line("a", "passed") * 4)
    watching = Watch(root)
    assert " a second" not in " ".join(watching.look().facts)
    path = journal(root, line("b", "passed") * 2)
    os.utime(path, (time.time() + 20, time.time() + 20))
    (fact,) = watching.look().facts
    assert fact.startswith("rollouts: 6 of at most 10 rollouts, pass rate 1.000, ") and "ends about " in fact
    assert 5.5 < float(fact.split(" a minute")[0].split()[-1]) <= 6.5
    journal(root, line("b", "passed")[:-5])
    assert watching.look().facts[0].startswith("rollouts: 6 of at most 10")


def test_a_journal_that_is_written_anew_is_counted_anew(root: Path, start: Start) -> None:
    start(root, "stages/rollouts.py")
    path = journal(root, line("a", "failed") * 3)
    watching = Watch(root)
    assert "3 of at most 10" in watching.look().facts[0]
    publish_text(path, line("a", "passed"))
    assert "1 of at most 10 rollouts, pass rate 1.000" in watching.look().facts[0]


def test_other_processes_are_not_mistaken_for_a_stage(root: Path, start: Start, tmp_path: Path) -> None:
    publish_text(tmp_path / "other/stages/rollouts.py", "import time\ntime.sleep(300)\n")
    start(tmp_path / "other", "stages/rollouts.py")
    start(root, "-c", "import time; time.sleep(300)", "stages/rollouts.py")
    start(root, "-m", "timeit", "-n", "1", "import time; time.sleep(300)", "stages/rollouts.py")
    assert "no stage runs" in drawn(Watch(root))


def test_a_stage_that_went_has_ended_until_it_is_looked_at_again(
    root: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(root, "stages/rollouts.py")
    watching = Watch(root)
    assert state(drawn(watching), "rollouts").startswith("runs")
    process.kill()
    process.wait()
    out = drawn(watching)
    assert state(out, "rollouts") == "has ended" and "would begin with adapters" in out
    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    assert state(drawn(watching), "rollouts") == "to come (never run)"


def test_what_is_stale_is_looked_for_once_a_minute_at_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(Watch, "_find_stale", lambda self, running: looks.append(running))
    watching = Watch(root)
    watching.look()
    watching.look()
    assert len(looks) == 1


def test_it_sees_the_stages_while_dvc_holds_its_lock(root: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(root)) as repo, repo.lock:
        out = drawn(Watch(root))
    assert state(out, "rollouts") == "to come (never run)" and "cannot" not in out


def test_a_training_shows_its_last_checkpoint_with_rate_and_end(root: Path, start: Start) -> None:
    start(root, "stages/adapters.py")
    now = time.time()
    begun(root, now + 10)
    begun(root, now + 10, "bbbb")
    checkpoint(root, 4, now + 70)
    checkpoint(root, 8, now + 130)
    (first, second) = Watch(root).look().facts
    assert first.startswith("adapters: training wrong_record: step 8, 320 of 640 rollouts, mean reward 0.500, ")
    assert "pass rate 0.250, informative 80%, 2.7 a second, ends about " in first
    assert second == "adapters: training bbbb begun, no checkpoint yet"


def test_the_rate_of_a_training_that_goes_on_leaves_out_what_was_there_before(root: Path, start: Start) -> None:
    start(root, "stages/adapters.py")
    now = time.time()
    checkpoint(root, 4, now - 9000)
    begun(root, now)
    (fact,) = Watch(root).look().facts
    assert "160 of 640 rollouts" in fact and " a second" not in fact and " a minute" not in fact
    checkpoint(root, 8, now + 40)
    assert ", 4.0 a second, " in Watch(root).look().facts[0]


def test_trainings_that_are_whole_are_counted_and_those_of_other_runs_are_not(root: Path, start: Start) -> None:
    start(root, "stages/adapters.py")
    now = time.time()
    for name, at in (("aaaa", now + 1), ("cccc", now - 500)):
        begun(root, at, name)
        publish_json(root / f".cache/adapters/{name}/result.json", {"rollouts": 640, "history": [row(1, name)]})
    assert Watch(root).look().facts == ["adapters: 1 trained or found whole, 640 rollouts: aaaa"]


SPENT: list[tuple[str, Purpose, str, int]] = [
    ("rollouts", "diagnosis", "", 240),
    ("environments", "calibration", "alpha", 80),
    ("environments", "calibration", "beta", 160),
    ("adapters", "training", "alpha", 640),
    ("adapters", "training", "beta", 640),
]
TRACE = [
    LedgerEntry(stage=stage, purpose=purpose, method="trace", item=item, rollouts=rollouts)
    for stage, purpose, item, rollouts in SPENT
]


@pytest.mark.parametrize(("stage", "end"), [("grpo_target", 1760), ("awm", 1760), ("single", 1360), ("mixed", 1280)])
def test_a_baseline_ends_where_its_job_does(root: Path, start: Start, stage: str, end: int) -> None:
    """TRACE's total, without what of it the baseline is charged for beside its own rollouts."""
    publish_text(root / f"stages/{stage}.py", "import time\ntime.sleep(300)\n")
    publish_text(root / "dvc.yaml", PIPELINE + f"  {stage}:\n    cmd: python stages/{stage}.py\n")
    spec = compose_spec("smoke", 0, [], ROOT / "conf")
    publish_spec(spec, root / "results/spec.yaml")
    for name in ("rollouts", "environments", "adapters"):
        publish(root / f"results/{name}/ledger.jsonl", [entry for entry in TRACE if entry.stage == name])
    ranked = [Capability(id=name, name=name, description=name) for name in ("gamma", "beta", "alpha")]
    publish(root / "results/capabilities/capabilities.jsonl", ranked)
    publish(root / "artifacts/labels/labels.jsonl", [])
    for name in ("alpha", "beta"):
        (root / "results/environments").mkdir(exist_ok=True)
        synthesized(root, name)
    baseline = baselines()[stage]
    assert isinstance(baseline, GRPOBaseline)
    if stage != "awm":  # its environments would have to be written first
        assert [job.rollouts for job in baseline.jobs(spec, root, TRACE)] == [end]
    start(root, f"stages/{stage}.py")
    begun(root, time.time() + 1)
    checkpoint(root, 4, time.time() + 60)
    out = drawn(Watch(root))
    assert f"{stage}: training wrong_record: step 4, 160 of {end:,} rollouts" in out
    assert next(line for line in out.splitlines() if line.startswith("│ adapters")).split("│")[3].strip() == "1,280"


def test_what_a_training_leaves_is_what_is_read(tmp_path: Path, tiny: Path, warm: Path) -> None:
    folder = project(tmp_path / "project", tiny, "alpha")
    kill(folder, "adapters", warm)
    [(fact, _)] = Progress(folder).of("adapters", 0.0)
    assert re.match(
        r"training alpha: step \d+, \d+ of 48 rollouts, mean reward [\d.]+, pass rate [\d.]+, informa", fact
    )
    assert run_stage(folder, "adapters") == 0
    assert [fact for fact, _ in Progress(folder).of("adapters", 0.0)] == [
        "1 trained or found whole, 48 rollouts: alpha"
    ]


class Verdict(BaseModel):
    number: int


def test_answers_since_the_stage_began_are_counted(root: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with Answering(lambda body: {"number": 1}) as server:
        server.use(monkeypatch)
        model = StructuredAnswers(
            ModelAccess(), name="m", temperature=0.0, max_tokens=99, folder=root / ".cache/answers"
        )
        model.ask([Question("", "old", Verdict)], "labels")
        [old] = (path for path in (root / ".cache/answers").rglob("*") if path.is_file())
        os.utime(old, (1, 1))
        model.ask([Question("", "new", Verdict)], "labels")
    start(root, "stages/rollouts.py")
    assert Watch(root).look().facts == ["rollouts: 1 new answers of models, 2 on disk"]


def test_jobs_of_a_cluster_are_shown_by_their_states(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {
        "name": "n",
        "label": "adapters",
        "keys": ["k0", "k1", "k2"],
        "items": ["a", "b", "c"],
        "at": "",
        "job": "7",
    }
    publish_text(root / ".cache/jobs/ledger.jsonl", json.dumps(sent) + '\n{"name": "n", "jo')
    publish_text(root / ".cache/jobs/results/k0.pkl", "")
    publish_text(root / ".cache/jobs/n/7_1_0_log.out", "3 of 16: mean reward 0.500\n")
    monkeypatch.setattr(jobs, "states", lambda asked: {"7_1": State("RUNNING"), "7_2": State("PENDING")})
    assert Watch(root).look().facts == [
        "jobs: 1 of 3 finished, 1 pending, 1 running",
        "job 7_1: 3 of 16; 3 of 16: mean reward 0.500",
    ]

    def silent(asked: object) -> dict[str, State]:
        raise InfrastructureError("no controller")

    monkeypatch.setattr(jobs, "states", silent)
    assert Watch(root).look().facts == ["jobs: 2 are not finished; Slurm does not answer: no controller"]


def test_points_of_a_sweep_that_run_are_named(root: Path, start: Start) -> None:
    point = root / ".cache/points/default-1"
    publish_text(point / "stages/rollouts.py", "import time\ntime.sleep(300)\n")
    start(point, "stages/rollouts.py")
    out = drawn(Watch(root))
    assert "no stage runs" in out and "point default-1: rollouts, since " in out


def test_a_writer_that_is_not_here_is_told_apart_from_one_that_is(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    held = {"write": {str(root / "results/adapters"): {"pid": process.pid, "cmd": "dvc repro"}}}
    publish_json(root / ".dvc/tmp/rwlock", held)
    out = drawn(Watch(root))
    assert f"DVC's rwlock has process {process.pid} at work on adapters, which is not here" in out
    held["write"][str(root / "results/adapters")]["pid"] = os.getpid()
    publish_json(root / ".dvc/tmp/rwlock", held)
    assert f"DVC is about to begin or to end adapters (process {os.getpid()})" in drawn(Watch(root))


BROKEN = ["", "{", "[" * 1500, "null", '"x"', "[[]]", "\x00\xff", '{"stages": 3}', "stages: [\n"]


@pytest.mark.parametrize("text", BROKEN, ids=map(str, range(len(BROKEN))))
def test_files_that_are_half_written_or_are_not_what_they_should_be_are_survived(
    root: Path, start: Start, text: str
) -> None:
    start(root, "stages/rollouts.py")
    watching = Watch(root)
    assert "rollouts runs since" in drawn(watching)
    begun(root, time.time() + 1)
    begun(root, time.time() + 1, "bbbb")
    for name in (
        ".cache/adapters/aaaa/checkpoints/checkpoint-4/history.json",
        ".cache/adapters/bbbb/result.json",
        ".cache/answers/aa/aaaa.json",
        ".cache/rollouts/a.jsonl",
        ".cache/rollouts/a.lock",
        ".cache/times/rollouts/a.json",
        ".dvc/tmp/rwlock",
        "dvc.lock",
        "log.txt",
        "results/rollouts/ledger.jsonl",
        "results/spec.yaml",
    ):
        publish_text(root / name, text)
    watching._last_look = watching._progress._last_query = float("-inf")
    assert "rollouts runs since" in drawn(watching)
    publish_text(root / "dvc.yaml", text)
    publish_text(root / ".cache/jobs/ledger.jsonl", text)
    watching._last_look = watching._progress._last_query = float("-inf")
    assert "no stage runs" in drawn(watching)


def test_what_a_file_says_does_not_reach_the_terminal_as_commands(root: Path, start: Start) -> None:
    start(root, "stages/adapters.py")
    begun(root, time.time() + 1)
    checkpoint(root, 4, time.time() + 60, place="\x1b[2J\rgone [bold]x")
    publish_text(root / "log.txt", "adapters: 3/9 \x1b]0;title\x07")
    out = "\n".join(lines(Watch(root).look()))
    assert "\x1b" not in out and "\x07" not in out and "\r" not in out
    assert "training [2J gone [bold]x: step 4" in out


def test_without_a_terminal_a_line_is_printed_for_each_change(
    root: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(root, "stages/rollouts.py")
    journal(root, line("a", "passed"))
    naps = iter(["", "", line("b", "passed")])

    def nap(seconds: float) -> None:
        assert seconds == 7.0
        text = next(naps, None)
        if text is None:
            raise KeyboardInterrupt
        journal(root, text)

    monkeypatch.setattr(view.time, "sleep", nap)
    follow(root, 7.0)
    out = capsys.readouterr().out
    assert out.count("rollouts runs since") == 1
    assert out.count(": 1 of at most 10") == 1 and out.count(": 2 of at most 10") == 1


def test_the_command_looks_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["captrain", "watch", "--once"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert not end.value.code and "would begin with rollouts" in capsys.readouterr().out
