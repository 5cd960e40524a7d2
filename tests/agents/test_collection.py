"""Collection of rollouts: counts, errors and resumption."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any, get_args

import pytest
from support.needs import further
from support.stages import stage
from support.waiting import PATIENCE, until
from support.warm import ADDRESS, start

from captrain.agents.collection import collect, count_outcomes, pass_rate, summarise_rollouts
from captrain.agents.scripted import Script, ScriptedPolicy, by_the_book
from captrain.benchmarks.servicedesk import DeskEpisode, ServiceDesk
from captrain.contract import CheckedEnvironment, RunningEpisode
from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.ledger import SPLIT_OF, LedgerEntry, ledger_entry
from captrain.models.lora import Adapter
from captrain.records import Message, Purpose, Rollout, Score, Split, Task, load, publish, remains, sealed
from captrain.run import compose_spec, publish_spec

ROOT = Path(__file__).parents[2]
COUNT = 12


class FaultyDesk(ServiceDesk):
    """The desk with a fault at one place; `faults` holds how often each task raises it."""

    def __init__(
        self, faults: dict[str, int], where: str = "step", fault: type[Exception] = InfrastructureError
    ) -> None:
        super().__init__(mix="mixed")
        self.faults, self.where, self.fault = dict(faults), where, fault

    def trip(self, where: str, task: dict) -> None:
        if where == self.where and self.faults.get(task["id"], 0) > 0:
            self.faults[task["id"]] -= 1
            raise self.fault("the line went dead")

    def open(self, task: dict) -> DeskEpisode:
        self.trip("open", task)
        desk = self

        class Episode(DeskEpisode):
            def step(self, message: Message) -> tuple[list[Message], bool]:
                desk.trip("step", task)
                return super().step(message)

        return Episode(task["data"])

    def score(self, task: dict, messages: list[Message]) -> dict:
        self.trip("score", task)
        return super().score(task, messages)


class Counting(ScriptedPolicy):
    """Plays references with a skill of one half, and records the keys."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script=script, skill=0.5)
        self.keys: list[str] = []

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        self.keys += [play.key for play in plays]
        return super().play(plays)


def desk(environment: ServiceDesk | None = None) -> CheckedEnvironment:
    return CheckedEnvironment(environment or ServiceDesk(mix="mixed"), "tests", "desk-0")


def run(
    folder: Path, target: CheckedEnvironment | None = None, policy: ScriptedPolicy | None = None, *, seed: int = 0,
    count: int = COUNT, trials: int = 1, retries: int = 2, adapter: Adapter | None = None,
) -> list[Rollout]:  # fmt: skip
    target = target or desk()
    tasks = target.tasks("discovery", count)
    return collect(
        policy or ScriptedPolicy(), target, tasks, purpose="diagnosis", seed=seed, trials=trials, retries=retries,
        adapter=adapter, journals=folder, quiet=True,
    )  # fmt: skip


def task_id(index: int) -> str:
    return f"servicedesk-mixed/discovery/{index:05d}"


def journal_of(folder: Path) -> Path:
    [path] = folder.glob("*.jsonl")
    return path


def test_every_task_is_played_trials_times_in_order(tmp_path: Path) -> None:
    rollouts = run(tmp_path, trials=2, adapter=Adapter("somewhere", "abc"))
    assert [(r.task.id, r.trial) for r in rollouts] == [(task_id(i), trial) for i in range(COUNT) for trial in (0, 1)]
    assert len({rollout.id for rollout in rollouts}) == 2 * COUNT
    assert {(r.outcome, r.purpose, r.adapter, r.retries, r.error) for r in rollouts} == {
        ("passed", "diagnosis", "abc", 0, None)
    }
    assert all(r.score and r.score.success and r.messages[-1] == r.reference[-1] for r in rollouts)


def test_a_failed_rollout_is_no_error(tmp_path: Path) -> None:
    rollouts = run(tmp_path, policy=Counting(), count=40)
    outcomes = [rollout.outcome for rollout in rollouts]
    assert 10 <= outcomes.count("failed") <= 30 and outcomes.count("passed") == 40 - outcomes.count("failed")
    assert pass_rate(rollouts) == outcomes.count("passed") / 40


@pytest.mark.parametrize("where", ["step", "open", "score"])
def test_an_infrastructure_error_is_retried_and_counted(tmp_path: Path, where: str) -> None:
    target = desk(FaultyDesk({task_id(3): 1, task_id(5): 2}, where))
    rollouts = run(tmp_path, target)
    assert {rollout.outcome for rollout in rollouts} == {"passed"}
    assert [rollout.retries for rollout in rollouts] == [{3: 1, 5: 2}.get(i, 0) for i in range(COUNT)]
    entry = ledger_entry(rollouts, stage="rollouts", method="trace")
    assert (entry.rollouts, entry.errors) == (COUNT + 3, 3)
    # Only the retries differ from a run without faults.
    clean = run(tmp_path / "clean")
    assert [r.model_copy(update={"retries": 0}) for r in rollouts] == clean


@pytest.mark.parametrize("where", ["step", "open", "score"])
def test_a_persistent_infrastructure_error_is_an_error_not_a_failure(tmp_path: Path, where: str) -> None:
    target = desk(FaultyDesk({task_id(4): 99}, where))
    rollouts = run(tmp_path, target)
    broken = rollouts[4]
    assert (broken.outcome, broken.score, broken.error, broken.retries) == ("error", None, "the line went dead", 2)
    assert [rollout.outcome for rollout in rollouts].count("passed") == COUNT - 1
    assert pass_rate(rollouts) == 1.0 and pass_rate([broken]) is None
    assert summarise_rollouts(rollouts, target)["outcomes"] == {"passed": COUNT - 1, "failed": 0, "error": 1}
    entry = ledger_entry(rollouts, stage="rollouts", method="trace")
    assert (entry.rollouts, entry.errors) == (COUNT + 2, 3)
    assert load_again(rollouts, tmp_path / "again.jsonl") == rollouts


def test_the_summary_holds_the_floor_unless_infrastructure_fails(tmp_path: Path) -> None:
    class Gift(FaultyDesk):
        def idle(self, task: dict[str, Any]) -> list[Message]:
            return self.open(task).messages if task["id"] != task_id(1) else self.reference(task)

    target = desk(Gift({task_id(4): 99}, "open"))
    summed = summarise_rollouts(run(tmp_path, target), target)
    assert summed["pass_rate"] == summed["mean_reward"] == 1.0
    assert summed["floor"] == {"pass_rate": round(1 / (COUNT - 1), 6), "mean_reward": round(1 / (COUNT - 1), 6)}
    assert sum(kind["rollouts"] for kind in summed["kinds"].values()) == COUNT


def load_again(rollouts: list[Rollout], path: Path) -> list[Rollout]:
    publish(path, rollouts)
    return load(path, Rollout)


def test_a_play_is_retried_when_its_server_fails(tmp_path: Path) -> None:
    left = {task_id(2): 1, task_id(6): 99}

    def script(play: RunningEpisode) -> Sequence[Message]:
        task = play.key.split("/", 1)[1].rpartition("/")[0]
        if left.get(task, 0) > 0:
            left[task] -= 1
            raise InfrastructureError("no answer")
        return by_the_book(play)

    rollouts = run(tmp_path, policy=ScriptedPolicy(script=script))
    assert [rollout.outcome for rollout in rollouts] == ["error" if i == 6 else "passed" for i in range(COUNT)]
    assert [rollout.retries for rollout in rollouts] == [{2: 1, 6: 2}.get(i, 0) for i in range(COUNT)]


def test_sixteen_plays_are_scored_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = desk(FaultyDesk({}, "nowhere"))
    score, together = target.score, Barrier(16)

    def waiting(task: Task, messages: Sequence[Message]) -> Score:
        together.wait(PATIENCE)  # passes when all sixteen are being scored
        return score(task, messages)

    monkeypatch.setattr(target, "score", waiting)
    assert [rollout.outcome for rollout in run(tmp_path, target, count=16)] == ["passed"] * 16


class AllAtOnce(ScriptedPolicy):
    """Opens all episodes before it ends the first, as a batched policy does."""

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        for play in plays:
            play.start()
        yield from super().play(plays)


class LastingDesk(FaultyDesk):
    """The faulty desk, whose episodes must be closed."""

    def __init__(self, where: str, fault: type[Exception], at_close: type[Exception] | None = None) -> None:
        super().__init__({task_id(2): 1}, where, fault)
        self.at_close = at_close
        self.running: list[str] = []

    def open(self, task: dict) -> DeskEpisode:
        episode, desk = super().open(task), self

        def close() -> None:
            desk.running.remove(task["id"])
            if desk.at_close:
                raise desk.at_close("the door is stuck")

        episode.close = close  # type: ignore[attr-defined]
        self.running.append(task["id"])
        return episode

    def score(self, task: dict, messages: list[Message]) -> dict:
        self.trip("score", task)
        return ServiceDesk(mix="mixed").score(task, messages)  # opens another episode


@pytest.mark.parametrize("where", ["score", "step"])
@pytest.mark.parametrize("fault", [ValueError, UserError, KeyboardInterrupt])
def test_any_exception_closes_all_episodes(tmp_path: Path, where: str, fault: type[Exception]) -> None:
    class Fault(fault):
        def __init__(self, message: str) -> None:
            super().__init__(*([message, "none"] if issubclass(fault, UserError) else [message]))

    environment = LastingDesk(where, Fault)
    with pytest.raises((UserError, KeyboardInterrupt), match="the line went dead"):
        run(tmp_path, desk(environment), AllAtOnce())
    assert environment.running == []
    # Finished rollouts are kept, and the next run resumes.
    assert len(remains(journal_of(tmp_path), Rollout)) == 2
    assert [rollout.outcome for rollout in run(tmp_path, desk(environment), AllAtOnce())] == ["passed"] * COUNT


def test_a_bug_between_episode_and_score_closes_all_episodes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = LastingDesk("nowhere", ValueError)
    target = desk(environment)

    def bug(task: Task, messages: Sequence[Message]) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(target, "score", bug)
    with pytest.raises(KeyError, match="a bug of ours"):
        run(tmp_path, target, AllAtOnce())
    assert environment.running == []


def test_a_failing_close_leaves_no_episode_open_and_keeps_the_first_error(tmp_path: Path) -> None:
    environment = LastingDesk("step", ValueError, at_close=OSError)
    target = desk(environment)
    with pytest.raises(EnvironmentFault, match="the door is stuck in close on .*/00000"):
        run(tmp_path, target, AllAtOnce())
    assert environment.running == []
    tasks = target.tasks("discovery", 3)
    with pytest.raises(EnvironmentFault, match="ValueError: the line went dead in step") as fault:
        collect(AllAtOnce(), target, tasks[2:], purpose="diagnosis", seed=0, journals=tmp_path, quiet=True)
    assert "the door is stuck" in str(fault.value.__notes__) and environment.running == []


@pytest.mark.parametrize("where", ["step", "score"])
def test_a_reference_that_raises_closes_its_episode(where: str) -> None:
    environment = LastingDesk(where, ValueError)
    target = desk(environment)
    task = target.tasks("discovery", 3)[2]
    with pytest.raises(EnvironmentFault, match="the line went dead"):
        target.score(task, target.play(task, target.reference(task)))
    assert environment.running == []


def test_without_retries_the_first_error_is_recorded(tmp_path: Path) -> None:
    rollouts = run(tmp_path, desk(FaultyDesk({task_id(3): 1})), retries=0)
    assert [rollout.outcome for rollout in rollouts].count("error") == 1 and rollouts[3].retries == 0


def test_a_finished_run_is_not_played_again(tmp_path: Path) -> None:
    first, again = Counting(), Counting()
    rollouts = run(tmp_path, policy=first)
    assert run(tmp_path, policy=again) == rollouts and (len(first.keys), again.keys) == (COUNT, [])


def test_an_interrupted_run_plays_only_missing_rollouts(tmp_path: Path) -> None:
    rollouts = run(tmp_path, policy=Counting())
    journal = journal_of(tmp_path)
    content = journal.read_bytes()
    journal.write_bytes(b"".join(content.splitlines(keepends=True)[:7]))
    again = Counting()
    assert run(tmp_path, policy=again) == rollouts
    assert again.keys == [f"0/{task_id(i)}/0" for i in range(7, COUNT)]
    assert journal.read_bytes() == content


def cut(lines: list[bytes]) -> list[bytes]:
    return [*lines[:8], lines[8][:-30]]


def cut_before_its_newline(lines: list[bytes]) -> list[bytes]:
    return [*lines[:8], lines[8].rstrip(b"\n")]


def half_a_letter(lines: list[bytes]) -> list[bytes]:
    """Cut the text inside a two-byte character."""
    return [*lines[:8], b'{"id":"caf\xc3']


def damaged(lines: list[bytes]) -> list[bytes]:
    """Change one byte in a message."""
    return [*lines[:8], lines[8].replace(b"service desk", b"service d\xffsk", 1), *lines[9:]]


def another_letter(lines: list[bytes]) -> list[bytes]:
    """Change a word of a message; the line is still a whole record."""
    return [*lines[:8], lines[8].replace(b"service desk", b"service dusk", 1), *lines[9:]]


def another_task(lines: list[bytes]) -> list[bytes]:
    """Change the data of a task."""
    return [*lines[:8], lines[8].replace(b'"data":{', b'"data":{"more":1,', 1), *lines[9:]]


def passed(lines: list[bytes]) -> list[bytes]:
    """Change the reward and the verdict."""
    changed = lines[8].replace(b'"reward":1.0', b'"reward":0.0').replace(b'"outcome":"passed"', b'"outcome":"failed"')
    return [*lines[:8], changed, *lines[9:]]


def without_digest(lines: list[bytes]) -> list[bytes]:
    """A line as an older version wrote it."""
    return [*lines[:8], lines[8].rpartition(b',"digest":')[0] + b"}\n", *lines[9:]]


def of_another_journal(lines: list[bytes]) -> list[bytes]:
    """A line with the digest that it would have in a file of another name."""
    text = lines[8].rpartition(b',"digest":')[0] + b"}"
    return [*lines[:8], sealed(Path("another.jsonl"), text.decode()), *lines[9:]]


def page_of_zeros(lines: list[bytes]) -> list[bytes]:
    """Zeros in the middle of a line, with its length kept."""
    return [*lines[:8], lines[8][:100] + bytes(len(lines[8]) - 200) + lines[8][-100:], *lines[9:]]


def blank(lines: list[bytes]) -> list[bytes]:
    return [*lines[:8], b"\n", *lines[9:]]


DAMAGES = (cut, cut_before_its_newline, half_a_letter, damaged, blank)
DAMAGES += (another_letter, another_task, passed, without_digest, of_another_journal, page_of_zeros)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cut_off_or_altered_line_is_played_again(
    tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = run(tmp_path, policy=Counting())
    journal = journal_of(tmp_path)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(damage(lines)))
    assert journal.read_bytes() != b"".join(lines)
    again, third = Counting(), Counting()
    assert run(tmp_path, policy=again) == rollouts
    assert f"0/{task_id(8)}/0" in again.keys and f"0/{task_id(7)}/0" not in again.keys
    assert "1 of" in capsys.readouterr().out
    assert run(tmp_path, policy=third) == rollouts and third.keys == []
    assert sorted(journal.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_no_bit_or_page_of_a_journal_can_change_unseen_and_no_other_journal_is_taken_for_it(tmp_path: Path) -> None:
    rollouts, rng = run(tmp_path), random.Random(0)
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    run(tmp_path / "other", seed=1)
    contents = [journal_of(tmp_path / "other").read_bytes(), whole * 2, b"".join(reversed(whole.splitlines(True)))]
    for _ in range(20):
        flipped, zeroed = bytearray(whole), bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        start = rng.randrange(len(whole) - 4096)
        zeroed[start : start + 4096] = bytes(4096)
        contents += [bytes(flipped), bytes(zeroed), whole[: rng.randrange(len(whole))]]
    for content in contents:
        journal.write_bytes(content)
        assert run(tmp_path) == rollouts


def test_every_setting_that_changes_results_has_its_own_journal(tmp_path: Path) -> None:
    run(tmp_path)
    others = [
        {"seed": 1}, {"trials": 2}, {"policy": Counting()}, {"adapter": Adapter("folder", "abc")}, {"count": 3},
        {"target": CheckedEnvironment(ServiceDesk(mix="mixed"), "tests", "desk-1")},
    ]  # fmt: skip
    for other in others:
        run(tmp_path, **other)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1 + len(others)


def test_unusual_line_breaks_survive_the_journal(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\r\ng\x1ch"

    def script(play: RunningEpisode) -> Sequence[Message]:
        return [{"role": "assistant", "content": text}]

    rollouts = run(tmp_path, policy=ScriptedPolicy(script=script))
    assert rollouts[0].messages[-1]["content"] == text
    assert load_again(rollouts, tmp_path / "again" / "r.jsonl") == rollouts
    assert (
        run(tmp_path, policy=Counting(script)) != [] and run(tmp_path, policy=ScriptedPolicy(script=script)) == rollouts
    )


@pytest.mark.parametrize("split", get_args(Split))
@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_a_task_of_another_split_is_refused_before_anything_is_played(
    tmp_path: Path, purpose: Purpose, split: Split
) -> None:
    target, policy = desk(), Counting()
    own: Split = SPLIT_OF[purpose]
    tasks = [*target.tasks(own, 2), *target.tasks(split, 3)[2:]]

    def play() -> list[Rollout]:
        return collect(policy, target, tasks, purpose=purpose, seed=0, journals=tmp_path, quiet=True)

    if split == own:
        assert len(play()) == 3
    else:
        with pytest.raises(UserError, match=f"servicedesk-mixed/{split}/00002 is of the {split} split"):
            play()
        assert policy.keys == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["step", "open", "score"])
def test_an_environment_that_raises_is_named_with_its_task_and_finished_rollouts_are_kept(
    tmp_path: Path, where: str
) -> None:
    broken = desk(FaultyDesk({task_id(5): 1}, where, ZeroDivisionError))
    with pytest.raises(EnvironmentFault) as fault:
        run(tmp_path, broken, Counting())
    problem = fault.value.problem
    assert "environment servicedesk-mixed (tests) raised ZeroDivisionError: the line went dead" in problem
    assert f"in {where} on {task_id(5)}" in problem and "fix" in fault.value.remedy
    kept = 5
    assert len(journal_of(tmp_path).read_text().splitlines()) == kept
    mended = Counting()
    assert run(tmp_path, policy=mended) == run(tmp_path / "whole", policy=Counting())
    assert mended.keys == [f"0/{task_id(i)}/0" for i in range(kept, COUNT)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"score": lambda self, task, messages: {"reward": 1.5, "success": True}}, "with reward 1.5"),
        (
            {"score": lambda self, task, messages: {"reward": float("nan"), "success": True}},
            "a finite number at reward",
        ),
        ({"score": lambda self, task, messages: None}, "is not a score"),
        ({"tasks": lambda self, split, count: [{"id": "a"}]}, "is not a task"),
        ({"tasks": lambda self, split, count: [{"id": "a", "split": split, "data": {}}] * count}, "1 distinct ids"),
        ({"tasks": lambda self, split, count: []}, "gave 0 tasks"),
        ({"tasks": lambda self, split, count: ServiceDesk().tasks("test", count)}, "of split test as discovery"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    environment = type("Environment", (ServiceDesk,), change)()
    with pytest.raises(EnvironmentFault, match=said) as fault:
        run(tmp_path, desk(environment))
    assert "environment servicedesk-mixed" in fault.value.problem


# Stages in a project.


def project(folder: Path, model: Path, *overrides: str) -> Path:
    """A project up to its base: stages, the spec of the smoke experiment, and a tiny random model."""
    shutil.copytree(ROOT / "stages", folder / "stages")
    publish_spec(compose_spec("smoke", 0, overrides, ROOT / "conf"), folder / "results/spec.yaml")
    shutil.copytree(model, folder / "artifacts/base")
    return folder


def outputs(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("artifacts/rollouts/*"), *folder.glob("results/rollouts/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_killed_stage_resumes_and_ends_in_identical_files(tmp_path: Path, tiny: Path, warm: Path) -> None:
    count = 60
    killed = project(tmp_path / "killed", tiny, f"rollouts.tasks={count}", "machine.batch=2")
    running = start(warm / ADDRESS, ["stages/rollouts.py"], killed, os.environ)
    journals = killed / ".cache/rollouts"
    until(lambda: sum(path.read_bytes().count(b"\n") for path in journals.glob("*.jsonl")) >= 10 or not running.alive())
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = journal_of(journals).read_bytes().splitlines(keepends=True)
    assert 10 <= len(before) < count and not outputs(killed)
    assert stage(killed, "rollouts") == 0
    # Finished rollouts were kept and not played again.
    whole = [line for line in before if line.endswith(b"\n")]
    assert journal_of(journals).read_bytes().splitlines(keepends=True)[: len(whole)] == whole
    # Another batch size: speed does not change the result.
    undisturbed = project(tmp_path / "undisturbed", tiny, f"rollouts.tasks={count}", "machine.batch=64")
    assert stage(undisturbed, "rollouts") == 0
    assert outputs(killed) == outputs(undisturbed) and len(outputs(killed)) == 3
    rollouts = load(killed / "artifacts/rollouts/discovery.jsonl", Rollout)
    assert len(rollouts) == count and all(len(r.token_ids) == len(r.mask) == len(r.logprobs) > 0 for r in rollouts)
    [entry] = load(killed / "results/rollouts/ledger.jsonl", LedgerEntry)
    assert (entry.rollouts, entry.purpose, entry.method) == (count, "diagnosis", "trace")
    assert entry.completion_tokens == sum(sum(rollout.mask) for rollout in rollouts)


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a few diagnostic rollouts and no model."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "stages", folder / "stages")
    publish_spec(
        compose_spec("smoke", 0, ["policy=scripted", "policy.skill=0.5"], ROOT / "conf"), folder / "results/spec.yaml"
    )
    publish(folder / "artifacts/rollouts/discovery.jsonl", run(folder / "journals", policy=Counting()))
    return folder


def without_its_end(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2][: len(lines[2]) // 2]]


def not_text(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], b"\x00\xff\xfe" + lines[2], *lines[3:]]


def not_json(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], b"<html>\n", *lines[3:]]


def another_record(lines: list[bytes]) -> list[bytes]:
    changed = json.loads(lines[2]) | {"outcome": "maybe"}
    return [*lines[:2], json.dumps(changed).encode() + b"\n", *lines[3:]]


@pytest.mark.parametrize("damage", further([without_its_end, not_text, not_json, another_record], 2))
def test_a_corrupt_line_ends_the_next_stage_in_one_message(rolled_out: Path, tmp_path: Path, damage: Any) -> None:
    folder = shutil.copytree(rolled_out, tmp_path / "project")
    path = folder / "artifacts/rollouts/discovery.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    done = subprocess.run([sys.executable, "stages/labels.py"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: artifacts/rollouts/discovery.jsonl, line 3 is not a whole Rollout record")
    assert done.stderr.count("error:") == 1 and done.stderr.count("remedy:") == 1 and "Traceback" not in done.stderr
    assert "delete artifacts/rollouts/discovery.jsonl and run `dvc repro`" in done.stderr
    assert not (folder / "results/labels").exists() and not (folder / "artifacts/labels").exists()


def test_a_missing_file_or_model_ends_in_one_message(
    rolled_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(rolled_out, tmp_path / "project")
    (folder / "artifacts/rollouts/discovery.jsonl").unlink()
    assert stage(folder, "labels") == 2
    assert "error: artifacts/rollouts/discovery.jsonl is missing" in capsys.readouterr().err
    publish_spec(compose_spec("smoke", 0, [], ROOT / "conf"), folder / "results/spec.yaml")
    assert stage(folder, "rollouts") == 2
    assert "error: model artifacts/base lacks config.json" in capsys.readouterr().err


def test_tasks_of_a_record_are_enough_to_open_them_again(tmp_path: Path) -> None:
    target = desk()
    rollouts = load_again(run(tmp_path, policy=Counting()), tmp_path / "again.jsonl")
    for rollout in rollouts:
        task = Task.model_validate_json(rollout.task.model_dump_json())
        assert target.score(task, rollout.messages) == rollout.score
        assert target.open(task).messages == rollout.messages[:2]


def test_rollouts_with_a_turn_at_the_token_limit_are_counted() -> None:
    task = Task(id="t", split="discovery", data={})
    masks = [[0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1], []]
    rollouts = [
        Rollout(
            id=str(number),
            environment="e",
            task=task,
            trial=0,
            purpose="diagnosis",
            policy="p",
            messages=[],
            mask=mask,
            outcome="failed",
        )
        for number, mask in enumerate(masks)
    ]
    assert "0 of 4 passed; 2 have a turn that policy.max_tokens=3 ended" in count_outcomes(rollouts, 3)
    assert "1 have a turn" in count_outcomes(rollouts, 4)
    assert count_outcomes(rollouts, 5) == count_outcomes(rollouts, None) == "0 of 4 passed"
