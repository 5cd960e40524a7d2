# pyright: reportMissingImports=false
"""ToolSandbox behind the worker protocol. It runs in ToolSandbox's own environment, without model, key or network.

ToolSandbox's data are relative to the clock, and its tools read the clock. Here the clock starts at CLOCK and advances
by one second with each tool call. So a task is the same on every day, and `evaluate` can replay a record: it builds a
fresh world, repeats what agent and user said, and asks ToolSandbox for the similarity. ToolSandbox keeps its world in
one global. It is exchanged for each request, and requests come one at a time.

Five tools ask outside services. Their answers are kept in the folder ANSWERS and given to everybody who asks the same
again, so that a record scores as it was played. If there is neither a kept answer nor RAPID_API_KEY, our whole request
fails, not only the tool.

What a model writes is never executed. Calls are rebuilt from an existing tool, JSON values, and an id of our own.
"""

import os
import sys
import time

from worker_loop import BadRequest, Episode, Episodes, call_of, calling, digest, listed_once, protect, serve

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
"""Folder with answers of outside services."""
NOBODY = "none"
"""Stands for a missing key."""
CHANGING = {"add_to_database", "update_database", "remove_from_database"}
"""ToolSandbox's functions that change records."""
FAULTS = []
"""Services that did not answer during the current request, with reasons."""
LEAVE = {**calling([("end_conversation", {})]), "role": "user"}
ENVIRONMENT, AGENT, USER = RoleType.EXECUTION_ENVIRONMENT, RoleType.AGENT, RoleType.USER
GO_ON = {"role": "user", "content": "Go on."}
PERFECT = 1 - 1e-6


class Clock(datetime.datetime):
    """A `datetime.datetime` with our `now`."""

    seconds = 0

    @classmethod
    def now(cls, tz=None):
        return (CLOCK + datetime.timedelta(seconds=cls.seconds)).replace(tzinfo=tz)


def stop_clock():
    """Give our clock to ToolSandbox's modules; the rest of the process keeps the real one."""
    stopped = types.SimpleNamespace(**{**vars(datetime), "datetime": Clock})
    for name, module in list(sys.modules.items()):
        if name.startswith("tool_sandbox.") and getattr(module, "datetime", None) is datetime:
            setattr(module, "datetime", stopped)  # noqa: B010  (ModuleType has no such attribute)


class KeptAnswer:
    """A service's answer in the form that ToolSandbox reads. The service is asked if no answer is kept."""

    def __init__(self, url, headers, params):
        name = hashlib.sha256(json.dumps([url, params], sort_keys=True).encode()).hexdigest()[:16]
        self.path = ANSWERS / f"{name}.json"
        try:
            if not self.path.exists():
                # A refusal of the service is not an answer, and not the agent's fault.
                if headers["X-RapidAPI-Key"] == NOBODY:
                    raise PermissionError("RAPID_API_KEY is not set, and no answer is kept")
                answer = requests.get(url, params, headers=headers, timeout=30)
                if answer.status_code in (401, 403, 429) or answer.status_code >= 500:
                    raise PermissionError(f"status {answer.status_code}")
                ANSWERS.mkdir(parents=True, exist_ok=True)
                draft = self.path.with_suffix(f".{os.getpid()}")
                draft.write_text(
                    json.dumps({"url": url, "params": params, "answer": answer.json()}, indent=1), encoding="utf-8"
                )
                draft.replace(self.path)
            self.text = self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # errors of requests are OSErrors
            FAULTS.append(f"{url} did not answer: {error}")
            raise

    def json(self):
        """The JSON that the service returned."""
        try:
            return json.loads(self.text)["answer"]
        except (ValueError, TypeError, KeyError):
            FAULTS.append(f"{self.path} is no kept answer: remove it, and the service is asked again")
            raise


def answered(result):
    """The result, or an OSError if a service did not answer on the way to it."""
    faults, FAULTS[:] = [*FAULTS], []
    if faults:
        raise OSError("; ".join(faults))
    return result


class AgentRole(BaseRole):
    """Has the agent's rights, and says what it is given."""

    role_type = AGENT


class UserRole(BaseRole):
    """Has the user's rights, and says what it is given."""

    role_type = USER


class ScenarioEpisode(Episode):
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
        self.tools = convert_to_openai_tools(AgentRole.get_available_tools())
        self.context = get_current_context()

    def enter(self):
        """Make this episode's world and time the global ones."""
        Clock.seconds = self.calls
        set_current_context(self.context)

    def rows(self):
        database = get_current_context().get_database(
            DatabaseNamespace.SANDBOX, drop_sandbox_message_index=False, get_all_history_snapshots=True
        )
        return database.to_dicts()

    def opening(self):
        """Let the world and the scripted user act until our side has a turn.

        Return the new messages that the agent sees, without its own, and the user's leaving.
        """
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
                prompt = OpenAIAPIUser.to_openai_messages(UserRole.filter_messages(UserRole.get_messages()))
                tools = [convert_to_openai_tool(tool) for tool in UserRole.get_available_tools().values()]
                self.question = {"user_messages": prompt, "user_tools": tools}
                break
            else:
                self.speak("user", LEAVE)
        rows = self.rows()
        fresh = [message for message in map(self.chat_message, rows[self.reported :]) if message is not None]
        self.reported, self.context = len(rows), get_current_context()
        return fresh if rows[-1]["conversation_active"] else [*fresh, LEAVE]

    def chat_message(self, row):
        """A row as a chat message, or None if the agent does not see it."""
        if row["recipient"] != AGENT or row["visible_to"] == [USER]:
            return None
        if row["sender"] == ENVIRONMENT:
            call_id = row["openai_tool_call_id"]
            result = {"role": "tool", "tool_call_id": self.names.get(call_id, call_id)}
            result |= {"name": row["openai_function_name"], "content": row["content"]}
            return {**result, "error": True} if row["tool_call_exception"] else result
        return {"role": "system" if row["sender"] == RoleType.SYSTEM else "user", "content": row["content"]}

    def take(self, role, message):
        """Take a message of the agent or of the user."""
        self.enter()
        self.speak(role, message)
        return answered(self.opening())

    def speak(self, role, message):
        """Write a message into the world. A call of the user means leaving. An empty agent message ends the episode."""
        calls, text = message.get("tool_calls") or [], message.get("content") or ""
        if role == "user":
            content = call_code("call_user", "end_conversation", {}) if calls else text
            UserRole.add_messages([Message(sender=USER, recipient=ENVIRONMENT if calls else AGENT, content=content)])
        elif calls:
            AgentRole.add_messages([self.executable(call) for call in calls])
            Clock.seconds = self.calls
        elif text.strip():
            AgentRole.add_messages([Message(sender=AGENT, recipient=USER, content=text)])
        else:
            self.turn = None

    def executable(self, call):
        """A call in the form that ToolSandbox executes, with an id of ours. If the tool does not exist or the arguments
        are not an object, the code only raises an error of ours, which tells the agent."""
        self.calls += 1
        call_id = f"call_{self.calls}"
        self.names[call_id] = call["id"] if isinstance(call.get("id"), str) else call_id
        tool, arguments = call_of(call)
        name, available = str(tool), set(AgentRole.get_available_tools())
        if name not in available:
            fault = f"there is no tool {name}; there are {', '.join(sorted(available))}"
            code = f"raise ValueError({fault!r})"
        elif not isinstance(arguments, dict):
            code = f"raise ValueError({f'the arguments of {name} are not an object'!r})"
        else:
            code = call_code(call_id, get_current_context().get_execution_facing_tool_name(name), arguments)
        return Message(
            sender=AGENT, recipient=ENVIRONMENT, content=code, openai_tool_call_id=call_id, openai_function_name=name
        )

    def score(self):
        """The similarity so far, with a part for each milestone and minefield."""
        self.enter()
        evaluation, most = self.scenario.evaluation, self.scenario.max_messages
        result = evaluation.evaluate(execution_context=self.context, max_turn_count=most)
        milestones, minefields = sorted(result.milestone_mapping.items()), sorted(result.minefield_mapping.items())
        parts = {f"milestone {index + 1}": float(score) for index, (_, score) in milestones}
        first = len(evaluation.milestone_matcher.milestones) + 1
        # A minefield's score is 1 if it was entered, and its part is 1 if it was not.
        parts |= {f"milestone {first + index}": 1.0 - float(score) for index, (_, score) in minefields}
        similarity = float(result.similarity)
        summary = {
            "milestones": float(result.milestone_similarity),
            "minefields": 1.0 - float(result.minefield_similarity),
        }
        return {"reward": similarity, "success": similarity >= PERFECT, "parts": {**summary, **parts}}


def call_code(call_id, tool, arguments):
    """The code of a call, as ToolSandbox parses it."""
    parameters, response = f"{call_id}_parameters", f"{call_id}_response"
    return f"{parameters} = {arguments!r}\n{response} = {tool}(**{parameters})\nprint(repr({response}))"


@functools.cache
def scenarios():
    """Name -> scenario and category, in the world of the stopped clock."""
    return {
        name: (scenario, category)
        for category, scenarios_of in CATEGORIES.items()
        for name, scenario in scenarios_of(preferred_tool_backend=ToolBackend.DEFAULT).items()
    }


def rows_of(constraint):
    """The records that a constraint looks for."""
    return [] if constraint.target_dataframe is None else constraint.target_dataframe.to_dicts()


def traces_of(row):
    """The calls that a record of the dialogue requires, as (tool, arguments)."""
    trace = json.loads(row["tool_trace"]) if row.get("tool_trace") is not None else []
    return [(call["tool_name"], call["arguments"]) for call in (trace if isinstance(trace, list) else [trace])]


def description(milestone, minefield):
    """What a milestone checks, as JSON: calls, words to the user, or a state of the records."""
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
    """Hash of scenarios and tools, which stands for the version (it never changes), and the clock."""
    root = Path(str(tool_sandbox.__file__)).parent
    files = [path for part in ("common", "scenarios", "tools") for path in sorted((root / part).rglob("*.py"))]
    return {"data": {"sources": digest(files), "clock": CLOCK.isoformat()}}


def list_tasks():
    """Scenarios with category, tools that ask outside services, and what their milestones check."""
    tasks = []
    for name, (scenario, category) in scenarios().items():
        allowed, evaluation = scenario.starting_context.tool_allow_list or (), scenario.evaluation
        milestones = [description(entry, False) for entry in evaluation.milestone_matcher.milestones]
        milestones += [description(entry, True) for entry in evaluation.minefield_matcher.milestones]
        about = {"id": name, "category": category, "external": sorted(EXTERNAL & set(allowed))}
        tasks.append({**about, "milestones": milestones})
    return {"tasks": tasks}


def tools():
    """Schemas of every tool that some scenario offers."""
    schemas = []
    for scenario, _ in scenarios().values():
        set_current_context(scenario.starting_context)
        schemas += convert_to_openai_tools(AgentRole.get_available_tools())
    return listed_once(schemas)


def evaluate(task_id, messages):
    """The similarity of a record, by replaying its messages in a fresh world."""
    episode = ScenarioEpisode(task_id)
    for message in messages[len(episode.opening()) :]:
        if message["role"] != "tool" and episode.turn is not None:
            episode.act("user" if message["role"] == "user" else "agent", message)
    return answered(episode.score())


def idle(task_id):
    """The opening as the record of an agent that does nothing: how the user would leave is unknown."""
    return {"messages": ScenarioEpisode(task_id).opening()}


# Replays.


def world(task_id):
    """A reference that meets the milestones, if one is found, and the kinds of the tools."""
    ScenarioEpisode(task_id)
    return {"kinds": kinds(), "messages": reference(task_id)}


def kinds():
    """Kinds of the open world's tools: "write" if their code changes records."""
    return {name: "write" if writes(tool) else "read" for name, tool in AgentRole.get_available_tools().items()}


def writes(tool):
    """Return whether a function changes records, itself or through a function of its module."""
    function = inspect.unwrap(tool)
    inner = [function.__globals__.get(name) for name in function.__code__.co_names]
    peers = [peer for peer in inner if inspect.isfunction(peer) and peer.__module__ == function.__module__]
    return bool(CHANGING & set(function.__code__.co_names)) or any(map(writes, peers))


@functools.cache
def reference(task_id):
    """Assistant messages that meet all milestones, found by playing proposals for one milestone after the other.

    None if no proposal meets a milestone, or if the messages do not pass as a whole.
    """
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
    """Messages that may meet a milestone: its call, its words, or calls whose arguments are columns of its records."""
    ScenarioEpisode(task_id)
    tools = {name: inspect.signature(tool).parameters for name, tool in AgentRole.get_available_tools().items()}
    for constraint in milestone.snapshot_constraints:
        rows = rows_of(constraint)
        if constraint.database_namespace != DatabaseNamespace.SANDBOX:
            for name, parameters in tools.items():
                fitted = [fitting(name, parameters, row) for row in rows]
                if fitted and None not in fitted:
                    yield calling((name, arguments) for arguments in fitted)
        for row in rows:
            yield from (calling([call]) for call in traces_of(row))
            is_said = constraint.database_namespace == DatabaseNamespace.SANDBOX and row.get("tool_trace") is None
            if is_said and row.get("content"):
                yield {"role": "assistant", "content": row["content"]}


def fitting(name, parameters, row):
    """Arguments of a tool from the columns of a record with the same names; a switch's column is in the tool's name.
    None if a required argument has no column."""
    arguments = {}
    for parameter, about in parameters.items():
        values = [value for column, value in row.items() if column == parameter or column.endswith(f"_{parameter}")]
        values += [value for column, value in row.items() if isinstance(value, bool) and column in name]
        if values and values[0] is not None:
            arguments[parameter] = values[0]
        elif about.default is about.empty:
            return None
    return arguments


def replay(task_id, words, dialogues):
    """Play assistant messages in fresh worlds, where the user speaks as in a log; return call outcomes and scores."""
    return {"replayed": [played(task_id, words, messages) for messages in dialogues]}


def played(task_id, words, messages):
    """Outcome of a dialogue. After its logged words the user asks to go on, and leaves after the last message."""
    episode, calls = ScenarioEpisode(task_id), []
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
    """All records except the dialogue."""
    spaces = [space for space in DatabaseNamespace if space != DatabaseNamespace.SANDBOX]
    return [get_current_context().get_database(space).to_dicts() for space in spaces]


if __name__ == "__main__":
    stop_clock()
    if "CAPTRAIN_ANSWERS" in os.environ:
        # ToolSandbox requires a key; kept answers need none.
        os.environ.setdefault("RAPID_API_KEY", NOBODY)
        rapid_api_search_tools.requests = types.SimpleNamespace(get=KeptAnswer)
    scenarios()  # during the start, which has more time than the first request
    operations = (hello, list_tasks, tools, evaluate, idle, world, replay)
    serve([*Episodes(ScenarioEpisode).operations(), *operations], REPLIES)
