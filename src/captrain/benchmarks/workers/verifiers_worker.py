# pyright: reportMissingImports=false
"""verifiers behind the worker protocol. It runs in an environment that has `verifiers`.

An episode is one of verifiers' own, from set-up to scoring: its `Env` runs it, with users, stops, limits and rewards.
The harness is ours (`captrain_harness`), and so is the model: a server in this process that holds each request until
the agent's message arrives over the protocol. The model's name tells which episode asks.
"""

from worker_loop import LONGEST, SILENCE, BadRequest, protect, serve

REPLIES = protect()

import asyncio
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
import threading
import uuid
from pathlib import Path

SETTINGS = json.loads(sys.argv[1])
if SETTINGS["folder"]:
    sys.path.insert(0, SETTINGS["folder"])
    os.environ["PYTHONPATH"] = SETTINGS["folder"]  # tool servers are processes of their own

import captrain_harness
from aiohttp import web
from record_replay import NotRepeatable, ReplayableEpisode, operations, texts
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.task import TaskData
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config, taskset_class

KEY = "CAPTRAIN_NO_KEY"
os.environ[KEY] = "none"
EPISODES = {}
LOOP = asyncio.new_event_loop()
"""The event loop of all episodes."""


def wait(function, *values):
    """Call an async function in the event loop, and return its result."""
    if not LOOP.is_running():
        threading.Thread(target=LOOP.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(function(*values), LOOP).result()


@functools.cache
def environment(split):
    """The environment with the tasks of a split, whose one seat is played from here.

    Raises:
        BadRequest: it needs several agents, a container or a judge.
    """
    name = SETTINGS["taskset"]
    config_type = env_config_type(name)
    seats = {
        field: spec.default for field, spec in config_type.model_fields.items() if isinstance(spec.default, AgentConfig)
    }
    if len(seats) != 1:
        raise BadRequest(f"{name} has the seats {', '.join(seats)}: captrain plays one agent")
    [(seat, default)] = seats.items()
    turns = default.max_turns or SETTINGS["turns"]
    agent = {"harness": {"id": captrain_harness.__name__}, "runtime": {"type": "subprocess"}, "max_turns": turns}
    taskset = {"id": name, **SETTINGS["config"], **SETTINGS["splits"][split]}
    try:
        loaded = load_environment(resolve_env_config({"taskset": taskset, seat: agent}))
    except ValueError as error:
        raise BadRequest(f"the taskset {name} does not take its config: {error}") from None
    kind = type(loaded.taskset).task_type()
    if kind.NEEDS_CONTAINER:
        raise BadRequest(f"the tasks of {name} need a container")
    if loaded.taskset.config.task.judges:
        raise BadRequest(f"the tasks of {name} are judged by a model")
    # Shared servers stay up as long as this process. Keep the context: collecting it would close them.
    loaded.captrain_serving = loaded.serving()
    wait(loaded.captrain_serving.__aenter__)
    return loaded


class Rows:
    """The tasks of a split, read as far as they are needed."""

    def __init__(self, split):
        taskset = environment(split).taskset
        self.source, self.read = iter(taskset), []
        self.endless = not taskset.bounded
        if not self.endless:
            self.read = list(self.source)

    def __getitem__(self, number):
        self.read += itertools.islice(self.source, max(0, number + 1 - len(self.read)))
        if number >= len(self.read):
            raise BadRequest(f"there is no task {number}")
        return self.read[number]


rows_of = functools.cache(Rows)


def listing():
    """Number of tasks by split, None for an endless one."""
    return {split: None if rows_of(split).endless else len(rows_of(split).read) for split in SETTINGS["splits"]}


@functools.cache
def survey():
    """Describe the taskset: its splits, its tools, and the versions and hashes that its tasks depend on.

    Raises:
        BadRequest: it has no tasks, or they need a container.
    """
    name, splits = SETTINGS["taskset"], listing()
    first = next((split for split, count in splits.items() if count is None or count), None)
    if first is None:
        raise BadRequest(f"the taskset {name} has no tasks")
    if rows_of(first)[0].data.image is not None:
        raise BadRequest(f"the tasks of {name} need a container")
    folder, source = Path(inspect.getfile(taskset_class(name))).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            source.update(path.name.encode() + b"\0" + path.read_bytes())
    world = {
        "standard": f"verifiers {importlib.metadata.version('verifiers')}",
        "environment": name,
        "source": source.hexdigest()[:16],
        "config": json.dumps(SETTINGS["config"], sort_keys=True),
    }
    episode = TasksetEpisode(f"{first}/0")
    episode.close()
    about = {**world, "tasks": "load()", "runner": type(environment(first)).__name__}
    return {"splits": splits, "tools": episode.tools, "world": world, "about": about}


def hidden(place):
    """The fields that the taskset adds to verifiers' own data of a task."""
    split, _, index = place.rpartition("/")
    data = rows_of(split)[int(index)].data
    return data.model_dump(mode="json", include=set(type(data).model_fields) - set(TaskData.model_fields))


CONTACTED = set()
LOCAL = ("localhost", "127.", "::1", "0.0.0.0")


def note(event, arguments):
    """Note the hosts that anything in this process looks up or connects to."""
    host = None
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if isinstance(host, str) and not host.startswith(LOCAL):
        CONTACTED.add(host)


def contacted():
    """The other machines that were contacted since the last question."""
    hosts = sorted(CONTACTED)
    CONTACTED.clear()
    return hosts


@functools.cache
def client():
    """verifiers' client of the model, which is this process."""
    return EvalClientConfig(base_url=wait(_start_model), api_key_var=KEY)


async def _start_model():
    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def answer(request):
    """Answer a request of the harness with the agent's next message."""
    body = await request.json()
    episode = EPISODES[body["model"]]
    await episode.requests.put(body)
    message = await episode.answers.get()
    end = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": end}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    about = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return web.json_response({**about, "choices": [choice], "usage": usage})


class TasksetEpisode(ReplayableEpisode):
    """An episode of verifiers, whose model waits for the agent's messages."""

    turns = SETTINGS["turns"]

    def __init__(self, place, user="scripted"):
        split, _, index = place.rpartition("/")
        if split not in SETTINGS["splits"] or not index.isdecimal():
            raise BadRequest(f"there is no task {place!r}")
        task = rows_of(split)[int(index)]
        self.name = uuid.uuid4().hex
        self.dialogue, self.tools = [], []
        EPISODES[self.name] = self
        context = ModelContext(model=self.name, client=client())
        wait(self._begin, environment(split), task, context)
        if self.turn is None:
            problem = self._problem() or "it never asks the agent"
            self.close()
            raise RuntimeError(f"the episode of task {place} does not begin: {problem}")
        self.messages = [plain(message) for message in self.dialogue]

    async def _begin(self, loaded, task, context):
        """Play until the agent is asked for the first time."""
        self.requests, self.answers = asyncio.Queue(), asyncio.Queue()
        self.running = asyncio.create_task(loaded.run_episode(task, context))
        await self._until_asked()

    async def _until_asked(self, message=None):
        """Send the agent's message, if there is one, and wait until the agent is asked or the episode is over."""
        if message is not None:
            await self.answers.put(message)
        request = asyncio.ensure_future(self.requests.get())
        await asyncio.wait({request, self.running}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            body = request.result()
            self.dialogue, self.tools = body["messages"], body.get("tools") or []
        else:
            request.cancel()
            self.turn = None

    def answer(self, message):
        """Take an assistant message; return tool results, or the user's answer."""
        before = self.dialogue
        wait(self._until_asked, wire(message, len(before)))
        if self.turn is None:
            return []
        if texts(self.dialogue[: len(before)]) != texts(before):
            raise NotRepeatable("the environment rewrites what was said: its dialogues cannot be recorded")
        return [plain(entry) for entry in self.dialogue[len(before) + 1 :]]

    def verdict(self):
        """The environment's reward of the episode. If it is not over, the agent stays silent until it is."""
        while not self.running.done():
            self.answer(SILENCE)
        if problem := self._problem():
            raise RuntimeError(problem)
        [trace] = self.running.result().traces
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if isinstance(value, (int, float))}
        return {"reward": float(trace.reward), "parts": {**metrics, **rewards}}

    def _problem(self):
        """What went wrong in an episode that is over, or ""."""
        outcome = self.running.result()
        errors = [*outcome.errors, *(error for trace in outcome.traces for error in trace.errors)]
        if errors:
            return f"{errors[0].type}: {errors[0].message}"[:LONGEST]
        return "" if len(outcome.traces) == 1 else f"{len(outcome.traces)} agents have played"

    def close(self):
        """Cancel the episode."""
        EPISODES.pop(self.name)
        wait(self._cancel)

    async def _cancel(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def wire(message, turn):
    """An assistant message as a server sends it: with ids, and with names and arguments as text."""
    reply = {"role": "assistant", "content": message.get("content") or ""}
    calls = []
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        name, arguments = (
            value if isinstance(value, str) else json.dumps(value)
            for value in (function.get("name"), function.get("arguments"))
        )
        identity = call.get("id") if isinstance(call.get("id"), str) and call.get("id") else f"call_{turn}_{place}"
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {**reply, "tool_calls": calls} if calls else reply


def plain(message):
    """A message of the dialogue with its content as text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] if part.get("type") == "text" else json.dumps(part) for part in content)
    fields = {name: message[name] for name in ("role", "name", "tool_call_id") if name in message}
    return {**fields, "content": content}


if __name__ == "__main__":
    sys.addaudithook(note)
    serve([*operations(survey, TasksetEpisode), hidden, contacted], REPLIES)
