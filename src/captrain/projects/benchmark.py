"""A benchmark held to the contract before anything is spent on it: what `captrain check-benchmark` does.

Every method is called as the pipeline would call it, and as it would not: with reference solutions, with nothing, with
random and malformed calls, with every call twice, again in this process and in another one. The checks stand in the
order in which a reader mends them: members, tools, tasks, episodes, scores, other processes. `examination` has how
methods are called.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from captrain.contract import IDLE, Environment, Episode, calls_of
from captrain.environments import in_other_words, structure
from captrain.errors import UserError
from captrain.projects.examination import (
    LIMIT,
    BenchmarkReport,
    Examined,
    MethodFailed,
    Problem,
    T,
    is_json,
    load_environment_class,
    message_faults,
)
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
UNTOLD = (
    "lose by other words beside their calls or at the end: no environment derived from such a task earns a passport; "
    "let the policy say the words, or score none"
)
NO_REFERENCES = (
    "without references the programmatic analyst finds what goes with failing alone and no environment is derived "
    "(analyst=openai analyst.name=MODEL synthesizer=openai synthesizer.name=MODEL)"
)
START = 120.0
"""Seconds that another process may take to begin, on a busy machine."""


class _Score(BaseModel):
    """Shape of a score as the contract has it."""

    model_config = ConfigDict(strict=True)
    reward: Annotated[float, Field(ge=0, le=1)]
    success: bool
    parts: dict[str, float] = {}


def check_benchmark(
    target: str, settings: Mapping[str, object] | None = None, *, tasks: int = TASKS, limit: float = LIMIT
) -> BenchmarkReport:
    """Hold a benchmark to the contract, in a process of its own: what ends that process, or lets nobody interrupt it,
    ends nothing else, and whatever it started ends with it.

    Args:
        target: module:Class.
        settings: of its constructor.
        tasks: of each split.
        limit: seconds for one call of one method.

    Raises:
        UserError: it cannot be built at all, or lacks a member of the contract.
    """
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(far, target, settings or {}, tasks, limit))
    process.start()
    far.close()
    call, patience = None, 2 * LIMIT + 8 * limit
    latest = time.monotonic() + patience
    try:
        while time.monotonic() < latest:
            # In steps: what the process started may hold its end of the pipe. Asked first: what it sent is there then.
            is_over = not process.is_alive()
            if not near.poll(0 if is_over else 1):
                if is_over:
                    break
                continue
            try:
                message: tuple[Problem, BenchmarkReport] | BenchmarkReport | UserError = near.recv()
            except (EOFError, OSError):  # the latter amid a message
                while process.is_alive() and time.monotonic() < latest:
                    time.sleep(0.05)  # join would wait for all that it started
                break
            if isinstance(message, UserError):
                raise message
            if isinstance(message, BenchmarkReport):
                return message
            call, latest = message, time.monotonic() + patience
        status = process.exitcode
        loss = f"did not return within {patience:g} s, and let nobody interrupt it"
        if status is not None:
            loss = f"ended the process ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        if call is None:
            raise UserError(
                f"{target} cannot be built: it {loss}",
                "end what does not end, and leave the process alone, when it is imported or constructed",
            )
        problem, report = call
        report.add(replace(problem, text=loss))
        return report
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.kill()
        process.join()
        near.close()


def _examine(connection: Connection, target: str, settings: Mapping[str, object], tasks: int, limit: float) -> None:
    """Check everything, and send each call before it is made, then the report or the error."""
    os.setsid()
    os.register_at_fork(after_in_child=connection.close)  # or a message that its end cuts off would not end
    try:
        environment = load_environment_class(target, settings)
        report = BenchmarkReport(str(getattr(environment, "name", "")))
        examined = Examined(environment, report, limit, connection.send)
        tools = _check_members(examined)
        by_split = {split: _check_tasks(examined, split, tasks) for split in SPLITS}
        _check_splits(examined, by_split)
        if sound := [task for split_tasks in by_split.values() for task in split_tasks]:
            _check_play(examined, sound, tools)
            _check_other_process(examined, target, settings, tasks)
        connection.send(report)
    except UserError as error:
        connection.send(error)


def _check_members(examined: Examined) -> list[JsonObject]:
    """Check the name, the facts that it gives of itself, and that tool schemas are those that a chat API takes; return
    the sound ones."""
    name = examined.environment.name
    if not isinstance(name, str) or not name:
        examined.note("name", "", f"is {name!r}", "name the benchmark by a text")
    about = getattr(examined.environment, "about", {})
    if not is_json(about) or not isinstance(about, dict):
        examined.note("about", "", "is not a plain JSON object", "keep versions and hashes in it, as text and numbers")
    try:
        tools: object = examined.call("tools", "", lambda: examined.environment.tools)
    except MethodFailed:
        return []
    sound = list[JsonObject]()
    for tool in tools if isinstance(tools, list) else [{"not a list": str(tools)}]:
        match tool:
            case {"function": {"parameters": {"type": "object"}}} if is_json(tool):
                sound.append(tool)
            case _:
                examined.note(
                    "tools", "", f"{str(tool)[:60]!r} is not a function schema", f"write {SCHEMA}, plain JSON"
                )
    names = [str(tool["function"].get("name")) for tool in sound]
    examined.report.facts["tools"] = ", ".join(names)
    if len({*names}) < len(names):
        examined.note("tools", "", "two tools have the same name", "name each by itself")
    return sound


def _check_tasks(examined: Examined, split: str, count: int) -> list[JsonObject]:
    """Check the tasks of a split and return the sound ones: as many as were asked for, each its own, the same when
    asked again."""
    environment = examined.environment
    note = partial(examined.note, "tasks", f"split {split}")
    try:
        size = getattr(environment, "size", None)
        most = None if size is None else examined.call("size", f"split {split}", lambda: size(split))
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            examined.note("size", f"split {split}", f"is {str(most)[:60]!r}", "return a whole number, 0 or more")
            return []
        count = count if most is None else min(count, most)
        tasks, again, fewer = (
            examined.call("tasks", f"split {split}", partial(environment.tasks, split, number))
            for number in (count, count, count // 2)
        )
    except MethodFailed:
        return []
    examined.report.facts[f"tasks of {split}"] = "no end" if most is None else str(most)
    remedy = 'return a list of dicts {"id", "split", "data"}, plain JSON'
    if not isinstance(tasks, list):
        note(f"{str(tasks)[:60]!r} is not a task", remedy)
        return []
    sound = [task for task in tasks if _is_task(task)]
    if len(sound) < len(tasks):
        wrong = next(task for task in tasks if not _is_task(task))
        note(f"{str(wrong)[:60]!r} is not a task", remedy)
    if len(tasks) != count:
        note(
            f"gave {len(tasks)} tasks where {count} were asked for",
            "give as many as asked for, or say by size(split) how many",
        )
    if len({task["id"] for task in sound}) < len(sound):
        note("two tasks have the same id", "give each task an id of its own")
    for task in sound:
        if task["split"] != split:
            examined.note(
                "tasks",
                str(task["id"]),
                f"is of split {task['split']!r}, asked was {split!r}",
                "splits never mix: return tasks of the split asked for",
            )
    if tasks != again:
        note("are others when asked again", "draw from random.Random(seed), anew")
    elif fewer != tasks[: count // 2]:
        note(
            f"tasks({count // 2}) are not the first of tasks({count})",
            "let a task depend on its split and number alone",
        )
    return [task for task in sound if task["split"] == split]


def _is_task(task: object) -> bool:
    match task:
        case {"id": str(), "split": str(), "data": dict()}:
            return is_json(task)
    return False


def _check_splits(examined: Examined, by_split: Mapping[str, Sequence[JsonObject]]) -> None:
    """Check that no task is in two splits: neither its id, nor, for nearly all, its content."""
    for first, second in (("discovery", "test"), ("training", "test"), ("discovery", "training")):
        ids = ({task["id"] for task in by_split[split]} for split in (first, second))
        contents = [{json.dumps(task["data"], sort_keys=True) for task in by_split[split]} for split in (first, second)]
        if common := set.intersection(*ids):
            examined.note(
                "tasks",
                min(common),
                f"is in split {first} and in split {second}",
                "splits never mix: put the split into what a task is drawn from",
            )
        shared, least = set.intersection(*contents), min(map(len, contents))
        if least and len(shared) > least / 2:
            examined.note(
                "tasks",
                f"split {second}",
                f"{len(shared)} of {least} tasks of {second} are those of {first} under other ids",
                "draw other content for each split, or a test measures what was trained on",
            )


def _check_play(examined: Examined, tasks: Sequence[JsonObject], tools: Sequence[JsonObject]) -> None:
    """Check that references score 1, and that every task can be played by whoever plays."""
    structures, references, demanding, facts = set[str](), 0, 0, examined.report.facts
    rewards_of: dict[str, list[float]] = {"reference": [], "nothing": [], "random calls": [], "every call twice": []}
    for task in tasks:
        rng = random.Random(task["id"])
        try:
            reference = examined.call("reference", task["id"], partial(examined.environment.reference, _copy(task)))
            if fault := message_faults(reference, ("assistant",)):
                examined.note(
                    "reference", task["id"], fault, "return the assistant messages of a solution, [] for none known"
                )
                continue
            agents: dict[str, Sequence[Message]] = {
                "reference": reference,
                "nothing": [IDLE],
                "random calls": [careless_call(rng, tools, task) for _ in range(TURNS)],
                "every call twice": [action for action in reference for _ in range(1 + bool(calls_of(action)))],
            }
        except MethodFailed:
            continue
        references += bool(reference)
        for agent, actions in agents.items():
            if not actions:
                continue
            with suppress(MethodFailed):
                messages, score = _play_and_score(examined, task, agent, actions)
                rewards_of[agent].append(score.reward)
                if agent != "reference":
                    continue
                structures.add(structure(messages))
                if score.reward != 1 or not score.success:
                    examined.note(
                        agent,
                        task["id"],
                        f"scores {score.reward}, success {score.success}",
                        "make reference and score agree: played in order it is 1",
                    )
                # Does it lose by words that nobody told the agent?
                actions = in_other_words(reference, messages, random.Random(task["id"]))
                _, further = _play_and_score(examined, task, "reference in other words", actions)
                demanding += further.reward < score.reward
    for agent, rewards in rewards_of.items():
        if rewards:
            facts[f"mean reward of {agent}"] = f"{sum(rewards) / len(rewards):.2f} of {len(rewards)}"
    if references:
        few = " (all tasks differ in names and numbers only)" if len(structures) == 1 else ""
        facts["structures of tasks"] = f"{len(structures)} in {references} references{few}"
    if demanding:
        facts["words that nobody told"] = f"{demanding} of {references} references {UNTOLD}"
    if references < len(tasks):
        facts["references"] = f"{len(tasks) - references} of {len(tasks)} tasks have none: {NO_REFERENCES}"
    if rewards_of["nothing"] and min(rewards_of["nothing"]) == 1:
        examined.note("score", "", "doing nothing scores 1 on every task", "score what the agent was asked to do")


def _copy(value: T) -> T:
    """Copy what the benchmark is given, by way of JSON, which alone comes through the files of the pipeline."""
    return json.loads(json.dumps(value))


def _play_and_score(
    examined: Examined, task: JsonObject, agent: str, actions: Sequence[Message]
) -> tuple[list[Message], _Score]:
    """Play, twice where it is cheap to see a difference, and score the record, twice; return both."""
    name, messages = task["id"], _play(examined, task, agent, actions)
    if agent != "random calls" and _play(examined, task, agent, actions) != messages:
        examined.note(
            "step",
            name,
            f"played again with the same messages ({agent}) answers otherwise",
            "draw from the task or from open's `key`, never from a clock or a shared state",
        )
    before = deepcopy(task)
    score, again = (
        examined.call("score", name, lambda: examined.environment.score(task, _copy(messages))) for _ in range(2)
    )
    if task != before:
        examined.note("score", name, "changes the task it is given", "copy what is changed")
    if score != again:
        examined.note("score", name, "differs when asked again", "score the task and the messages alone")
    try:
        if is_json(score):
            return messages, _Score.model_validate(score)
    except ValidationError:
        pass
    examined.note(
        "score",
        name,
        f"{str(score)[:80]!r} is not a score",
        'return {"reward": a number from 0 to 1, "success": a bool, "parts": {name: number}}',
    )
    raise MethodFailed


def _play(examined: Examined, task: JsonObject, agent: str, actions: Sequence[Message]) -> list[Message]:
    """Play an episode and return its record."""
    name, before = task["id"], deepcopy(task)

    def refuse(method: str, text: str, remedy: str) -> None:
        examined.note(method, name, text, remedy)
        raise MethodFailed

    episode: Episode = examined.call("open", name, lambda: examined.environment.open(task))
    examined.episode = episode
    if task != before:
        examined.note("open", name, "changes the task it is given", "copy what is changed")
    opening: list[Message] = examined.call("messages", name, lambda: episode.messages)
    if fault := message_faults(opening, AGENT):
        refuse("open", f"the episode's messages: {fault}", "open with a system and a user message")
    messages = [*opening]
    for action in actions:
        answer: object = examined.call("step", name, lambda action=action: episode.step(_copy(action)))
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], bool):
            refuse("step", f"returned {str(answer)[:60]!r} ({agent})", "return (messages, over): a list, a bool")
        replies, over = answer  # type: ignore[misc]
        if fault := message_faults(replies, WORLD):
            refuse("step", f"the answer {fault} ({agent})", "answer with tool results and user messages")
        if not replies and not over:
            refuse(
                "step",
                f"answers nothing and goes on ({agent})",
                "answer each call, and words with the user's; or end the episode: True",
            )
        messages += [action, *replies]
        if over:
            break
    if (close := getattr(episode, "close", None)) is not None:
        examined.call("close", name, close)
    return messages


def careless_call(rng: random.Random, tools: Sequence[JsonObject], task: JsonObject) -> Message:
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
    command, seconds = [sys.executable, "-c", FOREIGN, json.dumps(request)], START + 6 * examined.limit
    try:
        expected = examined.call("tasks", "", lambda: task_listing(request))
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except MethodFailed:
        return  # it has been noted
    except subprocess.TimeoutExpired:
        examined.note(
            "tasks",
            "",
            f"do not come in another process within {seconds:.0f} s",
            "list tasks in less, or raise --limit",
        )
        return
    if process.returncode or process.stdout.strip().splitlines()[-1:] != [expected]:
        last = process.stderr.strip().splitlines()[-1:]
        examined.note(
            "tasks",
            "",
            f"fail in another process: {''.join(last)}" if process.returncode else "are others in another process",
            ("let a task depend on nothing but settings, split and number: no hash(), no set order, no clock, no file"),
        )
