# pyright: reportMissingImports=false
"""ToolSandbox behind the worker protocol: runs in ToolSandbox's own environment, needs no model, no key, no network.

Its data are relative to the clock, and its tools read the clock. Here the clock stands at an instant given by CLOCK and
moves by one second with each call of a tool, so that a task is the same on every day and `evaluate` can play a record
again: it builds a fresh world, repeats what agent and user said, and asks ToolSandbox for the similarity. ToolSandbox
keeps its world in one global; it is exchanged for each request, and requests come one at a time.

Five tools ask outside services. An answer of theirs is kept in the folder ANSWERS and given to whoever asks the same
again, so that a record scores as it was played; without a kept answer and RAPID_API_KEY the request of ours fails, and
not the tool alone.

What a model writes is never executed: calls are rebuilt from a tool that exists, JSON values, and an id of our own.
"""

import os
import sys
import time

import worker_loop
from worker_loop import BadRequest, Episodes, call_of, digest, protect, serve

REPLIES = protect()
os.environ["TZ"] = "UTC"
time.tzset()
import copy
import datetime
import functools
import hashlib
import inspect
import json
import types
from pathlib import Path

import networkx
import requests
import tool_sandbox
from tool_sandbox.common.execution_context import (
    DatabaseNamespace,
    RoleType,
    get_current_context,
    set_current_context,
)
from tool_sandbox.common.message_conversion import Message
from tool_sandbox.common.tool_conversion import convert_to_openai_tool, convert_to_openai_tools
from tool_sandbox.common.tool_discovery import ToolBackend
from tool_sandbox.roles.base_role import BaseRole
from tool_sandbox.roles.execution_environment import ExecutionEnvironment
from tool_sandbox.roles.openai_api_user import OpenAIAPIUser
from tool_sandbox.scenarios.insufficient_information_scenarios import named_insufficient_information_scenarios
from tool_sandbox.scenarios.multiple_tool_call_scenarios import named_multiple_tool_call_scenarios
from tool_sandbox.scenarios.multiple_user_turn_scenarios import named_multiple_user_turn_scenarios
from tool_sandbox.scenarios.single_tool_call_scenarios import named_single_tool_call_scenarios
from tool_sandbox.tools import rapid_api_search_tools

CLOCK = datetime.datetime.fromisoformat(os.environ["CAPTRAIN_CLOCK"])
CATEGORIES = {
    "single_tool_call": named_single_tool_call_scenarios,
    "multiple_tool_call": named_multiple_tool_call_scenarios,
    "multiple_user_turn": named_multiple_user_turn_scenarios,
    "insufficient_information": named_insufficient_information_scenarios,
}
EXTERNAL = {
    "search_lat_lon",
    "search_location_around_lat_lon",
    "search_weather_around_lat_lon",
    "search_stock",
    "convert_currency",
}
ANSWERS = Path(os.environ.get("CAPTRAIN_ANSWERS", ""))
"""Folder of what outside services have answered."""
NOBODY = "none"
"""A key that opens nothing."""
CHANGING = {"add_to_database", "update_database", "remove_from_database"}
"""Functions of ToolSandbox by which a tool changes records."""
FAULTS = []
"""Reasons why a service has not answered, during one request of ours."""
LEAVE = {
    "role": "user",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "end_conversation", "arguments": {}}}],
}
ENVIRONMENT, AGENT, USER = RoleType.EXECUTION_ENVIRONMENT, RoleType.AGENT, RoleType.USER
GO_ON = {"role": "user", "content": "Go on."}
PERFECT = 1 - 1e-6


class Clock(datetime.datetime):
    """ToolSandbox's `datetime.datetime`: another now, and otherwise the same."""

    seconds = 0

    @classmethod
    def now(cls, tz=None):
        return (CLOCK + datetime.timedelta(seconds=cls.seconds)).replace(tzinfo=tz)


def stop_clock():
    """Give ToolSandbox's modules our clock; the rest of the process keeps the real one."""
    stopped = types.SimpleNamespace(**{**vars(datetime), "datetime": Clock})
    for name, module in list(sys.modules.items()):
        if name.startswith("tool_sandbox.") and getattr(module, "datetime", None) is datetime:
            setattr(module, "datetime", stopped)  # noqa: B010  (it is no attribute that a module has by its type)


class KeptAnswer:
    """An answer of a service, as ToolSandbox reads one; the service is asked where none is kept."""

    def __init__(self, url, headers, params):
        name = hashlib.sha256(json.dumps([url, params], sort_keys=True).encode()).hexdigest()[:16]
        self.path = ANSWERS / f"{name}.json"
        try:
            if not self.path.exists():
                # That a service refuses us is no answer, and the agent is not to blame for it.
                if headers["X-RapidAPI-Key"] == NOBODY:
                    raise PermissionError("RAPID_API_KEY is not set, and no answer is kept")
                answer = requests.get(url, params, headers=headers, timeout=30)
                if answer.status_code in (401, 403, 429) or answer.status_code >= 500:
                    raise PermissionError(f"status {answer.status_code}")
                ANSWERS.mkdir(parents=True, exist_ok=True)
                draft = self.path.with_suffix(f".{os.getpid()}")
                draft.write_text(json.dumps({"url": url, "params": params, "answer": answer.json()}, indent=1))
                draft.replace(self.path)
            self.text = self.path.read_text()
        except (OSError, ValueError) as error:  # those of requests are of OSError
            FAULTS.append(f"{url} did not answer: {error}")
            raise

    def json(self):
        """Return what the service said."""
        try:
            return json.loads(self.text)["answer"]
        except (ValueError, TypeError, KeyError):
            FAULTS.append(f"{self.path} is no kept answer: remove it, and it is asked for again")
            raise


def answered(result):
    """A result, unless a service has not answered on the way to it."""
    faults, FAULTS[:] = [*FAULTS], []
    if faults:
        raise OSError("; ".join(faults))
    return result


class Agent(BaseRole):
    """Only says what it is given; its rights are the agent's."""

    role_type = AGENT


class User(BaseRole):
    """Only says what it is given; its rights are the user's."""

    role_type = USER


class Episode(worker_loop.Episode):
    """One scenario being played."""

    def __init__(self, task_id, user="client"):
        if task_id not in scenarios():
            raise BadRequest(f"there is no scenario {task_id!r}")
        self.scenario, self.scripted = scenarios()[task_id][0], user == "scripted"
        self.calls, self.names = 0, {}
        self.context = copy.deepcopy(self.scenario.starting_context)
        self.environment = ExecutionEnvironment()
        self.enter()
        start = self.context.max_sandbox_message_index
        for index, row in enumerate(self.rows()):
            if row["recipient"] == ENVIRONMENT and row["sender"] == RoleType.SYSTEM:
                self.environment.respond(ending_index=index)
        self.reported, self.limit = 0, self.scenario.max_messages + start
        self.tools = convert_to_openai_tools(Agent.get_available_tools())
        self.context = get_current_context()

    def enter(self):
        """Make this world the global one, with its own time."""
        Clock.seconds = self.calls
        set_current_context(self.context)

    def rows(self):
        database = get_current_context().get_database(
            DatabaseNamespace.SANDBOX, drop_sandbox_message_index=False, get_all_history_snapshots=True
        )
        return database.to_dicts()

    def opening(self):
        """Let the world and the scripted user act until it is somebody's turn on our side; return what the agent sees
        of what has happened since the last time, without its own messages; and the user's leaving."""
        self.question = {}
        while self.turn is not None:
            last = self.rows()[-1]
            if not last["conversation_active"] or last["sandbox_message_index"] >= self.limit:
                self.turn = None
            elif last["recipient"] == ENVIRONMENT:
                self.environment.respond()
            elif last["recipient"] == AGENT:
                self.turn = "agent"
                break
            elif not self.scripted:
                self.turn = "user"
                prompt = OpenAIAPIUser.to_openai_messages(User.filter_messages(User.get_messages()))
                tools = [convert_to_openai_tool(tool) for tool in User.get_available_tools().values()]
                self.question = {"user_messages": prompt, "user_tools": tools}
                break
            else:
                self.speak("user", LEAVE)
        rows = self.rows()
        fresh = [message for message in map(self.chat_message, rows[self.reported :]) if message is not None]
        self.reported, self.context = len(rows), get_current_context()
        return fresh if rows[-1]["conversation_active"] else [*fresh, LEAVE]

    def chat_message(self, row):
        """A row as a chat message, None where it is not for the agent's eyes."""
        if row["recipient"] != AGENT or row["visible_to"] == [USER]:
            return None
        if row["sender"] == ENVIRONMENT:
            call_id = row["openai_tool_call_id"]
            result = {"role": "tool", "tool_call_id": self.names.get(call_id, call_id)}
            result["name"] = row["openai_function_name"]
            result["content"] = row["content"]
            return {**result, "error": True} if row["tool_call_exception"] else result
        return {"role": "system" if row["sender"] == RoleType.SYSTEM else "user", "content": row["content"]}

    def take(self, role, message):
        """A message of the agent or of the user."""
        self.enter()
        self.speak(role, message)
        return answered(self.opening())

    def speak(self, role, message):
        """Write a message into the world; a user's call is to leave. An agent that says nothing ends the episode."""
        calls, text = message.get("tool_calls") or [], message.get("content") or ""
        if role == "user":
            content = call_code("call_user", "end_conversation", {}) if calls else text
            User.add_messages([Message(sender=USER, recipient=ENVIRONMENT if calls else AGENT, content=content)])
        elif calls:
            Agent.add_messages([self.executable(call) for call in calls])
            Clock.seconds = self.calls
        elif text.strip():
            Agent.add_messages([Message(sender=AGENT, recipient=USER, content=text)])
        else:
            self.turn = None

    def executable(self, call):
        """A call as ToolSandbox executes it. The id is ours, the tool exists, arguments are values; for anything else
        the code only raises, in words of ours, so that the agent is told."""
        self.calls += 1
        call_id = f"call_{self.calls}"
        self.names[call_id] = call["id"] if isinstance(call.get("id"), str) else call_id
        tool, arguments = call_of(call)
        name, available = str(tool), set(Agent.get_available_tools())
        if name not in available:
            fault = f"there is no tool {name}; there are {', '.join(sorted(available))}"
            code = f"raise ValueError({fault!r})"
        elif not isinstance(arguments, dict):
            fault = f"the arguments of {name} are not an object"
            code = f"raise ValueError({fault!r})"
        else:
            code = call_code(call_id, get_current_context().get_execution_facing_tool_name(name), arguments)
        return Message(
            sender=AGENT, recipient=ENVIRONMENT, content=code, openai_tool_call_id=call_id, openai_function_name=name
        )

    def score(self):
        """The similarity of what was played so far, with its parts by milestone and minefield."""
        self.enter()
        evaluation, most = self.scenario.evaluation, self.scenario.max_messages
        result = evaluation.evaluate(execution_context=self.context, max_turn_count=most)
        milestones, minefields = sorted(result.milestone_mapping.items()), sorted(result.minefield_mapping.items())
        parts = {f"milestone {index + 1}": float(score) for index, (_, score) in milestones}
        first = len(evaluation.milestone_matcher.milestones) + 1
        # Of a minefield the score says how surely it was entered; the part says how surely it was not.
        parts |= {f"milestone {first + index}": 1.0 - float(score) for index, (_, score) in minefields}
        similarity = float(result.similarity)
        summary = {
            "milestones": float(result.milestone_similarity),
            "minefields": 1.0 - float(result.minefield_similarity),
        }
        return {"reward": similarity, "success": similarity >= PERFECT, "parts": {**summary, **parts}}


def call_code(call_id, tool, arguments):
    """The code of a call in the form that ToolSandbox reads back."""
    parameters, response = f"{call_id}_parameters", f"{call_id}_response"
    return f"{parameters} = {arguments!r}\n{response} = {tool}(**{parameters})\nprint(repr({response}))"


@functools.cache
def scenarios():
    """All scenarios in the world of the stopped clock, each with its category, by name."""
    return {
        name: (scenario, category)
        for category, scenarios_of in CATEGORIES.items()
        for name, scenario in scenarios_of(preferred_tool_backend=ToolBackend.DEFAULT).items()
    }


def rows_of(constraint):
    """The records that a constraint looks for."""
    return [] if constraint.target_dataframe is None else constraint.target_dataframe.to_dicts()


def traces_of(row):
    """The calls that a record of the dialogue asks for, as tool and arguments."""
    trace = json.loads(row["tool_trace"]) if row.get("tool_trace") is not None else []
    return [(call["tool_name"], call["arguments"]) for call in (trace if isinstance(trace, list) else [trace])]


def description(milestone, minefield):
    """Describe what a milestone checks, as plain values: calls, words to the user, or a state of the records."""
    checks = []
    for constraint in milestone.snapshot_constraints:
        namespace = str(constraint.database_namespace)
        measure = getattr(constraint.snapshot_constraint, "func", constraint.snapshot_constraint).__name__
        for row in rows_of(constraint):
            if row.get("tool_trace") is not None:
                checks += [{"tool": tool, "arguments": arguments} for tool, arguments in traces_of(row)]
            elif namespace == "SANDBOX":
                checks.append({"message": row.get("content")})
            else:
                change, values = measure.removesuffix("_similarity"), json.loads(json.dumps(row, default=str))
                checks.append({"namespace": namespace, "change": change, "values": values})
    first: dict = dict(checks[0]) if checks else {"namespace": "state"}
    if len(checks) > 1:
        first["also"] = checks[1:]
    return {**first, "minefield": True} if minefield else first


def hello():
    """Version and data; ToolSandbox's version never changes, so the hash of its scenarios and tools stands for it."""
    root = Path(str(tool_sandbox.__file__)).parent
    files = [path for part in ("common", "scenarios", "tools") for path in sorted((root / part).rglob("*.py"))]
    return {"data": {"sources": digest(files), "clock": CLOCK.isoformat()}}


def list_tasks():
    """Scenarios with category, the tools that ask outside services, and what their milestones check."""
    tasks = []
    for name, (scenario, category) in scenarios().items():
        allowed, evaluation = scenario.starting_context.tool_allow_list or (), scenario.evaluation
        milestones = [description(entry, False) for entry in evaluation.milestone_matcher.milestones]
        milestones += [description(entry, True) for entry in evaluation.minefield_matcher.milestones]
        about = {"name": name, "category": category, "external": sorted(EXTERNAL & set(allowed))}
        tasks.append({**about, "milestones": milestones})
    return {"tasks": tasks}


def tools():
    """Schemas of every tool that some scenario offers."""
    schemas = {}
    for scenario, _ in scenarios().values():
        set_current_context(scenario.starting_context)
        for tool in convert_to_openai_tools(Agent.get_available_tools()):
            schemas.setdefault(tool["function"]["name"], tool)
    return {"tools": list(schemas.values())}


def evaluate(task_id, messages):
    """The similarity of a record: its messages are played again in a fresh world."""
    episode = Episode(task_id)
    for message in messages[len(episode.opening()) :]:
        if message["role"] != "tool" and episode.turn is not None:
            episode.act("user" if message["role"] == "user" else "agent", message)
    return answered(episode.score())


def idle(task_id):
    """The record of an agent that has done nothing when the user leaves; nobody knows how it would look."""
    return {"messages": Episode(task_id).opening()}


# Replays.


def world(task_id):
    """The reference of a task, as far as its milestones tell one, and what its tools do to the records."""
    Episode(task_id)
    return {"kinds": kinds(), "messages": reference(task_id)}


def kinds():
    """Kinds of the tools of the open world, by whether their code changes records."""
    return {name: "write" if writes(tool) else "read" for name, tool in Agent.get_available_tools().items()}


def writes(tool):
    """Tell whether a function changes records, or one of ToolSandbox's that it calls."""
    function = inspect.unwrap(tool)
    inner = [function.__globals__.get(name) for name in function.__code__.co_names]
    peers = [peer for peer in inner if inspect.isfunction(peer) and peer.__module__ == function.__module__]
    return bool(CHANGING & set(function.__code__.co_names)) or any(map(writes, peers))


@functools.cache
def reference(task_id):
    """Assistant messages that meet the milestones one after the other, found by playing what each of them says; None
    where one of them says too little, or where what meets each does not pass as a whole."""
    matcher = scenarios()[task_id][0].evaluation.milestone_matcher
    messages = []
    for index in networkx.topological_sort(matcher.milestone_dag):
        candidates = [[], *([message] for message in proposals(task_id, matcher.milestones[index]))]
        part = f"milestone {index + 1}"
        sufficient = (new for new in candidates if played(task_id, [], [*messages, *new])["parts"][part] >= PERFECT)
        if (new := next(sufficient, None)) is None:
            return None
        messages += new
    return messages if played(task_id, [], messages)["passed"] else None


def proposals(task_id, milestone):
    """Messages that may meet a milestone: its call; its words; calls whose arguments are the columns of its records."""
    Episode(task_id)
    tools = {name: inspect.signature(tool).parameters for name, tool in Agent.get_available_tools().items()}
    for constraint in milestone.snapshot_constraints:
        rows = rows_of(constraint)
        if constraint.database_namespace != DatabaseNamespace.SANDBOX:
            for name, parameters in tools.items():
                calls = [(name, fitting(name, parameters, row)) for row in rows]
                if calls and all(arguments is not None for _, arguments in calls):
                    yield calling(calls)
        for row in rows:
            yield from (calling([call]) for call in traces_of(row))
            is_said = constraint.database_namespace == DatabaseNamespace.SANDBOX and row.get("tool_trace") is None
            if is_said and row.get("content"):
                yield {"role": "assistant", "content": row["content"]}


def fitting(name, parameters, row):
    """Arguments of a tool from the columns of a record, by their names, or for a switch by the tool's; None where one
    that it needs is in none."""
    arguments = {}
    for parameter, about in parameters.items():
        values = [value for column, value in row.items() if column == parameter or column.endswith(f"_{parameter}")]
        values += [value for column, value in row.items() if isinstance(value, bool) and column in name]
        if values and values[0] is not None:
            arguments[parameter] = values[0]
        elif about.default is about.empty:
            return None
    return arguments


def calling(calls):
    """A message that makes calls."""
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def replay(task_id, words, dialogues):
    """Assistant messages, played in fresh worlds where the user says what a log has: what each call led to, and the
    score."""
    return {"replayed": [played(task_id, words, messages) for messages in dialogues]}


def played(task_id, words, messages):
    """Outcome of a dialogue. A user who has no more words of their own asks to go on, and leaves when all is said."""
    episode, calls = Episode(task_id), []
    opening = [message for message in episode.opening() if message["role"] == "user"]
    turns = [message for message in words[len(opening) :] if not message.get("tool_calls")]
    declared = kinds()
    for place, message in enumerate(messages, start=1):
        if episode.turn is None:
            break
        before, names = state(), [call["function"]["name"] for call in message.get("tool_calls") or []]
        results = [reply for reply in episode.take("agent", message) if reply["role"] == "tool"]
        changed = state() != before
        for name, result in zip(names, results, strict=False):
            failed = bool(result.get("error"))
            calls.append((result["content"], failed, changed and not failed and declared.get(name) == "write"))
        if episode.turn == "user":
            further = turns.pop(0) if turns else GO_ON
            episode.take("user", further if turns or place < len(messages) else LEAVE)
    score = answered(episode.score())
    return {"calls": calls, "parts": score["parts"], "passed": score["success"]}


def state():
    """The records as they are, without the dialogue."""
    spaces = [space for space in DatabaseNamespace if space != DatabaseNamespace.SANDBOX]
    return [get_current_context().get_database(space).to_dicts() for space in spaces]


if __name__ == "__main__":
    stop_clock()
    if "CAPTRAIN_ANSWERS" in os.environ:
        # ToolSandbox wants a key before it asks; what is kept needs none.
        os.environ.setdefault("RAPID_API_KEY", NOBODY)
        rapid_api_search_tools.requests = types.SimpleNamespace(get=KeptAnswer)
    scenarios()  # in the time that a start has, and not in that of the first request
    operations = (hello, list_tasks, tools, evaluate, idle, world, replay)
    serve([*Episodes(Episode).operations(), *operations], REPLIES)
