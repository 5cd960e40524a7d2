"""Synthesized environments: templates, and passports of bad ones."""

import ast
import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.needs import further

from captrain.agents.scripted import ScriptedPolicy, by_the_book
from captrain.benchmarks.loading import load_benchmark
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file, tool_call
from captrain.environments.checks import CHECKS, TRANSFER
from captrain.environments.evidence import make_standard
from captrain.environments.loading import load_environment, read_passports
from captrain.environments.passport import calibrate, run_checks, widening
from captrain.environments.publication import publish_environments
from captrain.environments.synthesis import LOADS, SynthesisResult, make_brief, shortfall, synthesize
from captrain.environments.synthesizer import Attempt, Brief
from captrain.environments.templates import ANY_OPERATION, DEFICITS, EASIEST, TemplateSynthesizer
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Capability, CheckResult, Message, Passport, Rollout, Score, Task, digest
from captrain.records import load as load_records
from captrain.run import compose_spec

SMOKE = compose_spec("smoke", 0, [], Path(__file__).parents[2] / "conf")
BENCHMARK = load_benchmark(SMOKE.benchmark)
STRICT = compose_spec("default", 0, ["environments.seeds=7"], Path(__file__).parents[2] / "conf").environments
AGAINST = make_standard(BENCHMARK, SMOKE.evaluation.tasks, STRICT)
CONFINED = SMOKE.machine.model_copy(update={"sandbox": "basic"})
WRITES = {"cancel_order", "return_order", "wrap_order", "update_zip", "deny_request"}


def capability(name: str) -> Capability:
    return Capability(id=name, name=name.replace("_", " ").capitalize(), description="What it takes.")


def wanted(name: str) -> Brief:
    return Brief(capability(name), BENCHMARK.tools)


def text_of(name: str, attempt: int | str = 0) -> str:
    """Write the template after some attempts, or after one that lacked the named step."""
    missing = isinstance(attempt, str)
    found = CheckResult(name=TRANSFER, passed=not missing, measured=0.0, bound="at least 0.1")
    passport = Passport(
        capability=name, environment="", attempt=0, passed=False, trusted=True, calibration_tasks=0, checks=[found]
    )
    asked = replace(wanted(name), examples=[failing(attempt)]) if missing else wanted(name)
    return TemplateSynthesizer().synthesize(asked, [Attempt("", passport)] * (1 if missing else attempt))


def failing(tool: str) -> Rollout:
    """A rollout that failed at a call of the tool."""
    task = Task(id="t", split="discovery", data={})
    return Rollout(
        id="f", environment="e", task=task, trial=0, purpose="diagnosis", policy="p", outcome="failed",
        messages=[{"role": "user", "content": "x"}], score=Score(reward=0, success=False),
        reference=[tool_call(tool, {})],
    )  # fmt: skip


def written(folder: Path, name: str, attempt: int | str = 0, change: str = "") -> tuple[CheckedEnvironment, Path]:
    """A template's environment with changed lines."""
    path = folder / f"{name}_{attempt}.py"
    path.write_text(text_of(name, attempt) + mutation(change))
    return load_file(path), path


def mutation(change: str) -> str:
    if not change:
        return ""
    body = "".join(f"    {line}\n" for line in change.strip().splitlines())
    return f"\n\nSound = Environment\n\n\nclass Environment(Sound):\n{body}"


def call(name: str, *values: str) -> Message:
    [required] = [
        tool["function"]["parameters"]["required"] for tool in BENCHMARK.tools if tool["function"]["name"] == name
    ]
    return tool_call(name, dict(zip(required, values, strict=True)))


def name_of(message: Message) -> str:
    return message["tool_calls"][0]["function"]["name"] if message.get("tool_calls") else ""


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def played(target: CheckedEnvironment, task: Task, actions: Sequence[Message]) -> Score:
    return target.score(task, target.play(task, actions))


EVERY = [(name, attempt) for name in DEFICITS for attempt in range(EASIEST + 1)]
EVERY += [(name, tool) for name in ANY_OPERATION for tool in ("update_zip", "get_order")]


@pytest.mark.parametrize("name", DEFICITS)
def test_a_written_file_stands_alone_without_any_installed_package(tmp_path: Path, name: str) -> None:
    target, path = written(tmp_path, name)
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(str(node.module))])
    }
    assert imported <= sys.stdlib_module_names
    code = (
        "import importlib.util, json, runpy, sys\n"
        "assert importlib.util.find_spec('captrain') is None\n"
        "environment = runpy.run_path(sys.argv[1])['Environment']()\n"
        "tasks = environment.tasks('training', 5)\n"
        "print(json.dumps([[task, environment.score(task, environment.reference(task))] for task in tasks]))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for there, task in zip(json.loads(done.stdout), target.tasks("training", 5), strict=True):
        assert there == [task.model_dump(), played(target, task, target.reference(task)).model_dump()]


@pytest.mark.parametrize("name", DEFICITS)
def test_a_written_file_says_what_it_is_for_and_other_attempts_have_other_tasks(tmp_path: Path, name: str) -> None:
    targets = [written(tmp_path, name, attempt)[0] for attempt in range(EASIEST + 1)]
    assert text_of(name).startswith(f'"""{capability(name).name}: What it takes.')
    tasks = [digest([task.data for task in target.tasks("training", 10)]) for target in targets]
    assert len(set(tasks)) == len({target.fingerprint for target in targets}) == EASIEST + 1
    splits = [digest([t.data for t in targets[0].tasks(split, 10)]) for split in ("training", "discovery", "test")]
    assert len(set(splits)) == 3


def test_the_files_of_the_results_are_what_the_templates_write_to_the_byte(committed: Path) -> None:
    """Templates of other capabilities and of pairs do not change the committed files."""
    results = committed / "results"
    known = {one.id: one for one in load_records(results / "capabilities/capabilities.jsonl", Capability)}
    earned = read_passports(results / "environments")
    assert earned and {*earned} <= {*DEFICITS}
    for name, passport in earned.items():
        attempts = [Attempt("", passport)] * passport.attempt
        text = TemplateSynthesizer().synthesize(Brief(known[name], BENCHMARK.tools), attempts)
        assert text == (results / f"environments/{name}.py").read_text()
        assert "class Pair" not in text and "any_named" not in text


def tampered(target: CheckedEnvironment, task: Task, change: str) -> list[Message]:
    """The reference with its writes made twice, or with an extra write before the closing words."""
    reference = target.reference(task)
    if change == "duplicate":
        return [m for message in reference for m in [message] * (2 if name_of(message) in WRITES else 1)]
    treated = [operation["order"] for operation in task.data["operations"]]
    others = [order["id"] for order in task.data["orders"] if order["id"] not in treated]
    stray = call("wrap_order", others[0]) if others else call("cancel_order", treated[0])
    return [*reference[:-1], stray, reference[-1]]


@pytest.mark.parametrize("change", ["duplicate", "extra"])
@pytest.mark.parametrize(("name", "attempt"), EVERY)
def test_a_duplicate_or_an_extra_write_costs_success_and_reward(
    tmp_path: Path, name: str, attempt: int | str, change: str
) -> None:
    target, _ = written(tmp_path, name, attempt)
    for task in target.tasks("training", 30):
        score = played(target, task, tampered(target, task, change))
        assert not score.success and score.reward < 0.5 and score.parts["skill"] < 1.0


@pytest.mark.parametrize(("name", "attempt"), EVERY)
def test_skill_without_success_earns_at_most_half(tmp_path: Path, name: str, attempt: int | str) -> None:
    target, _ = written(tmp_path, name, attempt)
    rng = random.Random(0)
    for task in target.tasks("training", 30):
        reference = target.reference(task)
        handed_over = [*reference[:-1], call("transfer_to_human")]
        unclosed = reference[:-1]
        mixed = rng.sample(reference[:-1], len(reference) - 2) + [reference[-1]]
        for actions in (handed_over, unclosed, mixed):
            score = played(target, task, actions)
            assert score.success or score.reward <= 0.5
        assert played(target, task, handed_over).parts["skill"] == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "attempt"), EVERY)
def test_a_write_beyond_those_asked_for_never_pays(tmp_path: Path, name: str, attempt: int | str) -> None:
    """The rules of the other capabilities stay binding in every environment."""
    target, _ = written(tmp_path, name, attempt)
    rng = random.Random(1)
    for task in target.tasks("training", 40):
        ids = [order["id"] for order in task.data["orders"]]
        reference = target.reference(task)
        asked = [message for message in reference if name_of(message) in WRITES]
        strays = [call(tool, rng.choice(ids)) for tool in ("wrap_order", "cancel_order", "deny_request")]
        strays += [call("update_zip", rng.choice(ids), "1234")]
        for _ in range(4):
            done = rng.choices([*asked, *strays], k=len(asked))
            more = rng.choice([one for one in [*asked, *strays] if one not in asked or one in done])
            less_said, more_said = [*done, say("Done.")], [*done, more, say("Done.")]
            assert played(target, task, more_said).reward <= played(target, task, less_said).reward + 1e-9


def test_a_lucky_unchecked_write_earns_less_than_a_checked_one_and_an_unlucky_one_nearly_nothing(
    tmp_path: Path,
) -> None:
    target, _ = written(tmp_path, "missing_lookup")
    outcomes = set()
    for task in target.tasks("training", 60):
        operation = task.data["operations"][0]
        write = call({"cancel": "cancel_order", "return": "return_order"}[operation["verb"]], operation["order"])
        score = played(target, task, [write, say("Done.")])
        outcomes.add(score.success)
        assert score.reward <= (0.9 if score.success else 0.05) + 1e-9
    assert outcomes == {True, False}


def test_writing_to_every_record_does_not_find_the_right_one(tmp_path: Path) -> None:
    for name in ("wrong_record", "wrong_argument"):
        target, _ = written(tmp_path, name)
        for task in target.tasks("training", 20):
            writes = [call("wrap_order", order["id"]) for order in task.data["orders"]]
            assert played(target, task, [*writes, say("Done.")]).reward < 0.5


@pytest.mark.parametrize("name", further(ANY_OPERATION))
def test_steps_that_failed_and_that_a_template_lacks_are_asked_for_in_its_next_attempt(
    elsewhere: Path, name: str
) -> None:
    asked = replace(wanted(name), examples=[failing("update_zip"), failing("get_order"), failing("get_order")])
    one = synthesize(asked, TemplateSynthesizer(), None, AGAINST, CONFINED, 0)
    first, second = one.attempts
    assert first.text == text_of(name) and first.passport.complaints().startswith(f"{TRANSFER} is 0.0")
    assert one.passed and second.passport.passed
    assert 'OPERATIONS = ["zip", "cancel", "return"]' in second.text.replace("'", '"')
    target = load_file(elsewhere / f".cache/environments/{name}/1/{name}.py")
    tasks = target.tasks("training", 300)
    verbs = Counter(operation["verb"] for task in tasks for operation in task.data["operations"])
    assert {*verbs} == {"wrap", "zip", "cancel", "return"} and 0.4 < verbs["wrap"] / verbs.total() < 0.6
    # The desk's rules stay binding: most requests must be denied, as on the target.
    written = [name_of(message) for task in tasks for message in target.reference(task)]
    assert written.count("deny_request") > 2 * (written.count("cancel_order") + written.count("return_order"))


def test_where_no_operation_can_bring_the_missing_step_the_next_attempt_is_an_easier_one() -> None:
    for name in DEFICITS:
        if name not in ANY_OPERATION:
            assert text_of(name, "wrap_order") == text_of(name, 1)
    assert text_of("wrong_record", "transfer_to_human") == text_of("wrong_record", 1)


# Faults that only a second process shows: (change to a sound environment, failed checks, detail of the second
# process's check).
ELSEWHERE = "same seed, same task in a fresh process"
BAD = {
    "no seed": (
        """
def make(self, split, index):
    return make_data(random.Random(), self.name, **self.requests(random))
""",
        {ELSEWHERE, "same play, same observations"},
        "another task",
    ),
    "a seed that differs between processes": (
        """
def make(self, split, index):
    return super().make(split, hash((split, str(index))))
""",
        {ELSEWHERE},
        "another task",
    ),
    "a score that differs between processes": (
        """
def score(self, task, messages):
    score = super().score(task, messages)
    return {**score, "parts": {**score["parts"], "luck": float(hash(task["id"]) % 1000)}}
""",
        {ELSEWHERE},
        "the same messages earn another reward",
    ),
    "it leans on a package": ("import pydantic", {ELSEWHERE, "imports that the sandbox lacks"}, "pydantic"),
    "it leans on captrain": (
        "from captrain.records import digest",
        {ELSEWHERE, "imports that the sandbox lacks"},
        "captrain",
    ),
    "it falls silent in a fresh process": (
        """
import sys
def tasks(self, split, count):
    return super().tasks(split, count if "pytest" in self.sys.modules else 0)
""",
        {ELSEWHERE},
        "0 tasks",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_only_a_second_process_shows_is_found_by_it(tmp_path: Path, fault: str) -> None:
    change, names, said = BAD[fault]
    target, path = written(tmp_path, "wrong_record", change=change)
    failed = {check.name: check for check in run_checks(target, path, AGAINST, ()) if not check.passed}
    assert {*failed} == names and said in failed[ELSEWHERE].detail


@pytest.mark.parametrize("method", ["tasks", "open", "score", "reference"])
def test_an_environment_that_raises_is_named_with_the_task(tmp_path: Path, method: str) -> None:
    arguments = {"tasks": "split, count", "score": "task, messages"}.get(method, "task")
    change = f"def {method}(self, {arguments}):\n    return {{}}['gone']"
    target, path = written(tmp_path, "wrong_record", change=change)
    checks = {check.name: check for check in run_checks(target, path, AGAINST, ())}
    check = checks["reward of the reference solution"]
    where = "split training" if method == "tasks" else "wrong_record/training/00000"
    assert check.detail == f"environment wrong_record ({path}) raised KeyError: 'gone' in {method} on {where}"
    assert not check.passed and check.task == ("" if method == "tasks" else where)
    assert len(checks) == len(CHECKS) and checks["schemas equal the target's"].passed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Environment:\n    def broken(", "does not load: SyntaxError"),
        ("import nowhere_at_all", "does not load: ModuleNotFoundError"),
        ("x = 1", "does not load: AttributeError"),
        ("class Environment:\n    def __init__(self, seed): ...", "does not load: TypeError"),
        ("class Environment:\n    name, tools = 'x', []", "lacks tasks, open, score, reference"),
    ],
)
def test_a_file_that_is_no_environment_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(text)
    with pytest.raises(EnvironmentFault, match=said) as fault:
        load_file(path)
    assert str(path) in fault.value.problem
    with pytest.raises(UserError, match="missing"):
        load_file(tmp_path / "none.py")


def test_a_capability_without_a_template_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="no template trains the capability small_talk") as refusal:
        text_of("small_talk")
    assert all(family in refusal.value.remedy for family in DEFICITS)


# On the base: the spread of rewards, rounds, and what they cost.


class Drafts:
    """A synthesizer with a fixed text for each attempt, which records the complaints about earlier ones."""

    def __init__(self, *texts: str, trusted: bool = True) -> None:
        self.texts, self.trusted = texts, trusted
        self.told: list[list[str]] = []

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        self.told.append([attempt.passport.complaints() for attempt in attempts])
        return self.texts[min(len(attempts), len(self.texts) - 1)]


GOOD = text_of("wrong_record")
ALL_OR_NOTHING = GOOD + mutation(
    """
def score(self, task, messages):
    score = super().score(task, messages)
    return {**score, "reward": float(score["success"])}
"""
)
UNFAITHFUL = GOOD + mutation("tools = TOOLS[1:]")


def without_closing(play: RunningEpisode) -> list[Message]:
    return by_the_book(play)[:-1]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Drafts and journals are in the working folder. Trusted drafts run outside of the sandbox, which is faster."""
    monkeypatch.setattr("captrain.environments.synthesis.is_own_text", lambda _text: True)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def made(drafts: Drafts, policy: ScriptedPolicy, name: str = "wrong_record", **bounds: Any) -> SynthesisResult:
    chosen = STRICT.model_copy(update={"groups": 6, "group_size": 5, **bounds})
    against = replace(AGAINST, bounds=chosen)
    return synthesize(wanted(name), drafts, policy, against, CONFINED, 0)


def measured(one: SynthesisResult) -> dict[str, float | None]:
    return {check.name: check.measured for check in one.best.passport.checks}


def test_a_sound_environment_earns_its_passport_and_its_cost_is_counted(elsewhere: Path) -> None:
    one = made(Drafts(GOOD), ScriptedPolicy(skill=0.5))
    assert one.passed and one.best.text == GOOD and one.best.passport.attempt == 0 and one.best.passport.trusted
    assert len(one.best.passport.checks) == len(CHECKS) + 3 and one.best.passport.complaints() == ""
    assert {(r.purpose, r.task.split) for r in one.rollouts} == {("calibration", "training")}
    assert [(entry.purpose, entry.method, entry.item, entry.rollouts) for entry in one.ledger] == [
        ("calibration", "trace", "wrong_record", 30)
    ]
    assert len({rollout.task.id for rollout in one.rollouts}) == one.best.passport.calibration_tasks == 6
    rewards = [rollout.score.reward for rollout in one.rollouts if rollout.score]
    assert measured(one)["mean reward of the base"] == pytest.approx(sum(rewards) / 30, abs=1e-6)
    passed = sum(rollout.outcome == "passed" for rollout in one.rollouts)
    assert measured(one)["pass rate of the base"] == pytest.approx(passed / 30, abs=1e-6)


def test_a_later_attempt_may_pass_and_every_calibration_rollout_of_all_counts(elsewhere: Path) -> None:
    drafts = Drafts(ALL_OR_NOTHING, UNFAITHFUL, GOOD)
    policy = ScriptedPolicy(script=without_closing, skill=0.5)
    one = made(drafts, policy, success=(0.0, 0.5))
    assert (one.passed, one.best.text, one.best.passport.attempt) == (True, GOOD, 2)
    assert [len(told) for told in drafts.told] == [0, 1, 2]
    assert drafts.told[2][1].startswith("schemas equal the target's is 0.0, asked is 1 (the target has 8 tools")
    # The second attempt failed before it reached the base, so it cost nothing.
    assert [entry.rollouts for entry in one.ledger] == [30, 30] and len(one.rollouts) == 30
    for number, attempt in enumerate(one.attempts):
        draft = elsewhere / f".cache/environments/wrong_record/{number}/wrong_record.py"
        assert draft.read_text() == attempt.text
        assert Passport.model_validate_json(draft.with_suffix(".passport.json").read_text()) == attempt.passport


def test_an_attempt_that_does_not_load_or_raises_is_one_that_failed_and_not_the_end(elsewhere: Path) -> None:
    raising = GOOD + mutation("def open(self, task):\n    return {}['gone']")
    for trusted in (True, False):
        drafts = Drafts("class Environment(", raising, GOOD, trusted=trusted)
        one = made(drafts, ScriptedPolicy(skill=0.5))
        assert one.passed and one.best.passport.attempt == 2 and one.best.passport.trusted is trusted
        assert drafts.told[1][0].startswith(f"{LOADS} is None") and "SyntaxError" in drafts.told[1][0]
        assert "KeyError: 'gone'" in drafts.told[2][1]
        assert [len(attempt.passport.checks) for attempt in one.attempts[:2]] == [1, len(CHECKS)]


def test_a_fault_that_the_base_meets_fails_the_attempt_and_counts_in_full(elsewhere: Path) -> None:
    late = GOOD + mutation(
        """
def step_of(self, episode, step):
    def guarded(message):
        if not message["content"] and not message.get("tool_calls") and episode.turns == 1:
            raise ValueError("too late")
        return step(message)
    return guarded

def open(self, task):
    episode = super().open(task)
    episode.step = self.step_of(episode, episode.step)
    return episode
"""
    )

    def silent_second(play: RunningEpisode) -> list[Message]:
        return [by_the_book(play)[0], {"role": "assistant", "content": ""}]

    one = made(Drafts(late), ScriptedPolicy(script=silent_second), rounds=1)
    assert not one.passed and [entry.rollouts for entry in one.ledger] == [30] and one.rollouts == []
    assert "ValueError: too late" in one.best.passport.complaints()


def test_the_best_attempt_is_kept_of_those_that_failed_all(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = GOOD + mutation(
        """
def score(self, task, messages):
    score = super().score(task, messages)
    return {**score, "reward": 1.0}
"""
    )
    drafts = Drafts(idle, ALL_OR_NOTHING, UNFAITHFUL)
    bounds: dict[str, Any] = {"success": (0.0, 1.0), "mean_reward": (0.0, 1.0)}
    one = made(drafts, ScriptedPolicy(script=without_closing), **bounds)
    # The second reached the base, and failed only the spread of rewards.
    assert (one.passed, one.best.text, one.best.passport.attempt) == (False, ALL_OR_NOTHING, 1)
    assert one.best.passport.complaints() == "share of constant-reward groups on the base is 1.0, asked is 0.0 to 0.6"
    assert [len(attempt.passport.checks) > len(CHECKS) for attempt in one.attempts] == [False, True, False]
    assert capsys.readouterr().out.count("environment for wrong_record, attempt") == 3


@pytest.mark.parametrize(
    ("measured", "bound", "far"),
    [(0.7, "at most 0.2", 0.5), (3.0, "at least 5", 0.4), (0.0, "0.1 to 0.8", 0.1), (None, "no fault", 1.0)],
)
def test_of_equally_many_checks_the_nearer_miss_is_the_better_attempt(
    measured: float | None, bound: str, far: float
) -> None:
    miss = CheckResult(name="c", passed=False, measured=measured, bound=bound)
    assert shortfall([miss, miss]) == (0, pytest.approx(2 * far))


def test_of_attempts_that_passed_as_many_checks_the_one_nearest_to_its_bounds_is_kept(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [[CheckResult(name="c", passed=False, measured=far, bound="at most 0.2")] for far in (0.9, 0.3, 0.5)]
    monkeypatch.setattr("captrain.environments.synthesis.run_checks", lambda *_, **__: findings.pop(0))
    one = made(Drafts(GOOD), ScriptedPolicy())
    assert [attempt.passport.checks[0].measured for attempt in one.attempts] == [0.9, 0.3, 0.5]
    assert one.best is one.attempts[1]


def test_a_capability_without_an_environment_is_left_out_with_its_findings_and_the_others_go_on(
    elsewhere: Path,
) -> None:
    good = made(Drafts(GOOD), ScriptedPolicy(skill=0.5))
    bad = made(Drafts(UNFAITHFUL, GOOD.replace("class", "clas")), ScriptedPolicy(skill=0.5), "wrong_argument")
    results, artifacts = elsewhere / "results", elsewhere / "artifacts"
    publish_environments([bad, good], results, artifacts)
    assert [*read_passports(results)] == ["wrong_record"]
    assert load_environment(results, good.best.passport, SMOKE.machine).name == "wrong_record"
    assert (results / "rejected/wrong_argument.py").read_text() == UNFAITHFUL
    findings = json.loads((results / "rejected/wrong_argument.findings.json").read_text())
    assert [one["attempt"] for one in findings] == [0, 1, 2]
    page = (results / "rejected/wrong_argument.md").read_text()
    assert page.startswith(f"# wrong_argument: 1 of {len(CHECKS)} checks failed\n")
    assert "the target has 8 tools" in page and page.count("- attempt ") == 2 and "SyntaxError" in page
    assert "The base passes" in (results / "wrong_record.md").read_text()
    assert len((artifacts / "calibration.jsonl").read_text().splitlines()) == 30
    with pytest.raises(UserError, match="no environment earned its passport") as refusal:
        publish_environments([bad], results, artifacts)
    assert "wrong_argument: schemas equal" in refusal.value.problem and "rejected" in refusal.value.remedy
    assert "synthesizer.name=" in refusal.value.remedy
    paid = bad.best.passport.model_copy(
        update={
            "checks": [
                CheckResult(name="reward of plays that know nothing", passed=False, measured=1, bound="at most 0.3")
            ]
        }
    )
    assert widening([paid]).startswith("widen environments.hacking_reward ")


def test_a_brief_shows_the_failures_that_the_capability_was_found_in_and_the_shortest_that_passed() -> None:
    def one(name: str, outcome: Any, length: int, split: Any = "discovery") -> Rollout:
        task = Task(id=f"t{name}", split=split, data={})
        return Rollout(
            id=name, environment="e", task=task, trial=0, purpose="diagnosis", policy="p", outcome=outcome,
            messages=[{"role": "user", "content": "x"}] * length, score=Score(reward=0, success=outcome == "passed"),
        )  # fmt: skip

    rollouts = [one(f"p{length}", "passed", length) for length in (5, 2, 4, 3)] + [one("f1", "failed", 1)]
    rollouts.append(one("f2", "failed", 1))
    lacking = capability("wrong_record").model_copy(update={"examples": ["f2", "gone"]})
    shown = make_brief(lacking, BENCHMARK.tools, rollouts)
    assert [rollout.id for rollout in shown.examples] == ["f2", "p2", "p3", "p4"]
    with pytest.raises(UserError, match="of the test split"):
        make_brief(lacking, BENCHMARK.tools, [one("t", "failed", 1, "test")])


@pytest.mark.parametrize(
    ("skill", "complaint"),
    [
        (1.0, "mean reward of the base is 1.0, asked is 0.1 to 0.8; pass rate of the base is 1.0"),
        (0.0, "mean reward of the base is 0.05, asked is 0.1 to 0.8; pass rate of the base is 0.0"),
    ],
)
def test_an_environment_too_easy_or_too_hard_for_the_base_is_refused(
    elsewhere: Path, skill: float, complaint: str
) -> None:
    one = made(Drafts(GOOD), ScriptedPolicy(skill=skill), rounds=1)
    assert not one.passed and complaint in one.best.passport.complaints()
    assert "share of constant-reward groups on the base is 1.0" in one.best.passport.complaints()


def rollout(reward: float | None, group: int = 0) -> Rollout:
    score = None if reward is None else Score(reward=reward, success=reward == 1.0)
    task = Task(id=f"t{group}", split="training", data={})
    return Rollout(
        id="r", environment="e", task=task, trial=0, purpose="calibration", policy="p", messages=[],
        score=score, outcome="error" if score is None else "passed" if score.success else "failed",
    )  # fmt: skip


def test_spread_is_measured_within_groups() -> None:
    rewards = [0.0, 0.0, 0.5, 0.5, 1.0, 0.0, 1.0, 0.2]
    checks = calibrate([rollout(reward, at // 2) for at, reward in enumerate(rewards)], 2, STRICT)
    assert [check.measured for check in checks] == [0.4, 0.25, 0.5]


def test_an_error_among_calibration_rollouts_is_no_low_reward() -> None:
    [check] = calibrate([rollout(0.5), rollout(None)], 2, STRICT)
    assert not check.passed and check.detail == "1 rollout ended in an infrastructure error"
