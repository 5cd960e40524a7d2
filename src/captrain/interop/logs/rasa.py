"""Trackers of Rasa: the events of one conversation, as its API and its tracker stores give them.

An action of the developer's own is a call without arguments, and the slots that it sets are its result. Actions that
only utter a response are the bot's messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.chat import chat_row
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, text_of
from captrain.records import Message

OF_RASA = ("action_listen", "action_session_start", "action_extract_slots")
"""Actions that Rasa takes by itself in every conversation."""
UTTERS = "utter_"


def _recognizes(row: Foreign) -> bool:
    events = row.get("events")
    if "sender_id" not in row or not isinstance(events, list) or not all(isinstance(e, Mapping) for e in events):
        return False
    return any(event.get("event") in ("user", "bot") for event in events)


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    return chat_row({"task_id": row["sender_id"], **row, "messages": [*_messages(row["events"])]})


def _messages(events: Sequence[Foreign]) -> Iterator[Message]:
    """Yield the messages of a conversation. The slots after an action are its result, up to the next turn."""
    slots: dict[str, object] | None = None
    for event in events:
        kind, name = event.get("event"), str(event.get("name") or "")
        if kind == "slot" and slots is not None:
            slots[name] = event.get("value")
        is_rejected = kind == "action_execution_rejected"
        if kind in ("user", "bot", "action") or is_rejected:
            if slots is not None:
                yield {"role": "tool", "content": json.dumps(slots, ensure_ascii=False), "error": is_rejected}
            slots = None
        if kind in ("user", "bot"):
            said = event.get("text") or event.get("data") or ""
            yield {"role": "user" if kind == "user" else "assistant", "content": text_of(said)}
        elif kind == "action" and name not in OF_RASA and not name.startswith(UTTERS):
            yield calling([call_entry(name, {})])
            slots = {}
    if slots is not None:
        yield {"role": "tool", "content": json.dumps(slots, ensure_ascii=False)}


RASA = RowFormat("Rasa trackers", _recognizes, _chat_row)
