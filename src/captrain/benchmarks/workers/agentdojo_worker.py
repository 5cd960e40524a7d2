# pyright: reportMissingImports=false
"""AgentDojo's user tasks behind the worker protocol: runs in an environment of its own that has `agentdojo`.

A suite's world is the one without any injection. Calls go through AgentDojo's own `FunctionsRuntime`, which looks a
tool up by name and checks its arguments; nothing that an agent writes is ever evaluated. `evaluate` is a function of
the task and the recorded messages: it plays the calls anew and asks the task's own `utility`. The clock that the tools
read stands still, so that the same calls always see the same.

AgentDojo imports the libraries of all vendors that it can ask. Its tasks need none of them, so that the packages that
hold those are stood in for, and an environment without them will do.
"""

from scripted_play import Episodes, ScriptedEpisode, batches
from worker_loop import LONGEST, BadRequest, digest, objection, patience, protect, serve

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
"""Modules of AgentDojo that are not run, with what is taken from them; what lies below them can still be imported."""
for name, values in STAND_INS.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values, __path__=[str(PACKAGE.joinpath(*name.split(".")[1:]))])

import deepdiff.diff

DIFFERENCE = deepdiff.diff.DeepDiff


def unlike(before, after):
    """Two values of a world, without the fields and entries in which they are the same."""
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


# AgentDojo's comparison of worlds takes most of a verdict, and is quicker without what is the same on both sides.
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
"""Version of the tasks, as AgentDojo counts: the last of its 0.1.35."""
VERSIONS = (VERSION, "v1.2.1", "v1.2", "v1.1.2", "v1.1.1", "v1.1", "v1")
"""That runs in logs may be of, which do not say it."""
NAMES = ("workspace", "travel", "banking", "slack")
SUITES = {name: suite for name, suite in get_suites(VERSION).items() if name in NAMES}
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


@functools.cache
def pickled_world(version, name, injections):
    """A fresh world of a suite."""
    return pickle.dumps(get_suites(version)[name].load_and_inject_default_environment(json.loads(injections)))


def fresh_world(name, version=VERSION, injections=None):
    """A fresh world of a suite, without injections where a log does not name any."""
    return pickle.loads(pickled_world(version, name, json.dumps(injections or {})))


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


def task_of(task_id, version):
    """A suite and a task of it, by suite/name."""
    name, _, task = task_id.partition("/")
    suite = get_suites(version).get(name) if name in NAMES and version in VERSIONS else None
    if suite is None or task not in suite.user_tasks:
        raise BadRequest(f"there is no task {task_id!r}")
    return suite, suite.user_tasks[task]


@functools.lru_cache(20_000)
def worded(pickled):
    """A result of a tool as text. To word many records takes longer than all else, and replays do so over and over."""
    return tool_result_to_str(pickle.loads(pickled))


class Episode(ScriptedEpisode):
    """One task being played, by suite/name."""

    # The system message that AgentDojo gives the agent by default.
    system = yaml.safe_load((PACKAGE / "data/system_messages.yaml").read_text(encoding="utf-8"))["default"]

    def __init__(self, task_id, user="scripted", version=VERSION, injections=None):
        suite, self.task = task_of(task_id, version)
        self.fresh = lambda: self.task.init_environment(fresh_world(suite.name, version, injections))
        self.world, self.runtime = self.fresh(), FunctionsRuntime(suite.tools)
        self.calls, self.rounds, self.answer, self.is_refused = [], 0, "", False

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
        """The result of a call as AgentDojo words it."""
        self.is_refused = True
        if not isinstance(tool, str) or tool not in self.runtime.functions:
            return f"Invalid tool {str(tool)[:100]} provided."
        if problem := objection(arguments):
            return f"ValidationError: {problem}"
        # A text that is written like a list is one, as AgentDojo reads them.
        for name, value in arguments.items():
            if isinstance(value, str) and value.strip().startswith("[") and len(value) <= LONGEST_LIST:
                with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                    read = ast.literal_eval(value)
                    arguments = {**arguments, name: read if isinstance(read, list) else value}
        self.calls.append(FunctionCall(function=tool, args=copy.deepcopy(arguments)))
        try:
            with patience():
                result, error = self.runtime.run_function(self.world, tool, arguments)
                self.is_refused = bool(error)
                return error[:LONGEST] if error else worded(pickle.dumps(result))
        except Exception as error:
            self.is_refused = True
            return f"{type(error).__name__}: {str(error)[:LONGEST]}"

    def refuses(self, result):
        return self.is_refused

    def state(self):
        return self.world.model_dump_json()

    def score(self, messages):
        """AgentDojo's verdict. Gold and silence make no `utility` raise, so that one that does looks for what the agent
        has taken away."""
        before = self.fresh()
        try:
            verdict = self.task.utility_from_traces(self.answer, before, self.world, self.calls)
            if verdict is None:
                verdict = self.task.utility(self.answer, before, self.world)
        except Exception:
            verdict = False
        return {"reward": float(bool(verdict)), "success": bool(verdict), "parts": {"utility": float(bool(verdict))}}


def hello():
    """Versions and data."""
    files = sorted((PACKAGE / "data").rglob("*.yaml"))
    files += sorted(path for name in ("default_suites", "task_suite") for path in (PACKAGE / name).rglob("*.py"))
    files += [PACKAGE / "functions_runtime.py", PACKAGE / "agent_pipeline/tool_execution.py"]
    return {"version": importlib.metadata.version("agentdojo"), "data": {"tasks": VERSION, "suites": digest(files)}}


def list_tasks():
    """Tasks by id: suite, and a scenario that a combined task shares with those that it is made of."""
    entries = []
    for suite in SUITES:
        roots = {name: name for name in SUITES[suite].user_tasks}
        for name, task in SUITES[suite].user_tasks.items():
            # AgentDojo makes such tasks in a function, of whose variables alone its parts can be told.
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
    merged = {}
    for suite in SUITES.values():
        for tool in suite.tools:
            merged.setdefault(tool.name, schema_of(tool))
    return {"tools": list(merged.values())}


def evaluate(task_id, messages):
    """Score a record: the task's `utility` must hold after the recorded calls and the agent's last words."""
    episode = Episode(task_id)
    for message in messages:
        if message["role"] == "assistant" and episode.turn is not None:
            episode.take("agent", message)
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
                episode = Episode(task_id, version=version, injections=injections)
                spoken = [message for message in messages if message["role"] == "assistant"]
                results = [reply["content"] for message in spoken for reply in episode.take("agent", message)]
                agrees = episode.score(messages)["success"] == passed
                versions[version] = sum(map(operator.eq, results, logged)), agrees
                if versions[version] == (len(logged), True):
                    break
    return {"version": max(versions, key=lambda version: versions[version], default=None)}


if __name__ == "__main__":
    serve([*Episodes(Episode).operations(), hello, list_tasks, tools, evaluate, reference, locate], REPLIES)
