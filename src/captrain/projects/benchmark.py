"""The checks of a benchmark, in the order in which a reader mends them: members, tools, tasks, episodes, scores, other
processes. `examination` has how its methods are called."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

from captrain.contract import IDLE, Environment, Episode, calls_of
from captrain.environments import in_other_words, structure
from captrain.errors import UserError
from captrain.projects.examination import (
    LIMIT,
    BenchmarkReport,
    Call,
    Examined,
    MethodFailed,
    Problem,
    is_json,
    load_environment_class,
    message_faults,
)
from captrain.projects.isolation import Announce, ProcessLost, in_own_process
from captrain.records import JsonObject, Message, Split

SPLITS = get_args(Split)
TASKS = 20
"""Tasks of each split that are looked at; fewer where the benchmark has fewer."""
TURNS = 30
"""Calls of an agent at random in one task."""
AGENT, WORLD = ("system", "user"), ("tool", "user")
SCHEMA = '{"type": "function", "function": {"name", "description", "parameters": {"type": "object", "properties"}}}'
FOREIGN = """
import json, sys
from captrain.projects.benchmark import task_listing
print(task_listing(json.loads(sys.argv[1])))
"""
"""Program of another process, which shows whether it has the same tasks."""
START = 120.0
"""Seconds that another process may take to begin, on a busy machine."""


def check_benchmark(
    target: str, settings: Mapping[str, object] | None = None, *, tasks: int = TASKS, limit: float = LIMIT
) -> BenchmarkReport:
    """Hold a benchmark to the contract, in a process of its own.

    Args:
        target: module:Class.
        settings: of its constructor.
        tasks: of each split.
        limit: seconds for one call of one method.

    Raises:
        UserError: it cannot be built at all, or lacks a member of the contract.
    """
    work = partial(_examine, target, settings or {}, tasks, limit)
    try:
        return in_own_process(work, 2 * LIMIT + 8 * limit)
    except ProcessLost as loss:
        call: Call | None = loss.state
        if call is None:
            remedy = "end what does not end, and leave the process alone, when it is imported or constructed"
            raise UserError(f"{target} cannot be built: it {loss}", remedy) from None
        remedy = "raise an error in place of leaving, and end what does not end"
        call.report.add(Problem(call.method, call.task, call.place, str(loss), remedy))
        return call.report


def _examine(
    target: str, settings: Mapping[str, object], tasks: int, limit: float, announce: Announce[Call]
) -> BenchmarkReport:
    environment = load_environment_class(target, settings)
    report = BenchmarkReport(str(getattr(environment, "name", "")))
    examined = Examined(environment, report, limit, announce)
    _check_name(examined)
    tools = _check_tools(examined)
    by_split = {split: _check_tasks(examined, split, tasks) for split in SPLITS}
    _check_splits(examined, by_split)
    sound = [task for split_tasks in by_split.values() for task in split_tasks]
    if sound:
        _check_play(examined, sound, tools)
        _check_other_process(examined, target, settings, tasks)
    return report


def _check_name(examined: Examined) -> None:
    name = examined.environment.name
    if not isinstance(name, str) or not name:
        examined.note("name", "", f"is {name!r}", "name the benchmark by a text")
    about = getattr(examined.environment, "about", {})
    if not is_json(about) or not isinstance(about, dict):
        examined.note("about", "", "is not a plain JSON object", "keep versions and hashes in it, as text and numbers")


def _check_tools(examined: Examined) -> list[JsonObject]:
    """Check that tool schemas are those that a chat API takes, and return the sound ones."""
    try:
        tools: object = examined.call("tools", "", lambda: examined.environment.tools)
    except MethodFailed:
        return []
    names, sound = list[str](), list[JsonObject]()
    entries: list[JsonObject] = tools if isinstance(tools, list) else [{"not a list": str(tools)}]
    for tool in entries:
        function = tool.get("function") if isinstance(tool, dict) else None
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if not (isinstance(parameters, dict) and parameters.get("type") == "object" and is_json(tool)):
            examined.note("tools", "", f"{str(tool)[:60]!r} is not a function schema", f"write {SCHEMA}, plain JSON")
        elif isinstance(function, dict):
            names.append(str(function.get("name")))
            sound.append(tool)
    examined.report.facts["tools"] = ", ".join(names)
    if len({*names}) < len(names):
        examined.note("tools", "", "two tools have the same name", "name each by itself")
    return sound


def _check_tasks(examined: Examined, split: str, count: int) -> list[JsonObject]:
    """Check the tasks of a split and return the sound ones: as many as were asked for, each its own, the same when
    asked again."""
    environment = examined.environment
    try:
        size = getattr(environment, "size", None)
        most = None if size is None else examined.call("size", f"split {split}", lambda: size(split))
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            examined.note("size", f"split {split}", f"is {str(most)[:60]!r}", "return a whole number, 0 or more")
            return []
        count = count if most is None else min(count, most)
        tasks: object = examined.call("tasks", f"split {split}", lambda: environment.tasks(split, count))
        again: object = examined.call("tasks", f"split {split}", lambda: environment.tasks(split, count))
        fewer: object = examined.call("tasks", f"split {split}", lambda: environment.tasks(split, count // 2))
    except MethodFailed:
        return []
    examined.report.facts[f"tasks of {split}"] = "no end" if most is None else str(most)
    remedy = 'return a list of dicts {"id", "split", "data"}, plain JSON'
    sound = [task for task in tasks if _is_task(task)] if isinstance(tasks, list) else []
    if not isinstance(tasks, list) or len(sound) < len(tasks):
        wrong = next((task for task in tasks if not _is_task(task)), None) if isinstance(tasks, list) else tasks
        examined.note("tasks", f"split {split}", f"{str(wrong)[:60]!r} is not a task", remedy)
    if isinstance(tasks, list) and len(tasks) != count:
        text = f"gave {len(tasks)} tasks where {count} were asked for"
        examined.note("tasks", f"split {split}", text, "give as many as asked for, or say by size(split) how many")
    if len({task["id"] for task in sound}) < len(sound):
        examined.note("tasks", f"split {split}", "two tasks have the same id", "give each task an id of its own")
    for task in sound:
        if task["split"] != split:
            text = f"is of split {task['split']!r}, asked was {split!r}"
            examined.note("tasks", str(task["id"]), text, "splits never mix: return tasks of the split asked for")
    if tasks != again:
        examined.note("tasks", f"split {split}", "are others when asked again", "draw from random.Random(seed), anew")
    elif isinstance(tasks, list) and fewer != tasks[: count // 2]:
        text = f"tasks({count // 2}) are not the first of tasks({count})"
        examined.note("tasks", f"split {split}", text, "let a task depend on its split and number alone")
    return [task for task in sound if task["split"] == split]


def _is_task(task: object) -> bool:
    match task:
        case {"id": str(), "split": str(), "data": dict()}:
            return is_json(task)
    return False


def _check_splits(examined: Examined, by_split: Mapping[str, Sequence[JsonObject]]) -> None:
    """Check that no task is in two splits: neither its id, nor, for nearly all, its content."""
    sections = {
        split: {json.dumps(task["data"], sort_keys=True) for task in tasks} for split, tasks in by_split.items()
    }
    ids = {split: {task["id"] for task in tasks} for split, tasks in by_split.items()}
    for first, second in (("discovery", "test"), ("training", "test"), ("discovery", "training")):
        if common := ids[first] & ids[second]:
            text = f"is in split {first} and in split {second}"
            examined.note("tasks", min(common), text, "splits never mix: put the split into what a task is drawn from")
        shared, least = sections[first] & sections[second], min(len(sections[first]), len(sections[second]))
        if least and len(shared) > least / 2:
            text = f"{len(shared)} of {least} tasks of {second} are those of {first} under other ids"
            remedy = "draw other content for each split, or a test measures what was trained on"
            examined.note("tasks", f"split {second}", text, remedy)


def _check_play(examined: Examined, tasks: Sequence[JsonObject], tools: Sequence[JsonObject]) -> None:
    """Check that references score 1, and that every task can be played by whoever plays."""
    structures, references, demanding = set[str](), 0, 0
    rewards_of: dict[str, list[float]] = {"reference": [], "nothing": [], "random calls": [], "every call twice": []}
    for task in tasks:
        rng = random.Random(task["id"])
        try:
            reference = _reference(examined, task)
            agents: dict[str, Sequence[Message]] = {
                "reference": reference,
                "nothing": [IDLE],
                "random calls": [random_call(rng, tools, task) for _ in range(TURNS)],
                "every call twice": [action for action in reference for _ in range(1 + bool(calls_of(action)))],
            }
        except MethodFailed:
            continue
        references += bool(reference)
        for agent, actions in agents.items():
            if not actions:
                continue
            try:
                messages, score = _play_and_score(examined, task, agent, actions)
            except MethodFailed:
                continue
            if agent == "reference":
                structures.add(structure(messages))
                demanding += _loses_by_words(examined, task, actions, messages, float(score["reward"]))
            rewards_of[agent].append(float(score["reward"]))
            if agent == "reference" and (score["reward"] != 1 or not score["success"]):
                text = f"scores {score['reward']}, success {score['success']}"
                examined.note("reference", task["id"], text, "make reference and score agree: played in order it is 1")
    for agent, rewards in rewards_of.items():
        if rewards:
            examined.report.facts[f"mean reward of {agent}"] = f"{sum(rewards) / len(rewards):.2f} of {len(rewards)}"
    if references:
        few = " (all tasks differ in names and numbers only)" if len(structures) == 1 else ""
        examined.report.facts["structures of tasks"] = f"{len(structures)} in {references} references{few}"
    if demanding:
        examined.report.facts["words that nobody told"] = (
            f"{demanding} of {references} references lose by other words beside their calls or at the end: no "
            "environment derived from such a task earns a passport; let the policy say the words, or score none"
        )
    if references < len(tasks):
        missing = f"{len(tasks) - references} of {len(tasks)} tasks have none: without references the programmatic "
        missing += (
            "analyst finds what goes with failing alone and no environment is derived "
            "(analyst=openai analyst.name=MODEL synthesizer=openai synthesizer.name=MODEL)"
        )
        examined.report.facts["references"] = missing
    if rewards_of["nothing"] and min(rewards_of["nothing"]) == 1:
        examined.note("score", "", "doing nothing scores 1 on every task", "score what the agent was asked to do")


def _reference(examined: Examined, task: JsonObject) -> list[Message]:
    reference = examined.call("reference", task["id"], lambda: examined.environment.reference(_copy(task)))
    if fault := message_faults(reference, ("assistant",)):
        examined.note("reference", task["id"], fault, "return the assistant messages of a solution, [] for none known")
        raise MethodFailed
    return reference


def _loses_by_words(
    examined: Examined, task: JsonObject, reference: Sequence[Message], messages: Sequence[Message], reward: float
) -> bool:
    """Return whether a reference earns less in other words."""
    actions = in_other_words(reference, messages, random.Random(task["id"]))
    try:
        return float(_play_and_score(examined, task, "reference in other words", actions)[1]["reward"]) < reward
    except MethodFailed:
        return False


def _copy(task: JsonObject) -> JsonObject:
    return json.loads(json.dumps(task))


def _play_and_score(
    examined: Examined, task: JsonObject, agent: str, actions: Sequence[Message]
) -> tuple[list[Message], JsonObject]:
    """Play, twice where it is cheap to see a difference, and score the record, twice; return both."""
    messages = _play(examined, task, agent, actions)
    if agent != "random calls" and _play(examined, task, agent, actions) != messages:
        text = f"played again with the same messages ({agent}) answers otherwise"
        remedy = "draw from the task or from open's `key`, never from a clock or a shared state"
        examined.note("step", task["id"], text, remedy)
    before = _copy(task)
    scores = [
        examined.call("score", task["id"], lambda: examined.environment.score(task, json.loads(json.dumps(messages))))
        for _ in range(2)
    ]
    if task != before:
        examined.note("score", task["id"], "changes the task it is given", "copy what is changed")
    if scores[0] != scores[1]:
        examined.note("score", task["id"], "differs when asked again", "score the task and the messages alone")
    return messages, _sound_score(examined, task, scores[0])


def _sound_score(examined: Examined, task: JsonObject, score: object) -> JsonObject:
    remedy = 'return {"reward": a number from 0 to 1, "success": a bool, "parts": {name: number}}'
    reward = score.get("reward") if isinstance(score, dict) else None
    numeric = isinstance(reward, int | float) and not isinstance(reward, bool) and 0 <= reward <= 1
    if not isinstance(score, dict) or not numeric or not isinstance(score.get("success"), bool) or not is_json(score):
        examined.note("score", task["id"], f"{str(score)[:80]!r} is not a score", remedy)
        raise MethodFailed
    parts = score.get("parts", {})
    if not isinstance(parts, dict) or not all(isinstance(part, int | float) for part in parts.values()):
        examined.note("score", task["id"], f"parts {str(parts)[:60]!r} are not numbers by name", remedy)
        raise MethodFailed
    return score


def _play(examined: Examined, task: JsonObject, agent: str, actions: Sequence[Message]) -> list[Message]:
    """Play an episode and return its record."""
    name, before = task["id"], _copy(task)
    episode: Episode = examined.call("open", name, lambda: examined.environment.open(task))
    examined.episode = episode
    if task != before:
        examined.note("open", name, "changes the task it is given", "copy what is changed")
    opening: object = examined.call("messages", name, lambda: episode.messages)
    if fault := message_faults(opening, AGENT):
        examined.note("open", name, f"the episode's messages: {fault}", "open with a system and a user message")
        raise MethodFailed
    messages, over = [*_messages(opening)], False
    for action in actions:
        answer: object = examined.call("step", name, lambda action=action: episode.step(json.loads(json.dumps(action))))
        replies, over = _answer(examined, name, agent, answer)
        messages += [action, *replies]
        if over:
            break
    if (close := getattr(episode, "close", None)) is not None:
        examined.call("close", name, close)
    return messages


def _messages(value: object) -> list[Message]:
    return [*value] if isinstance(value, list) else []


def _answer(examined: Examined, task: str, agent: str, answer: object) -> tuple[list[Message], bool]:
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], bool):
        examined.note(
            "step", task, f"returned {str(answer)[:60]!r} ({agent})", "return (messages, over): a list, a bool"
        )
        raise MethodFailed
    replies, over = answer
    if fault := message_faults(replies, WORLD):
        examined.note("step", task, f"the answer {fault} ({agent})", "answer with tool results and user messages")
        raise MethodFailed
    if not replies and not over:
        text = f"answers nothing and goes on ({agent})"
        examined.note("step", task, text, "answer each call, and words with the user's; or end the episode: True")
        raise MethodFailed
    return replies, over


def random_call(rng: random.Random, tools: Sequence[JsonObject], task: JsonObject) -> Message:
    """Draw a call that no careful agent makes: a known tool with values of the task, or wrong in every way that a
    language model is."""
    texts = [text for text in json.dumps(task["data"]).split('"') if text.strip(" ,:{}[]")]
    function = rng.choice([*tools])["function"] if tools else {"name": "none", "parameters": {}}
    properties = function["parameters"].get("properties", {})
    values: list[Callable[[], object]] = [
        lambda: rng.choice(texts or [""]),
        lambda: rng.choice(["", " ", "x" * 2000, "\u2603\x00", "../../etc/passwd", "1e999"]),
        lambda: rng.choice([None, True, -1, 0, 2**70, 1.5]),
        lambda: rng.choice([[], {}, [[[]]], {"": {"": None}}]),
    ]
    arguments: object = {name: rng.choices(values, [5, 1, 1, 1])[0]() for name in properties if rng.random() < 0.9}
    name = str(function["name"]) if rng.random() < 0.9 else rng.choice(["", "no_such_tool", "__init__", "step"])
    shape = rng.random()
    if shape < 0.3:
        arguments = json.dumps(arguments)
    elif shape < 0.4:
        arguments = rng.choice(["", "{", "[]", "null", '"text"', "{'a': 1}", "[" * 100])
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": rng.choice(["", "Let me see."]), "tool_calls": [call]}


def task_listing(request: JsonObject) -> str:
    """List the first tasks of every split as JSON, for a comparison between processes."""
    environment: Environment = load_environment_class(request["target"], request["settings"])
    listing = {}
    for split in SPLITS:
        size = getattr(environment, "size", None)
        most = None if size is None else size(split)
        count = request["tasks"] if most is None else min(request["tasks"], most)
        listing[split] = environment.tasks(split, count)
    return json.dumps(listing, sort_keys=True)


def _check_other_process(examined: Examined, target: str, settings: Mapping[str, object], tasks: int) -> None:
    """Check that another process, with other hashes of texts, has the same tasks."""
    request = {"target": target, "settings": dict(settings), "tasks": tasks}
    try:
        expected = examined.call("tasks", "", lambda: task_listing(request))
        command = [sys.executable, "-c", FOREIGN, json.dumps(request)]
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=START + 6 * examined.limit, check=False
        )
    except MethodFailed:
        return  # it has been noted
    except subprocess.TimeoutExpired as error:
        text, remedy = (
            f"do not come in another process within {error.timeout:.0f} s",
            "list tasks in less, or raise --limit",
        )
        examined.report.add(Problem("tasks", "", examined.place("tasks"), text, remedy))
        return
    if process.returncode or process.stdout.strip().splitlines()[-1:] != [expected]:
        last = process.stderr.strip().splitlines()[-1:]
        text = f"fail in another process: {''.join(last)}" if process.returncode else "are others in another process"
        remedy = (
            "let a task depend on nothing but settings, split and number: no hash(), no set order, no clock, no file"
        )
        examined.report.add(Problem("tasks", "", examined.place("tasks"), text, remedy))
