# pyright: reportMissingImports=false
"""BFCL's multi-turn categories behind the worker protocol: runs in an environment of its own that has `bfcl-eval`.

The user's turns are BFCL's, one after another: each time the agent answers without a call, the next is asked. Calls are
dispatched by name to the methods that a task documents, with arguments as given: nothing that an agent writes is ever
evaluated, as it is upstream. Instances are an episode's own, where upstream keeps them in module globals. `evaluate` is
a function of the task and the recorded messages: it plays both sides anew and asks BFCL's own checks, turn by turn.
"""

from worker_loop import LONGEST, PROTOCOL, BadRequest, protect, serve

REPLIES = protect()

import ast
import copy
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import resource
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

START = time.perf_counter()

import bfcl_eval
from bfcl_eval.constants.default_prompts import (
    DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING,
    MAXIMUM_STEP_LIMIT,
)
from bfcl_eval.constants.executable_backend_config import (
    CLASS_FILE_PATH_MAPPING,
    MULTI_TURN_FUNC_DOC_FILE_MAPPING,
    STATELESS_CLASSES,
)
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

IMPORT_SECONDS = time.perf_counter() - START
PACKAGE = Path(inspect.getfile(bfcl_eval)).parent
DATA = PACKAGE / "data"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's names of types, in JSON Schema's."""
DEEPEST, LARGEST, LONGEST_TEXT = 20, 10**15, 100_000
"""What arguments may be, beyond which a call is refused: levels of nesting, numbers, characters."""
PATIENCE = 2.0
"""Seconds of CPU for one call. By the clock a busy machine would decide a score."""
CLOSING = {"role": "assistant", "content": "Done."}


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def load_tasks():
    """Tasks by id, each with its gold turns."""
    tasks = {}
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category}.json"
        gold = {entry["id"]: entry["ground_truth"] for entry in lines(DATA / "possible_answer" / name)}
        for entry in lines(DATA / name):
            tasks[entry["id"]] = {**entry, "category": category, "gold": gold[entry["id"]]}
    return tasks


TASKS, DOCS, EPISODES = {}, {}, {}


def tasks():
    if not TASKS:
        TASKS.update(load_tasks())
    return TASKS


def task_of(task_id):
    if task_id not in tasks():
        raise BadRequest(f"there is no task {task_id!r}")
    return TASKS[task_id]


def docs(name):
    """The documented functions of a class, as OpenAI schemas by name."""
    if name not in DOCS:
        entries = lines(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])
        DOCS[name] = {entry["name"]: schema_of(entry) for entry in entries}
    return DOCS[name]


def schema_of(entry):
    function = {name: entry[name] for name in ("name", "description")}
    return {"type": "function", "function": {**function, "parameters": converted(entry["parameters"])}}


def converted(schema):
    """A parameter's schema with JSON Schema's names of types."""
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key in ("type", "description", "required", "enum")}
    if "type" in result:
        result["type"] = TYPES.get(result["type"], result["type"])
    if "properties" in schema:
        result["properties"] = {name: converted(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        result["items"] = converted(schema["items"])
    return result


class World:
    """The instances of one task's classes, and the tools that are offered so far."""

    def __init__(self, task):
        self.task = task
        self.instances = {}
        for name in task["involved_classes"]:
            instance = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                config = copy.deepcopy(task["initial_config"].get(name, {}))
                instance._load_scenario(config, long_context=task["category"] == "long_context")
            self.instances[name] = instance
        self.late = {name for names in task.get("missed_function", {}).values() for name in names}
        self.excluded = set(task.get("excluded_function") or [])

    def schemas(self):
        """What the agent is offered, in the order of the documents."""
        offered = {}
        for name in self.task["involved_classes"]:
            for tool, schema in docs(name).items():
                if tool not in self.late | self.excluded:
                    offered.setdefault(tool, schema)
        return offered

    def release(self, turn):
        """The tools that a turn adds."""
        names = self.task.get("missed_function", {}).get(str(turn), [])
        self.late -= set(names)
        return [schema for tool, schema in self.schemas().items() if tool in names]

    def method(self, tool):
        return next(getattr(self.instances[name], tool) for name in self.instances if tool in docs(name))

    def call(self, tool, arguments):
        """The result of a call as BFCL words it. As there, a tool that is not offered yet is no less a tool: one gold
        solution calls one."""
        if not isinstance(tool, str) or not any(tool in docs(name) for name in self.instances):
            return f"Error during execution: there is no tool {str(tool)[:100]}"
        if problem := objection(arguments):
            return f"Error during execution: {problem}"
        try:
            with patience():
                result = self.method(tool)(**copy.deepcopy(arguments))
        except Exception as error:
            return f"Error during execution: {str(error)[:LONGEST]}"
        if isinstance(result, str):
            return result
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return str(result)
        return str(result)


def objection(arguments):
    """Why arguments are not tried, "" where they are."""
    if not isinstance(arguments, dict):
        return "arguments are no JSON object"
    pending = [(arguments, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST:
            return "arguments are nested too deeply"
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
            return "a number is too large"
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return "a text is too long"
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(element, depth + 1) for element in inner]
    return ""


@contextmanager
def patience():
    """Interrupt what takes too long."""

    def interrupt(number, frame):
        raise TimeoutError(f"no answer within {PATIENCE:g} s")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def calls_of(message):
    """(id, tool, arguments) of each call; arguments that are no JSON object stay what they are."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        calls.append((call.get("id") if isinstance(call.get("id"), str) else "", function.get("name"), arguments))
    return calls


def gold_call(world, text):
    """A gold call as (tool, arguments): positional arguments are bound by the signature."""
    node = ast.parse(text, mode="eval").body
    tool = node.func.id
    values = [ast.literal_eval(value) for value in node.args]
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return tool, dict(inspect.signature(world.method(tool)).bind(*values, **keywords).arguments)


class Episode:
    """One task being played."""

    def __init__(self, task):
        self.task, self.world, self.turn, self.steps = task, World(task), 0, 0
        self.termination = None

    def user(self):
        """What the user says in this turn."""
        messages = [{"role": "user", "content": m["content"]} for m in self.task["question"][self.turn]]
        added = self.world.release(self.turn)
        if messages or not added:
            return messages
        functions = json.dumps([schema["function"] for schema in added])
        text = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions)
        return [{"role": "user", "content": text}]

    def take(self, message):
        """What answers an assistant message."""
        calls = calls_of(message)
        if calls:
            self.steps += 1
            if self.steps > MAXIMUM_STEP_LIMIT:
                self.termination = "max_steps"
                return []
            results = [self.world.call(tool, arguments) for _, tool, arguments in calls]
            return [
                {"role": "tool", "tool_call_id": identity, "name": str(tool), "content": result}
                for (identity, tool, _), result in zip(calls, results, strict=True)
            ]
        self.turn, self.steps = self.turn + 1, 0
        if self.turn >= len(self.task["question"]):
            self.termination = "user_stop"
            return []
        return self.user()

    def seen(self, messages):
        is_over = self.termination is not None
        return {
            "turn": None if is_over else "agent",
            "done": is_over,
            "termination": self.termination,
            "messages": messages,
        }


def hello():
    """Versions and data."""
    names = [f"BFCL_v4_multi_turn_{category}.json" for category in CATEGORIES]
    files = [folder / name for folder in (DATA, DATA / "possible_answer") for name in names]
    files += sorted((DATA / "multi_turn_func_doc").glob("*.json"))
    files += sorted((PACKAGE / "eval_checker/multi_turn_eval").rglob("*.py"))
    total = hashlib.sha256()
    for path in files:
        total.update(path.read_bytes())
    return {
        "protocol": PROTOCOL,
        "benchmark": "bfcl",
        "version": importlib.metadata.version("bfcl-eval"),
        "python": sys.version.split()[0],
        "data": {"multi_turn": total.hexdigest()[:16]},
        "seconds": round(IMPORT_SECONDS, 3),
    }


def list_tasks():
    """Tasks by id: category and scenario, which the categories share."""
    return {
        "tasks": [
            {"id": name, "category": task["category"], "scenario": int(name.rsplit("_", 1)[1])}
            for name, task in tasks().items()
        ]
    }


def tools():
    """All tools of all classes; an episode has its own."""
    names = dict.fromkeys(name for task in tasks().values() for name in task["involved_classes"])
    merged = {}
    for name in names:
        for tool, schema in docs(name).items():
            merged.setdefault(tool, schema)
    return {"tools": list(merged.values())}


def reset(task_id, user="scripted"):
    """Open a task."""
    episode = Episode(task_of(task_id))
    name = str(len(EPISODES) and max(map(int, EPISODES)) + 1)
    EPISODES[name] = episode
    opening = episode.user()
    return {"episode": name, "system": "", "tools": list(episode.world.schemas().values()), **episode.seen(opening)}


def step(episode, role, message):
    """The agent speaks."""
    if episode not in EPISODES:
        raise BadRequest(f"there is no episode {episode!r}")
    if EPISODES[episode].termination is not None:
        raise BadRequest("the episode is over")
    return EPISODES[episode].seen(EPISODES[episode].take(message))


def evaluate(task_id, messages):
    """Whether every turn left the world as gold does and saw what gold sees; from the record alone."""
    task = task_of(task_id)
    right, verdict = 0, "a turn was never answered"
    episode, gold, turn_results, all_results = Episode(task), World(task), [], []
    for message in messages:
        if message["role"] != "assistant" or episode.termination is not None:
            continue
        turn = episode.turn
        replies = episode.take(message)
        if calls_of(message):
            results = [reply["content"] for reply in replies]
            turn_results += results
            all_results += results
        if episode.termination == "max_steps":
            verdict = "more steps in a turn than BFCL allows"
            break
        if episode.turn > turn:
            verdict = turn_verdict(task, turn, episode.world, gold, turn_results, all_results)
            if verdict:
                break
            right, turn_results = right + 1, []
    turns = len(task["gold"])
    success = right == turns
    return {
        "reward": float(success),
        "success": success,
        "parts": {"turns": right / turns},
        "detail": "" if success else verdict,
    }


def turn_verdict(task, turn, world, gold, turn_results, all_results):
    """What BFCL's checker finds wrong with a turn, "" for nothing."""
    expected = [gold.call(*gold_call(gold, text)) for text in task["gold"][turn]]
    if not expected:
        return ""
    if not turn_results:
        return f"no call in turn {turn}"
    for check in (
        state_checker(world.instances, gold.instances),
        response_checker(all_results, expected, turn),
    ):
        if not check["valid"]:
            return f"turn {turn}: {check['error_type']}"
    return ""


def reference(task_id):
    """The gold calls as assistant messages, one each but where there are too many, each turn closed by one without."""
    task = task_of(task_id)
    world, messages = World(task), []
    for turn in task["gold"]:
        calls = [dict(zip(("name", "arguments"), gold_call(world, text), strict=True)) for text in turn]
        size = -(-len(calls) // MAXIMUM_STEP_LIMIT)
        for start in range(0, len(calls), size or 1):
            parallel = [{"type": "function", "function": call} for call in calls[start : start + size]]
            messages.append({"role": "assistant", "content": "", "tool_calls": parallel})
        messages.append(CLOSING)
    return {"messages": messages}


def idle(task_id):
    """The record of an agent that says nothing to whatever the user asks."""
    episode = Episode(task_of(task_id))
    messages = episode.user()
    while episode.termination is None:
        silence = {"role": "assistant", "content": ""}
        messages = [*messages, silence, *episode.take(silence)]
    return {"messages": messages}


def close(episode):
    """Drop an episode."""
    EPISODES.pop(episode, None)
    return {}


def stats():
    """Open episodes and memory."""
    return {
        "episodes": len(EPISODES),
        "maxrss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    operations = (hello, list_tasks, tools, reset, step, evaluate, reference, idle, close, stats)
    serve({operation.__name__: operation for operation in operations}, REPLIES)
