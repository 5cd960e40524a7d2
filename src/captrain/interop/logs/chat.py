"""Chats with a reward, one JSON object a line, in OpenAI's message format.

The columns go by several names. `tools` (OpenAI schemas), `task_id`, `trial`, `model` and `reference` (assistant
messages of a solution) are used where they are there; everything else is left out.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.interop.logs.source import Source, parsed, record_of_entry, text_of
from captrain.records import JsonObject, Message, Rollout, file_digest

MESSAGES = ("messages", "conversation", "trajectory")
REWARD = ("reward", "score", "success")
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def read_chats(path: Path) -> Source:
    """One entry for each line that is not empty."""
    file, tools = file_digest(path), dict[str, JsonObject]()
    return Source(file, {"format": "chat JSONL"}, _entries(path, file, tools), tools)


def _entries(path: Path, file: str, tools: dict[str, JsonObject]) -> Iterator[tuple[str, Rollout | str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                yield f"line {number}", f"it is not JSON: {error}"
                continue
            if isinstance(row, Mapping):
                tools |= {tool["function"]["name"]: tool for tool in row.get("tools") or [] if _is_schema(tool)}
            yield f"line {number}", _rollout(file, number, row)


def _is_schema(tool: object) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and "name" in tool["function"]


def _rollout(file: str, number: int, row: object) -> Rollout | str:
    if not isinstance(row, Mapping):
        return "it is no object"
    messages = next((row[name] for name in MESSAGES if isinstance(row.get(name), list)), None)
    if messages is None:
        return f"there are no messages (a list named {', '.join(MESSAGES)})"
    reward = next((row[name] for name in REWARD if row.get(name) is not None), None)
    reference = row.get("reference") if isinstance(row.get("reference"), list) else []
    try:
        dialogue, solution = [chat_message(item) for item in messages], [chat_message(item) for item in reference or []]
    except ValueError as error:
        return str(error)
    return record_of_entry(
        file,
        number,
        environment="chat",
        task=str(row.get("task_id", number)),
        data={"kind": "chat"},
        messages=dialogue,
        reward=float(reward) if isinstance(reward, bool) else reward,
        policy=str(row.get("model", "unknown")),
        trial=row["trial"] if isinstance(row.get("trial"), int) else 0,
        reference=solution,
    )


def chat_message(item: object) -> Message:
    """A chat message with its known fields alone, arguments as objects.

    Raises:
        ValueError: it is no chat message.
    """
    if not isinstance(item, Mapping) or item.get("role") not in ROLES:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    message: Message = {
        "role": "tool" if item["role"] == "function" else item["role"],
        "content": text_of(item.get("content")),
    }
    if message["role"] == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or "")
    if calls := item.get("tool_calls"):
        if not all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls):
            raise ValueError("a tool call has no function")
        message["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {
                    "name": str(call["function"].get("name")),
                    "arguments": parsed(call["function"].get("arguments")),
                },
            }
            for call in calls
        ]
    if isinstance(item.get("informs"), list):
        message["informs"] = [str(value) for value in item["informs"]]
    return message
