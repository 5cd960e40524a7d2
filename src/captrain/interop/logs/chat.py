"""Chats with a reward, in OpenAI's message format or in Anthropic's blocks: the rows that other formats become.

The columns go by several names. `tools` (OpenAI schemas), `task_id`, `trial`, `model` and `reference` (assistant
messages of a solution) are used where they are there; everything else is left out. A row without `task_id` is a task of
its own, named by its file and number.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from captrain.interop.logs.records import RowFormat, rows_of
from captrain.interop.logs.source import (
    MALFORMED,
    Source,
    entry_of,
    parsed,
    reason_of,
    record_of_entry,
    schema_of,
    text_of,
)
from captrain.records import JsonObject, Message, Rollout, file_digest

MESSAGES = ("messages", "conversation", "trajectory")
REWARD = ("reward", "score", "success")
BLOCKS = ("tool_use", "tool_result")
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def _is_chat(row: JsonObject) -> bool:
    return any(isinstance(row.get(name), list) for name in MESSAGES)


CHAT = RowFormat("chat JSONL", _is_chat, lambda row, path: row)


def read_rows(path: Path, row_format: RowFormat) -> Source:
    """One entry for each row of a file, read as its format has it."""
    file, tools = file_digest(path), dict[str, JsonObject]()
    return Source(file, {"format": row_format.name}, _entries(path, file, tools, row_format), tools)


def _entries(
    path: Path, file: str, tools: dict[str, JsonObject], row_format: RowFormat
) -> Iterator[tuple[str, Rollout | str]]:
    for number, (place, row) in enumerate(rows_of(path), start=1):
        if not isinstance(row, dict):
            yield place, row if isinstance(row, str) else "it is no object"
            continue
        yield place, entry_of(partial(_read_row, path, file, number, row, tools, row_format))


def _read_row(
    path: Path, file: str, number: int, row: JsonObject, tools: dict[str, JsonObject], row_format: RowFormat
) -> Rollout | str:
    try:
        chat = row_format.chat_row(row, path)
    except MALFORMED as error:
        return f"it is no {row_format.name}: {reason_of(error)}"
    if not isinstance(chat, dict):
        return chat
    definitions = chat.get("tools")
    schemas = map(schema_of, definitions if isinstance(definitions, list) else [])
    tools |= {schema["function"]["name"]: schema for schema in schemas if schema}
    return chat_rollout(file, number, chat)


def chat_rollout(file: str, number: int, row: JsonObject) -> Rollout | str:
    """The record of a row of a chat, or the reason why there is none.

    Args:
        file: digest of the file.
        number: of the row, from 1.
        row: messages and reward under one of their names; `tools`, `task_id`, `trial`, `model`, `reference`, `script`
            (what a simulated user was told), `injections` (texts that AgentDojo has put into its world) and `fault`
            (what went wrong that is no verdict on the agent) where they are known.
    """
    messages = next((row[name] for name in MESSAGES if isinstance(row.get(name), list)), None)
    if messages is None:
        return f"there are no messages (a list named {', '.join(MESSAGES)})"
    reward = next((row[name] for name in REWARD if row.get(name) is not None), None)
    reference, script, injections = row.get("reference"), row.get("script"), row.get("injections")
    if reference is not None and not isinstance(reference, list):
        return "its reference is no list of messages"
    try:
        dialogue = [message for item in messages for message in chat_messages(item)]
    except ValueError as error:
        return str(error)
    try:
        solution = [message for item in reference or [] for message in chat_messages(item)]
    except ValueError as error:
        return f"its reference does not read: {error}"
    if any(message["role"] != "assistant" for message in solution):
        return "its reference holds messages that are not the assistant's"
    return record_of_entry(
        file,
        number,
        environment="chat",
        # Rows of several files have nothing in common by their numbers.
        task=str(row.get("task_id") if row.get("task_id") is not None else f"{file[:6]}:{number}"),
        data={
            "kind": "chat",
            **({"script": script} if isinstance(script, str) and script else {}),
            **({"injections": injections} if isinstance(injections, dict) and injections else {}),
        },
        messages=dialogue,
        reward=float(reward) if isinstance(reward, bool) else reward,
        policy=str(row.get("model", "unknown")),
        trial=row["trial"] if type(row.get("trial")) is int and 0 <= row["trial"] < 1 << 31 else 0,
        reference=solution,
        fault=str(row["fault"]) if row.get("fault") else None,
    )


def chat_messages(item: object) -> list[Message]:
    """A message as one, or as several where it holds blocks as Anthropic has them: words and calls are one message,
    each result one of a tool.

    Raises:
        ValueError: it is no chat message.
    """
    content = item.get("content") if isinstance(item, Mapping) else None
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    if not isinstance(item, Mapping) or not any(block.get("type") in BLOCKS for block in blocks):
        return [chat_message(item)]
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": text_of(block.get("content")),
            "error": bool(block.get("is_error")),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    words = text_of([block for block in blocks if block.get("type") == "text"])
    speech = {"role": item.get("role"), "content": words, **({"tool_calls": calls} if calls else {})}
    return [*map(chat_message, results), *([chat_message(speech)] if words or calls else [])]


def chat_message(item: object) -> Message:
    """A chat message with its known fields alone, arguments as objects.

    Raises:
        ValueError: it is no chat message.
    """
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str) or item["role"] not in ROLES:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    message: Message = {
        "role": "tool" if item["role"] == "function" else item["role"],
        "content": text_of(item.get("content")),
    }
    if message["role"] == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or "")
        message |= {"error": True} if item.get("error") is True else {}
    if calls := item.get("tool_calls"):
        if not isinstance(calls, list):
            raise ValueError("its tool_calls are no list")
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
