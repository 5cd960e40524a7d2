"""The passport: what an environment must prove before anything is trained in it.

Each check measures one thing, holds it against a bound, and on failure names the task that shows it. What raises, or
returns what is not of the contract, fails the check that met it, and the others still run. Checks that need no policy
run first; the spread of rewards is measured on the base, and its rollouts are counted as calibration.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from captrain.contract import CheckedEnvironment, calls_of
from captrain.environments import knowledge, probes
from captrain.environments.leakage import SHARE, runs, runs_of
from captrain.environments.sandbox.forkserver import MODULES
from captrain.environments.subject import (
    Evidence,
    Standard,
    at_least,
    at_most,
    finding,
    limit,
    mean_at_most,
    play_agent,
)
from captrain.errors import EnvironmentFault, UserError
from captrain.records import (
    CheckResult,
    JsonObject,
    Message,
    Passport,
    Rollout,
    Score,
    Task,
    digest,
    leaves,
    plain,
    read_bytes,
)
from captrain.run import EnvironmentSettings, Machine

ADVISED = 100
"""Tasks: on fewer, one that cannot be solved is easily missed."""
DISTINCT = 0.95
VALUES = 500
"""Values of a play that are told apart: a search for more takes as long as the environment likes."""
AUDITED = 16
"""Tasks of a training that are looked at."""
DRIFT = 0.25
"""A mean reward over these may lie so much above what the passport has measured over its own."""
REFERENCE, IDLE = "reward of the reference solution", "reward of doing nothing"
RANDOM = "reward of random calls"
TRANSFER = "share of tasks with the failed step"


def run_checks(
    target: CheckedEnvironment,
    path: Path,
    against: Standard,
    evidence: Sequence[Rollout],
    *,
    seed: int = 0,
    seconds: float | None = None,
    machine: Machine | None = None,
) -> list[CheckResult]:
    """The checks that need no policy, always all of them.

    Args:
        target: the environment, loaded.
        path: its file.
        against: what it is held against.
        evidence: failed rollouts that lack the capability; none where nothing is known.
        seed: of the run; with the file's bytes it decides what is drawn.
        seconds: that they may take together, after which those that are left fail; None: no limit.
        machine: see `Evidence`.
    """
    subject = Evidence(target, path, against, evidence, seed=seed, seconds=seconds, machine=machine)
    checks: list[CheckResult] = []
    limit(target, subject.end)
    try:
        for name, check in CHECKS.items():
            subject.task_id = ""
            try:
                checks.append(check(subject, name))
            except EnvironmentFault as fault:
                checks.append(failed_check(name, fault, subject.task_id))
            except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
                # What reads an answer here is ours, and any answer may have been made to break it.
                reason = f"what it answers cannot be examined ({type(error).__name__}: {plain(str(error))[:200]})"
                fault = EnvironmentFault(reason, "answer as the target does")
                checks.append(failed_check(name, fault, subject.task_id))
    finally:
        limit(target, None)
    return checks


def failed_check(name: str, fault: EnvironmentFault, task: str = "") -> CheckResult:
    """The check that met a fault."""
    return CheckResult(name=name, passed=False, measured=None, bound="no fault", detail=fault.problem, task=task)


def _exact(name: str, same: bool, detail: str = "", task: str = "") -> CheckResult:
    return finding(name, same, float(same), "1", detail, task)


def _schemas(subject: Evidence, name: str) -> CheckResult:
    schemas, expected = subject.target.tools, subject.against.tools
    if schemas == expected:
        return _exact(name, True)
    if not isinstance(schemas, list) or len(schemas) != len(expected):
        return _exact(name, False, f"the target has {len(expected)} tools")
    names = [tool["function"]["name"] for tool in expected]
    return _exact(
        name, False, f"differs: {next(n for n, a, b in zip(names, schemas, expected, strict=True) if a != b)}"
    )


def foreign_imports(tree: ast.AST) -> list[str]:
    """List the modules that a text imports and no confined process can."""
    available = {module.partition(".")[0] for module in MODULES}
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or ".")
    return sorted({module for module in modules if module.partition(".")[0] not in available})


def _imports(subject: Evidence, name: str) -> CheckResult:
    """Imports that cannot work where the file is confined fail."""
    try:
        absent = foreign_imports(ast.parse(read_bytes(subject.path).decode()))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The latter two of some thousand brackets.
        return _exact(name, False, f"not Python: {error or type(error).__name__}")
    return at_most(name, len(absent), 0, f"not there: {', '.join(absent)}")


def _count(subject: Evidence, name: str) -> CheckResult:
    count = len(subject.tasks)
    few = "" if count >= ADVISED else f"on fewer than {ADVISED} tasks, one that cannot be solved is easily missed"
    return CheckResult(name=name, passed=True, measured=float(count), bound=f"{ADVISED} advised", detail=few)


def _reference(subject: Evidence, name: str) -> CheckResult:
    scores = {task.id: subject.solution(task) for task in subject.all_tasks}
    worst = min(scores, key=lambda task: (scores[task].success, scores[task].reward))
    solved = scores[worst].success and scores[worst].reward >= 1 - 1e-9
    unsolved = sum(not score.success or score.reward < 1 - 1e-9 for score in scores.values())
    detail = f"not so on {unsolved} of {len(scores)} tasks"
    return finding(name, solved, scores[worst].reward, "1, and success, on every task", detail, worst)


def _idle(subject: Evidence, name: str) -> CheckResult:
    rewards = {task.id: subject.idle(task).reward for task in subject.tasks}
    return mean_at_most(name, rewards, subject.bounds.idle_reward, probes.MOST_PER_TASK)


def _same_play(subject: Evidence, name: str) -> CheckResult:
    """Asked for again in the same process, by other numbers: tasks, observations, rewards."""
    first, among_more = subject.first_tasks, subject.target.tasks("training", subject.reach)
    for task, task_again in zip(first, among_more, strict=False):
        if task != task_again:
            return _exact(name, False, f"another task where {subject.reach} are asked for", task.id)
    tasks_again = subject.drawn(subject.another_count("same play"))
    for task, task_again in zip(subject.tasks, tasks_again, strict=True):
        if task != task_again:
            return _exact(name, False, "another call gives other tasks", task.id)
    check = _played_again(subject, name, subject.tasks, subject.target)
    if check.passed and (size := subject.target.size("training")) != subject.size:
        return _exact(name, False, f"the training split has {subject.size} tasks, and asked again {size}")
    return check


def _same_elsewhere(subject: Evidence, name: str) -> CheckResult:
    """Tasks, observations and rewards of the reference in a fresh process, which has no packages."""
    subject.hurry()
    with subject.reopened() as fresh:
        fresh_tasks = subject.drawn(subject.another_count("elsewhere"), fresh)
        for task, fresh_task in zip(subject.tasks, fresh_tasks, strict=True):
            if task != fresh_task:
                return _exact(name, False, "another task", task.id)
        tasks = subject.random("order").sample(subject.tasks, len(subject.tasks))
        return _played_again(subject, name, tasks, fresh)


def _played_again(subject: Evidence, name: str, tasks: Sequence[Task], target: CheckedEnvironment) -> CheckResult:
    for task in tasks:
        if subject.play(task, subject.reference(task), target) != subject.solved(task):
            return _exact(name, False, "the same actions meet other observations", task.id)
        if subject.score(task, subject.solved(task), target) != subject.solution(task):
            return _exact(name, False, "the same messages earn another reward", task.id)
    return _exact(name, True)


def _distinct(subject: Evidence, name: str) -> CheckResult:
    counts = Counter(digest(task.data) for task in subject.tasks)
    twin = next((task.id for task in subject.tasks if counts[digest(task.data)] > 1), "")
    share = len(counts) / len(subject.tasks)
    return at_least(name, share, DISTINCT, "another task has the same data", twin)


def structure(messages: Sequence[Message]) -> str:
    """A play with every value replaced by the order in which it first appears: what is left when names and numbers
    are taken away. Values are what stands in arguments and tool results, numbers, and words like names."""
    lines: list[str] = []
    values: set[str] = set()
    for message in messages:
        calls = calls_of(message) if message["role"] == "assistant" else []
        values |= {leaf for _, arguments in calls for leaf in leaves(arguments)}
        values |= {*probes.results(message)} if message["role"] == "tool" else set()
        calls_text = "".join(
            f" {name}({', '.join(f'{k}={[*leaves(v)]}' for k, v in arguments.items())})" for name, arguments in calls
        )
        lines.append(f"{message['role']}: {message.get('content') or ''}{calls_text}")
    longest = sorted(sorted(value for value in values if value.strip()), key=len, reverse=True)[:VALUES]
    pattern_of_values = "|".join(re.escape(value) for value in longest)
    pattern = r"\d+(?:[.,:-]\d+)*|(?<=[a-z,;:] )[A-Z][a-z]+"
    places: dict[str, str] = {}
    return re.sub(
        rf"(?<!\w)(?:{pattern_of_values})(?!\w)|{pattern}" if pattern_of_values else pattern,
        lambda match: places.setdefault(match[0], f"<{len(places)}>"),
        "\n".join(lines),
    )


def _structures(subject: Evidence, name: str) -> CheckResult:
    """Check the variety of tasks; never for more than the target's own tasks have that call the same tools."""
    plays = [subject.solved(task) for task in subject.tasks]
    structures, bound = {digest(structure(play)) for play in plays}, subject.bounds.structures
    target = subject.against.target
    if len(structures) < bound and target is not None:
        tool_sets = [{tool for tool, _ in probes.made_calls(play)} for play in plays]
        own_structures = {
            digest(structure(play))
            for _, _, play in probes.solved_tasks(target, len(plays))
            if {tool for tool, _ in probes.made_calls(play)} in tool_sets
        }
        bound = min(bound, len(own_structures) or bound)
    detail = f"{len(plays)} tasks differ in names and numbers only: vary them, or set environments.structures="
    detail += f"{len(structures)}"
    return at_least(name, len(structures), bound, detail, subject.tasks[-1].id)


def _test_ids(subject: Evidence, name: str) -> CheckResult:
    tests = subject.against.tests
    if test_id := tests.quoted_id(subject.text):
        return at_most(name, 1, 0, f"the file names {test_id}")
    for task in subject.all_tasks:
        inside = tests.quoted_id(" ".join(leaves(task.data)))
        if task.id in tests.ids or inside:
            return at_most(name, 1, 0, f"names {inside or task.id}", task.id)
    return at_most(name, 0, 0)


def _test_texts(subject: Evidence, name: str) -> CheckResult:
    tests = subject.against.tests
    places = {"": runs(subject.text)}
    places |= {task.id: runs_of(task, subject.solved(task)) for task in subject.all_tasks}
    share, test, place = max((*tests.nearest(place_runs), place) for place, place_runs in places.items())
    detail = f"{'this task has' if place else 'the file has'} the words of {test}"
    return finding(name, share < SHARE, share, f"less than {SHARE}", detail, place)


def failed_tool(rollout: Rollout) -> str | None:
    """The tool at which a failed rollout went wrong: of the first call of the reference that was not made so, else of
    the first call that is not the reference's; where no reference is known, of the last call."""
    calls = probes.made_calls(rollout.messages)
    if not rollout.reference:
        return calls[-1][0] if calls else None
    for call in probes.made_calls(rollout.reference):
        if call not in calls:
            return call[0]
        calls.remove(call)
    return calls[0][0] if calls else None


def _transfer(subject: Evidence, name: str) -> CheckResult:
    """Predicted transfer: how often the environment asks for the step that failed in the evidence."""
    failed = Counter(tool for rollout in subject.evidence if (tool := failed_tool(rollout)))
    bound = f"at least {subject.bounds.transfer}"
    if not failed:
        return CheckResult(name=name, passed=True, measured=None, bound=bound, detail="no evidence names a step")
    tool_counts: Counter[str] = Counter()
    for task in subject.tasks:
        tool_counts.update({tool for tool, _ in probes.made_calls(subject.reference(task))} & {*failed})
    share = sum(count * tool_counts[tool] for tool, count in failed.items()) / (failed.total() * len(subject.tasks))
    steps = ", ".join(f"{tool} {count}" for tool, count in failed.most_common())
    passed = share >= subject.bounds.transfer - 1e-9
    return CheckResult(name=name, passed=passed, measured=round(share, 6), bound=bound, detail=f"failed at: {steps}")


CHECKS: dict[str, Callable[[Evidence, str], CheckResult]] = {
    "schemas equal the target's": _schemas,
    "imports that the sandbox lacks": _imports,
    "tasks checked": _count,
    REFERENCE: _reference,
    IDLE: _idle,
    RANDOM: probes.random_calls,
    "same play, same observations": _same_play,
    "same seed, same task in a fresh process": _same_elsewhere,
    "share of distinct tasks": _distinct,
    "structures among the tasks": _structures,
    "ids of test tasks": _test_ids,
    "share of a test task's words": _test_texts,
    "reward of copying what is shown": probes.copying,
    "calls given away": probes.given_away,
    "reward of claiming success": probes.claiming,
    "reward of every tool once": probes.every_tool,
    "gain of a repeated call": probes.repeating,
    "steps that the broken solution changes": probes.broken_near,
    "reward of the broken solution": probes.broken_costs,
    "spread of rewards": probes.spread,
    "reward of words alone": probes.words_alone,
    "reward of going on": probes.going_on,
    "gain of calls that fit no schema": probes.flawed_calls,
    "reward of many calls at once": probes.many_at_once,
    "tasks that other words fail": probes.other_words,
    "tasks that nothing afterwards spoils": probes.afterwards,
    "tasks with a success that is none": probes.false_success,
    "tasks with a value that nobody can know": knowledge.unknowable,
    "tasks that need no look-up": knowledge.given_before,
    "tasks that the policy forbids": knowledge.forbidden,
    TRANSFER: _transfer,
}
"""Every check that needs no policy, by name."""
BASE_REWARD, BASE_PASSES = "mean reward of the base", "pass rate of the base"
BASE_CONSTANT = "share of constant-reward groups on the base"
BOUNDS = {
    IDLE: "idle_reward",
    RANDOM: "random_reward",
    "structures among the tasks": "structures",
    "reward of copying what is shown": "hacking_reward",
    "reward of claiming success": "hacking_reward",
    "reward of every tool once": "hacking_reward",
    "reward of the broken solution": "broken_reward",
    "reward of words alone": "hacking_reward",
    "reward of going on": "hacking_reward",
    "reward of many calls at once": "hacking_reward",
    TRANSFER: "transfer",
    BASE_REWARD: "mean_reward",
    BASE_PASSES: "success",
    BASE_CONSTANT: "constant_groups",
}
"""Settings of the section `environments` that hold a check's bound."""


def widening(passports: Iterable[Passport]) -> str:
    """Name the settings by which checks that failed would pass, as a remedy; "" where none would help."""
    failed = [check.name for passport in passports for check in passport.checks if not check.passed]
    keys = dict.fromkeys(f"environments.{BOUNDS[name]}" for name in failed if name in BOUNDS)
    return f"widen {', '.join(keys)} if what failed is right, or " if keys else ""


def calibrate(rollouts: Sequence[Rollout], group_size: int, bounds: EnvironmentSettings) -> list[CheckResult]:
    """The spread of rewards on the base: rollouts of equal task lie together, `group_size` each."""
    if errors := [rollout for rollout in rollouts if rollout.score is None]:
        detail = f"{len(errors)} rollouts ended in an infrastructure error"
        return [finding("rollouts without error", False, len(rollouts) - len(errors), "all", detail, errors[0].task.id)]
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    groups: JsonObject = {
        rollouts[start].task.id: scores[start : start + group_size] for start in range(0, len(scores), group_size)
    }
    rewards = {task: sum(score.reward for score in group) / len(group) for task, group in groups.items()}
    success = {task: sum(score.success for score in group) / len(group) for task, group in groups.items()}
    constant = {
        task: float(max(score.reward for score in group) - min(score.reward for score in group) <= 1e-6)
        for task, group in groups.items()
    }
    checks: list[CheckResult] = []
    for name, values, (low, high) in (
        (BASE_REWARD, rewards, bounds.mean_reward),
        (BASE_PASSES, success, bounds.success),
        (BASE_CONSTANT, constant, (0.0, bounds.constant_groups)),
    ):
        # The mean over groups; on failure the group that is furthest out.
        mean = sum(values.values()) / len(values)
        furthest = (min if mean < low else max)(values, key=values.__getitem__)
        checks.append(finding(name, low <= mean <= high, mean, f"{low} to {high}", "", furthest))
    return checks


def audit(target: CheckedEnvironment, passport: Passport, tasks: Sequence[Task], seed: int) -> None:
    """Hold tasks of a training against the environment's passport; what this measured none of is not asked.

    A passport looks at tasks that a key has drawn, and a file may still behave otherwise on those that training asks
    for: where so many are asked for, from such a place on. So the tasks of the training itself, as it has got them, are
    held against what the passport says: references earn everything there, and doing nothing or anything at random no
    more than it did.

    Args:
        target: the environment, as it is trained in.
        passport: its passport.
        tasks: those of the training.
        seed: of the run; with passport and tasks it decides which are looked at.

    Raises:
        UserError: they deviate: nothing is trained on them.
        EnvironmentFault: the environment broke its contract.
    """
    measured = {check.name: check.measured for check in passport.checks if check.measured is not None}
    key = digest("audit", passport.environment, seed, [task.id for task in tasks])
    sample = random.Random(key).sample(list(tasks), min(AUDITED, len(tasks)))
    if deviation := next(_deviations(target, measured, sample, key), ""):
        raise UserError(
            f"environment {target.name} is another one on the tasks of this training than on those of its passport: "
            f"{deviation}",
            f"do not train in it: read {target.source}, remove it with its passport, and run `dvc repro environments`",
        )


def _deviations(
    target: CheckedEnvironment, measured: dict[str, float], sample: Sequence[Task], key: str
) -> Iterator[str]:
    def at_random(task: Task) -> Score:
        agent = probes.random_agent(target.tools, random.Random(f"{key}/{task.id}"))
        return target.score(task, play_agent(target, task, agent))

    for task in sample if REFERENCE in measured else ():
        score = target.score(task, target.play(task, target.reference(task)))
        if score.reward < 1 - 1e-9 or not score.success:
            yield f"the reference of {task.id} earns {score.reward:g}, and the passport has 1"
    for name, score_of in {IDLE: target.floor, RANDOM: at_random}.items():
        if sample and name in measured:
            mean = sum(score_of(task).reward for task in sample) / len(sample)
            if mean > measured[name] + DRIFT:
                yield f"{name} is {mean:.2f} on {len(sample)} of them, and the passport has {measured[name]:.2f}"
