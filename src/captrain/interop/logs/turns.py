"""Reads the turns of a dialogue in unknown notations: the speaker, the text, the calls and the results.

One rule reads the messages of pydantic-ai, Letta, Bedrock, Gemini CLI, OpenCode, goose and Google's ADK:

- A turn names its speaker in one of the fields `SPEAKERS`, in the turn itself or in an object inside it.
- A turn holds a text, or parts. Each part is a text, a call or a result.
- The kind of a part is its type, or the name of the object that it holds.

A list is a dialogue only if every item is a turn.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from captrain.interop.logs.source import (
    ARGUMENTS,
    CALL_IDS,
    CallEntry,
    Foreign,
    call_entry,
    call_of,
    listed_calls,
    loaded,
    text_of,
)
from captrain.records import Message

SPEAKERS = ("role", "message_type", "kind", "type", "author", "speaker", "sender", "from", "actor")
INNER = ("info", "content", "message")
"""Names of objects inside a turn that may hold the speaker or the parts."""
PARTS = ("parts", "content", "message", "utterance", "text", "value", "items", "blocks")
OF_SPEAKER = {
    **dict.fromkeys(("user", "human", "customer", "client", "request", "userprompt", "caller"), "user"),
    **dict.fromkeys(("assistant", "ai", "model", "agent", "bot", "gemini", "response", "gpt", "llm"), "assistant"),
    **dict.fromkeys(("system", "developer", "systemprompt"), "system"),
    **dict.fromkeys(("tool", "toolreturn", "toolresult", "toolresponse", "function", "observation"), "tool"),
    **dict.fromkeys(("toolcallresult", "functionresult"), "tool"),
    **dict.fromkeys(
        ("toolcall", "toolcalls", "toolcallinvocation", "functioncall", "reasoning", "thinking"), "assistant"
    ),
}
"""Name of a speaker or type of a turn, in lower case and letters only -> role."""
LISTED_RESULTS = ("tool_results", "toolResults")
KINDS = ("type", "part_kind", "message_type", "content_type", "kind")
CALLS = ("toolcall", "tooluse", "functioncall", "toolrequest", "tool", "toolcallinvocation")
RESULTS = ("toolresult", "toolresponse", "toolreturn", "functionresponse", "functionresult", "toolcallresult")
THOUGHTS = ("reasoning", "thinking", "thought", "reasoningcontent")
NAMES = ("name", "tool_name", "toolName", "tool", "api_name")
OUTPUTS = (
    *("content", "output", "result", "result_value", "response", "tool_return", "value", "text", "outcome"),
    *("errorText", "error"),
)
WRAPPED = ("value", "state")
"""Names of objects inside a call or result that may hold its actual content."""


@dataclass(frozen=True)
class Piece:
    """One piece of a turn: a text, a call or a result. `role` is set only if the part itself names a role."""

    text: str = ""
    role: str = ""
    call: CallEntry | None = None
    result: Message | None = None


def _kind(value: object) -> str:
    return re.sub(r"[^a-z]|message$", "", str(value or "").lower())


def speaker_of(item: object) -> str:
    """Return the role of a turn; "" if it names no known speaker."""
    places = [item, *(item.get(name) for name in INNER)] if isinstance(item, Mapping) else []
    for place in [place for place in places if isinstance(place, Mapping)]:
        for name in SPEAKERS:
            value = place.get(name)
            if isinstance(value, str) and _kind(value) == "api":  # an answer of the agent's API, or a call of one
                return "tool" if any(place.get(key) for key in NAMES) else "assistant"
            if isinstance(value, str) and (role := OF_SPEAKER.get(_kind(value))):
                return role
    return ""


def is_exchange(items: Sequence[object]) -> bool:
    """Return whether an agent and somebody else both speak in a list of turns. Always true if a turn has a `role`."""
    is_plain = any(isinstance(item, Mapping) and isinstance(item.get("role"), str) for item in items)
    return is_plain or {"assistant"} < {speaker_of(item) for item in items} - {""}


def is_turn(item: object) -> bool:
    """Return whether an object is a turn of a dialogue: it has a known speaker, and content or a thought."""
    return bool(speaker_of(item)) and bool(_pieces(item) or _is_thought(item))


def of_turn(item: object) -> list[Message]:
    """Convert a turn to messages, without thoughts. Text and calls form one message, unless a result is in between."""
    messages: list[Message] = []
    speaker = speaker_of(item)
    for piece in _pieces(item):
        if piece.result is not None:
            messages.append(piece.result)
            continue
        role = "assistant" if piece.call else piece.role or speaker
        if not messages or messages[-1]["role"] != role or role == "tool":
            messages.append({"role": role, "content": ""} | ({"tool_calls": []} if role == "assistant" else {}))
        messages[-1]["content"] += piece.text
        if piece.call:
            messages[-1]["tool_calls"].append(piece.call)
    return messages


def _is_thought(item: object) -> bool:
    return isinstance(item, Mapping) and any(_kind(item.get(name)) in THOUGHTS for name in SPEAKERS)


def _pieces(item: object) -> list[Piece]:
    """List the pieces of a turn: its own text, call or result, those of its parts, and calls in a separate field."""
    if not isinstance(item, Mapping) or _is_thought(item):
        return []
    kind = _kind(item.get("role"))  # some name a call or result as the speaker
    is_called = speaker_of(item) == "tool" and any(item.get(name) for name in NAMES) and "content" not in item
    pieces = [*_of_part(item)] if _kind_of(item) in (*CALLS, *RESULTS) else []
    if not pieces and (is_called or kind in ("toolcall", "toolcallinvocation", "toolcallresult")):
        pieces = [*_of_part({**item, "type": "toolcallresult" if kind == "toolcallresult" else "toolcall"})]
    places = [item, *(item[name] for name in INNER if isinstance(item.get(name), Mapping))]
    parts = next((place[name] for place in places for name in PARTS if _says(place.get(name))), None)
    if not pieces:
        pieces = [piece for part in (parts if isinstance(parts, list) else [parts]) for piece in _of_part(part)]
    beside = listed_calls(item)
    for entry in map(loaded, beside if isinstance(beside, list) else []):
        pieces += _of_call(entry) if isinstance(entry, Mapping) else []
    results = next((item[name] for name in LISTED_RESULTS if item.get(name)), None)
    held = [result for result in (results if isinstance(results, list) else []) if isinstance(result, Mapping)]
    return [*pieces, *(Piece(result=_result(result, _identity(result))) for result in held)]


def _of_call(entry: Foreign) -> Iterator[Piece]:
    """Yield a call in a list of calls, with its result if it has one."""
    call = call_of(entry)
    if call is not None:
        yield Piece(call=call)
    if call is not None and any(entry.get(key) is not None for key in ("output", "result")):
        yield Piece(result=_result(entry, _identity(entry)))


def _says(value: object) -> bool:
    return isinstance(value, str | list) and bool(value)


def _kind_of(part: Foreign) -> str:
    """Return the kind of a part, from its type or from the name of the call or result object inside it. "" if none."""
    for name in KINDS:
        if (kind := _kind(part.get(name))) in (*CALLS, *RESULTS, *THOUGHTS):
            return kind
    held = [_kind(name) for name, value in part.items() if isinstance(value, Mapping)]
    return next((kind for kind in held if kind in (*CALLS, *RESULTS, *THOUGHTS)), "")


def _of_part(part: object) -> Iterator[Piece]:
    """Yield the pieces of a part: a text, or a call with its result if it has one."""
    if isinstance(part, str):
        yield Piece(part)
    if not isinstance(part, Mapping):
        return
    kind = _kind_of(part)
    kinds = next((group for group in (CALLS, RESULTS) if kind in group), ())
    inner = next((value for name, value in part.items() if _kind(name) in kinds and isinstance(value, Mapping)), part)
    held = {**inner, **next((inner[name] for name in WRAPPED if isinstance(inner.get(name), Mapping)), {})}
    if kind in CALLS:
        name = next((held[key] for key in NAMES if isinstance(held.get(key), str)), None)
        arguments = next((held[key] for key in ARGUMENTS if held.get(key) is not None), {})
        identity = _identity(part, held)
        if name:
            yield Piece(call=call_entry(name, arguments, identity))
        if name and any(held.get(key) is not None for key in ("output", "result")):
            yield Piece(result=_result(held, identity))
    elif kind in RESULTS:
        yield Piece(result=_result(inner, _identity(part, held)))
    elif kind not in THOUGHTS:
        words = part.get("text") if isinstance(part.get("text"), str | Mapping) else part.get("content")
        words = words.get("value") if isinstance(words, Mapping) else words
        if isinstance(words, str) and words:
            yield Piece(words, OF_SPEAKER.get(_kind(part.get("part_kind")), ""))


def _identity(*places: Foreign) -> object:
    return next((place[key] for place in places for key in (*CALL_IDS, "toolUseId") if place.get(key)), "")


def _result(held: Foreign, identity: object) -> Message:
    error = held.get("status") in ("error", "failed") or held.get("is_error") is True
    return {"role": "tool", "tool_call_id": identity, "content": _output(held), "error": error}


def _output(value: object) -> str:
    """Return the text of a result, or its JSON if it has no known text field."""
    value = loaded(value) if isinstance(value, str) and value.startswith("[{") else value
    if isinstance(value, list):
        return "\n".join(_output(part) for part in value)
    if isinstance(value, Mapping):
        nested = next((value[name] for name in ("functionResponse", "toolResult") if name in value), None)
        found = nested or next((value[name] for name in OUTPUTS if value.get(name) not in (None, "", [])), None)
        return _output(found) if found is not None else json.dumps({**value}, ensure_ascii=False) if value else ""
    return text_of(value)
