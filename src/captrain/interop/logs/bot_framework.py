"""Transcripts of Microsoft's Bot Framework: the activities of one or several conversations.

Only messages are read. Without the role of a sender, nothing tells the bot from the user.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign
from captrain.records import Message

ROLES = {"user": "user", "bot": "assistant", "skill": "assistant"}


def is_activity(row: Foreign) -> bool:
    """Return whether a row is an activity, with or without the role of its sender."""
    parts = [row.get(name) for name in ("from", "conversation")]
    return "channelId" in row and isinstance(row.get("type"), str) and all(isinstance(p, Mapping) for p in parts)


def _role(row: Foreign) -> str | None:
    return ROLES.get(str(row["from"].get("role")))


def _recognizes(rows: Sequence[Foreign]) -> bool:
    said = [row for row in rows if is_activity(row) and row["type"] == "message"]
    return bool(said) and all(map(is_activity, rows)) and all(map(_role, said))


def _conversations(rows: Sequence[Foreign]) -> list[list[Foreign]]:
    conversations: dict[str, list[Foreign]] = {}
    for row in filter(is_activity, rows):
        conversations.setdefault(str(row["conversation"].get("id")), []).append(row)
    return [*conversations.values()]


def _conversation(rows: Sequence[Foreign], path: Path) -> ChatRow:
    name = str(rows[0]["conversation"].get("id"))
    return ChatRow([_message(row) for row in rows if row["type"] == "message"], None, task_id=name, keys=(name,))


def _message(row: Foreign) -> Message:
    """Convert a message. A card that the bot shows, or that the user submits, has no text."""
    shown = next((row[name] for name in ("value", "attachments") if row.get(name)), "")
    text = row.get("text") or (shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False))
    return {"role": _role(row), "content": text}


TRANSCRIPTS = FileFormat("Bot Framework transcripts", _recognizes, _conversation, _conversations)
