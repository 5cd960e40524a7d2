# pyright: reportMissingImports=false
"""tau2's worlds for replays, behind the worker protocol: tasks as logs embed them, of any domain that tau2 registers.

A search over repairs plays a task hundreds of times, and loading a domain's database takes longer than all of them. So
a database is loaded once; a play gets shallow copies of its large collections, whose records are copied when a tool
first takes hold of them, and a state is what differs from the start. What a call answers in a state, and the state that
it leads to, is kept, so that calls are made only from where a play goes a way of its own. The score is tau2's: its
checks of database, assertions, actions and information told. No model is asked, so that tau2's way to them, whose
import takes longest, is stood in for.
"""

import os

from scripted_play import patience
from worker_loop import BadRequest, protect, serve

REPLIES = protect()
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # tau2's model library would fetch prices at import

import copy
import gc
import json
import pickle
import sys
import types

from loguru import logger

logger.remove()
logger.add(sys.stderr, level="ERROR")


class NoModel(types.ModuleType):
    """A module whose functions, by which a model would be asked, can be imported and are not there."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


sys.modules["tau2.utils.llm_utils"] = NoModel("tau2.utils.llm_utils")

from pydantic import BaseModel
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.data_model.tasks import RewardType, Task
from tau2.environment.toolkit import get_tool_types
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.registry import registry
from tau2_tasks import task_of

DOMAINS, TASKS = {}, {}
MOST_TASKS = 500
"""Tasks whose starts are kept."""
MOST_ANSWERS = 10_000
"""Answers of calls that are kept for each task."""
GENERIC = {"transfer_to_human_agents": "handover", "calculate": "think"}
"""tau2 says of these only that they neither look up nor change anything."""


class Records(dict):
    """A shallow copy of a collection, whose records are copied when somebody may change them: when one is fetched by
    its key, and when a tool that is no look-up goes through all of them."""

    exposed = True
    """True while what goes through them may change them; looking up does not, and copies of thousands take long."""

    def __init__(self, start):
        super().__init__(start)
        self.start, self.copied = start, set()

    def __getitem__(self, key):
        record = super().__getitem__(key)
        if key not in self.copied:
            self.copied.add(key)
            if record is self.start.get(key):
                record = record.model_copy(deep=True)
                super().__setitem__(key, record)
        return record

    def __setitem__(self, key, record):
        self.copied.add(key)
        super().__setitem__(key, record)

    def get(self, key, default=None):
        return self[key] if key in self else default  # noqa: SIM401  (dict's own would not copy)

    def values(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self[key] for key in self] if Records.exposed else super().values()

    def items(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return [(key, self[key]) for key in self] if Records.exposed else super().items()

    def difference(self):
        """Entries that are not as at the start: key -> record as text, None where it is gone."""
        touched = self.copied & self.keys()
        losses = set()
        if len(self) != len(self.start) + sum(key not in self.start for key in touched):
            touched, losses = touched | (self.keys() - self.start.keys()), self.start.keys() - self.keys()
        now = {key: text(super(Records, self).__getitem__(key)) for key in touched}
        changed = {key: new for key, new in now.items() if key not in self.start or new != text(self.start[key])}
        return sorted({**changed, **dict.fromkeys(losses)}.items(), key=lambda item: item[0])


def text(model):
    """A record as text; equal records give equal texts."""
    return json.dumps(model.model_dump(mode="json"), sort_keys=True)


class Database:
    """A database as it is at the start."""

    def __init__(self, database):
        self.collections = {
            name: value
            for name, value in vars(database).items()
            if isinstance(value, dict) and value and all(isinstance(record, BaseModel) for record in value.values())
        }
        self.remainder = pickle.dumps(database.model_copy(update={name: {} for name in self.collections}))

    def copy(self):
        """One to play with."""
        database = pickle.loads(self.remainder)
        for name, records in self.collections.items():
            vars(database)[name] = Records(records)
        return database

    def state(self, database):
        """Differences from the start in the collections, and all else as text."""
        collections = {name: vars(database)[name] for name in self.collections}
        remainder = text(database.model_copy(update={name: {} for name in collections}))
        # A collection that a tool has put in another's place is compared as a whole.
        differences = [
            records.difference() if isinstance(records, Records) else sorted((k, text(v)) for k, v in records.items())
            for records in collections.values()
        ]
        return json.dumps([remainder, differences])


class Domain:
    """An environment whose databases can be opened over and over."""

    def __init__(self, name):
        try:
            self.make = registry.get_env_constructor(name)
        except KeyError:
            raise BadRequest(f"there is no domain {name!r}") from None
        self.environment = self.make()
        self.start = Start(self.environment)
        toolkits = {"assistant": self.environment.tools, "user": self.environment.user_tools}
        self.types = {
            (side, tool): GENERIC.get(tool) if kind.value == "generic" else kind.value
            for side, toolkit in toolkits.items()
            if toolkit is not None
            for tool, kind in get_tool_types(toolkit).items()
        }

    def side(self, tool, by):
        """Name the side whose toolkit a call goes to: an agent that works alone has the user's tools, too."""
        return "user" if (by, tool) not in self.types and ("user", tool) in self.types else by


class Start:
    """The databases of an environment as they are."""

    def __init__(self, environment):
        self.environment = environment
        self.databases = [
            (side, Database(toolkit.db))
            for side in ("tools", "user_tools")
            if (toolkit := getattr(environment, side)) is not None and toolkit.db is not None
        ]

    def open(self):
        """The environment in this state."""
        environment = copy.copy(self.environment)
        for side, database in self.databases:
            toolkit = copy.copy(getattr(environment, side))
            toolkit.db = database.copy()
            setattr(environment, side, toolkit)
        return environment

    def state(self, environment):
        """State that can be compared with that of another play from this start."""
        return "\n".join(database.state(getattr(environment, side).db) for side, database in self.databases)


class World:
    """The world of one task, and the score of any sequence of calls in it."""

    def __init__(self, domain, task):
        self.domain, self.task, self.answers = domain, task, {}
        initial, self.criteria = task.initial_state, task.evaluation_criteria
        self.start = self.prepared(initial) if initial else self.domain.start
        history = (initial.message_history if initial else None) or []
        calls_of_history = [call for message in history for call in getattr(message, "tool_calls", None) or []]
        self.gold = [(call.name, call.arguments, call.requestor) for call in calls_of_history]
        self.gold += [
            (a.name, a.arguments, a.requestor) for a in (self.criteria.actions if self.criteria else None) or []
        ]
        self.basis = set(self.criteria.reward_basis) if self.criteria else set()
        self.initial, self.goal = self.start.state(self.start.open()), None

    def prepared(self, initial):
        """The start that a task asks for: its data and its actions. The calls of its history are every record's own,
        and the reference's, too."""
        environment = self.domain.start.open()
        environment.set_state(initial.initialization_data, initial.initialization_actions, [])
        return Start(environment)

    def respond(self, environment, tool, arguments, by):
        """The answer to a call, and whether it is a refusal."""
        side = self.domain.side(tool, by)
        Records.exposed = self.domain.types.get((side, tool)) != "read"
        call = ToolCall(id="call", name=tool, arguments=copy.deepcopy(arguments), requestor=side)
        with patience():  # tau2's calculator computes powers of any size
            message = environment.get_response(call)
        return message.content or "", bool(message.error)

    def play(self, calls):
        """Results, refusals and changes of calls, and the state that they lead to. Calls are made in an environment
        from the first whose answer is not known; what lies behind it is made up for."""
        state, environment, behind = self.initial, None, []
        results, failed, changed = [], [], []
        for tool, arguments, by in calls:
            key = (state, tool, by, json.dumps(arguments, sort_keys=True))
            if key not in self.answers:
                environment = environment or self.start.open()
                for call in behind:
                    self.respond(environment, *call)
                behind = []
                answer = self.respond(environment, tool, arguments, by)
                is_read = self.domain.types.get((self.domain.side(tool, by), tool)) == "read"
                outcome = *answer, state if is_read else self.start.state(environment)
                if len(self.answers) < MOST_ANSWERS:
                    self.answers[key] = outcome
            else:
                outcome = self.answers[key]
                behind += [(tool, arguments, by)] if outcome[2] != state else []
            results.append(outcome[0])
            failed.append(outcome[1])
            changed.append(outcome[2] != state)
            state = outcome[2]
        return results, failed, changed, state

    def environment(self, calls, changed):
        """The environment that calls leave, by those that change it."""
        environment = self.start.open()
        for call, has_changed in zip(calls, changed, strict=True):
            if has_changed:
                self.respond(environment, *call)
        return environment

    def score(self, calls, changed, state, texts, is_ended):
        """tau2's checks that the reward is made of, by name, each 0 or 1; a dialogue that was not ended scores 0."""
        parts = {"ended": float(is_ended)}
        if RewardType.DB in self.basis:
            if self.goal is None:
                self.goal = self.play(self.gold)[3]
            parts["db"] = float(state == self.goal)
        if RewardType.ENV_ASSERTION in self.basis:
            environment, assertions = self.environment(calls, changed), self.criteria.env_assertions or []
            parts["env_assertion"] = float(all(self.holds(environment, assertion) for assertion in assertions))
        attempts = [ToolCall(id="call", name=tool, arguments=arguments, requestor=by) for tool, arguments, by in calls]
        record = [AssistantMessage(role="assistant", tool_calls=attempts)] if attempts else []
        record += [AssistantMessage(role="assistant", content=line) for line in texts]
        if RewardType.ACTION in self.basis:
            parts["action"] = float(ActionEvaluator.calculate_reward(self.task, record).reward)
        if RewardType.COMMUNICATE in self.basis:
            parts["communicate"] = float(CommunicateEvaluator.calculate_reward(self.task, record).reward)
        return parts

    def holds(self, environment, assertion):
        """Tell whether an assertion holds; some raise where what they look at was never made."""
        try:
            return environment.run_env_assertion(assertion, raise_assertion_error=False)
        except Exception:
            return False


def world_of(domain, task_id, task):
    """The world of a task: as the log has it, else as tau2 has it under this id."""
    key = domain, json.dumps(task, sort_keys=True) if task else task_id
    if key in TASKS:
        return TASKS[key]
    if domain not in DOMAINS:
        DOMAINS[domain] = Domain(domain)
        gc.freeze()  # a hundred thousand objects that stay: looking through them over and over takes longer than plays
    if len(TASKS) >= MOST_TASKS:
        TASKS.pop(next(iter(TASKS)))
    whole = {"id": task_id, "user_scenario": {"instructions": ""}, **task} if task else None
    definition = Task.model_validate(whole) if whole else task_of(domain, task_id)
    world = TASKS[key] = World(DOMAINS[domain], definition)
    return world


def hello():
    """Nothing: what is asked first is whether the worker answers."""
    return {}


def world(domain, task_id, task):
    """The reference of a task, what has to be told, and what tau2 declares of its tools."""
    task_world = world_of(domain, task_id, task)
    information = task_world.criteria.communicate_info if RewardType.COMMUNICATE in task_world.basis else None
    return {
        "reference": [{"tool": tool, "arguments": arguments, "by": by} for tool, arguments, by in task_world.gold],
        "owed": list(information or []),
        "kinds": {tool: kind for (_, tool), kind in task_world.domain.types.items() if kind},
    }


def replay(domain, task_id, task, replays):
    """Each replay, played from the task's start: results, refusals, changes, parts of the score."""
    task_world, replayed = world_of(domain, task_id, task), []
    for entry in replays:
        calls = [(call["tool"], call["arguments"], call["by"]) for call in entry["calls"]]
        results, failed, changed, state = task_world.play(calls)
        parts = task_world.score(calls, changed, state, entry["texts"], entry["ended"])
        replayed.append(
            {
                "results": results,
                "failed": failed,
                "changed": changed,
                "parts": parts,
                "passed": all(part == 1.0 for part in parts.values()),
            }
        )
    return {"replayed": replayed}


if __name__ == "__main__":
    serve({operation.__name__: operation for operation in (hello, world, replay)}, REPLIES)
