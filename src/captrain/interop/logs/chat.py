"""Chats with a reward: the rows that other formats are converted to.

Messages may be in OpenAI's format, Anthropic's blocks, items of Responses, LangChain's or ShareGPT's: each message
tells its own format. Columns go by several names. `tools` (schemas), `task_id`, `trial`, `model` and `reference`
(assistant messages of a solution) are optional; everything else is ignored. A row without `task_id` (ShareGPT: without
`id`) is a task of its own, named by its file and number.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from captrain.interop.logs.messages import is_item, is_langchain, is_sharegpt, of_item, of_langchain, of_sharegpt
from captrain.interop.logs.records import ChatRow, RowFormat, rows_of
from captrain.interop.logs.source import (
    MALFORMED,
    CallEntry,
    Foreign,
    Source,
    call_entry,
    entries_of,
    parsed,
    reason_of,
    record_of_entry,
    schemas_by_name,
    text_of,
)
from captrain.records import Message, Rollout, file_digest

MESSAGES = ("messages", "conversation", "conversations", "trajectory", "items")
REWARD = ("reward", "score", "success")
BLOCKS = ("tool_use", "tool_result")
FIRST = 20
"""Messages of a row that are inspected for the format of the file."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def is_message(item: object) -> bool:
    """Return whether an object is a message of any of these formats."""
    is_chat = isinstance(item, Mapping) and isinstance(item.get("role"), str)
    return is_chat or is_item(item) or is_langchain(item) or is_sharegpt(item)


def chat_row(row: Foreign, path: Path | None = None) -> ChatRow | str:
    """Read the columns of a row; return why it is no chat otherwise."""
    messages = next((row[name] for name in MESSAGES if isinstance(row.get(name), list)), None)
    if messages is None:
        return f"there are no messages (a list named {', '.join(MESSAGES)})"
    if isinstance(row.get("system"), str):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    injections = row.get("injections")
    return ChatRow(
        messages,
        next((row[name] for name in REWARD if row.get(name) is not None), None),
        row.get("task_id"),
        row.get("trial"),
        row.get("model", "unknown"),
        row.get("tools"),
        row.get("reference"),
        row.get("script"),
        injections if isinstance(injections, dict) else {},
        str(row.get("fault") or ""),
    )


def _sharegpt_row(row: Foreign, path: Path) -> ChatRow | str:
    return chat_row({"task_id": row.get("id"), **row})


def _has(is_one: Callable[[object], bool]) -> Callable[[Foreign], bool]:
    """Return a test whether one of the first messages of a row is of a format."""

    def recognizes(row: Foreign) -> bool:
        lists = [row[name] for name in MESSAGES if isinstance(row.get(name), list)]
        return bool(lists) and any(map(is_one, lists[0][:FIRST]))

    return recognizes


def _is_chat(row: Foreign) -> bool:
    return any(isinstance(row.get(name), list) for name in MESSAGES)


LANGCHAIN = RowFormat("LangChain messages", _has(is_langchain), chat_row)
SHAREGPT = RowFormat("ShareGPT conversations", _has(is_sharegpt), _sharegpt_row)
ITEMS = RowFormat("OpenAI Responses items", _has(is_item), chat_row)
CHAT = RowFormat("chat JSONL", _is_chat, chat_row)


def read_rows(path: Path, row_format: RowFormat) -> Source:
    """Read one entry for each row of a file."""
    source = Source(file_digest(path), {"format": row_format.name}, iter(()))

    def read(number: int, row: Foreign) -> Rollout | str:
        try:
            chat = row_format.convert(row, path)
        except MALFORMED as error:
            return f"it is no {row_format.name}: {reason_of(error)}"
        if not isinstance(chat, ChatRow):
            return chat
        tools = json.loads(chat.tools) if isinstance(chat.tools, str) else chat.tools
        source.tools.update(schemas_by_name(tools))
        return chat_rollout(source.file, number, chat)

    return replace(source, entries=entries_of(rows_of(path), read))


def chat_rollout(file: str, number: int, row: ChatRow) -> Rollout | str:
    """Return the record of a chat, or why there is none.

    Args:
        file: digest of the file.
        number: of the row, from 1.
        row: the chat.
    """
    reference = row.reference or []
    if not isinstance(reference, list):
        return "its reference is not a list of messages"
    try:
        dialogue = dialogue_of(row.messages)
    except ValueError as error:
        return str(error)
    try:
        solution = dialogue_of(reference)
    except ValueError as error:
        return f"its reference cannot be read: {error}"
    if any(message["role"] != "assistant" for message in solution):
        return "its reference holds messages that are not the assistant's"
    data: dict[str, object] = {"kind": "chat"}
    if row.script and isinstance(row.script, str):
        data["script"] = row.script
    if row.injections:
        data["injections"] = row.injections
    return record_of_entry(
        file,
        number,
        environment="chat",
        # Rows of different files share no task by their numbers.
        task=str(row.task_id if row.task_id is not None else f"{file[:6]}:{number}"),
        data=data,
        messages=dialogue,
        reward=float(row.reward) if isinstance(row.reward, bool) else row.reward,
        policy=str(row.model),
        trial=row.trial if type(row.trial) is int and 0 <= row.trial < 1 << 31 else 0,
        reference=solution,
        fault=row.fault or None,
    )


def dialogue_of(items: Iterable[object]) -> list[Message]:
    """Convert messages to chat messages. A message of thoughts alone gives none, one with results beside text gives
    several. Calls that are items of their own join the assistant's turn before them.

    Raises:
        ValueError: one of them is no message.
    """
    dialogue: list[Message] = []
    for item in items:
        parts: Sequence[object] = [item]
        if is_langchain(item):
            parts = [of_langchain(item)]
        elif is_sharegpt(item):
            parts = [of_sharegpt(item)]
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
    """Divide a message of Anthropic's blocks: text and calls are one message, each result is one of a tool."""
    content = item.get("content")
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    if not any(block.get("type") in BLOCKS for block in blocks):
        return [item]
    messages: list[Message] = []
    calls: list[CallEntry] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            text, error = text_of(block.get("content")), bool(block.get("is_error"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text, "error": error})
        elif block.get("type") == "tool_use":
            calls.append(call_entry(block.get("name"), block.get("input"), block.get("id")))
    text = text_of([block for block in blocks if block.get("type") == "text"])
    if text or calls:
        messages.append({"role": item.get("role"), "content": text, "tool_calls": calls})
    return messages


def chat_message(item: object) -> Message:
    """Reduce a chat message to its known fields, with arguments as objects.

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
