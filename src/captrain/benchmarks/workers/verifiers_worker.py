# pyright: reportMissingImports=false
"""verifiers behind the worker protocol: runs in an environment of its own that has `verifiers`.

An episode is one of verifiers' own, from set-up to scoring: its `Env` runs it, users, stops, limits and rewards
included. The harness is ours (`captrain_harness`), and so is the model: a server in this process, which holds each
request until the agent's message comes over the protocol. The model's name says which episode asks.
"""

from worker_loop import BadRequest, protect, serve

REPLIES = protect()

import asyncio
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
import uuid
from pathlib import Path

SETTINGS = json.loads(sys.argv[1])
if SETTINGS["folder"]:
    sys.path.insert(0, SETTINGS["folder"])
    os.environ["PYTHONPATH"] = SETTINGS["folder"]  # tool servers are processes of their own

from aiohttp import web
from standard_worker import NotRepeatable, Operations, files_of, hash_of, placed, texts, wait
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config, taskset_class

VERSION = importlib.metadata.version("verifiers")
HARNESS = "captrain-harness"
KEY = "CAPTRAIN_NO_KEY"
os.environ[KEY] = "none"
EPISODES = {}


@functools.cache
def environment(split):
    """The environment whose tasks are of a split, with its one seat played from here.

    Raises:
        BadRequest: it cannot be played by one agent, without a container and without a judge.
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
    agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": turns}
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
    wait(_served(loaded))
    return loaded


async def _served(loaded):
    """Bring up what all episodes share, for as long as this process lives."""
    context = loaded.serving()
    await context.__aenter__()
    loaded.captrain_serving = context  # a context that is collected is left


class Rows:
    """The tasks of a split, read as far as they were asked for."""

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


@functools.cache
def rows(split):
    return Rows(split)


def listing():
    """Tasks by split, None for no end."""
    return {split: None if rows(split).endless else len(rows(split).read) for split in SETTINGS["splits"]}


def survey():
    """Describe the taskset: its splits, its tools, and what decides its tasks.

    Raises:
        BadRequest: it has no tasks, or they need a container.
    """
    splits = listing()
    name = SETTINGS["taskset"]
    if not any(count is None or count for count in splits.values()):
        raise BadRequest(f"the taskset {name} has no tasks")
    first = rows(next(split for split, count in splits.items() if count is None or count))[0]
    if first.data.image is not None:
        raise BadRequest(f"the tasks of {name} need a container")
    package = Path(inspect.getfile(taskset_class(name))).parent
    world = {
        "standard": f"verifiers {VERSION}",
        "environment": name,
        "source": hash_of(files_of(package)),
        "config": json.dumps(SETTINGS["config"], sort_keys=True),
    }
    client()
    episode = wait(Episode.open(f"{next(iter(splits))}/0"))
    wait(episode.close())
    about = {**world, "tasks": "load()", "runner": type(environment(next(iter(splits)))).__name__}
    return {"splits": splits, "tools": episode.tools, "world": world, "about": about}


@functools.cache
def client():
    """Configure how verifiers asks the model, which is this process."""
    return EvalClientConfig(base_url=wait(_start_model()), api_key_var=KEY)


async def _start_model():
    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def answer(request):
    """A request of the harness, answered when the agent has spoken."""
    body = await request.json()
    episode = EPISODES[body["model"]]
    await episode.requests.put(body)
    message = await episode.answers.get()
    end = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice = {"index": 0, "message": message, "finish_reason": end}
    return web.json_response(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
    )


class Episode:
    """An episode of verifiers, whose model waits for us."""

    def __init__(self, split, number):
        self.name = uuid.uuid4().hex
        self.requests, self.answers = asyncio.Queue(), asyncio.Queue()
        self.messages, self.tools, self.dialogue, self.over = [], [], [], False
        context = ModelContext(model=self.name, client=client())
        self.running = asyncio.create_task(environment(split).run_episode(rows(split)[number], context))
        EPISODES[self.name] = self

    @classmethod
    async def open(cls, place):
        """Open a task, up to the first time that the agent is asked."""
        split, number = placed(place, listing())
        self = cls(split, number)
        await self._until_asked()
        if self.over:
            problem = await self._problem() or "it asks nobody"
            await self.close()
            raise RuntimeError(f"the episode of task {place} does not begin: {problem}")
        self.messages = [plain(message) for message in self.dialogue]
        return self

    async def _until_asked(self):
        """Wait until the agent is asked or the episode is over; gives the request's messages."""
        request = asyncio.ensure_future(self.requests.get())
        await asyncio.wait({request, self.running}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            self.over = True
            return
        body = request.result()
        self.dialogue, self.tools = body["messages"], body.get("tools") or []

    async def take(self, message):
        """What answers an assistant message: tool results, or the user."""
        before = self.dialogue
        await self.answers.put(wire(message, len(before)))
        await self._until_asked()
        if self.over:
            return []
        if texts(self.dialogue[: len(before)]) != texts(before):
            raise NotRepeatable("the environment rewrites what was said: its dialogues cannot be recorded")
        return [plain(entry) for entry in self.dialogue[len(before) + 1 :]]

    async def verdict(self):
        """The environment's reward of the episode; one that is not over is played on in silence."""
        while not self.over:
            await self.take({"role": "assistant", "content": ""})
        if problem := await self._problem():
            raise RuntimeError(problem)
        [trace] = self.running.result().traces
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if isinstance(value, (int, float))}
        return {"reward": float(trace.reward), "parts": {**metrics, **rewards}}

    async def _problem(self):
        """What went wrong in the episode, "" for nothing."""
        outcome = await self.running
        errors = [*outcome.errors, *(error for trace in outcome.traces for error in trace.errors)]
        if errors:
            return f"{errors[0].type}: {errors[0].message}"[:2000]
        return "" if len(outcome.traces) == 1 else f"{len(outcome.traces)} agents have played"

    async def close(self):
        """Drop the episode, wherever it is."""
        EPISODES.pop(self.name, None)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def wire(message, turn):
    """An assistant message as a server sends it: names and arguments as text, ids."""
    reply = {"role": "assistant", "content": message.get("content") or ""}
    calls = []
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        identity = call.get("id") if isinstance(call.get("id"), str) and call.get("id") else f"call_{turn}_{place}"
        name = function.get("name")
        function = {"name": name if isinstance(name, str) else json.dumps(name), "arguments": text}
        calls.append({"id": identity, "type": "function", "function": function})
    return {**reply, "tool_calls": calls} if calls else reply


def plain(message):
    """A message of the dialogue, its content as text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] if part.get("type") == "text" else json.dumps(part) for part in content)
    fields = {name: message[name] for name in ("role", "name", "tool_call_id") if name in message}
    return {**fields, "content": content}


if __name__ == "__main__":
    serve(Operations(survey, Episode.open, SETTINGS["turns"]).table(), REPLIES)
