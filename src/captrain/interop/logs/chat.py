"""Chats with a reward: the rows that other formats become.

Messages are in OpenAI's format, in Anthropic's blocks, items of Responses, or LangChain's or ShareGPT's, each told by
itself. The columns go by several names. `tools` (schemas), `task_id`, `trial`, `model` and `reference` (assistant
messages of a solution) are used where they are there; everything else is left out. A row without
`task_id` (of ShareGPT: and without `id`) is a task of its own, named by its file and number.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.messages import is_item, is_langchain, is_sharegpt, of_item, of_langchain, of_sharegpt
from captrain.interop.logs.records import RowFormat, rows_of
from captrain.interop.logs.source import (
    MALFORMED,
    Source,
    call_entry,
    entries_of,
    parsed,
    reason_of,
    record_of_entry,
    schemas_by_name,
    text_of,
)
from captrain.records import JsonObject, Message, Rollout, file_digest

MESSAGES = ("messages", "conversation", "conversations", "trajectory", "items")
REWARD = ("reward", "score", "success")
BLOCKS = ("tool_use", "tool_result")
FIRST = 20
"""Messages of a row that are looked at to tell the format of a file."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def is_message(item: object) -> bool:
    """Tell whether an object is a message of any of these formats."""
    is_chat = isinstance(item, Mapping) and isinstance(item.get("role"), str)
    return is_chat or is_item(item) or is_langchain(item) or is_sharegpt(item)


def _has(is_one: Callable[[object], bool]) -> Callable[[JsonObject], bool]:
    """Tell whether the first messages of a row are of a format."""

    def recognizes(row: JsonObject) -> bool:
        lists = [row[name] for name in MESSAGES if isinstance(row.get(name), list)]
        return bool(lists) and any(map(is_one, lists[0][:FIRST]))

    return recognizes


LANGCHAIN = RowFormat("LangChain messages", _has(is_langchain))
SHAREGPT = RowFormat("ShareGPT conversations", _has(is_sharegpt), lambda row, path: {"task_id": row.get("id"), **row})
ITEMS = RowFormat("OpenAI Responses items", _has(is_item))
CHAT = RowFormat("chat JSONL", lambda row: any(isinstance(row.get(name), list) for name in MESSAGES))


def read_rows(path: Path, row_format: RowFormat) -> Source:
    """Read one entry for each row of a file, as its format has it."""
    file, tools = file_digest(path), dict[str, JsonObject]()

    def read(number: int, row: JsonObject) -> Rollout | str:
        try:
            chat = row_format.chat_row(row, path)
        except MALFORMED as error:
            return f"it is no {row_format.name}: {reason_of(error)}"
        if not isinstance(chat, dict):
            return chat
        definitions = chat.get("tools")
        tools.update(schemas_by_name(json.loads(definitions) if isinstance(definitions, str) else definitions))
        return chat_rollout(file, number, chat)

    return Source(file, {"format": row_format.name}, entries_of(rows_of(path), read), tools)


def chat_rollout(file: str, number: int, row: JsonObject) -> Rollout | str:
    """Make the record of a row of a chat, or say why there is none.

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
    if isinstance(row.get("system"), str):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    reward = next((row[name] for name in REWARD if row.get(name) is not None), None)
    reference, script, injections = row.get("reference"), row.get("script"), row.get("injections")
    if reference is not None and not isinstance(reference, list):
        return "its reference is not a list of messages"
    try:
        dialogue = dialogue_of(messages)
    except ValueError as error:
        return str(error)
    try:
        solution = dialogue_of(reference or [])
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


def dialogue_of(items: Iterable[object]) -> list[Message]:
    """Convert messages to chat messages: none of one that holds only thoughts, several of one that holds results beside
    words; calls that are items of their own belong to the assistant's turn before them.

    Raises:
        ValueError: one of them is no message.
    """
    dialogue: list[Message] = []
    for item in items:
        parts: Sequence[object] = [item]
        if is_langchain(item):
            parts = of_langchain(item)
        elif is_sharegpt(item):
            parts = of_sharegpt(item)
        elif is_item(item):
            parts = of_item(item)
        elif isinstance(item, Mapping):
            parts = _of_blocks(item)
        messages = [*map(chat_message, parts)]
        if is_item(item) and messages and dialogue and messages[0]["role"] == dialogue[-1]["role"] == "assistant":
            calls = dialogue[-1].get("tool_calls", []) + messages.pop(0)["tool_calls"]
            dialogue[-1] = {**dialogue[-1], "tool_calls": calls}
        dialogue += messages
    return dialogue


def _of_blocks(item: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """Divide a message with Anthropic's blocks: words and calls are one message, each result one of a tool."""
    content = item.get("content")
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    if not any(block.get("type") in BLOCKS for block in blocks):
        return [item]
    messages: list[JsonObject] = []
    calls: list[JsonObject] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            text, error = text_of(block.get("content")), bool(block.get("is_error"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text, "error": error})
        elif block.get("type") == "tool_use":
            calls.append(call_entry(block.get("name"), block.get("input"), block.get("id")))
    words = text_of([block for block in blocks if block.get("type") == "text"])
    speech = {"role": item.get("role"), "content": words, **({"tool_calls": calls} if calls else {})}
    return [*messages, *([speech] if words or calls else [])]


def chat_message(item: object) -> Message:
    """Reduce a chat message to its known fields, arguments as objects.

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
            raise ValueError("its tool_calls are not a list")
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
                **({"compare": [*map(str, call["compare"])]} if isinstance(call.get("compare"), list) else {}),
            }
            for call in calls
        ]
    if isinstance(item.get("informs"), list):
        message["informs"] = [str(value) for value in item["informs"]]
    return message
