# pyright: reportMissingImports=false
"""AgentDojo's user tasks behind the worker protocol: runs in an environment of its own that has `agentdojo`.

A suite's world is the one without any injection. Calls go through AgentDojo's own `FunctionsRuntime`, which looks a
tool up by name and checks its arguments; nothing that an agent writes is ever evaluated. `evaluate` is a function of
the task and the recorded messages: it plays the calls anew and asks the task's own `utility`. The clock that the tools
read stands still, so that the same calls always see the same.

AgentDojo imports the libraries of all vendors that it can ask. Its tasks need none of them, so that the packages that
hold those are stood in for, and an environment without them will do.
"""

from scripted_play import Episodes, ScriptedEpisode, batches, calls_of, objection, patience
from worker_loop import LONGEST, BadRequest, protect, serve

REPLIES = protect()

import ast
import copy
import datetime
import hashlib
import importlib.metadata
import inspect
import json
import operator
import pickle
import sys
import types
from contextlib import suppress
from pathlib import Path

import agentdojo

PACKAGE = Path(agentdojo.__path__[0])
NO_TOOL = "<no tool>"


def stand_in(name, **values):
    """A module of AgentDojo that is not run: what lies below it can still be imported."""
    module = types.ModuleType(name)
    module.__path__ = [str(PACKAGE.joinpath(*name.split(".")[1:]))]
    vars(module).update(values)
    sys.modules[name] = module


stand_in("agentdojo.agent_pipeline")
stand_in("agentdojo.agent_pipeline.llms")
stand_in("agentdojo.agent_pipeline.llms.google_llm", EMPTY_FUNCTION_NAME=NO_TOOL)
stand_in("agentdojo.logging", Logger=None)

import deepdiff.diff

EXACT = deepdiff.diff.DeepDiff


def difference(before, after, **options):
    """AgentDojo's comparison of worlds, which takes most of a verdict, without what is the same on both sides."""
    first, second = unlike(before, after)
    return EXACT(first, second, **options)


def unlike(before, after):
    """Two values of a world, without the fields and entries in which they are the same."""
    if type(before) is not type(after) or not isinstance(before, (dict, BaseModel)):
        return before, after
    sides = [dict(side) if isinstance(side, dict) else dict(vars(side)) for side in (before, after)]
    for key in sides[0].keys() & sides[1].keys():
        if to_json(sides[0][key]) == to_json(sides[1][key]):
            sides[0][key] = sides[1][key] = None
        else:
            sides[0][key], sides[1][key] = unlike(sides[0][key], sides[1][key])
    if isinstance(before, dict):
        return tuple(sides)
    copies = copy.copy(before), copy.copy(after)
    for model, fields in zip(copies, sides, strict=True):
        vars(model).update(fields)
    return copies


setattr(deepdiff.diff, "DeepDiff", difference)  # noqa: B010

import yaml
from agentdojo.agent_pipeline.tool_execution import tool_result_to_str
from agentdojo.default_suites.v1.tools import cloud_drive_client, email_client
from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
from agentdojo.task_suite.load_suites import get_suites
from pydantic import BaseModel
from pydantic_core import to_json

setattr(deepdiff.diff, "DeepDiff", EXACT)  # noqa: B010

VERSION = "v1.2.2"
"""Version of the tasks, as AgentDojo counts: the last of its 0.1.35."""
VERSIONS = (VERSION, "v1.2.1", "v1.2", "v1.1.2", "v1.1.1", "v1.1", "v1")
"""That runs in logs may be of, which do not say it."""
SUITES = {
    name: suite for name, suite in get_suites(VERSION).items() if name in ("workspace", "travel", "banking", "slack")
}
ROUNDS = 15
"""Messages with calls that are answered, as in AgentDojo's own loop; the calls of a further one are not."""
LONGEST_LIST = 10_000
"""Characters of a text that is read as a list, as AgentDojo does."""
NOW = datetime.datetime(2025, 1, 1, 12, 0)
"""After everything in the worlds: a file that is changed is newer than it was."""


class Clock(datetime.datetime):
    """A time whose present stands still."""

    @classmethod
    def now(cls, tz=None):
        return NOW


for client in (cloud_drive_client, email_client):
    client.datetime = types.SimpleNamespace(**{**vars(datetime), "datetime": Clock})

WORLDS, ANSWERS = {}, {}
MOST_ANSWERS = 20_000
"""Answers of calls in replays that are kept."""


def fresh_world(suite, injections=None):
    """A fresh world of a suite, without injections where a log does not name any."""
    key = id(suite), repr(injections)
    if key not in WORLDS:
        WORLDS[key] = pickle.dumps(suite.load_and_inject_default_environment(injections or {}))
    return pickle.loads(WORLDS[key])


def task_of(task_id, version=VERSION):
    """A suite and a task of it, by suite/name."""
    name, _, task = str(task_id).partition("/")
    suites = SUITES if version == VERSION else get_suites(version) if version in VERSIONS else {}
    if name not in SUITES or name not in suites or task not in suites[name].user_tasks:
        raise BadRequest(f"there is no task {task_id!r}")
    return suites[name], suites[name].user_tasks[task]


def parts_of(task):
    """The tasks that a task is combined from: AgentDojo makes such ones, of which nothing else tells."""
    values = inspect.getclosurevars(task.ground_truth).nonlocals.values()
    return [value.ID for value in values if getattr(value, "ID", None) and hasattr(value, "ground_truth")]


def schema_of(tool):
    """A tool as an OpenAI schema, as AgentDojo gives it to a model; a type by reference is written out."""
    parameters = tool.parameters.model_json_schema()
    definitions = parameters.pop("$defs", {})

    def plain(schema):
        if isinstance(schema, list):
            return [plain(element) for element in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            inner = {key: value for key, value in schema.items() if key != "$ref"}
            return plain({**definitions[schema["$ref"].rsplit("/", 1)[1]], **inner})
        return {key: plain(value) for key, value in schema.items()}

    function = {"name": tool.name, "description": tool.description, "parameters": plain(parameters)}
    return {"type": "function", "function": function}


def with_lists(arguments):
    """Arguments in which a text that is written like a list is one, as AgentDojo reads them."""
    result = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, str) and value.strip().startswith("[") and len(value) <= LONGEST_LIST:
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                read = ast.literal_eval(value)
                result[name] = read if isinstance(read, list) else value
    return result


class Episode(ScriptedEpisode):
    """One task being played."""

    def __init__(self, task_id, version=VERSION, injections=None):
        self.suite, self.task = task_of(task_id, version)
        self.injections = injections
        self.world, self.digest, self.behind = self.fresh(), None, []
        self.runtime = FunctionsRuntime(self.suite.tools)
        self.calls, self.rounds, self.answer, self.is_refused = [], 0, "", False

    def fresh(self):
        """The world as the task begins."""
        return self.task.init_environment(fresh_world(self.suite, self.injections))

    @property
    def system(self):
        return system_message()

    def opening(self):
        return [{"role": "user", "content": self.task.PROMPT}]

    def tools(self):
        return [schema_of(tool) for tool in self.suite.tools]

    def result(self, tool, arguments):
        """The result of a call as AgentDojo words it."""
        self.is_refused = True
        if not isinstance(tool, str) or tool not in self.runtime.functions:
            return f"Invalid tool {str(tool)[:100]} provided."
        if problem := objection(arguments):
            return f"ValidationError: {problem}"
        arguments = with_lists(arguments)
        self.calls.append(FunctionCall(function=tool, args=copy.deepcopy(arguments)))
        if self.replay is None:
            result, self.is_refused = self.run(tool, arguments)
            return result
        # To word what many records are takes longer than all else, and replays make the same calls over and over.
        key = id(self.suite), tool, json.dumps(arguments, sort_keys=True), self.state()
        if key in ANSWERS:
            result, self.is_refused, after = ANSWERS[key]
            self.behind += [self.calls[-1]] if after != self.digest else []
            self.digest = after
            return result
        self.catch_up()
        (result, self.is_refused), self.digest = self.run(tool, arguments), None
        if len(ANSWERS) < MOST_ANSWERS:
            ANSWERS[key] = result, self.is_refused, self.state()
        return result

    def catch_up(self):
        """Make the calls that were answered from memory and change the world."""
        for call in self.behind:
            self.run(call.function, copy.deepcopy(call.args))
        self.behind = []

    def run(self, tool, arguments):
        """The result of a call, and whether it is a refusal."""
        try:
            with patience():
                result, error = self.runtime.run_function(self.world, tool, arguments)
                return (error[:LONGEST], True) if error else (tool_result_to_str(result), False)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:LONGEST]}", True

    def state(self):
        if self.digest is None:
            self.digest = hashlib.sha256(self.world.model_dump_json().encode()).digest()
        return self.digest

    def score(self, messages):
        success, detail = self.success()
        return {"reward": float(success), "success": success, "parts": {"utility": float(success)}, "detail": detail}

    def refuses(self, result):
        return self.is_refused

    def take(self, message):
        content = message.get("content")
        self.answer = content if isinstance(content, str) else ""
        if calls_of(message) and self.rounds < ROUNDS:
            self.rounds += 1
            return self.results(message)
        self.termination = "max_steps" if calls_of(message) else "agent_stop"
        return []

    def success(self):
        """AgentDojo's verdict, and what it stumbled over: gold and silence make no `utility` raise, so that one that
        does looks for what the agent has taken away."""
        self.catch_up()
        before = self.fresh()
        try:
            verdict = self.task.utility_from_traces(self.answer, before, self.world, self.calls)
            if verdict is None:
                verdict = self.task.utility(self.answer, before, self.world)
        except Exception as error:
            return False, f"utility raised {type(error).__name__}: {str(error)[:LONGEST]}"
        return bool(verdict), "" if verdict else "utility is false"


def system_message():
    """Read the system message that AgentDojo gives the agent by default."""
    return yaml.safe_load((PACKAGE / "data/system_messages.yaml").read_text(encoding="utf-8"))["default"]


def hello():
    """Versions and data."""
    files = sorted((PACKAGE / "data").rglob("*.yaml"))
    files += sorted(path for name in ("default_suites", "task_suite") for path in (PACKAGE / name).rglob("*.py"))
    total = hashlib.sha256()
    for path in [*files, PACKAGE / "functions_runtime.py", PACKAGE / "agent_pipeline/tool_execution.py"]:
        total.update(path.read_bytes())
    return {
        "version": importlib.metadata.version("agentdojo"),
        "data": {"tasks": VERSION, "suites": total.hexdigest()[:16]},
    }


def list_tasks():
    """Tasks by id: suite, and a scenario that a combined task shares with those that it is made of."""
    entries = []
    for suite in SUITES:
        roots = {name: name for name in SUITES[suite].user_tasks}
        for name, task in SUITES[suite].user_tasks.items():
            for part in parts_of(task):
                old, new = roots[part], roots[name]
                roots = {key: new if root == old else root for key, root in roots.items()}
        entries += [
            {"id": f"{suite}/{name}", "category": suite, "scenario": f"{suite}/{root}"} for name, root in roots.items()
        ]
    return {"tasks": entries}


def tools():
    """All tools of all suites; an episode has its own."""
    merged = {}
    for suite in SUITES.values():
        for tool in suite.tools:
            merged.setdefault(tool.name, schema_of(tool))
    return {"tools": list(merged.values())}


def evaluate(task_id, messages, **world):
    """Score a record: the task's `utility` must hold after the recorded calls and the agent's last words."""
    episode = Episode(task_id, **world)
    for message in messages:
        if message["role"] == "assistant" and episode.termination is None:
            episode.take(message)
    return episode.score(messages)


def reference(task_id, **world):
    """The calls of the task's `ground_truth` as assistant messages, and what it then answers."""
    episode = Episode(task_id, **world)
    calls = [(call.function, dict(call.args)) for call in episode.task.ground_truth(episode.world)]
    closing = {"role": "assistant", "content": episode.task.GROUND_TRUTH_OUTPUT or "Done."}
    return {"messages": [*batches(calls, ROUNDS), closing]}


def locate(task_id, messages, passed, injections=None):
    """The version of the tasks that a run is of: of those with its prompt the one in which its calls return the most of
    what they have returned there, and which says the same of it; None where no version has the prompt."""
    prompt = next((message["content"] for message in messages if message["role"] == "user"), None)
    logged = [message["content"] for message in messages if message["role"] == "tool"]
    versions = {}
    for version in VERSIONS:
        with suppress(BadRequest):
            if prompt == task_of(task_id, version)[1].PROMPT:
                episode = Episode(task_id, version, injections)
                episode.replay = []
                spoken = [message for message in messages if message["role"] == "assistant"]
                results = [reply["content"] for message in spoken for reply in episode.take(message)]
                versions[version] = sum(map(operator.eq, results, logged)), episode.success()[0] == passed
                if versions[version] == (len(logged), True):
                    break
    return {"version": max(versions, key=lambda version: versions[version], default=None)}


if __name__ == "__main__":
    operations = (hello, list_tasks, tools, evaluate, reference, locate)
    episodes = Episodes(Episode)
    serve({**{operation.__name__: operation for operation in operations}, **episodes.operations()}, REPLIES)
