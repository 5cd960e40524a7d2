# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportPossiblyUnboundVariable=false
"""OpenEnv behind the worker protocol: runs in an environment of its own that has `openenv`.

Each episode is a session of OpenEnv's own client with a server, started here from the environment's folder or running
somewhere. A server that takes fewer sessions than there are episodes is shared: the session that was used last longest
ago is closed, and its episode is played again from the start when its turn comes.

What the agent does goes to the server in the form that its action schema has: whole messages (as packages of captrain
take them), calls of MCP tools, or the fields of its one action, which is then the tool `act`, and text its field that
is required alone. Other text ends the episode.
"""

from worker_loop import BadRequest, call_of, protect, serve

REPLIES = protect()

import functools
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import standard_worker
import yaml
from openenv.core import GenericEnvClient
from standard_worker import Episodes, NotRepeatable, hash_of, placed, wait

SETTINGS = json.loads(sys.argv[1])
SOURCE = SETTINGS["source"]
VERSION = importlib.metadata.version("openenv")
START = 250.0
"""Seconds until a server must answer, and until a session that was closed is free again."""
SERVE = (
    "import ctypes, importlib, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # it ends with this worker
    "module, _, name = sys.argv[1].partition(':')\n"
    "import uvicorn\n"
    "uvicorn.run(getattr(importlib.import_module(module), name), host='127.0.0.1', port=int(sys.argv[2]),"
    " log_level='warning', access_log=False)\n"
)
MCP = {"Action", "CallToolAction", "ListToolsAction"}
ACT = "act"
MARKS = {"done", "reward", "metadata"}


def http(path, body=None):
    """JSON from the server; None where it does not have that."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address() + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=START) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code in (404, 405, 501):
            return None
        raise


@functools.cache
def address():
    """The server, started where the source is a folder."""
    if SOURCE.startswith(("http://", "https://")):
        return SOURCE.rstrip("/")
    manifest = Path(SOURCE) / "openenv.yaml"
    if not manifest.exists():
        raise BadRequest(f"{SOURCE} is no folder of an OpenEnv environment: it has no openenv.yaml")
    app = str((yaml.safe_load(manifest.read_text()) or {}).get("app") or "server.app:app")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, app, str(port)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # the folder is somebody's
    process = subprocess.Popen(command, cwd=SOURCE, env=environment, stdin=subprocess.DEVNULL, stdout=2)
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the server of {SOURCE} ({app}) does not start")


@functools.cache
def action_schema():
    schema = (http("/schema") or {}).get("action") or {}
    return {**schema, "properties": {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}}


def mode():
    """Name the form in which an agent's messages go to the server: as messages, as calls of MCP, or as fields."""
    properties = action_schema()["properties"]
    if {"content", "tool_calls"} <= set(properties):
        return "messages"
    if action_schema().get("title") in MCP or {"tool_name", "arguments"} <= set(properties):
        return "calls"
    return "fields"


@functools.cache
def tools():
    """OpenAI function schemas."""
    if mode() == "fields":
        schema = {name: value for name, value in action_schema().items() if name in ("properties", "required", "$defs")}
        about = action_schema().get("description") or "Take an action."
        function = {"name": ACT, "description": about, "parameters": {"type": "object", **schema}}
        return [{"type": "function", "function": function}]
    client = GenericEnvClient(base_url=address())
    try:
        wait(client.connect)
        offers = wait(client.step, {"type": "list_tools"}).observation["tools"]
    finally:
        wait(client.close)
    schemas = []
    for tool in offers:
        parameters = {"type": "object", "properties": {}, **(tool.get("input_schema") or {})}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


@functools.cache
def listing():
    """Tasks by split, None for no end: of the Task API, else the seeds."""
    for name in (entry if isinstance(entry, str) else entry.get("name") for entry in http("/list_environments") or []):
        if splits := http(f"/{name}/splits"):
            names = [split if isinstance(split, str) else split["name"] for split in splits]
            return {split: (http(f"/{name}/num_tasks", {"split": split}) or {})["num_tasks"] for split in names}
    episodes = [Episode("seeds/0", splits={"seeds": None}) for _ in range(2)]
    for episode in episodes:
        episode.close()
    if episodes[0].messages != episodes[1].messages:
        raise BadRequest("reset(seed=0) opens another episode each time: it has no tasks, and its seeds name none")
    return {"seeds": None}


@functools.cache
def survey():
    """Describe the environment: its splits, its tools, and the versions that decide what it does."""
    splits = listing()
    metadata = http("/metadata") or {}
    folder = Path(SOURCE)
    source = hash_of(folder) if folder.is_dir() else str(metadata.get("version") or "")
    world = {"standard": f"openenv {VERSION}", "environment": str(metadata.get("name") or ""), "source": source}
    about = {**world, "tasks": "seeds" if "seeds" in splits else "Task API", "actions": mode()}
    return {"splits": splits, "tools": tools(), "world": world, "about": about}


class Episode(standard_worker.Episode):
    """A session with the server, and what was done in it."""

    turns = SETTINGS["turns"]
    tools = property(lambda self: tools())
    sessions = []
    """Episodes that hold a session, in the order of use."""

    def __init__(self, place, user="scripted", splits=None):
        split, number = placed(place, splits or listing())
        self.arguments = {"seed": number} if split == "seeds" else {"split": split, "index": number}
        self.client, self.actions, self.total = None, [], 0.0
        result = self.start()
        briefing = [{"role": "system", "content": SETTINGS["instructions"]}] if SETTINGS["instructions"] else []
        self.messages = [*briefing, *dialogue(result.observation)]
        self.turn = None if result.done else "agent"

    def start(self):
        """Take a session, for which another episode may have to give up its own."""
        deadline = time.monotonic() + START
        while self.client is None:
            client = GenericEnvClient(base_url=address())
            try:
                wait(client.connect)
                result = wait(client.reset, **self.arguments)
                self.client = client
            except RuntimeError as error:
                wait(client.close)
                if "CAPACITY_REACHED" not in str(error) or time.monotonic() > deadline:
                    raise
                if Episode.sessions:
                    Episode.sessions[0].close()
                time.sleep(0.05)
        Episode.sessions.append(self)
        return result

    def close(self):
        """End the session."""
        if self.client is not None:
            Episode.sessions.remove(self)
            wait(self.client.close)
            self.client = None

    def act_on(self, action):
        """One step, after all that were made before where the session was given up: what an agent reads."""
        if self.client is None:
            self.start()
            for former, outcome in self.actions:
                if self.send(former) != outcome:
                    raise NotRepeatable("the environment answers otherwise when an episode is played again")
        Episode.sessions.remove(self)
        Episode.sessions.append(self)
        outcome = self.send(action)
        self.actions.append((action, outcome))
        observation, reward, is_last = outcome
        self.total += reward
        self.turn = None if is_last else self.turn
        return observation

    def send(self, action):
        try:
            result = wait(self.client.step, action)
        except RuntimeError as error:  # the server's refusal of an action, after which the session goes on
            return {"error": str(error)[:2000]}, 0.0, False
        return result.observation, float(result.reward or 0.0), bool(result.done)

    def answer(self, message):
        """Take an assistant message; return the messages that answer it."""
        text, calls = message.get("content") or "", message.get("tool_calls") or []
        if mode() == "messages":
            return dialogue(self.act_on({"type": "message", "content": text, "tool_calls": calls}))
        required = action_schema().get("required") or []
        if not calls and mode() == "fields" and len(required) == 1 and text:
            return [{"role": "user", "content": text_of(self.act_on({required[0]: text}))}]
        if not calls:
            self.turn = None
        replies = []
        for call in calls:
            name, arguments = call_of(call)
            if self.turn is None:
                result = "Error: the episode is over"
            elif not isinstance(arguments, dict):
                result = "Error: arguments are no JSON object"
            elif name not in [tool["function"]["name"] for tool in tools()]:
                result = f"Error: there is no tool {str(name)[:100]}"
            else:
                action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                result = text_of(self.act_on(arguments if mode() == "fields" else action))
            identity = {"tool_call_id": call["id"]} if isinstance(call.get("id"), str) else {}
            replies.append({"role": "tool", **identity, "name": str(name), "content": result})
        return replies

    def verdict(self):
        """The sum of what the steps were worth."""
        return {"reward": self.total, "parts": {}}


def dialogue(observation):
    """An observation as messages: its own, where it has any."""
    messages = observation.get("messages")
    if mode() == "messages" and isinstance(messages, list):
        return messages
    return [{"role": "user", "content": text_of(observation)}]


def text_of(observation):
    """Return what an agent reads of an observation: an error, the result of a tool, or the fields that are left."""
    if set(observation) == {"error"}:
        return f"Error: {observation['error']}"
    if "tool_name" in observation and "result" in observation:
        if problem := observation.get("error"):
            return f"Error: {problem.get('message', problem)}"
        result = observation["result"]
        content = result.get("content") if isinstance(result, dict) else None
        if isinstance(content, list) and all(
            isinstance(block, dict) and block.get("type") == "text" for block in content
        ):
            return "\n".join(block["text"] for block in content)
        return result if isinstance(result, str) else json.dumps(result)
    fields = {name: value for name, value in observation.items() if name not in MARKS}
    only = next(iter(fields.values())) if len(fields) == 1 else None
    return only if isinstance(only, str) else json.dumps(fields)


if __name__ == "__main__":
    serve(Episodes(survey, Episode).operations(), REPLIES)
