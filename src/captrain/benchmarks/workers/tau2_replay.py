# pyright: reportMissingImports=false
"""Replays of tau2 tasks in tau2's worker: tasks as logs embed them, of any domain that tau2 registers.

A search for repairs plays a task hundreds of times, and loading a domain's database takes longer than all these plays.
So a database is loaded once. A play gets shallow copies of its large collections, whose records are copied when a tool
first accesses them, and a state is the difference from the start. The answer to a call in a state and the next state
are cached, so that calls are only made where a play leaves the known paths. The score is tau2's: its checks of
database, assertions, actions and communicated information. No model is asked.
"""

import copy
import functools
import gc
import json
import pickle

from pydantic import BaseModel
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.data_model.tasks import RewardType, Task
from tau2.environment.toolkit import get_tool_types
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.registry import registry
from worker_loop import BadRequest, patience

MOST_TASKS = 500
"""Tasks whose starts are cached."""
MOST_ANSWERS = 10_000
"""Answers of calls that are cached for each task."""
GENERIC = {"transfer_to_human_agents": "handover", "calculate": "think"}
"""Kinds of tools that tau2 calls generic: they neither read nor write."""


def text(model):
    """A record as text, equal for equal records."""
    return json.dumps(model.model_dump(mode="json"), sort_keys=True)


class Records(dict):
    """A shallow copy of a collection. A record is copied when a tool may change it: when it is fetched by its key, or
    when a tool that is not a read tool iterates over all records."""

    exposed = True
    """Whether iterating copies the records: False during calls of read tools, since copying thousands is slow."""

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
        """Entries that differ from the start: key -> record as text, None for a removed one."""
        touched = (self.copied & self.keys()) | (self.keys() - self.start.keys())
        now = {key: text(dict.__getitem__(self, key)) for key in touched}
        changed = {key: new for key, new in now.items() if key not in self.start or new != text(self.start[key])}
        return changed | dict.fromkeys(self.start.keys() - self.keys())


class Start:
    """The databases of an environment in its current state, which can be opened many times."""

    def __init__(self, environment):
        self.environment, self.databases = environment, {}
        """Side -> large collections, and all else, pickled."""
        for side in ("tools", "user_tools"):
            toolkit = getattr(environment, side)
            if toolkit is not None and toolkit.db is not None:
                collections = {
                    name: value
                    for name, value in vars(toolkit.db).items()
                    if isinstance(value, dict) and value and all(isinstance(v, BaseModel) for v in value.values())
                }
                remainder = toolkit.db.model_copy(update={name: {} for name in collections})
                self.databases[side] = collections, pickle.dumps(remainder)

    def open(self):
        """A copy of the environment in this state."""
        environment = copy.copy(self.environment)
        for side, (collections, remainder) in self.databases.items():
            toolkit = copy.copy(getattr(environment, side))
            toolkit.db = pickle.loads(remainder)
            vars(toolkit.db).update({name: Records(records) for name, records in collections.items()})
            setattr(environment, side, toolkit)
        return environment

    def state(self, environment):
        """The state of a play from this start, comparable with other plays': differences in the collections, and all
        else."""
        state = []
        for side, (collections, _) in self.databases.items():
            database = getattr(environment, side).db
            state.append(text(database.model_copy(update={name: {} for name in collections})))
            for records in (vars(database)[name] for name in collections):
                # A collection that a tool has replaced is compared as a whole.
                is_ours = isinstance(records, Records)
                state.append(records.difference() if is_ours else {key: text(v) for key, v in records.items()})
        return json.dumps(state, sort_keys=True)


@functools.cache
def domain_of(name):
    """The start of a domain, and the kinds of its tools by side: "assistant" or "user"."""
    try:
        environment = registry.get_env_constructor(name)()
    except KeyError:
        raise BadRequest(f"there is no domain {name!r}") from None
    kinds = {
        (side, tool): GENERIC.get(tool) if kind.value == "generic" else kind.value
        for side, toolkit in (("assistant", environment.tools), ("user", environment.user_tools))
        if toolkit is not None
        for tool, kind in get_tool_types(toolkit).items()
    }
    start = Start(environment)
    gc.freeze()  # never scan these hundred thousand permanent objects again: scanning takes longer than plays
    return start, kinds


class TaskWorld:
    """The world of one task, which scores any sequence of calls: (tool, arguments, requestor)."""

    def __init__(self, domain, task):
        self.task, self.answers = task, {}
        self.start, self.kinds = domain_of(domain)
        initial, self.criteria = task.initial_state, task.evaluation_criteria
        # Every record and the reference start with the calls of the task's history.
        history = (initial.message_history if initial else None) or []
        gold = [call for message in history for call in getattr(message, "tool_calls", None) or []]
        gold += getattr(self.criteria, "actions", None) or []
        self.gold = [(action.name, action.arguments, action.requestor) for action in gold]
        self.basis = set(self.criteria.reward_basis) if self.criteria else set()
        if initial:
            environment = self.start.open()
            environment.set_state(initial.initialization_data, initial.initialization_actions, [])
            self.start = Start(environment)
        self.initial, self.goal = self.start.state(self.start.open()), None

    def respond(self, environment, tool, arguments, by):
        """The answer to a call, whether it is a refusal, and whether the tool only reads."""
        # An agent that works alone also has the user's tools.
        side = "user" if (by, tool) not in self.kinds and ("user", tool) in self.kinds else by
        is_read = self.kinds.get((side, tool)) == "read"
        Records.exposed = not is_read
        call = ToolCall(id="call", name=tool, arguments=copy.deepcopy(arguments), requestor=side)
        with patience():  # tau2's calculator computes powers of any size
            message = environment.get_response(call)
        return message.content or "", bool(message.error), is_read

    def play(self, calls):
        """Results, refusals and changes of calls, and the final state.

        An environment is opened at the first call whose answer is not cached. The changes before it are then repeated.
        """
        state, environment, behind, outcomes = self.initial, None, [], []
        for call in calls:
            key = state, json.dumps(call, sort_keys=True)
            if key in self.answers:
                answer, is_refused, after = self.answers[key]
                behind += [call] if after != state else []
            else:
                environment = environment or self.start.open()
                for former in behind:
                    self.respond(environment, *former)
                behind = []
                answer, is_refused, is_read = self.respond(environment, *call)
                after = state if is_read else self.start.state(environment)
                if len(self.answers) < MOST_ANSWERS:
                    self.answers[key] = answer, is_refused, after
            outcomes.append((answer, is_refused, after != state))
            state = after
        results, failed, changed = ([outcome[place] for outcome in outcomes] for place in range(3))
        return results, failed, changed, state

    def score(self, calls, changed, state, texts, is_ended):
        """tau2's checks in the task's reward, by name, each 0 or 1. A dialogue without its proper end scores 0."""
        parts = {"ended": float(is_ended)}
        if RewardType.DB in self.basis:
            if self.goal is None:
                self.goal = self.play(self.gold)[3]
            parts["db"] = float(state == self.goal)
        if RewardType.ENV_ASSERTION in self.basis:
            environment = self.start.open()
            for call, has_changed in zip(calls, changed, strict=True):
                if has_changed:
                    self.respond(environment, *call)
            try:
                assertions = self.criteria.env_assertions or []
                holds = all(environment.run_env_assertion(entry, raise_assertion_error=False) for entry in assertions)
            except Exception:  # some raise if what they look at was never created
                holds = False
            parts["env_assertion"] = float(holds)
        attempts = [ToolCall(id="call", name=tool, arguments=arguments, requestor=by) for tool, arguments, by in calls]
        record = [AssistantMessage(role="assistant", tool_calls=attempts)] if attempts else []
        record += [AssistantMessage(role="assistant", content=line) for line in texts]
        if RewardType.ACTION in self.basis:
            parts["action"] = float(ActionEvaluator.calculate_reward(self.task, record).reward)
        if RewardType.COMMUNICATE in self.basis:
            parts["communicate"] = float(CommunicateEvaluator.calculate_reward(self.task, record).reward)
        return parts


@functools.cache
def tasks_of(domain):
    """All tasks of a domain, by id. Passing None as split matters: the default split lacks some tasks."""
    domain_of(domain)
    return {task.id: task for task in registry.get_tasks_loader(domain)(None)}


@functools.lru_cache(MOST_TASKS)
def world_of(domain, task_id, definition):
    """The world of a task, as the log defines it, else as tau2 defines this id."""
    if definition:
        whole = {"id": task_id, "user_scenario": {"instructions": ""}, **json.loads(definition)}
        return TaskWorld(domain, Task.model_validate(whole))
    if task_id not in tasks_of(domain):
        raise BadRequest(f"{domain} has no task {task_id!r}")
    return TaskWorld(domain, tasks_of(domain)[task_id])


def world(domain, task_id, task):
    """The reference of a task, the information to communicate, and the tool kinds that tau2 declares."""
    task_world = world_of(domain, task_id, json.dumps(task) if task else "")
    information = task_world.criteria.communicate_info if RewardType.COMMUNICATE in task_world.basis else None
    return {
        "reference": [{"tool": tool, "arguments": arguments, "by": by} for tool, arguments, by in task_world.gold],
        "owed": list(information or []),
        "kinds": {tool: kind for (_, tool), kind in task_world.kinds.items() if kind},
    }


def replay(domain, task_id, task, replays):
    """Play each replay from the task's start: results, refusals, changes, parts of the score."""
    task_world, replayed = world_of(domain, task_id, json.dumps(task) if task else ""), []
    for entry in replays:
        calls = [(call["tool"], call["arguments"], call["by"]) for call in entry["calls"]]
        results, failed, changed, state = task_world.play(calls)
        parts = task_world.score(calls, changed, state, entry["texts"], entry["ended"])
        passed = all(part == 1.0 for part in parts.values())
        replayed.append({"results": results, "failed": failed, "changed": changed, "parts": parts, "passed": passed})
    return {"replayed": replayed}
