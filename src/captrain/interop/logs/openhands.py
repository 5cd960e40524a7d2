"""OpenHands: `output.jsonl` of its evaluations, and the events of one conversation, of version 0 and 1."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.beside import failing_tests, task_of
from captrain.interop.logs.records import ChatRow, FileFormat, RowFormat
from captrain.interop.logs.source import CallEntry, Foreign, call_entry, call_of, calling, text_of
from captrain.records import Message

UNSEEN = ("null", "recall", "agent_state_changed", "change_agent_state", "condensation", "task_tracking")
"""Actions and observations of the harness, which are not part of the dialogue."""
INNER = ("thought", "translated_ipython_code", "impl_source", "security_risk", "confirmation_state", "kind", "hidden")
LIMITS = ("maximum iteration", "max_iterations", "maximum budget", "max iterations")


def _is_event(item: object) -> bool:
    if not isinstance(item, Mapping):
        return False
    return "source" in item and (isinstance(item.get("kind"), str) or bool({"action", "observation"} & item.keys()))


def _events(history: object) -> list[Foreign]:
    """Return the events of a history as a flat list. Older histories are pairs of an action and its observation."""
    items = history if isinstance(history, list) else []
    flat = [part for item in items for part in (item if isinstance(item, list) else [item])]
    return [item for item in flat if isinstance(item, Mapping)]


def _messages(events: Sequence[Foreign]) -> Iterator[Message]:
    for event in events:
        kind = str(event.get("kind") or "")
        if kind.endswith("Event") or kind.endswith("Observation"):
            yield from _of_kind(kind, event)
        elif isinstance(event.get("action"), str) and event["action"] not in UNSEEN:
            yield _of_action(event)
        elif isinstance(event.get("observation"), str) and event["observation"] not in UNSEEN:
            error = event["observation"] == "error"
            yield {"role": "tool", "content": text_of(event.get("content")), "error": error}


def _of_kind(kind: str, event: Foreign) -> Iterator[Message]:
    """Convert an event of OpenHands 1 to messages."""
    if kind == "SystemPromptEvent":
        yield {"role": "system", "content": text_of(event.get("system_prompt"))}
    elif kind == "MessageEvent":
        role = "assistant" if event.get("source") == "agent" else "user"
        yield {"role": role, "content": text_of((event.get("llm_message") or {}).get("content"))}
    elif kind == "ActionEvent":
        action = {name: value for name, value in (event.get("action") or {}).items() if name not in INNER}
        call = call_of(event.get("tool_call")) or call_entry(event.get("tool_name") or "action", action)
        yield calling([call], text_of(event.get("thought")))
    elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        seen = event.get("observation") or {}
        text = text_of(seen.get("content") or seen.get("output") or event.get("error") or event.get("rejection_reason"))
        yield {"role": "tool", "content": text, "error": kind != "ObservationEvent" or bool(seen.get("is_error"))}


def _of_action(event: Foreign) -> Message:
    """Convert an action of OpenHands 0 to a text message, or to the call that the model made."""
    action, arguments = str(event["action"]), event.get("args") or {}
    words = text_of(arguments.get("content") or event.get("message")) if action in ("message", "system") else ""
    if action == "system":
        return {"role": "system", "content": words}
    if action == "message":
        return {"role": "assistant" if event.get("source") == "agent" else "user", "content": words}
    thought = text_of(arguments.get("thought") or arguments.get("final_thought"))
    if action == "finish":
        return {"role": "assistant", "content": thought or text_of(event.get("message"))}
    own = {name: value for name, value in arguments.items() if name not in INNER and value not in (None, "")}
    return calling([_model_call(event) or call_entry(action, own)], thought)


def _model_call(event: Foreign) -> CallEntry | None:
    metadata = event.get("tool_call_metadata") or {}
    choices = (metadata.get("model_response") or {}).get("choices") or [{}]
    calls = (choices[0].get("message") or {}).get("tool_calls") or []
    return next((call_of(call) for call in calls if call.get("id") == metadata.get("tool_call_id")), None)


def _model(events: Sequence[Foreign]) -> object:
    responses = ((event.get("tool_call_metadata") or {}).get("model_response") or {} for event in events)
    return next((response["model"] for response in responses if response.get("model")), "unknown")


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    events, result = _events(row["history"]), row.get("test_result") or {}
    report = next((place["report"] for place in (row, result) if isinstance(place.get("report"), dict)), {})
    error, metadata = str(row.get("error") or ""), row.get("metadata") or {}
    is_limit = any(words in error.lower() for words in LIMITS)
    model = ((metadata.get("llm_config") or metadata.get("llm") or {}).get("model")) or _model(events)
    messages = [*_messages(events)]
    if not any(message["role"] == "user" for message in messages) and row.get("instruction"):
        messages.insert(0, {"role": "user", "content": text_of(row["instruction"])})
    return ChatRow(
        messages,
        next((place["resolved"] for place in (row, report, result) if isinstance(place.get("resolved"), bool)), None),
        task_id=row.get("instance_id"),
        model=model,
        limit="max_iterations" if is_limit else "",
        fault="" if is_limit else error,
        grading=failing_tests(report),
        submission=result.get("git_patch", row.get("git_patch")),
        agent=metadata.get("agent_class"),
    )


def _conversation(rows: Sequence[Foreign], path: Path) -> ChatRow:
    return ChatRow([*_messages(rows)], None, task_id=task_of(path), model=_model(rows))


def _is_output(row: Foreign) -> bool:
    events = _events(row.get("history"))
    return bool(events) and any(map(_is_event, events[:5]))


OUTPUT = RowFormat("OpenHands output", _is_output, _chat_row)
EVENTS = FileFormat("OpenHands events", lambda rows: all(map(_is_event, rows)), _conversation)
