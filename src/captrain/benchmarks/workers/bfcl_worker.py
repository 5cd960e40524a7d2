# pyright: reportMissingImports=false
"""BFCL's multi-turn categories behind the worker protocol: runs in an environment of its own that has `bfcl-eval`.

The user's turns are BFCL's, one after another: each time the agent answers without a call, the next is asked. Calls are
dispatched by name to the methods that a task documents, with arguments as given: nothing that an agent writes is ever
evaluated, as it is upstream. Instances are an episode's own, where upstream keeps them in module globals. `evaluate` is
a function of the task and the recorded messages: it plays both sides anew and asks BFCL's own checks, turn by turn.
"""

from scripted_play import Episodes, ScriptedEpisode, batches, calls_of, objection, patience
from worker_loop import LONGEST, BadRequest, protect, serve

REPLIES = protect()

import ast
import copy
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import pickle
from pathlib import Path
from random import Random

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

PACKAGE = Path(inspect.getfile(bfcl_eval)).parent
DATA = PACKAGE / "data"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's names of types, in JSON Schema's."""
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


TASKS, DOCS = {}, {}


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
        """Return the tools that the agent is offered, in the order of the documents: name -> schema."""
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


def gold_call(world, text):
    """A gold call as (tool, arguments): positional arguments are bound by the signature."""
    node = ast.parse(text, mode="eval").body
    tool = node.func.id
    values = [ast.literal_eval(value) for value in node.args]
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return tool, dict(inspect.signature(world.method(tool)).bind(*values, **keywords).arguments)


class Episode(ScriptedEpisode):
    """One task being played."""

    def __init__(self, task):
        self.task, self.world, self.turn, self.steps = task, World(task), 0, 0

    def tools(self):
        return list(self.world.schemas().values())

    def result(self, tool, arguments):
        return self.world.call(tool, arguments)

    def state(self):
        # A look-up that draws at random moves a generator, and changes nothing that a check or an agent could see.
        worlds = {name: vars(instance) for name, instance in self.world.instances.items()}
        return pickle.dumps({n: {k: v for k, v in w.items() if not isinstance(v, Random)} for n, w in worlds.items()})

    def score(self, messages):
        return evaluate(self.task["id"], messages)

    def refuses(self, result):
        return result.startswith("Error during execution") or result.startswith('{"error"')

    def opening(self):
        return self.user()

    def user(self):
        """Return what the user says in this turn; where it says nothing, the tools that come in it."""
        messages = [{"role": "user", "content": m["content"]} for m in self.task["question"][self.turn]]
        added = self.world.release(self.turn)
        if messages or not added:
            return messages
        functions = json.dumps([schema["function"] for schema in added])
        text = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions)
        return [{"role": "user", "content": text}]

    def take(self, message):
        """Answer an assistant message: with the results of its calls, or else with the user's next turn."""
        if calls_of(message):
            self.steps += 1
            if self.steps > MAXIMUM_STEP_LIMIT:
                self.termination = "max_steps"
                return []
            return self.results(message)
        self.turn, self.steps = self.turn + 1, 0
        if self.turn >= len(self.task["question"]):
            self.termination = "user_stop"
            return []
        return self.user()


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
        "version": importlib.metadata.version("bfcl-eval"),
        "data": {"multi_turn": total.hexdigest()[:16]},
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


def evaluate(task_id, messages):
    """Score a record by itself: every turn must leave the world as gold does, and see what gold sees."""
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
    """Return what BFCL's checkers find wrong with a turn, "" for nothing."""
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
        messages += batches([gold_call(world, text) for text in turn], MAXIMUM_STEP_LIMIT)
        messages.append(CLOSING)
    return {"messages": messages}


if __name__ == "__main__":
    operations = (hello, list_tasks, tools, evaluate, reference)
    episodes = Episodes(lambda task_id: Episode(task_of(task_id)))
    serve({**{operation.__name__: operation for operation in operations}, **episodes.operations()}, REPLIES)
