"""Recorded episodes of an environment, and a model that repeats them."""

import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from captrain.contract import IDLE, CheckedEnvironment, load_file, tool_call
from captrain.environments.probes import act_randomly
from captrain.records import JsonObject, Message, Task

KINDS = ("reference", "idle", "broken", "random", "parallel", "malformed")


def record(path: Path, count: int) -> list[JsonObject]:
    """Play episodes of the environment in a file, of all kinds in turn, each with its score."""
    target, rng = load_file(path), random.Random(0)
    episodes = []
    for index, task in enumerate(target.tasks("training", count)):
        kind = KINDS[index % len(KINDS)]
        messages = target.play(task, actions(target, task, kind, rng))
        said = [message for message in messages if message["role"] == "assistant"]
        score = target.score(task, messages).model_dump()
        episodes.append(
            {"kind": kind, "split": "training", "index": index, "actions": said, "messages": messages, "score": score}
        )
    return episodes


def actions(target: CheckedEnvironment, task: Task, kind: str, rng: random.Random) -> Sequence[Message]:
    reference = target.reference(task)
    if kind == "idle":
        return [IDLE]
    if kind == "broken":
        return target.environment.broken(task.model_dump())  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "parallel":
        calls = [call for message in reference for call in message.get("tool_calls", [])]
        spoken = [message for message in reference if not message.get("tool_calls")]
        return [*spoken[:-1], {"role": "assistant", "content": "", "tool_calls": calls}, spoken[-1]]
    if kind == "malformed":
        broken_json: JsonObject = {"type": "function", "function": {"name": "get_order", "arguments": '{"order_id'}}
        return [
            tool_call("list_orders", {"number": 1}),
            {"role": "assistant", "content": "", "tool_calls": [broken_json]},
            *reference,
        ]
    if kind == "random":
        messages, said = list(target.open(task).messages), []
        episode = target.open(task)
        for _ in range(14):
            message = act_randomly(target.tools, rng, messages)
            said.append(message)
            replies, over = episode.step(message)
            messages += [message, *replies]
            if over:
                break
        return said
    return reference


def opening(messages: Sequence[Message]) -> str:
    """Return the text of the user's first message."""
    content = next(message["content"] for message in messages if message["role"] == "user")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@contextmanager
def speaking(episodes: Sequence[JsonObject]) -> Iterator[str]:
    """Serve a chat model that answers as in the episodes; yield its address."""
    scripts = {opening(episode["messages"]): episode["actions"] for episode in episodes}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *values: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = sum(message["role"] == "assistant" for message in body["messages"])
            script = scripts[opening(body["messages"])]
            reply = wire(script[said] if said < len(script) else IDLE, said)
            end = "tool_calls" if reply.get("tool_calls") else "stop"
            self.send_response(200)
            if not body.get("stream"):
                choice = {"index": 0, "message": reply, "finish_reason": end}
                self.answer("application/json", json.dumps(completion("chat.completion", choice)).encode())
                return
            calls = [{**call, "index": place} for place, call in enumerate(reply.get("tool_calls", []))]
            delta = {**reply, "tool_calls": calls} if calls else reply
            parts = [
                {"index": 0, "delta": delta, "finish_reason": None},
                {"index": 0, "delta": {}, "finish_reason": end},
            ]
            lines = [json.dumps(completion("chat.completion.chunk", part)) for part in parts]
            self.answer("text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

        def answer(self, kind: str, content: bytes) -> None:
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def completion(kind: str, choice: JsonObject) -> JsonObject:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "x", "object": kind, "created": 0, "model": "scripted", "choices": [choice], "usage": usage}


def wire(message: Message, turn: int) -> Message:
    """Return an assistant message as a server sends it: with ids, and arguments as text."""
    reply: Message = {"role": "assistant", "content": message.get("content") or ""}
    calls = []
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        text = function["arguments"] if isinstance(function["arguments"], str) else json.dumps(function["arguments"])
        calls.append(
            {"id": f"c{turn}_{place}", "type": "function", "function": {"name": function["name"], "arguments": text}}
        )
    return {**reply, "tool_calls": calls} if calls else reply
