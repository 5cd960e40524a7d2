"""Reads sessions of Claude Code, Codex and OpenClaw. A file of events is one dialogue. Outcomes need a score table."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.beside import task_of
from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign, call_entry, calling

OF_CODEX = {"session_meta", "response_item", "turn_context", "event_msg", "thread.started", "item.completed"}
SPEAKERS = ("user", "assistant", "system", "developer", "tool", "toolresult")
"""Roles that are part of the dialogue. Other roles are notes of the tool, such as a command that the user ran."""
SPOKEN = ("user", "assistant", "message")
"""Types of events that hold a message."""
LIMIT = "error_max_"
"""Prefix of the end reason of a session that hit a limit, such as `error_max_turns`."""


def _recognizes(rows: Sequence[Foreign]) -> bool:
    return any(row.get("type") in OF_CODEX or _message(row) is not None for row in rows)


def _message(row: Foreign) -> Foreign | None:
    message = row.get("message")
    is_spoken = row.get("type") in SPOKEN and isinstance(message, Mapping) and isinstance(message.get("role"), str)
    return message if is_spoken else None


def _items(rows: Sequence[Foreign]) -> Iterator[Foreign]:
    """Yield the messages and items of a session, without those of its subagents and without the tool's notes."""
    for row in rows:
        if row.get("isSidechain") or row.get("isMeta"):
            continue
        if message := _message(row):
            if message["role"].lower() in SPEAKERS:
                yield message
        elif row.get("type") == "response_item" and isinstance(row.get("payload"), Mapping):
            yield row["payload"]
        elif row.get("type") == "item.completed" and isinstance(row.get("item"), Mapping):
            yield from _of_codex(row["item"])


def _of_codex(item: Foreign) -> Iterator[Foreign]:
    """Convert an item that `codex exec --json` prints."""
    if item.get("type") == "agent_message":
        yield {"role": "assistant", "content": item.get("text")}
    elif item.get("type") == "command_execution":
        yield calling([call_entry("shell", {"command": item.get("command")}, item.get("id"))])
        error = item.get("exit_code") not in (0, None)
        yield {"role": "tool", "tool_call_id": item.get("id"), "content": item.get("aggregated_output"), "error": error}
    elif item.get("type") in ("mcp_tool_call", "file_change", "web_search"):
        inner = item.get("arguments") or item.get("changes") or item.get("query")
        name = item.get("tool") or item["type"]
        yield calling([call_entry(name, inner if isinstance(inner, dict) else {"input": inner}, item.get("id"))])


def _joined(items: Iterator[Foreign]) -> list[Foreign]:
    """Join the messages of an answer. The log has one message per content block, all with the same id."""
    whole: list[Foreign] = []
    for item in items:
        last = whole[-1] if whole else {}
        blocks = last.get("content"), item.get("content")
        if item.get("id") and item.get("id") == last.get("id") and all(isinstance(part, list) for part in blocks):
            whole[-1] = {**last, "content": [*last["content"], *item["content"]]}
        else:
            whole.append(item)
    return whole


def _chat_row(rows: Sequence[Foreign], path: Path) -> ChatRow:
    payloads = [row["payload"] if isinstance(row.get("payload"), Mapping) else row for row in rows]
    places = [*(message for row in rows if (message := _message(row))), *payloads]
    models = Counter(name for place in places if isinstance(name := place.get("model"), str) and name[:1] != "<")
    meta = next(
        (
            payload
            for row, payload in zip(rows, payloads, strict=True)
            if row.get("type") in ("session", "session_meta")
        ),
        {},
    )
    names = [row["sessionId"] for row in rows if row.get("sessionId")]
    name = meta.get("id") or next(iter(names), None) or task_of(path)
    end = next((row for row in reversed(rows) if row.get("type") == "result"), {})
    subtype = str(end.get("subtype") or "")
    return ChatRow(
        _joined(_items(rows)),
        None,
        task_id=name,
        model=most_common[0][0] if (most_common := models.most_common(1)) else "unknown",
        limit=subtype.removeprefix("error_") if subtype.startswith(LIMIT) else "",
        fault=subtype if subtype == "error_during_execution" else "",
        keys=(str(name),),
    )


SESSIONS = FileFormat("sessions of Claude Code, Codex or OpenClaw", _recognizes, _chat_row)
