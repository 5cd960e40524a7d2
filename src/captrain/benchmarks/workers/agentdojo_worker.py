# pyright: reportMissingImports=false
"""AgentDojo's user tasks behind the worker protocol. It runs in an environment that has `agentdojo`.

A suite's world is the one without injections. Calls go through AgentDojo's own `FunctionsRuntime`, which looks tools up
by name and checks their arguments. What an agent writes is never evaluated. `evaluate` depends only on the task and the
recorded messages: it replays the calls and asks the task's own `utility`. The clock that the tools read stands still,
so that the same calls always return the same.

AgentDojo imports the libraries of all vendors that it supports. Its tasks need none of them, so the modules that import
them are replaced by stand-ins, and the environment does not need the libraries.
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
import datetime
import functools
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
STAND_INS = {
    "agentdojo.agent_pipeline": {},
    "agentdojo.agent_pipeline.llms": {},
    "agentdojo.agent_pipeline.llms.google_llm": {"EMPTY_FUNCTION_NAME": "<no tool>"},
    "agentdojo.logging": {"Logger": None},
}
"""Modules of AgentDojo that are replaced, with the names that others import from them. Their submodules still load."""
for name, values in STAND_INS.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values, __path__=[str(PACKAGE.joinpath(*name.split(".")[1:]))])

import deepdiff.diff

DIFFERENCE = deepdiff.diff.DeepDiff


def unlike(before, after):
    """Two values of a world, without the fields and entries that are equal."""
    if type(before) is not type(after) or not isinstance(before, (dict, BaseModel)):
        return before, after
    first, second = copy.copy(before), copy.copy(after)
    fields, changed = (side if isinstance(side, dict) else vars(side) for side in (first, second))
    for key in fields.keys() & changed.keys():
        if to_json(fields[key]) == to_json(changed[key]):
            fields[key] = changed[key] = None
        else:
            fields[key], changed[key] = unlike(fields[key], changed[key])
    return first, second


# Comparing worlds takes most of AgentDojo's scoring time; it is faster without what is equal on both sides.
setattr(deepdiff.diff, "DeepDiff", lambda before, after, **options: DIFFERENCE(*unlike(before, after), **options))  # noqa: B010

import yaml
from agentdojo.agent_pipeline.tool_execution import tool_result_to_str
from agentdojo.default_suites.v1.tools import cloud_drive_client, email_client
from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
from agentdojo.task_suite.load_suites import get_suites
from pydantic import BaseModel
from pydantic_core import to_json

setattr(deepdiff.diff, "DeepDiff", DIFFERENCE)  # noqa: B010

VERSION = "v1.2.2"
"""AgentDojo's version of the tasks: the last one in its 0.1.35."""
VERSIONS = (VERSION, "v1.2.1", "v1.2", "v1.1.2", "v1.1.1", "v1.1", "v1")
"""Versions that a log, which does not name its version, may come from."""
NAMES = ("workspace", "travel", "banking", "slack")
SUITES = {name: suite for name, suite in get_suites(VERSION).items() if name in NAMES}
ROUNDS = 15
"""Messages with calls that are answered, as in AgentDojo's own loop; later calls are not."""
LONGEST_LIST = 10_000
"""Maximum number of characters of a text that is read as a list, as AgentDojo does."""
NOW = datetime.datetime(2025, 1, 1, 12, 0)
"""Later than everything in the worlds: a changed file is newer than before."""


class Clock(datetime.datetime):
    """A datetime whose `now` stands still."""

    @classmethod
    def now(cls, tz=None):
        return NOW


for client in (cloud_drive_client, email_client):
    client.datetime = types.SimpleNamespace(**{**vars(datetime), "datetime": Clock})


@functools.cache
def pickled_world(version, name, injections):
    return pickle.dumps(get_suites(version)[name].load_and_inject_default_environment(json.loads(injections)))


def fresh_world(name, version=VERSION, injections=None):
    """A fresh world of a suite, with the injections of a log, if it names any."""
    return pickle.loads(pickled_world(version, name, json.dumps(injections or {})))


def schema_of(tool):
    """The OpenAI schema of a tool, as AgentDojo gives it to a model, with references to types written out."""
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


def task_of(task_id, version):
    """The suite and the task of an id "suite/name"."""
    name, _, task = task_id.partition("/")
    suite = get_suites(version).get(name) if name in NAMES and version in VERSIONS else None
    if suite is None or task not in suite.user_tasks:
        raise BadRequest(f"there is no task {task_id!r}")
    return suite, suite.user_tasks[task]


@functools.lru_cache(20_000)
def worded(pickled):
    """A tool result as text. It is cached: formatting many records takes longer than anything else in a replay."""
    return tool_result_to_str(pickle.loads(pickled))


class Episode(ScriptedEpisode):
    """One task being played."""

    # AgentDojo's default system message.
    system = yaml.safe_load((PACKAGE / "data/system_messages.yaml").read_text(encoding="utf-8"))["default"]

    def __init__(self, task_id, user="scripted", version=VERSION, injections=None):
        suite, self.task = task_of(task_id, version)
        self.fresh = lambda: self.task.init_environment(fresh_world(suite.name, version, injections))
        self.world, self.runtime = self.fresh(), FunctionsRuntime(suite.tools)
        self.calls, self.rounds, self.answer = [], 0, ""

    @property
    def tools(self):
        return [schema_of(tool) for tool in self.runtime.functions.values()]

    def opening(self):
        return [{"role": "user", "content": self.task.PROMPT}]

    def take(self, role, message):
        content = message.get("content")
        self.answer = content if isinstance(content, str) else ""
        if message.get("tool_calls") and self.rounds < ROUNDS:
            self.rounds += 1
            return self.results(message)
        self.turn = None
        return []

    def result(self, tool, arguments):
        """The result of a call in AgentDojo's words, and whether it is an error."""
        if not isinstance(tool, str) or tool not in self.runtime.functions:
            return f"Invalid tool {str(tool)[:100]} provided.", True
        if problem := objection(arguments):
            return f"ValidationError: {problem}", True
        # AgentDojo reads a text that looks like a list as one.
        for name, value in arguments.items():
            if isinstance(value, str) and value.strip().startswith("[") and len(value) <= LONGEST_LIST:
                with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                    read = ast.literal_eval(value)
                    arguments = {**arguments, name: read if isinstance(read, list) else value}
        self.calls.append(FunctionCall(function=tool, args=copy.deepcopy(arguments)))
        try:
            with patience():
                result, error = self.runtime.run_function(self.world, tool, arguments)
                return (error[:LONGEST], True) if error else (worded(pickle.dumps(result)), False)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:LONGEST]}", True

    def state(self):
        return self.world.model_dump_json()

    def score(self, messages):
        """AgentDojo's verdict. No `utility` raises for the gold calls or for silence. If one raises, it looks for
        something that the agent has removed, and the task is failed."""
        before = self.fresh()
        try:
            verdict = self.task.utility_from_traces(self.answer, before, self.world, self.calls)
            if verdict is None:
                verdict = self.task.utility(self.answer, before, self.world)
        except Exception:
            verdict = False
        return {"reward": float(bool(verdict)), "success": bool(verdict), "parts": {"utility": float(bool(verdict))}}


def hello():
    """Versions and hashes."""
    files = sorted((PACKAGE / "data").rglob("*.yaml"))
    files += sorted(path for name in ("default_suites", "task_suite") for path in (PACKAGE / name).rglob("*.py"))
    files += [PACKAGE / "functions_runtime.py", PACKAGE / "agent_pipeline/tool_execution.py"]
    version = importlib.metadata.version("agentdojo")
    return {"data": {"version": version, "tasks": VERSION, "suites": digest(files)}}


def list_tasks():
    """All tasks with their suite, and a scenario, which a combined task shares with its parts."""
    entries = []
    for suite in SUITES:
        roots = {name: name for name in SUITES[suite].user_tasks}
        for name, task in SUITES[suite].user_tasks.items():
            # A function makes combined tasks; only its variables tell their parts.
            for part in inspect.getclosurevars(task.ground_truth).nonlocals.values():
                if getattr(part, "ID", None) and hasattr(part, "ground_truth"):
                    old, new = roots[part.ID], roots[name]
                    roots = {key: new if root == old else root for key, root in roots.items()}
        entries += [
            {"id": f"{suite}/{name}", "category": suite, "scenario": f"{suite}/{root}"} for name, root in roots.items()
        ]
    return {"tasks": entries}


def tools():
    """All tools of all suites; an episode has its own."""
    return listed_once(schema_of(tool) for suite in SUITES.values() for tool in suite.tools)


def evaluate(task_id, messages):
    """Score a record: the task's `utility` must hold after the recorded calls and the agent's last message."""
    episode = Episode(task_id)
    for message in messages:
        if message["role"] == "assistant" and episode.turn is not None:
            episode.take("agent", message)
    return episode.score(messages)


def reference(task_id, **world):
    """The calls of the task's `ground_truth` as assistant messages, then its answer."""
    episode = Episode(task_id, **world)
    calls = [(call.function, dict(call.args)) for call in episode.task.ground_truth(episode.world)]
    closing = {"role": "assistant", "content": episode.task.GROUND_TRUTH_OUTPUT or "Done."}
    return {"messages": [*batches(calls, ROUNDS), closing]}


def locate(task_id, messages, passed, injections=None):
    """The version of the tasks that a run comes from, or None if no version has its prompt.

    Among the versions with the run's prompt, prefer the one whose calls return most of the logged results, then the one
    whose verdict agrees.
    """
    prompt = next((message["content"] for message in messages if message["role"] == "user"), None)
    logged = [message["content"] for message in messages if message["role"] == "tool"]
    versions = {}
    for version in VERSIONS:
        with suppress(BadRequest):
            if prompt == task_of(task_id, version)[1].PROMPT:
                episode = Episode(task_id, version=version, injections=injections)
                spoken = [message for message in messages if message["role"] == "assistant"]
                results = [reply["content"] for message in spoken for reply in episode.take("agent", message)]
                agrees = episode.score(messages)["success"] == passed
                versions[version] = sum(map(operator.eq, results, logged)), agrees
                if versions[version] == (len(logged), True):
                    break
    return {"version": max(versions, key=lambda version: versions[version], default=None)}


if __name__ == "__main__":
    operations = (replaying(Episode), hello, list_tasks, tools, evaluate, reference, locate)
    serve([*Episodes(Episode).operations(), *operations], REPLIES)
