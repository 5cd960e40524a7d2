"""Reads chats with a reward. Other formats are converted to such chats first.

The format is detected message by message: OpenAI's chat format, Anthropic's blocks, items of OpenAI's Responses, or
messages of LangChain, ShareGPT or AutoGen. A column may have one of several names. `tools` (schemas), `task_id`,
`trial`, `model` and `reference` (assistant messages of a solution) are optional. All other columns are ignored. A row
without `task_id` (in ShareGPT: without `id`) is a task of its own, named by its file and number.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from captrain.interop.logs.autogen import LIMIT, is_autogen, of_autogen
from captrain.interop.logs.beside import completed
from captrain.interop.logs.messages import (
    is_item,
    is_langchain,
    is_sharegpt,
    of_item,
    of_langchain,
    of_parts,
    of_sharegpt,
)
from captrain.interop.logs.outcomes import NO_REWARD
from captrain.interop.logs.records import ChatRow, FileFormat, RowFormat
from captrain.interop.logs.source import (
    MALFORMED,
    CallEntry,
    Entry,
    Foreign,
    Read,
    Source,
    call_of,
    entries_of,
    listed_calls,
    loaded,
    parsed,
    reason_of,
    schemas_by_name,
    text_of,
    trial_of,
)
from captrain.interop.logs.turns import LISTED_RESULTS, PARTS, is_exchange, is_turn, of_turn, speaker_of
from captrain.records import Message, file_digest, plain

MESSAGES = ("messages", "conversation", "conversations", "trajectory", "items")
REWARD = ("reward", "score", "success")
MODEL = ("model", "model_name", "model_id", "llm", "agent_model")
FOREIGN = ("toolRequest", "toolResponse")
CALLS, RESULTS = ("tooluse", "toolcall"), ("toolresult", "toolresponse")
"""Types of content blocks in the notations of Anthropic, Vercel and OpenClaw, without hyphens and in lower case."""
TIMES = ("created_at", "createdAt", "timestamp", "time")
ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]")
EARLIEST = 1e9
"""Least number that is a point in time, in seconds since 1970 or a finer unit. A smaller one may be a duration."""
OPENING = ("system", "user")
"""Speakers that begin a dialogue."""
NUMBERED = re.compile(r"([A-Za-z]+)_?(\d+)")
TASK = ("task_id", "instance_id")
AGENT = ("implementation", "agent", "agent_name")
KEYS = ("trace_id", "session_id", "id")
NO_WORDS = "no message of its user holds a text that captrain knows"
REQUEST = f"{NO_REWARD}: it is one request to a model, with the reply beside the messages"
FACT = 20_000
FAULT = 2000
"""Most characters that are kept of a fact in the log (`FACT`) and of an error (`FAULT`)."""
FIRST = 20
"""Number of messages per row that are inspected to detect the format."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
OTHER_ROLES = {
    **dict.fromkeys(("function", "toolresult", "toolresponse", "observation", "ipython"), "tool"),
    **dict.fromkeys(("ai", "model", "agent", "bot", "toolcall"), "assistant"),
    "human": "user",
}
"""Role in other tools' notation, without hyphens -> role in OpenAI's."""


def is_message(item: object) -> bool:
    """Return whether an object is a message of any of these formats."""
    is_chat = isinstance(item, Mapping) and isinstance(item.get("role"), str)
    return is_chat or is_item(item) or is_langchain(item) or is_sharegpt(item) or is_autogen(item) or is_turn(item)


def is_spoken(items: Sequence[object]) -> bool:
    """Return whether a list of messages is a dialogue.

    A list in a known format always is. In any other notation, an agent and somebody else must both speak.
    """
    kinds = (is_item, is_langchain, is_sharegpt, is_autogen)
    return is_exchange(items) or any(is_one(item) for item in items for is_one in kinds)


def _is_foreign_turn(item: object) -> bool:
    """Return whether an object is a turn that chat formats do not know: its role or one of its parts is unknown."""
    if not isinstance(item, Mapping):
        return False
    content, role = item.get("content"), item.get("role")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    is_known = isinstance(role, str) and (role in ROLES or _kind(item, "role") in OTHER_ROLES)
    is_foreign = any("type" not in part or part["type"] in FOREIGN for part in parts)
    is_elsewhere = not content and any(item.get(name) for name in (*PARTS, *LISTED_RESULTS) if name != "parts")
    return (is_foreign or not is_known or is_elsewhere) and is_turn(item)


def messages_in(row: Foreign) -> list[object] | None:
    """Return the dialogue of a row; None if there is none.

    The dialogue is a list under one of the usual names, possibly as JSON text. Otherwise it is the longest list of
    messages under any name.
    """
    for name in MESSAGES:
        value = loaded(row.get(name))
        if isinstance(value, list):
            turns = [*map(unwrapped, value)]
            if name == MESSAGES[0] or not turns or any(map(is_message, turns)):
                return oldest_first(turns)
    if is_message(row):
        return None
    lists = [[*map(unwrapped, part)] for part in row.values() if isinstance(part, list) and part]
    lists = [part for part in (*lists, *_numbered(row)) if all(map(is_message, part)) and is_spoken(part)]
    return oldest_first(max(lists, key=len, default=None))


def unwrapped(item: object) -> object:
    """Return the message that an object wraps, such as a choice of a completion. Any other object is returned as is."""
    if not isinstance(item, Mapping) or "role" in item or "type" in item:
        return item
    message = item.get("message")
    return message if isinstance(message, Mapping) and isinstance(message.get("role"), str) else item


def _numbered(row: Foreign) -> Iterator[list[object]]:
    """Yield the messages in numbered fields of a row, such as `message_1` and `message_2`, by the fields' name."""
    names = [match for name in row if (match := NUMBERED.fullmatch(str(name))) and isinstance(row[name], Mapping)]
    names.sort(key=lambda match: int(match[2]))
    for stem in dict.fromkeys(match[1] for match in names):
        yield [row[match[0]] for match in names if match[1] == stem]


def oldest_first(messages: list[object] | None) -> list[object] | None:
    """Reverse a list of messages that some APIs list the newest first.

    Every message must have a point in time, these must fall, and the dialogue must begin with the user or the system
    only if it is reversed.
    """
    times = [*map(_time_of, messages or ())]
    falling = all(a is not None and b is not None and a > b for a, b in pairwise(times))
    if not messages or len(times) < 2 or not falling:
        return messages
    first, last = speaker_of(messages[0]), speaker_of(messages[-1])
    return messages[::-1] if last in OPENING and first not in OPENING else messages


def _time_of(item: object) -> float | None:
    """Return when a message was sent, in seconds since 1970. None if it has no date in a known notation."""
    value = next((item[name] for name in TIMES if name in item), None) if isinstance(item, Mapping) else None
    if isinstance(value, str) and ISO_TIME.match(value):
        with suppress(ValueError):
            time = datetime.fromisoformat(value)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) and value > EARLIEST else None


def chat_row(row: Foreign, path: Path | None = None) -> ChatRow | str:
    """Read the columns of a row. Return the chat, or the reason why the row is not one."""
    messages = messages_in(row)
    if messages is None:
        return f"there are no messages (a list named {', '.join(MESSAGES)})"
    reply = _reply(row)
    # A run repeats its last message as `response`. A single request ends before the message in `response`.
    is_request = bool(reply) and not (messages and _is_assistants(messages[-1]))
    if is_request and messages and isinstance(messages[-1], Mapping):
        messages = [*messages, *reply]
    if isinstance(row.get("system"), str):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    injections, error = row.get("injections"), row.get("fault") or row.get("error")
    reference = row.get("reference")
    return ChatRow(
        messages,
        next((row[name] for name in REWARD if row.get(name) is not None), None),
        next((row[name] for name in TASK if row.get(name) is not None), None),
        row.get("trial"),
        next((row[name] for name in MODEL if isinstance(row.get(name), str)), "unknown"),
        row.get("tools"),
        reference if isinstance(reference, list) or not reference else None,
        row.get("script"),
        injections if isinstance(injections, dict) else {},
        expected={} if isinstance(reference, list) else {"reference": reference},
        fault=fact(error)[:FAULT] if error and isinstance(error, str | dict) else "",
        agent=next((row[name] for name in AGENT if isinstance(row.get(name), str)), None),
        keys=tuple(str(row[name]) for name in KEYS if row.get(name) is not None),
        missing=REQUEST if is_request else "",
    )


def _is_assistants(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _reply(row: Foreign) -> list[object]:
    """Return the reply in a field beside the messages, in OpenAI's or Anthropic's response format. [] if missing."""
    stored = row if row.get("object") == "chat.completion" else None
    reply = loaded(row.get("response") or row.get("original_response") or stored)
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        reply = choices[0].get("message")
    if isinstance(reply, str) and reply.strip():
        return [{"role": "assistant", "content": reply}]
    return [reply] if isinstance(reply, Mapping) and reply.get("role") == "assistant" else []


def _sharegpt_row(row: Foreign, path: Path) -> ChatRow | str:
    return chat_row({"task_id": row.get("id"), **row})


def _autogen_row(row: Foreign, path: Path) -> ChatRow | str:
    chat, reason = chat_row(row), str(row.get("stop_reason") or "")
    return chat if isinstance(chat, str) or not LIMIT.match(reason) else replace(chat, limit=reason)


def _has(is_one: Callable[[object], bool]) -> Callable[[Foreign], bool]:
    """Return a function that tests whether one of a row's first messages has a format."""

    def recognizes(row: Foreign) -> bool:
        return any(map(is_one, (messages_in(row) or [])[:FIRST]))

    return recognizes


def _is_chat(row: Foreign) -> bool:
    return messages_in(row) is not None


LANGCHAIN = RowFormat("LangChain messages", _has(is_langchain), chat_row)
AUTOGEN = RowFormat("AutoGen messages", _has(is_autogen), _autogen_row)
SHAREGPT = RowFormat("ShareGPT conversations", _has(is_sharegpt), _sharegpt_row)
ITEMS = RowFormat("OpenAI Responses items", _has(is_item), chat_row)
CHAT = RowFormat("chat JSONL", _is_chat, chat_row)


def read_rows(path: Path, row_format: RowFormat, rows: Iterable[tuple[str, object]]) -> Source:
    """Read one entry for each row of a file."""
    source = Source(file_digest(path), {"format": row_format.name}, iter(()))

    def read(number: int, row: Foreign) -> Read:
        try:
            chat = row_format.convert(row, path)
        except MALFORMED as error:
            return f"it is no {row_format.name}: {reason_of(error)}"
        return _entry_of(source, path, number, chat)

    return replace(source, entries=entries_of(rows, read))


def read_whole(path: Path, file_format: FileFormat, rows: Sequence[Foreign]) -> Source:
    """Read all rows of a file as one dialogue, or as one for each of their groups."""
    source = Source(file_digest(path), {"format": file_format.name}, iter(()))
    groups = file_format.groups(rows)
    places = [f"dialogue {number}" for number, _ in enumerate(groups, start=1)] if len(groups) > 1 else ["the file"]

    def read(number: int, _: Foreign) -> Read:
        chat = file_format.convert(groups[number - 1], path)
        if isinstance(chat, ChatRow) and len(groups) > 1:  # the file names no single task
            chat = replace(chat, task_id=next(iter(chat.keys), None))
        return _entry_of(source, path, number, chat)

    return replace(source, entries=entries_of([(place, {}) for place in places], read))


def _entry_of(source: Source, path: Path, number: int, chat: ChatRow | Read) -> Read:
    if not isinstance(chat, ChatRow):
        return chat
    tools = json.loads(chat.tools) if isinstance(chat.tools, str) else chat.tools
    source.tools.update(schemas_by_name(tools))
    return chat_entry(source.file, number, completed(chat, path))


def chat_entry(file: str, number: int, row: ChatRow) -> Entry | str:
    """Return the entry of a chat, or the reason why it cannot be read.

    Args:
        file: digest of the file.
        number: number of the row, from 1.
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
    asked = [item for item in row.messages if isinstance(item, Mapping) and speaker_of(item) == "user"]
    is_silent = not any(message["content"] for message in dialogue if message["role"] == "user")
    if asked and is_silent and not any(map(_has_known_field, asked)):
        fields = ", ".join(map(str, asked[0]))
        return f"{NO_WORDS} (its fields: {plain(fields)[:200]})"
    facts = {
        "script": row.script if isinstance(row.script, str) else "",
        "injections": row.injections,
        "limit": row.limit,
        "grading": fact(row.grading),
        "expected": {name: fact(value) for name, value in row.expected.items() if value not in (None, "", [], {})},
    }
    submission = {} if row.submission is None else {"submission": fact(row.submission)}  # keep "", too
    return Entry(
        number,
        "chat",
        # The file's digest keeps rows with equal numbers in different files apart.
        str(row.task_id if row.task_id is not None else f"{file[:6]}:{number}"),
        dialogue,
        row.reward,
        str(row.model),
        data={"kind": "chat", **{name: value for name, value in facts.items() if value}, **submission},
        trial=trial_of(row.trial),
        reference=solution,
        fault=row.fault,
        agent="" if row.agent is None else str(row.agent),
        keys=row.keys,
        missing="" if row.reward is not None else row.missing,
        result=row.result,
    )


def _has_known_field(item: Foreign) -> bool:
    """Return whether a message has a field for texts, even if it is empty or holds something else, such as an image."""
    is_known = any(is_one(item) for is_one in (is_item, is_langchain, is_sharegpt, is_autogen))
    return is_known or not {*PARTS, *LISTED_RESULTS}.isdisjoint(item)


def fact(value: object) -> str:
    """Convert a fact in the log to text of at most `FACT` characters."""
    return ("" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:FACT]


def dialogue_of(items: Iterable[object]) -> list[Message]:
    """Convert messages of any known format to chat messages.

    A message may become none, one or several: a message with only thoughts is dropped, and tool results beside text
    become messages of their own. Calls that are separate items are merged into the assistant's message before them.

    Raises:
        ValueError: an item is not a message.
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
        elif is_autogen(item):
            parts = of_autogen(item)
        elif _is_foreign_turn(item):
            parts = of_turn(item)
        elif isinstance(item, Mapping):
            parts = of_parts(item) if isinstance(item.get("parts"), list) else _of_blocks(item)
        messages = [*map(chat_message, parts)]
        if is_item(item) and messages and dialogue and messages[0]["role"] == dialogue[-1]["role"] == "assistant":
            calls = dialogue[-1].get("tool_calls", []) + messages.pop(0)["tool_calls"]
            dialogue[-1] = {**dialogue[-1], "tool_calls": calls}
        dialogue += messages
    return dialogue


def _of_blocks(item: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """Split a message of content blocks: text and calls become one message, and each result becomes a tool message."""
    content = item.get("content")
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    messages: list[Message] = []
    calls: list[CallEntry] = []
    for block in blocks:
        if _kind(block) in RESULTS:
            result = next((block[name] for name in ("content", "result", "output") if block.get(name) is not None), "")
            name, error = block.get("tool_use_id") or block.get("toolCallId"), bool(block.get("is_error"))
            messages.append({"role": "tool", "tool_call_id": name, "content": result, "error": error})
        elif _kind(block) in CALLS and (call := call_of(block)):
            calls.append(call)
    if not (messages or calls):
        return [item]
    text = text_of([block for block in blocks if block.get("type") == "text"])
    if text or calls:
        messages.append({"role": item.get("role"), "content": text, "tool_calls": calls})
    return messages


def _kind(value: Mapping[str, object], name: str = "type") -> str:
    return str(value.get(name) or "").lower().replace("-", "").replace("_", "")


def chat_message(item: object) -> Message:
    """Reduce a chat message to its known fields, with arguments as objects.

    Raises:
        ValueError: the object is not a chat message.
    """
    role = item["role"] if isinstance(item, Mapping) and isinstance(item.get("role"), str) else None
    if role not in ROLES and isinstance(item, Mapping):
        role = OTHER_ROLES.get(_kind(item, "role"))
    if not isinstance(item, Mapping) or role is None:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    message: Message = {"role": OTHER_ROLES.get(role, role), "content": text_of(item.get("content"))}
    if message["role"] == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or item.get("toolCallId") or "")
        message |= {"error": True} if item.get("error") is True or item.get("isError") is True else {}
    if calls := listed_calls(item):
        if not isinstance(calls, list):
            raise ValueError("its tool_calls are not a list")
        message["tool_calls"] = [_chat_call(loaded(call)) for call in calls]
    called = item.get("function_call")
    if isinstance(called, Mapping | list) and called and message["role"] == "assistant" and not calls:
        message["tool_calls"] = [_chat_call(call) for call in (called if isinstance(called, list) else [called])]
    if isinstance(item.get("informs"), list):
        message["informs"] = [str(value) for value in item["informs"]]
    if message["role"] == "assistant" and isinstance(item.get("name"), str):
        message["name"] = item["name"]
    return message


def _chat_call(entry: object) -> Message:
    call = call_of(entry)
    if call is None or not isinstance(entry, Mapping):
        raise ValueError("a tool call has no function")
    function = {"name": call["function"]["name"], "arguments": parsed(call["function"]["arguments"])}
    compare = {"compare": [*map(str, entry["compare"])]} if isinstance(entry.get("compare"), list) else {}
    return {"id": str(call["id"] or ""), "type": "function", "function": function, **compare}
