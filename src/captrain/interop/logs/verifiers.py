"""Traces of verifiers 0.4 (`traces.jsonl`): an episode a line, whose traces are graphs of nodes, read leaf to root."""

from pathlib import Path

from captrain.interop.logs.records import RowFormat
from captrain.interop.logs.source import call_entry, text_of
from captrain.records import JsonObject


def _recognizes(row: JsonObject) -> bool:
    traces = row.get("traces")
    return isinstance(traces, list) and (not traces or "nodes" in traces[0])


def _chat_row(row: JsonObject, path: Path) -> JsonObject | str:
    """Convert the first trace of an episode; its reward is the weighted sum of its parts."""
    if not row["traces"]:
        return "the episode has no trace"
    trace = row["traces"][0]
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    leaves = [place for place in range(len(nodes)) if place not in parents]
    messages: list[JsonObject] = []
    place = leaves[-1] if leaves else None
    while place is not None:
        if place < 0 or len(messages) == len(nodes):
            return "the parents of its nodes lead to no root"
        messages.insert(0, _message(nodes[place]["message"]))
        place = nodes[place].get("parent")
    rewards = trace.get("rewards") or {}
    errors = row.get("errors") or []
    return {
        "messages": messages,
        "reward": sum(float(part["score"]) * float(part.get("weight", 1)) for part in rewards.values())
        if rewards
        else None,
        "tools": trace.get("tools"),
        "model": ((trace.get("agent") or {}).get("config") or {}).get("model") or "unknown",
        "task_id": _task_id(row.get("task")),
        "fault": text_of(errors[0]) if errors and not row.get("ok", True) else None,
    }


def _task_id(task: object) -> object:
    """Find the name of an episode's task: its data hold the name, where its type stands beside them."""
    entry = task.get("data", task) if isinstance(task, dict) else task
    if not isinstance(entry, dict):
        return entry
    return next((entry[name] for name in ("id", "name", "idx") if entry.get(name) is not None), None)


def _message(message: JsonObject) -> JsonObject:
    calls = [
        call_entry(call.get("name"), call.get("arguments"), call.get("id")) for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


VERIFIERS = RowFormat("verifiers traces", _recognizes, _chat_row)
