"""Runs of CrewAI: the output of a crew (`CrewOutput`), whose tasks hold the messages of their agents.

The tasks of one output are one rollout. The log of a crew (`output_log_file`) marks no runs and holds no messages.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.interop.logs.chat import chat_row
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import NO_DIALOGUE, Foreign

NO_MESSAGES = f"{NO_DIALOGUE}: this output of a crew has the results of its tasks, but no messages of its agents"


def _is_output(row: Foreign) -> bool:
    tasks = row.get("tasks_output")
    return (
        isinstance(tasks, list)
        and bool(tasks)
        and all({"description", "agent", "raw"} <= task.keys() for task in tasks)
    )


def is_event(row: Foreign) -> bool:
    """Return whether a row is an entry of a crew's log: a task began or ended."""
    return {"task_name", "task", "agent", "status"} <= row.keys() and row["status"] in ("started", "completed")


def _messages(row: Foreign) -> Iterator[object]:
    """Yield the messages of all tasks, the agents' with their names. Without any, a task has a request and a result."""
    for task in row["tasks_output"]:
        told = [{"role": "user", "content": task["description"]}, {"role": "assistant", "content": task["raw"]}]
        for message in task.get("messages") or told:
            is_own = isinstance(message, Mapping) and message.get("role") == "assistant"
            yield {**message, "name": task["agent"]} if is_own else message


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    if not any(task.get("messages") for task in row["tasks_output"]):
        return NO_MESSAGES
    return chat_row({**row, "messages": [*_messages(row)]})


CREW = RowFormat("CrewAI outputs", _is_output, _chat_row)
