"""Passports of subtly bad environments, and `captrain validate`.

`bad_environments/sound.py` is a careful author's environment. Each other file changes one thing in it, and the passport
must find that change.
"""

import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.hostile import BAD, MISSED, SOUND, text_of
from support.needs import further

from captrain.benchmarks.loading import load_benchmark
from captrain.cli import app
from captrain.contract import load_file, tool_call
from captrain.environments.checks import CHECKS, distance, failed_tool, is_written, steps, structure
from captrain.environments.evidence import Evidence, Standard, make_standard
from captrain.environments.leakage import HeldOutTasks, runs_of
from captrain.environments.passport import audit, calibrate, run_checks
from captrain.environments.probes import act_randomly
from captrain.environments.sandbox import forkserver
from captrain.environments.sandbox.confined import ConfinedEnvironment, active_confinement, load_confined
from captrain.environments.sandbox.forkserver import Allowance
from captrain.environments.synthesizer import Attempt, Brief
from captrain.environments.templates import DEFICITS, EASIEST, TemplateSynthesizer
from captrain.errors import UserError
from captrain.records import Capability, CheckResult, Message, Passport, Rollout, Score, Task
from captrain.run import compose_spec

HERE = Path(__file__).parents[1]
CONF = HERE.parent / "conf"
DEFAULT = compose_spec("default", 0, [], CONF)
BENCHMARK = load_benchmark(DEFAULT.benchmark)
AGAINST = make_standard(BENCHMARK, DEFAULT.evaluation.tasks, DEFAULT.environments)
FEW = 6
NAMES = [check.name for check in CHECKS]
HIDDEN = "\u200b"

SANDBOXED = {
    "another_reward_in_another_process", "other_tasks_in_another_process", "other_observations_each_time",
    "score_of_what_was_seen",
}  # fmt: skip
"""Environments whose faults need a process for every score. The others run in this process, which is faster."""


def is_dear(name: str) -> bool:
    """Return whether the check takes seconds; `make test` runs two of these."""
    return (name in SANDBOXED or name.startswith(("one_in_a_hundred", "pays_"))) and name not in (
        "other_tasks_in_another_process", "pays_when_many_are_asked_for"
    )  # fmt: skip


def against(seeds: int) -> Standard:
    return Standard(AGAINST.tools, AGAINST.tests, DEFAULT.environments.model_copy(update={"seeds": seeds}))


def found(folder: Path, text: str, seeds: int = FEW, sandboxed: bool = False) -> dict[str, CheckResult]:
    """The check results of a text, by name."""
    path = folder / "written.py"
    path.write_text(text)
    checks = run_checks(load_confined(path, "none") if sandboxed else load_file(path), path, against(seeds), ())
    assert [check.name for check in checks] == NAMES
    return {check.name: check for check in checks}


def failed(checks: dict[str, CheckResult]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def changed(change: str) -> str:
    body = "".join(f"    {line}\n" for line in change.strip().splitlines())
    return f"{SOUND}\n\nSound = Environment\n\n\nclass Environment(Sound):\n{body}"


def test_every_bad_environment_is_in_the_table() -> None:
    assert {path.name.removesuffix(".py.txt") for path in BAD.glob("*.py.txt")} == set(MISSED)


@pytest.mark.parametrize("name", further(sorted(MISSED, key=is_dear), len(MISSED) - 5))
def test_a_bad_environment_fails_the_checks_that_are_meant_for_it_and_no_other(tmp_path: Path, name: str) -> None:
    many = "hundred" in name or name.startswith("pays_")
    checks = found(tmp_path, text_of(name), 100 if many else FEW, name in SANDBOXED)
    assert failed(checks) == MISSED[name]
    for check in (checks[one] for one in MISSED[name]):
        assert check.detail
        # These failures have no task.
        assert check.task or name in ("schemas_altered", "nothing_broken")
    if "hundred" in name:
        assert checks["reward of the reference solution"].task.endswith("/57")


def test_which_tasks_are_checked_is_drawn_by_the_bytes_of_the_file_and_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "written.py"

    def numbers(text: str, seed: int) -> list[int]:
        path.write_text(text)
        tasks = Evidence(load_file(path), path, against(100), (), seed=seed).tasks
        return [int(task.id.rpartition("/")[2]) for task in tasks]

    first = numbers(SOUND, 0)
    assert first == numbers(SOUND, 0) != sorted(first) and len({*first}) == 100 and max(first) > 500
    assert len({tuple(first), tuple(numbers(SOUND, 1)), tuple(numbers(f"{SOUND}\n", 0))}) == 3


def test_an_examination_asks_for_the_reference_of_each_task_once(tmp_path: Path) -> None:
    path = tmp_path / "counting.py"
    path.write_text(changed("""
asked = []
def reference(self, task):
    self.asked.append(task["id"])
    return super().reference(task)
def broken(self, task):
    return Sound().broken(task)
"""))  # fmt: skip
    target = load_file(path)
    environment: Any = target.environment
    assert not failed({check.name: check for check in run_checks(target, path, against(FEW), ())})
    assert len(environment.asked) == len({*environment.asked}) >= FEW


def test_an_environment_that_has_few_tasks_is_checked_on_those(tmp_path: Path) -> None:
    few = changed("def tasks(self, split, count):\n    return super().tasks(split, min(count, 9))")
    assert not failed(found(tmp_path, few))


@pytest.mark.parametrize(
    ("function", "seconds"), [("score(self, task, messages)", 0.2), ("tasks(self, split, count)", 1.5)]
)
def test_an_examination_ends_in_a_verdict_however_slow_the_environment_is(
    tmp_path: Path, function: str, seconds: float
) -> None:
    """Each single answer is in time, but all answers together are not."""
    path = tmp_path / "written.py"
    name, arguments = function.replace("self, ", "").split("(")
    path.write_text(
        changed(
            f"def {function}:\n    import time\n    open({str(tmp_path / 'slept')!r}, 'a').write('.')\n"
            f"    time.sleep({seconds})\n    return super().{name}({arguments}"
        )
    )
    target = load_confined(path, "none", ())
    checks = {check.name: check for check in run_checks(target, path, against(100), (), seconds=2)}
    assert 0 < (tmp_path / "slept").stat().st_size * seconds < 20 and list(checks) == NAMES
    assert "used up the time of its examination (environments.seconds)" in checks["reward of doing nothing"].detail
    assert len(target.tasks("training", 1)) == 1  # once the examination is over, each answer has its time again


@pytest.mark.parametrize("which", ["the environment", "captrain"])
@pytest.mark.parametrize(("busy", "used"), [(100.0, False), (0.0, True)])
def test_time_waited_for_a_processor_by_either_side_is_not_counted(
    which: str, busy: float, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waits = tmp_path / "written.py", itertools.count(0.0, busy)
    path.write_text(changed("def tasks(self, split, count):\n    return super().tasks(split, count)"))
    target, allowance = load_confined(path, "none", ()), Allowance(60)
    assert isinstance(target.environment, ConfinedEnvironment)
    target.environment.allowance = allowance
    is_file = which == "the environment"
    monkeypatch.setattr(forkserver, "waited", lambda _handle: next(waits) if is_file else 0.0)
    monkeypatch.setattr(forkserver, "waited_here", lambda: 0.0 if is_file else next(waits))
    target.tasks("training", 3)
    assert (allowance.left < 60) == used


@pytest.mark.parametrize("kind", ["a pipe", "a link to nothing"])
def test_what_is_no_regular_file_is_not_taken_for_a_taskset(project: Path, captrain: "Captrain", kind: str) -> None:
    path = project / kind
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to("nothing")
    status, _, err = captrain("validate", kind)
    path.unlink()
    assert status == 2 and err.startswith(f"error: {kind} is not a Python file\n")


@pytest.mark.parametrize(
    "text",
    further(
        ["(" * 5000, "\x00", "-" * 100_000 + "1", "x = '" + "a" * 1000, f"{SOUND}\n# \udcff", "[" * 99 + "]" * 99], 2
    ),
)
def test_text_that_no_parser_likes_is_a_verdict(project: Path, captrain: "Captrain", text: str) -> None:
    (project / "mine.py").write_bytes(text.encode(errors="surrogateescape"))
    status, out, err = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 1 and re.search(r"\d checks? failed", out) and not err
    assert not Passport.model_validate_json((project / "mine.passport.json").read_text()).passed


@pytest.mark.parametrize(
    "value",
    further(
        [
            "[" * 900 + "]" * 900,
            "9" * 20_000,
            "9" * 4000,
            "wrap_order" * 20_000,
            "wrap_order({" * 15_000,
            "(" * 250_000,
            "a " * 100_000,
        ],
        2,
    ),
)
def test_no_observation_breaks_or_holds_up_what_reads_it(tmp_path: Path, value: str) -> None:
    text = changed(
        "def open(self, task):\n    episode = super().open(task)\n"
        "    episode.run = lambda name, arguments: VALUE\n    return episode"
    )
    path = tmp_path / "written.py"
    path.write_text(
        f"{text}\nVALUE = {value!r}\n".replace("json.dumps(self.run(name, arguments))", "self.run(name, arguments)")
    )
    began = time.process_time()
    checks = run_checks(load_confined(path, "none"), path, against(2), (), seconds=20)
    assert time.process_time() - began < 30 and not all(check.passed for check in checks)


def test_tasks_of_a_training_that_are_other_than_the_passport_s_stop_the_adapter(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    path.write_text(SOUND)
    checks = run_checks(load_file(path), path, against(FEW), ())
    passport = Passport(
        capability="written", environment="e", attempt=0, passed=True, trusted=False, calibration_tasks=0, checks=checks
    )
    target = load_file(path)
    audit(target, passport, target.tasks("training", 40), 0)
    for name in ("pays_from_task_500_on", "pays_when_many_are_asked_for"):
        path.write_text(text_of(name))
        target = load_file(path)
        with pytest.raises(UserError, match="reward of doing nothing is 1.00 on 16 of them, and the passport has 0"):
            audit(target, passport, target.tasks("training", 700)[500:], 0)
    path.write_text(
        changed(
            "def reference(self, task):\n    whole = super().reference(task)\n"
            "    return whole[:1] if '/7' in task['id'] else whole"
        )
    )
    target = load_file(path)
    with pytest.raises(UserError, match="the reference of careful_search/training/7. earns 0"):
        audit(target, passport, target.tasks("training", 80)[70:], 0)


def test_a_sound_environment_passes_every_check_in_the_sandbox(tmp_path: Path) -> None:
    checks = found(tmp_path, SOUND, sandboxed=True)
    assert failed(checks) == set()
    assert "fewer than 100" in checks["tasks checked"].detail
    assert checks["share of tasks with the failed step"].measured is None


@pytest.mark.parametrize(
    ("attempt", "seeds"), further([(0, 30), *((attempt, 10) for attempt in range(1, EASIEST + 1))])
)
@pytest.mark.parametrize("name", DEFICITS)
def test_the_templates_pass_every_check(tmp_path: Path, name: str, attempt: int, seeds: int) -> None:
    path = tmp_path / f"{name}.py"
    wanted = Brief(Capability(id=name, name=name, description=""), BENCHMARK.tools)
    unspread = Passport(
        capability=name, environment="", attempt=0, passed=False, trusted=True, calibration_tasks=10, checks=[]
    )
    path.write_text(TemplateSynthesizer().synthesize(wanted, [Attempt("", unspread)] * attempt))
    checks = run_checks(load_file(path), path, against(seeds), ())
    assert [check for check in checks if not check.passed] == []
    assert next(check for check in checks if check.name == "tasks checked").measured == seeds


# Environments that raise, hang or return something else.


@pytest.mark.parametrize(
    ("change", "met", "said"),
    further(
        [
            ("def broken(self, task):\n    return {}['gone']", MISSED["nothing_broken"], "KeyError: 'gone'"),
            ("def broken(self, task):\n    return 'no messages'", MISSED["nothing_broken"], ""),
            ("def idle(self, task):\n    raise SystemExit(3)", {"reward of doing nothing"}, "SystemExit"),
        ]
    ),
)
def test_what_raises_fails_the_checks_that_met_it_and_the_others_still_run(
    tmp_path: Path, change: str, met: set[str], said: str
) -> None:
    checks = found(tmp_path, changed(change), sandboxed=True)
    assert met <= failed(checks) <= met | {
        "spread of rewards", "tasks that other words fail", "tasks with a success that is none",
        "reward of plays that know nothing", "reward without the look-ups", "reward of other mistakes",
        "reward of any other choice", "tasks that nothing afterwards spoils",
    }  # fmt: skip
    for name in met:
        assert said in checks[name].detail and checks[name].task.startswith("careful_search/training/")
        assert checks[name].measured is None


@pytest.mark.parametrize(
    "change",
    [
        "def reference(self, task):\n    return 5",
        "def reference(self, task):\n    return [{'role': 'assistant', 'tool_calls': [{}]}]",
        "def reference(self, task):\n    return [{'role': 'nobody'}]",
        "def tasks(self, split, count):\n    return {'none': 0}",
        "def score(self, task, messages):\n    return {'reward': 7, 'success': True}",
    ],
)
def test_what_is_not_of_the_contract_is_a_finding_too(tmp_path: Path, change: str) -> None:
    check = found(tmp_path, changed(change), 3, sandboxed=True)["reward of the reference solution"]
    assert not check.passed and check.measured is None and check.detail


def test_an_import_that_the_sandbox_lacks_fails(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(SOUND + "\n\ndef unused():\n    import pydantic\n")
    checks = {check.name: check for check in run_checks(load_file(path), path, against(FEW), ())}
    check = checks["imports that the sandbox lacks"]
    assert failed(checks) == {check.name} and check.detail == "not there: pydantic"


# Test tasks.


def copied(test: Task) -> dict[str, str]:
    opening = BENCHMARK.open(test).messages[1]["content"]
    data = json.dumps(json.dumps(test.data))
    return {
        "its data": f"copied = json.loads({data})\n"
        "def make(self, split, index):\n    data = super().make(split, index)\n"
        "    return {**data, 'source': self.copied} if index == 2 else data",
        "its words in the file": f"example = {opening!r}",
        "its words in the file, with what nobody sees between the letters": "example = " + repr(HIDDEN.join(opening)),
        "its id in the file": f"source = {test.id!r}",
        "its id in the data": "def make(self, split, index):\n    more = {'source': '/'.join(['servicedesk-mixed', "
        f"'test', {test.id[-5:]!r}])}}\n    return {{**super().make(split, index), **more}}",
    }  # fmt: skip


LONG = max(BENCHMARK.tasks("test", 400), key=lambda task: len(task.data["request"]))


@pytest.mark.parametrize("what", copied(LONG))
def test_a_test_task_that_was_copied_in_is_found(tmp_path: Path, what: str) -> None:
    checks = found(tmp_path, changed(copied(LONG)[what]))
    [name] = failed(checks)
    assert name == ("ids of test tasks" if "id" in what.split() else "share of a test task's words")
    assert LONG.id in checks[name].detail
    assert checks[name].task == {"its data": "careful_search/training/2", "its id in the data":
                                 "careful_search/training/0"}.get(what, "")  # fmt: skip


@pytest.mark.parametrize("mix", ["single", "mixed", "rare", "compound"])
def test_test_tasks_are_recognised_and_other_tasks_of_the_same_small_world_are_not(mix: str) -> None:
    benchmark = load_benchmark(compose_spec("default", 0, [f"benchmark.mix={mix}"], CONF).benchmark)
    tests = benchmark.tasks("test", 400)
    held_out = HeldOutTasks(benchmark, tests)

    def share(task: Task) -> float:
        return held_out.nearest(runs_of(task, benchmark.play(task, benchmark.reference(task))))[0]

    assert sum(share(task) == 1.0 for task in tests) >= 0.9 * len(tests)
    assert max(share(task) for task in benchmark.tasks("training", 400)) < 0.5


# Transfer, structures, probes.


def rollout(made: Sequence[Message], reference: Sequence[Message]) -> Rollout:
    return Rollout(
        id="r", environment="e", task=Task(id="t", split="discovery", data={}), trial=0, purpose="diagnosis",
        policy="p", messages=[*made], reference=[*reference], outcome="failed", score=Score(reward=0, success=False),
    )  # fmt: skip


LOOK, WRAP, DENY = (tool_call(name, {"order_id": "#1"}) for name in ("get_order", "wrap_order", "deny_request"))
SAY: Message = {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize(
    ("made", "reference", "tool"),
    [
        ([LOOK, SAY], [LOOK, WRAP, SAY], "wrap_order"),
        ([LOOK, tool_call("wrap_order", {"order_id": "#2"})], [LOOK, WRAP], "wrap_order"),
        ([WRAP], [LOOK, WRAP], "get_order"),
        ([WRAP, WRAP], [WRAP], "wrap_order"),
        ([LOOK, DENY, SAY], [], "deny_request"),
        ([SAY], [], None),
        ([LOOK], [LOOK], None),
    ],
)
def test_a_failed_rollout_tells_the_tool_at_which_it_failed(
    made: list[Message], reference: list[Message], tool: str | None
) -> None:
    assert failed_tool(rollout(made, reference)) == tool


def test_transfer_is_predicted_from_the_steps_that_failed_in_the_evidence(tmp_path: Path) -> None:
    path = tmp_path / "sound.py"
    path.write_text(SOUND)

    def transfer(*evidence: Rollout) -> CheckResult:
        return {check.name: check for check in run_checks(load_file(path), path, against(5), evidence)}[
            "share of tasks with the failed step"
        ]

    wrap, deny = rollout([LOOK], [LOOK, WRAP]), rollout([WRAP], [DENY])
    assert (transfer(wrap, deny, deny, deny).measured, transfer(wrap, deny, deny, deny).passed) == (0.25, True)
    assert (transfer(deny).measured, transfer(deny).passed) == (0.0, False)
    assert transfer(deny).detail == "failed at: deny_request 1"


def test_a_structure_is_what_is_left_without_names_and_numbers() -> None:
    def play(name: str, order: str, status: str, asked: str = "Wrap") -> list[Message]:
        user = {"role": "user", "content": f"I am {name}. {asked} order {order} for 30 days."}
        result = {"role": "tool", "name": "get_order", "content": json.dumps({"status": status})}
        return [user, tool_call("get_order", {"order_id": order}), result]

    one = structure(play("Ada", "#12", "pending"))
    assert one == structure(play("Ben", "#47", "shipped")) and "Ada" not in one and "12" not in one
    assert one != structure(play("Ada", "#12", "pending", asked="Return"))
    assert one != structure([*play("Ada", "#12", "pending"), tool_call("get_order", {"order_id": "#13"})])


@pytest.mark.parametrize(
    "text",
    [
        'call wrap_order {"order_id": "#12"} now',
        '{"name": "wrap_order", "arguments": {"order_id": "#12"}}',
        'wrap_order(order_id="#12")',
        "wrap_order('#12')",
    ],
)
def test_a_call_in_a_text_is_recognised(text: str) -> None:
    assert is_written(text, "wrap_order", ["#12"]) and not is_written(text, "wrap_order", ["#13"])
    assert not is_written("Wrap it with wrap_order. Order #12 (pending) is wrapped.", "wrap_order", ["#12"])


def test_random_calls_take_their_arguments_from_enums_and_from_what_is_visible() -> None:
    import random

    parameters = {
        "type": "object",
        "properties": {"size": {"type": "string", "enum": ["small", "large"]}, "count": {"type": "integer"},
                       "order": {"type": "string"}, "sure": {"type": "boolean"}},
        "required": ["size", "count", "order", "sure"],
    }  # fmt: skip
    tools, rng = [{"type": "function", "function": {"name": "order", "parameters": parameters}}], random.Random(0)
    seen = [{"role": "user", "content": "Two of 7, for #12!"}, {"role": "tool", "content": '["K-3"]'}]
    given = [act_randomly(tools, rng, seen)["tool_calls"][0]["function"]["arguments"] for _ in range(200)]
    assert {one["size"] for one in given} == {"small", "large"} and {one["sure"] for one in given} == {True, False}
    assert {one["order"] for one in given} == {"Two", "of", "7", "for", "#12", "K-3"}
    assert all(isinstance(one["count"], int) for one in given) and {7, 12} <= {one["count"] for one in given}


def test_the_distance_of_two_solutions_counts_calls_and_questions_but_not_the_closing_words() -> None:
    ask: Message = {"role": "assistant", "content": "May I?"}

    def apart(one: list[Message], other: list[Message]) -> int:
        return distance(steps(one), steps(other))

    assert apart([LOOK, WRAP, SAY], [LOOK, WRAP, ask]) == 0
    assert apart([LOOK, ask, WRAP, SAY], [LOOK, WRAP, SAY]) == 1
    assert apart([LOOK, ask, WRAP, SAY], [LOOK, ask, SAY]) == 1
    assert apart([LOOK, WRAP, SAY], [LOOK, DENY, SAY]) == 1
    assert apart([LOOK, WRAP, SAY], [WRAP, LOOK, SAY]) == 2


def test_the_group_that_is_furthest_out_shows_why_the_base_finds_it_too_easy() -> None:
    bounds = DEFAULT.environments
    easy = [
        Rollout(id=str(at), environment="e", task=Task(id=f"t{at // 2}", split="training", data={}), trial=at % 2,
                purpose="calibration", policy="p", messages=[], outcome="passed",
                score=Score(reward=reward, success=True))
        for at, reward in enumerate([0.8, 0.9, 1.0, 1.0])
    ]  # fmt: skip
    checks = {check.name: check for check in calibrate(easy, 2, bounds)}
    assert checks["mean reward of the base"].task == checks["pass rate of the base"].task.replace("t0", "t1") == "t1"


# captrain validate.

Captrain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A new project."""
    shutil.copytree(CONF, tmp_path / "conf")
    scripted = "_target_: captrain.agents.scripted.ScriptedPolicy\nskill: 0.5\n"
    (tmp_path / "conf/policy/scripted.yaml").write_text(scripted)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text(
        f"experiment: smoke\nseed: 0\noverrides: [environments.seeds={FEW}, policy=scripted]\n"
    )
    (tmp_path / "mine.py").write_text(SOUND)
    return tmp_path


@pytest.fixture
def captrain(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Captrain:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(project)
        monkeypatch.setenv("COLUMNS", "250")
        monkeypatch.setattr(sys, "argv", ["captrain", *arguments])
        with pytest.raises(SystemExit) as end:
            app.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


def test_validate_prints_the_sandbox_and_every_check_and_writes_passport_and_page(
    project: Path, captrain: Captrain
) -> None:
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 0 and f"sandbox: {active_confinement()}" in out and "every check passed" in out
    assert all(name in out for name in NAMES)
    passport = Passport.model_validate_json((project / "mine.passport.json").read_text())
    assert passport.passed and not passport.trusted and passport.calibration_tasks == 0
    assert passport.environment == load_file(project / "mine.py").fingerprint
    page = (project / "mine.passport.md").read_text()
    assert page.startswith("# mine: passed\n") and "looks at every order before it gift-wraps" in page
    assert all(f"| passed | {name} |" in page for name in NAMES)
    assert "an agent that does nothing 0, " in page and "not played on the base" in page


def test_validate_exits_with_1_when_a_check_fails_and_says_which(project: Path, captrain: Captrain) -> None:
    (project / "mine.py").write_text(text_of("claiming_pays"))
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic", "--out", "found")
    assert status == 1 and "1 check failed\nthe page with every check: found/mine.passport.md\n" in out
    assert (
        "**failed** | reward of plays that know nothing | 0.5 | at most 0.3 |"
        in (project / "found/mine.passport.md").read_text()
    )
    checks = Passport.model_validate_json((project / "found/mine.passport.json").read_text()).checks
    [best] = [check for check in checks if check.name == "reward without the look-ups"]
    assert best.script[0].startswith("list_orders(") and " earns 0." in best.detail and best.deviation is not None
    (project / "mine.py").write_text("class Environment(")
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 1 and "the file loads" in out and "SyntaxError" in out


def test_validate_says_once_what_several_checks_found(project: Path, captrain: Captrain) -> None:
    text = (project / "mine.py").read_text()
    (project / "mine.py").write_text(text + "\ndel Environment.broken\n")
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 1 and out.count("the file defines no broken(task)") == 1 and out.count("as above") >= 2


def test_validate_refuses_what_it_cannot_do_with_the_remedy(project: Path, captrain: Captrain) -> None:
    status, _, err = captrain("validate", "nothing.py")
    assert status == 2 and "nothing.py is missing" in err and "remedy" in err
    (project / "results/environments").mkdir(parents=True)
    shutil.copy(project / "mine.py", project / "results/environments/mine.py")
    status, _, err = captrain("validate", "results/environments/mine.py")
    assert status == 2 and "results/environments belongs to the pipeline" in err and "--out" in err
    status, _, err = captrain("validate", "mine.py", "--sandbox", "basic", "--calibrate")
    assert status == 2 and "artifacts/base is missing" in err and "without --calibrate" in err


def test_validate_writes_over_no_file_that_is_not_a_passport_of_its_own(project: Path, captrain: Captrain) -> None:
    for name in ("README.md", "mine.md", "mine.passport.md"):
        (project / name).write_text("mine")
    status, _, err = captrain("validate", "README.md", "--sandbox", "basic")
    assert status == 2 and err.startswith("error: README.md is not a Python file")
    (project / "notes.py").write_text("x = 1\n")
    assert captrain("validate", "notes.py", "--sandbox", "basic")[0] == 1
    assert captrain("validate", "notes.py", "--sandbox", "basic")[0] == 1  # over its own passport
    (project / "mine.py").write_text("x = 1\n")
    status, _, err = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 2 and "mine.passport.md exists" in err
    assert all((project / name).read_text() == "mine" for name in ("README.md", "mine.md", "mine.passport.md"))


@pytest.mark.needs("minutes")
def test_validate_plays_the_base_when_asked_to_and_says_what_that_cost(project: Path, captrain: Captrain) -> None:
    (project / "artifacts/base").mkdir(parents=True)
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic", "--calibrate")
    assert status == 0 and "spent on the base: 40 rollouts" in out and "mean reward of the base" in out
    passport = Passport.model_validate_json((project / "mine.passport.json").read_text())
    assert passport.calibration_tasks == 5 and len(passport.checks) == len(CHECKS) + 3
    assert "The base passes" in (project / "mine.passport.md").read_text()


def test_what_an_environment_says_is_no_markup_of_its_page(project: Path, captrain: Captrain) -> None:
    text = SOUND.replace('"""Careful', '"""<script> | **Careful**', 1)
    (project / "mine.py").write_text(
        text.replace("def broken(self, task):", "def broken(self, task):\n        raise ValueError('a|b <i>')")
    )
    captrain("validate", "mine.py", "--sandbox", "basic")
    page = (project / "mine.passport.md").read_text()
    assert "<script>" not in page and "a\\|b &lt;i&gt;" in page and "\\*\\*Careful" in page


def test_the_evidence_of_the_project_is_used_for_a_capability_of_the_file_s_name(
    project: Path, captrain: Captrain
) -> None:
    from captrain.records import publish

    capability = Capability(id="mine", name="Mine", description="", examples=["r"])
    publish(project / "results/capabilities/capabilities.jsonl", [capability])
    publish(project / "artifacts/rollouts/discovery.jsonl", [rollout([WRAP], [DENY])])
    status, out, _ = captrain("validate", "mine.py", "--sandbox", "basic")
    assert status == 1 and "failed at: deny_request 1" in out
