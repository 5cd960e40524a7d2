# pyright: reportMissingImports=false, reportArgumentType=false
"""BFCL's multi-turn categories behind the worker protocol. It runs in an environment that has `bfcl-eval`.

The user's turns are BFCL's: each time the agent answers without a call, the next turn follows. Calls are dispatched by
name to the methods that a task documents, with the given arguments. Upstream evaluates what an agent writes; this
worker never does. Upstream keeps instances in module globals; here each episode has its own. `evaluate` depends only on
the task and the recorded messages: it replays both sides and applies BFCL's own checks, turn by turn.
"""

from worker_loop import (
    LONGEST,
    BadRequest,
    Episodes,
    ScriptedEpisode,
    batches,
    digest,
    listed_once,
    objection,
    patience,
    protect,
    replaying,
    serve,
)

REPLIES = protect()

import ast
import copy
import functools
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
"""BFCL's type names -> those of JSON Schema."""
CLOSING = {"role": "assistant", "content": "Done."}


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@functools.cache
def tasks():
    """Tasks by id, each with its gold turns."""
    tasks = {}
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category}.json"
        gold = {entry["id"]: entry["ground_truth"] for entry in lines(DATA / "possible_answer" / name)}
        for entry in lines(DATA / name):
            tasks[entry["id"]] = {**entry, "category": category, "gold": gold[entry["id"]]}
    return tasks


@functools.cache
def docs(name):
    """The documented functions of a class, as OpenAI schemas by name."""
    schemas = {}
    for entry in lines(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]):
        function = {"name": entry["name"], "description": entry["description"]}
        function["parameters"] = converted(entry["parameters"])
        schemas[entry["name"]] = {"type": "function", "function": function}
    return schemas


def converted(schema):
    """A parameter's schema with the type names of JSON Schema."""
    result = {key: value for key, value in schema.items() if key in ("type", "description", "required", "enum")}
    result["type"] = TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        result["properties"] = {name: converted(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        result["items"] = converted(schema["items"])
    return result


class Episode(ScriptedEpisode):
    """One task being played, in instances of its classes.

    number: the user's turn. steps: messages with calls that were answered in it. hidden: tools not offered, or not yet.
    """

    def __init__(self, task_id, user="scripted"):
        if task_id not in tasks():
            raise BadRequest(f"there is no task {task_id!r}")
        self.task, self.number, self.steps, self.instances = tasks()[task_id], 0, 0, {}
        for name in self.task["involved_classes"]:
            instance = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                config = copy.deepcopy(self.task["initial_config"].get(name, {}))
                instance._load_scenario(config, long_context=self.task["category"] == "long_context")
            self.instances[name] = instance
        self.hidden = {name for names in self.task.get("missed_function", {}).values() for name in names}
        self.hidden |= set(self.task.get("excluded_function") or [])
        self.tools = list(self.schemas().values())

    def schemas(self):
        """The tools that the agent is offered, in the order of the documents: name -> schema."""
        offered = {}
        for name in self.instances:
            for tool, schema in docs(name).items():
                if tool not in self.hidden:
                    offered.setdefault(tool, schema)
        return offered

    def opening(self):
        """The user's messages of this turn; if there are none, a message with the tools that this turn adds."""
        messages = [{"role": "user", "content": m["content"]} for m in self.task["question"][self.number]]
        added = self.task.get("missed_function", {}).get(str(self.number), [])
        self.hidden -= set(added)
        if messages or not added:
            return messages
        functions = [schema["function"] for tool, schema in self.schemas().items() if tool in added]
        text = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=json.dumps(functions))
        return [{"role": "user", "content": text}]

    def take(self, role, message):
        """Answer an assistant message with the results of its calls, or with the user's next turn."""
        if message.get("tool_calls"):
            self.steps += 1
            if self.steps <= MAXIMUM_STEP_LIMIT:
                return self.results(message)
        else:
            self.number, self.steps = self.number + 1, 0
            if self.number < len(self.task["question"]):
                return self.opening()
        self.turn = None
        return []

    def method(self, tool):
        """The method behind a tool, or None."""
        return next((getattr(instance, tool) for name, instance in self.instances.items() if tool in docs(name)), None)

    def result(self, tool, arguments):
        """The result of a call in BFCL's words, and whether it is an error. Tools that are not offered yet work, too:
        one gold solution calls one."""
        method = self.method(tool) if isinstance(tool, str) else None
        if method is None:
            return f"Error during execution: there is no tool {str(tool)[:100]}", True
        if problem := objection(arguments):
            return f"Error during execution: {problem}", True
        try:
            with patience():
                result = method(**copy.deepcopy(arguments))
        except Exception as error:
            return f"Error during execution: {str(error)[:LONGEST]}", True
        try:
            text = json.dumps(result) if isinstance(result, dict) else str(result)
        except (TypeError, ValueError):
            text = str(result)
        return text, text.startswith(("Error during execution", '{"error"'))

    def state(self):
        # A read tool may draw from a random generator. Neither a check nor an agent sees the generator's state.
        worlds = {name: vars(instance) for name, instance in self.instances.items()}
        return pickle.dumps({n: {k: v for k, v in w.items() if not isinstance(v, Random)} for n, w in worlds.items()})

    def gold(self, turn):
        """The gold calls of a turn as (tool, arguments); the signature names positional arguments."""
        calls = []
        for text in self.task["gold"][turn]:
            node = ast.parse(text, mode="eval").body
            values = [ast.literal_eval(value) for value in node.args]
            keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            bound = inspect.signature(self.method(node.func.id)).bind(*values, **keywords)
            calls.append((node.func.id, dict(bound.arguments)))
        return calls

    def score(self, messages):
        return evaluate(self.task["id"], messages)


def hello():
    """Version and hashes."""
    names = [f"BFCL_v4_multi_turn_{category}.json" for category in CATEGORIES]
    files = [folder / name for folder in (DATA, DATA / "possible_answer") for name in names]
    files += sorted((DATA / "multi_turn_func_doc").glob("*.json"))
    files += sorted((PACKAGE / "eval_checker/multi_turn_eval").rglob("*.py"))
    return {"data": {"version": importlib.metadata.version("bfcl-eval"), "multi_turn": digest(files)}}


def list_tasks():
    """All tasks with category and scenario; the categories share scenarios."""
    return {
        "tasks": [
            {"id": name, "category": task["category"], "scenario": int(name.rsplit("_", 1)[1])}
            for name, task in tasks().items()
        ]
    }


def tools():
    """All tools of all classes; an episode has its own."""
    names = dict.fromkeys(name for task in tasks().values() for name in task["involved_classes"])
    return listed_once(schema for name in names for schema in docs(name).values())


def evaluate(task_id, messages):
    """Score a record: every turn must leave the gold world and must have seen the gold results."""
    episode, gold = Episode(task_id), Episode(task_id)
    right, turn_results, all_results = 0, [], []
    for message in messages:
        if message["role"] != "assistant" or episode.turn is None:
            continue
        number = episode.number
        replies = episode.take("agent", message)
        if message.get("tool_calls"):
            turn_results += [reply["content"] for reply in replies]
            continue
        all_results += turn_results
        expected = [gold.result(*call)[0] for call in gold.gold(number)]
        if expected and not (
            turn_results
            and state_checker(episode.instances, gold.instances)["valid"]
            and response_checker(all_results, expected, number)["valid"]
        ):
            break
        right, turn_results = right + 1, []
    share = right / len(episode.task["gold"])
    return {"reward": float(share == 1), "success": share == 1, "parts": {"turns": share}}


def reference(task_id):
    """The gold calls as assistant messages; a message without calls closes each turn."""
    episode, messages = Episode(task_id), []
    for turn in range(len(episode.task["gold"])):
        messages += [*batches(episode.gold(turn), MAXIMUM_STEP_LIMIT), CLOSING]
    return {"messages": messages}


if __name__ == "__main__":
    serve([*Episodes(Episode).operations(), replaying(Episode), hello, list_tasks, tools, evaluate, reference], REPLIES)
