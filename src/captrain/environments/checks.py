"""The checks of a passport (an environment's examination) that need no policy, listed in `CHECKS`.

Each check measures one number and compares it with a bound. If it fails, its result names a task that shows why.
"""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from os.path import commonprefix
from statistics import pstdev

from captrain.contract import CheckedEnvironment, calls_of, tool_call
from captrain.environments.adversary import Adversary, Exploit, by_chance
from captrain.environments.evidence import Evidence, once
from captrain.environments.leakage import SHARE, runs, runs_of
from captrain.environments.leaks import leaks
from captrain.environments.learner import Learner
from captrain.environments.majority import play_same_answer
from captrain.environments.probes import (
    ENDLESS,
    FLAWS,
    LUCKY,
    act_randomly,
    calling,
    closing_of,
    content,
    flawed,
    in_other_words,
    made_calls,
    results,
    shape,
    shown,
    solved_tasks,
    visible_text,
)
from captrain.environments.sandbox.forkserver import MODULES
from captrain.environments.worded import ANSWER
from captrain.errors import EnvironmentFault
from captrain.records import CheckResult, Message, Rollout, Score, Task, digest, leaves, read_bytes

ADVISED = 100
"""Recommended number of tasks. With fewer, a single unsolvable task is easily missed."""
DISTINCT = 0.95
"""Minimum share of distinct tasks."""
VALUES = 500
"""Maximum number of values that `structure` replaces. Its time grows with their number."""
DRAWS = 3
"""Plays of random calls on each task."""
ROUNDING = 1e-9
"""Tolerance of comparisons of rewards."""
REPEATS = 12
"""Maximum number of repetitions of a call."""
REPEATED = 2
"""Number of calls per task that are repeated."""
FEW = 25
"""Number of tasks for checks that play each task many times."""
GAIN = 0.1
"""Maximum reward that a repeated or malformed call may gain. Some is allowed, as a call may earn partial reward."""
GIVEN_AWAY = 0.1
"""Maximum share of the reference's calls that the agent can read before it makes them."""
ARGUMENTS = r"[^\w{(]{0,6}(?:arguments|parameters|args)?[^\w{(]{0,6}[({]([^()}]{0,10000})"
"""Matches the arguments after a tool's name in a text: a JSON object, or names and values in brackets."""
MOST_PER_TASK = 0.9
"""Maximum reward on a single task for a play that does no work."""
LONG = 5 * len(ENDLESS)
"""Number of tasks with endless plays, of up to `STEPS` turns."""
LOSS = 0.05
"""Maximum reward that a reference may lose when its words change but its calls do not."""
ROUNDS = 6
"""Minimum uses of each flaw: in all calls, in the last call and in a random call, on two tasks each."""
STRICT = 0.1
"""Maximum share of tasks with a fault, for checks that accept a few faults."""
PREDICTED = 0.9
"""Maximum share of tasks in which the position in the results predicts the value to look up."""
CHANCE = 0.75
"""Maximum reward of a guess, even with few choices."""
KEYED = 0.8
"""Maximum reward of a choice that is neither right nor broken. Some may be right, so this is not zero."""
FEWEST = 3
"""Minimum number of tasks, and of listed values, for measuring `PREDICTED`."""
SOLVED = 1 - ROUNDING
"""Minimum reward of a solved task."""
REFERENCE, IDLE = "reward of the reference solution", "reward of doing nothing"
RANDOM = "reward of random calls"
TRANSFER = "share of tasks with the failed step"


@dataclass(frozen=True)
class Check:
    """A check: its name, its measurement, and the `environments` setting with its bound."""

    name: str
    measure: Callable[[Evidence], CheckResult]
    setting: str = ""


def result(passed: bool, measured: float, bound: str, detail: str = "", task: str = "") -> CheckResult:
    """Make the result of a check. `run_checks` sets its name. Detail and task are kept only for failures."""
    if passed:
        detail = task = ""
    return CheckResult(name="", passed=passed, measured=round(measured, 6), bound=bound, detail=detail, task=task)


def exactly(same: bool, detail: str = "", task: str = "") -> CheckResult:
    """Make the result of a check for equality."""
    return result(same, float(same), "1", detail, task)


def at_most(value: float, bound: float, detail: str = "", task: str = "") -> CheckResult:
    """Make the result of a check of an upper bound."""
    return result(value <= bound + ROUNDING, value, f"at most {bound}", detail, task)


def at_least(value: float, bound: float, detail: str = "", task: str = "") -> CheckResult:
    """Make the result of a check of a lower bound."""
    return result(value >= bound - ROUNDING, value, f"at least {bound}", detail, task)


def mean(values: Iterable[float]) -> float:
    """Return the mean of values; 0 if there are none."""
    numbers = list(values)
    return sum(numbers) / max(1, len(numbers))


def highest(values: Mapping[str, float], bound: float, detail: str) -> CheckResult:
    """Compare the highest value of a task with a bound."""
    most = max(values, key=lambda task: values[task])
    return at_most(values[most], bound, detail, most)


def mean_reward(
    reward: Callable[[Evidence, Task], float], setting: str, most_per_task: float, evidence: Evidence
) -> CheckResult:
    """Check a play that must earn little: on average at most the setting, and per task at most `most_per_task`."""
    rewards = {task.id: reward(evidence, task) for task in evidence.tasks}
    value, bound = mean(rewards.values()), getattr(evidence.bounds, setting)
    most = max(rewards, key=lambda task: rewards[task])
    passed = value <= bound + ROUNDING and rewards[most] <= most_per_task
    check = result(passed, value, f"at most {bound}", f"most on this task: {rewards[most]:.3g}", most)
    return check.model_copy(update={"deviation": round(pstdev(rewards.values()), 6)})


def faulty_tasks(
    fault: Callable[[Evidence, Task], str | None], bound: float, most: int | None, evidence: Evidence
) -> CheckResult:
    """Check that at most a share `bound` of the first `most` tasks has a fault.

    `fault` returns a description; "" if the task has no fault; None to leave the task out.
    """
    faults = {task.id: fault(evidence, task) for task in evidence.tasks[:most]}
    faults = {task: detail for task, detail in faults.items() if detail is not None}
    first = next((task for task, detail in faults.items() if detail), "")
    return at_most(mean(map(bool, faults.values())), bound, faults.get(first, ""), first)


def dealt(
    use: str, kinds: Sequence[str], most: int | None, rounds: int, evidence: Evidence
) -> Iterator[tuple[Task, str, random.Random]]:
    """Assign kinds of plays to the first `most` tasks in random order, with a random generator for each play.

    Every task gets at least one, and every kind is dealt at least `rounds` times.
    """
    tasks = evidence.tasks[:most]
    order = evidence.random(use, "kinds").sample(list(kinds), len(kinds))
    for number in range(max(len(tasks), rounds * len(kinds))):
        task = tasks[number % len(tasks)]
        yield task, order[number % len(kinds)], evidence.random(use, task.id, number)


# The file.


def schemas(evidence: Evidence) -> CheckResult:
    """Check that the tool schemas are the target's."""
    given, expected = evidence.target.tools, evidence.tools
    detail = f"the target has {len(expected)} tools"
    if isinstance(given, list) and len(given) == len(expected):
        detail = f"differs: {[b['function']['name'] for a, b in zip(given, expected, strict=True) if a != b][:1]}"
    return exactly(given == expected, detail)


def foreign_imports(tree: ast.AST) -> list[str]:
    """List the imported modules that the sandbox lacks."""
    available = {module.partition(".")[0] for module in MODULES}
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or ".")
    return sorted({module for module in modules if module.partition(".")[0] not in available})


def imports(evidence: Evidence) -> CheckResult:
    """Check that the file imports only what the sandbox has."""
    try:
        absent = foreign_imports(ast.parse(read_bytes(evidence.path).decode()))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two from thousands of brackets
        return exactly(False, f"not Python: {error or type(error).__name__}")
    return at_most(len(absent), 0, f"not there: {', '.join(absent)}")


def count(evidence: Evidence) -> CheckResult:
    """Report the number of checked tasks. This check always passes."""
    number = len(evidence.tasks)
    few = "" if number >= ADVISED else f"on fewer than {ADVISED} tasks, one that cannot be solved is easily missed"
    return result(True, number, f"{ADVISED} advised").model_copy(update={"detail": few})


# Solutions, determinism, variety.


def is_solved(score: Score) -> bool:
    """Return whether a score is a full success."""
    return score.success and score.reward >= SOLVED


def reference(evidence: Evidence) -> CheckResult:
    """Check that every reference solution solves its task."""
    scores = {task.id: evidence.solution(task) for task in evidence.all_tasks}
    worst = min(scores, key=lambda task: (scores[task].success, scores[task].reward))
    unsolved = sum(not is_solved(score) for score in scores.values())
    detail = f"{unsolved} of {len(scores)} tasks are not solved"
    check = result(is_solved(scores[worst]), scores[worst].reward, "1, and success, on every task", detail, worst)
    return check.model_copy(update={"deviation": round(pstdev(score.reward for score in scores.values()), 6)})


def same_play(evidence: Evidence) -> CheckResult:
    """Check that the same process gives the same tasks, observations and rewards again."""
    pairs = zip(evidence.first_tasks, evidence.target.tasks("training", evidence.reach), strict=False)
    if changed := [task.id for task, again in pairs if task != again]:
        return exactly(False, f"another task if {evidence.reach} are requested", changed[0])
    check = played_again(evidence, evidence.forgetful(), evidence.tasks)
    if check.passed and (size := evidence.target.size("training")) != evidence.size:
        return exactly(False, f"the training split had {evidence.size} tasks at first, and later {size}")
    return check


def same_elsewhere(evidence: Evidence) -> CheckResult:
    """Check that a fresh process without packages gives the same tasks, observations and rewards."""
    order = evidence.random("order").sample(evidence.tasks, evidence.count)
    with evidence.reopened() as fresh:
        return played_again(evidence, fresh, order)


def played_again(evidence: Evidence, again: Evidence, order: Sequence[Task]) -> CheckResult:
    """Compare tasks, observations and rewards with those of another process, or of the same one again."""
    for task, other in zip(evidence.tasks, again.draw(), strict=True):
        if task != other:
            return exactly(False, "another task", task.id)
    for task in order:
        if again.play(task, evidence.reference(task)) != evidence.solved(task):
            return exactly(False, "the same actions get other observations", task.id)
        if again.score(task, evidence.solved(task)) != evidence.solution(task):
            return exactly(False, "the same messages earn another reward", task.id)
    return exactly(True)


def distinct(evidence: Evidence) -> CheckResult:
    """Check that tasks differ in their data."""
    counts = Counter(digest(task.data) for task in evidence.tasks)
    twin = next((task.id for task in evidence.tasks if counts[digest(task.data)] > 1), "")
    return at_least(len(counts) / len(evidence.tasks), DISTINCT, "another task has the same data", twin)


def structure(messages: Sequence[Message]) -> str:
    """Return a play as text with each value replaced by a number, in order of first appearance.

    Plays that differ only in names and numbers are then equal. Values are arguments, tool results, numbers and
    capitalised words.
    """
    lines: list[str] = []
    values: set[str] = set()
    for message in messages:
        calls = calls_of(message) if message["role"] == "assistant" else []
        values |= {leaf for _, arguments in calls for leaf in leaves(arguments)}
        values |= {*results(message)} if message["role"] == "tool" else set()
        calls_text = "".join(
            f" {name}({', '.join(f'{k}={[*leaves(v)]}' for k, v in arguments.items())})" for name, arguments in calls
        )
        lines.append(f"{message['role']}: {content(message)}{calls_text}")
    longest = sorted(sorted(value for value in values if value.strip()), key=len, reverse=True)[:VALUES]
    alternatives = [r"\d+(?:[.,:-]\d+)*", r"(?<=[a-z,;:] )[A-Z][a-z]+"]
    if longest:
        alternatives.insert(0, rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")
    places: dict[str, str] = {}
    return re.sub(
        "|".join(alternatives), lambda match: places.setdefault(match[0], f"<{len(places)}>"), "\n".join(lines)
    )


def structures(evidence: Evidence) -> CheckResult:
    """Check that the tasks have enough different structures.

    A small sample may hide variety, so up to `ADVISED` tasks are played until the bound is met. The bound is lowered
    to the number of structures among the target's own tasks with the same tools.
    """
    plays, bound = [evidence.solved(task) for task in evidence.tasks], evidence.bounds.structures
    found, played = {digest(structure(play)) for play in plays}, {task.id for task in evidence.tasks}
    others = [task for task in evidence.target.tasks("training", evidence.reach) if task.id not in played]
    for task in others[: max(0, ADVISED - len(plays))]:
        if len(found) < bound:
            plays.append(evidence.solved(task))
            found.add(digest(structure(plays[-1])))
    target = evidence.against.target
    if len(found) < bound and target is not None:
        tool_sets = [{tool for tool, _ in made_calls(play)} for play in plays]
        own = [play for _, _, play in solved_tasks(target, len(plays))]
        own = {digest(structure(play)) for play in own if {tool for tool, _ in made_calls(play)} in tool_sets}
        bound = min(bound, len(own) or bound)
    detail = f"{len(plays)} tasks differ in names and numbers only: vary them, or set environments.structures="
    return at_least(len(found), bound, f"{detail}{len(found)}", evidence.tasks[-1].id)


# Leaks of test tasks.


def leaked_ids(evidence: Evidence) -> CheckResult:
    """Check that no test task's id is in the file or in a task."""
    tests = evidence.against.tests
    quoted = {"": tests.quoted_id(evidence.text)}
    for task in evidence.all_tasks:
        quoted[task.id] = task.id if task.id in tests.ids else tests.quoted_id(" ".join(leaves(task.data)))
    place = next((place for place, test in quoted.items() if test), "")
    return at_most(any(quoted.values()), 0, f"names {quoted[place]}", place)


def leaked_texts(evidence: Evidence) -> CheckResult:
    """Check that neither the file nor a task has the words of a test task."""
    places = {"": runs(evidence.text)}
    places |= {task.id: runs_of(task, evidence.solved(task)) for task in evidence.all_tasks}
    share, test, place = max((*evidence.against.tests.nearest(found), place) for place, found in places.items())
    detail = f"{'this task has' if place else 'the file has'} the words of {test}"
    return result(share < SHARE, share, f"less than {SHARE}", detail, place)


# Rewards of plays without the capability.


def idle_reward(evidence: Evidence, task: Task) -> float:
    """Reward an agent that does nothing."""
    return evidence.idle(task).reward


@once
def random_reward(evidence: Evidence, task: Task) -> float:
    """Reward random tools with arguments from what is visible: the mean of a few plays."""
    agents = [partial(act_randomly, evidence.tools, evidence.random("random", task.id, n)) for n in range(DRAWS)]
    return sum(evidence.score(task, evidence.act(task, agent)).reward for agent in agents) / DRAWS


@once
def broken_reward(evidence: Evidence, task: Task) -> float:
    """Reward the broken solution."""
    return evidence.reward_of(task, evidence.broken(task))


def given_away(evidence: Evidence) -> CheckResult:
    """Check that the agent can read few of the reference's calls (tool and values) before it makes them."""
    shares = {task.id: given_share(evidence, task) for task in evidence.tasks}
    detail = "the agent can read a call of the reference before it makes it"
    return at_most(mean(shares.values()), GIVEN_AWAY, detail, max(shares, key=lambda task: shares[task]))


def given_share(evidence: Evidence, task: Task) -> float:
    """Return the share of the reference's calls that an earlier message shows in full."""
    shown: list[str] = []
    hits: list[bool] = []
    for message in evidence.solved(task):
        if message["role"] != "assistant":
            shown.append(visible_text(message))
        calls = [(tool, [*leaves(arguments)]) for tool, arguments in calls_of(message) if arguments]
        hits += [any(is_written(text, tool, values) for text in shown) for tool, values in calls]
    return mean(hits)


def is_written(text: str, tool: str, values: Sequence[str]) -> bool:
    """Return whether a text contains a call: the tool's name followed by all values in brackets."""
    written = re.findall(rf"(?<!\w){re.escape(tool)}{ARGUMENTS}", text)
    return any(all(value in arguments for value in values) for arguments in written)


def repeating(evidence: Evidence) -> CheckResult:
    """Check that repeating a call of the reference earns no more than making it once. Later calls are left out.

    Calls that the reference itself repeats, for example because a tool is busy, are not tested.
    """
    gains: dict[str, float] = {}
    for task in evidence.tasks[:FEW]:
        rng, solution, gains[task.id] = evidence.random("repeating", task.id), evidence.reference(task), 0.0
        places = [place for place in calling(solution) if solution[place] not in solution[place + 1 :]]
        for index in rng.sample(places, min(REPEATED, len(places))):
            once_made, closing = solution[: index + 1], closing_of(solution)
            repeated = [*once_made, *[solution[index]] * rng.randint(1, REPEATS), *closing]
            gain = evidence.reward_of(task, repeated) - evidence.reward_of(task, [*once_made, *closing])
            gains[task.id] = max(gains[task.id], gain)
    return highest(gains, GAIN, "a call that is repeated earns more than once")


def steps(messages: Sequence[Message]) -> list[str]:
    """List calls and questions in order, without the closing words."""
    spoken = bool(messages) and not messages[-1].get("tool_calls")
    entries: list[str] = []
    for message in messages[:-1] if spoken else messages:
        calls = calls_of(message)
        entries += [json.dumps(call, sort_keys=True) for call in calls] or [content(message)]
    return entries


def distance(first: list[str], second: list[str]) -> int:
    """Count the steps from the first difference of two solutions to the last."""
    same = len(commonprefix([first, second]))
    first, second = first[same:], second[same:]
    return max(len(first), len(second)) - len(commonprefix([first[::-1], second[::-1]]))


def broken_steps(evidence: Evidence) -> CheckResult:
    """Check that the broken solution changes only one step, so that it loses reward only for the capability."""
    changed = {
        task.id: distance(steps(evidence.reference(task)), steps(evidence.broken(task))) for task in evidence.tasks
    }
    return highest(changed, 1, "broken(task) changes more than the capability's step")


def spread(evidence: Evidence) -> CheckResult:
    """Check that rewards differ between solutions, broken solutions, doing nothing and random calls."""
    kinds = [idle_reward, random_reward, *([broken_reward] if evidence.has_broken else [])]
    rewards = [evidence.solution(task).reward for task in evidence.tasks]
    rewards += [reward(evidence, task) for reward in kinds for task in evidence.tasks]
    detail = "whatever the agent does, the reward is the same"
    return at_least(max(rewards) - min(rewards), 0.1, detail, evidence.tasks[0].id)


def flawed_calls(evidence: Evidence) -> CheckResult:
    """Check that calls that break their schema earn no more than no call.

    The flaw is put into all calls of the reference, its last call, or a random call. An environment may also raise
    an error at such a call.
    """
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in evidence.tools}
    worst, detail, worst_task = 0.0, "", ""
    for number, (task, kind, rng) in enumerate(dealt("flaws", FLAWS, None, ROUNDS, evidence)):
        solution = evidence.reference(task)
        places = calling(solution)
        changed = (places, places[-1:], rng.sample(places, min(1, len(places))))[number // len(FLAWS) % 3]
        actions: list[Message] = []
        for index, message in enumerate(solution):
            if index in changed:
                calls = [flawed(kind, *call, parameters.get(call[0], {}), rng) for call in calls_of(message)]
                actions += [call for call in calls if call is not None]
            else:
                actions.append(message)
        absent = [message for index, message in enumerate(solution) if index not in changed]
        try:
            gain = evidence.reward_of(task, actions) - evidence.reward_of(task, absent)
        except EnvironmentFault:
            continue
        if gain > worst:
            worst, detail, worst_task = gain, f"{kind} earns more than no call", task.id
    return at_most(worst, GAIN, detail, worst_task)


# Faults of single tasks.


def demands_words(target: CheckedEnvironment, count: int) -> bool:
    """Return whether a benchmark's references lose reward when only their words change.

    No environment derived from such a benchmark could pass. At most `count` training tasks are tested.
    """
    losses: list[bool] = []
    for task, solution, record in solved_tasks(target, count):
        actions = in_other_words(solution, record, random.Random(task.id))
        loss = target.score(task, record).reward - target.score(task, target.play(task, actions)).reward
        losses.append(loss > LOSS)
    return sum(losses) > STRICT * len(losses)


def demanded_words(evidence: Evidence, task: Task) -> str | None:
    """Return a fault if changing only the reference's words costs reward.

    None if `broken` leaves the calls and questions unchanged: then words are the capability.
    """
    rng, solution = evidence.random("other words", task.id), evidence.reference(task)
    if evidence.has_broken and steps(evidence.broken(task)) == steps(solution):
        return None
    actions = in_other_words(solution, evidence.solved(task), rng)
    loss = evidence.solution(task).reward - evidence.reward_of(task, actions)
    detail = "the reference loses reward by words beside its calls, or by other closing words"
    return detail if loss > LOSS else ""


def unspoilt(evidence: Evidence, task: Task) -> str | None:
    """Return a fault if repeating the reference's last call on other records costs no reward.

    None if no such call was carried out, or if it is a look-up.
    """
    rng, solution, play = evidence.random("afterwards", task.id), evidence.reference(task), evidence.solved(task)
    last = len(solution) - len(closing_of(solution))
    right = calls_of(solution[last - 1]) if last else []
    if right and evidence.has_broken:
        player = adversary(evidence)
        if right[-1][0] in player.tells - player.written:
            return None
    changed = [
        tool_call(tool, {**arguments, key: value})
        for tool, arguments in right[-1:]
        for key, argument in arguments.items()
        for value in dict.fromkeys(value for message in play if message["role"] == "tool" for value in shown(message))
        if isinstance(argument, str) and value != argument and shape(value) == shape(argument)
    ]
    spoiling = rng.sample(changed, min(3, len(changed)))
    messages = evidence.play(task, [*solution[:last], *spoiling, *solution[last:]])
    answers = {
        json.dumps(message, sort_keys=True): content(answer)
        for message, answer in pairwise(messages)
        if message["role"] == "assistant" and answer["role"] == "tool"
    }
    usual = answers.get(json.dumps(solution[last - 1], sort_keys=True)) if last else None
    if not any(answers.get(json.dumps(message, sort_keys=True)) == usual is not None for message in spoiling):
        return None
    solved = evidence.score(task, messages).reward >= SOLVED
    return "after the reference, the last call on other records costs nothing" if solved else ""


def false_success(evidence: Evidence, task: Task) -> str:
    """Return a fault if doing nothing or the broken solution is a success without full reward."""
    scores = [evidence.idle(task)]
    if evidence.has_broken:
        scores.append(evidence.score(task, evidence.play(task, evidence.broken(task))))
    wrong = any(score.success and score.reward < SOLVED for score in scores)
    return "a play without the full reward is called a success" if wrong else ""


# The adversary, and transfer.


@once
def adversary(evidence: Evidence) -> Adversary:
    """Fit the adversary of an environment."""
    return Adversary(evidence)


def exploit(found: Exploit | None, bound: float, sentence: str) -> CheckResult:
    """Compare a script's reward with a bound. The result names the script even if the check passes."""
    if found is None:
        return result(True, 0.0, f"at most {bound:g}")
    task = max(found.rewards, key=lambda task: found.rewards[task])
    detail = f"{sentence.format(found.name)} earns {found.mean:.2f} on {len(found.rewards)} tasks"
    shown = {
        "detail": detail,
        "task": task,
        "script": found.deeds[task],
        "deviation": round(pstdev(found.rewards.values()), 6),
    }
    return at_most(found.least, bound, detail, task).model_copy(update=shown)


def knowing_nothing(evidence: Evidence) -> CheckResult:
    """Check that plays that ignore the task earn little on average.

    A play outside `LUCKY` also fails if it solves a single task. Words that happen to hold the right answer are chance:
    they do not, and their mean counts less its error.
    """
    worst, detail, worst_task, script = -1.0, "", "", list[str]()
    for one in adversary(evidence).blindly():
        most = max(one.rewards, key=lambda task: one.rewards[task])
        solved = sum(reward > MOST_PER_TASK and task not in one.lucky for task, reward in one.rewards.items())
        earned = 1.0 if solved and one.name not in LUCKY else one.least if one.lucky else one.mean
        if earned > worst:
            worst, worst_task, script = earned, most, one.deeds[most]
            detail = f"{one.name}: earns {one.mean:.2f}, solves {solved} of {len(one.rewards)} tasks"
    check = at_most(worst, evidence.bounds.hacking_reward, detail, worst_task)
    return check.model_copy(update={"detail": detail, "task": worst_task, "script": script})


def guessing(evidence: Evidence) -> CheckResult:
    """Check that the values that look-ups find cannot be guessed: a guess may earn `GAIN` more than chance.

    The same answer in every task may earn up to the midpoint between guessing evenly and the full reward.
    """
    player = adversary(evidence)
    lists = [
        view for view in player.views if len(view.listed) >= FEWEST and (view.about_candidates or view.key != ANSWER)
    ]
    listed, rights = [view.listed for view in lists], [view.right for view in lists]
    for end, name in ((0, "first"), (-1, "last")):
        same = mean(float(values[end] == right) for values, right in zip(listed, rights, strict=True))
        if len(listed) >= FEWEST and same > PREDICTED:
            detail = f"the value to look up is always the {name} in the results"
            return at_most(same, PREDICTED, detail, player.views[0].task.id)
    needed = ", ".join(sorted({tool for view in player.views for tool in view.needed})) or "a look-up"
    same = play_same_answer(player, evidence.bounds.broken_reward, CHANCE)
    if same and same.plays.least > same.bound:
        check = exploit(same.plays, same.bound, f"choosing {{}}, without {needed},")
        return check.model_copy(update={"detail": f"{check.detail}; {same.reason}"})
    chance = player.best({"chance": partial(by_chance, player.labels)}, "chance")
    bound = max(evidence.bounds.broken_reward, min(CHANCE, (chance.mean if chance else 0.0) + GAIN))
    guess = player.best({**player.guesses(), **leaks(player)}, "guesses")
    learnt = player.best(Learner(player).scripts(), "learnt")
    if guess and learnt and learnt.least > max(guess.least, bound):
        return exploit(learnt, round(bound, 3), f'the script "{{}}", learnt without {needed},')
    return exploit(guess, round(bound, 3), f"choosing {{}}, without {needed},")


def mistakes(evidence: Evidence) -> CheckResult:
    """Check that mistakes other than that of `broken` earn little."""
    player = adversary(evidence)
    return exploit(player.best(player.mistakes(), "mistakes"), evidence.bounds.broken_reward, "a solution {}")


def keyed(evidence: Evidence) -> CheckResult:
    """Check that `broken` is not the only choice that loses reward. Some other choices may be right, but not all."""
    player = adversary(evidence)
    return exploit(player.best(player.others(), "others"), KEYED, "a solution {}")


def failed_tool(rollout: Rollout) -> str | None:
    """Return the tool at which a failed rollout went wrong.

    This is the tool of the reference's first missing call, else of the first extra call. Without a reference, it is
    the tool of the last call.
    """
    calls = made_calls(rollout.messages)
    if not rollout.reference:
        return calls[-1][0] if calls else None
    for call in made_calls(rollout.reference):
        if call not in calls:
            return call[0]
        calls.remove(call)
    return calls[0][0] if calls else None


def transfer(evidence: Evidence) -> CheckResult:
    """Check how often the environment's references call the tools at which the evidence's rollouts failed."""
    failed = Counter(tool for rollout in evidence.failures if (tool := failed_tool(rollout)))
    bound = f"at least {evidence.bounds.transfer}"
    if not failed:
        return CheckResult(name="", passed=True, measured=None, bound=bound, detail="no evidence names a step")
    asked: Counter[str] = Counter()
    for task in evidence.tasks:
        asked.update({tool for tool, _ in made_calls(evidence.reference(task))} & {*failed})
    share = sum(number * asked[tool] for tool, number in failed.items()) / (failed.total() * len(evidence.tasks))
    tools = ", ".join(f"{tool} {number}" for tool, number in failed.most_common())
    return at_least(share, evidence.bounds.transfer).model_copy(update={"detail": f"failed at: {tools}"})


CHECKS = (
    Check("schemas equal the target's", schemas),
    Check("imports that the sandbox lacks", imports),
    Check("tasks checked", count),
    Check(REFERENCE, reference),
    Check(IDLE, partial(mean_reward, idle_reward, "idle_reward", MOST_PER_TASK), "idle_reward"),
    Check(RANDOM, partial(mean_reward, random_reward, "random_reward", 1), "random_reward"),
    Check("same play, same observations", same_play),
    Check("same seed, same task in a fresh process", same_elsewhere),
    Check("share of distinct tasks", distinct),
    Check("structures among the tasks", structures, "structures"),
    Check("ids of test tasks", leaked_ids),
    Check("share of a test task's words", leaked_texts),
    Check("calls given away", given_away),
    Check("gain of a repeated call", repeating),
    Check("steps that the broken solution changes", broken_steps),
    Check("reward of the broken solution", partial(mean_reward, broken_reward, "broken_reward", 1), "broken_reward"),
    Check("spread of rewards", spread),
    Check("reward of plays that know nothing", knowing_nothing, "hacking_reward"),
    Check("gain of calls that fit no schema", flawed_calls),
    Check("tasks that other words fail", partial(faulty_tasks, demanded_words, STRICT, None)),
    Check("tasks that nothing afterwards spoils", partial(faulty_tasks, unspoilt, 1 - STRICT, FEW)),
    Check("tasks with a success that is none", partial(faulty_tasks, false_success, STRICT, None)),
    Check("reward without the look-ups", guessing, "broken_reward"),
    Check("reward of other mistakes", mistakes, "broken_reward"),
    Check("reward of any other choice", keyed),
    Check(TRANSFER, transfer, "transfer"),
)
"""Every check that needs no policy, in order."""
