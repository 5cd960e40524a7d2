"""verifiers: traces of 0.4 (`traces.jsonl`: an episode a line, whose traces are graphs of nodes), and `results.jsonl`
of `vf-eval` and of Prime's export: a prompt and its completion a line."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, loaded, text_of
from captrain.interop.logs.templated import is_templated
from captrain.records import Message


def _recognizes(row: Foreign) -> bool:
    traces = row.get("traces")
    return isinstance(traces, list) and (not traces or "nodes" in traces[0])


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    """Convert the first trace of an episode, from its last leaf to the root. Its reward is the weighted sum of its
    parts."""
    if not row["traces"]:
        return "the episode has no trace"
    trace = row["traces"][0]
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    leaves = [place for place in range(len(nodes)) if place not in parents]
    messages: list[Message] = []
    place = leaves[-1] if leaves else None
    while place is not None:
        if place < 0 or len(messages) == len(nodes):
            return "the parents of its nodes lead to no root"
        messages.insert(0, _message(nodes[place]["message"]))
        place = nodes[place].get("parent")
    parts = [float(part["score"]) * float(part.get("weight", 1)) for part in (trace.get("rewards") or {}).values()]
    errors = row.get("errors") or []
    return ChatRow(
        messages,
        sum(parts) if parts else None,
        task_id=_task_id(row.get("task")),
        model=((trace.get("agent") or {}).get("config") or {}).get("model") or "unknown",
        tools=trace.get("tools"),
        fault=text_of(errors[0]) if errors and not row.get("ok", True) else "",
    )


def _task_id(task: object) -> object:
    """Find the name of an episode's task, in the task or in its `data`."""
    entry = task.get("data", task) if isinstance(task, dict) else task
    if not isinstance(entry, dict):
        return entry
    return next((entry[name] for name in ("id", "name", "idx") if entry.get(name) is not None), None)


def _message(message: Foreign) -> Message:
    calls = [
        call_entry(call.get("name"), call.get("arguments"), call.get("id")) for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls}


VERIFIERS = RowFormat("verifiers traces", _recognizes, _chat_row)


def _is_result(row: Foreign) -> bool:
    prompt, completion = loaded(row.get("prompt")), loaded(row.get("completion"))
    is_spoken = isinstance(completion, list) or (isinstance(completion, str) and isinstance(prompt, list | str))
    return "completion" in row and "prompt" in row and bool(prompt) and is_spoken and not is_templated(row)


def _result_row(row: Foreign, path: Path) -> ChatRow:
    prompt, completion, info = (loaded(row.get(name)) for name in ("prompt", "completion", "info"))
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    details = info if isinstance(info, dict) else {}
    error = row.get("error")
    return ChatRow(
        [*asked, *said],
        row.get("reward"),
        task_id=next((row[name] for name in TASK if row.get(name) is not None), None),
        trial=row.get("sample_id"),
        model=row.get("model") or "unknown",
        tools=details.get("oai_tools") or row.get("tools"),
        fault=text_of(error) if error else "",
        limit="truncated" if row.get("is_truncated") else "",
        expected={"answer": row.get("answer")},
    )


TASK = ("example_id", "problem_id", "task_id", "id")
RESULTS = RowFormat("verifiers results", _is_result, _result_row)
