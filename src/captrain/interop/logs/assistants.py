"""Run steps of OpenAI's Assistants, with the messages of their threads if the file holds these, too.

A step holds calls with their outputs. It only names a message of the assistant, so the text is read from the thread's
messages. Each thread is a dialogue.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.records import ChatRow, FileFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, text_of
from captrain.records import Message

STEP, MESSAGE = "thread.run.step", "thread.message"


def is_step(row: Foreign) -> bool:
    """Return whether a row is a run step."""
    return row.get("object") == STEP and isinstance(row.get("step_details"), Mapping)


def _calls(row: Foreign) -> list[Foreign]:
    return row["step_details"].get("tool_calls") or [] if is_step(row) else []


def _recognizes(rows: Sequence[Foreign]) -> bool:
    return any(map(is_step, rows)) and any(_calls(row) or row.get("object") == MESSAGE for row in rows)


def _threads(rows: Sequence[Foreign]) -> list[list[Foreign]]:
    """Return the steps and messages of each thread, the oldest first. The API lists the newest first."""
    threads: dict[str, list[Foreign]] = {}
    for row in [row for row in rows if row.get("object") in (STEP, MESSAGE)]:
        threads.setdefault(str(row.get("thread_id")), []).append(row)
    falling = [_time_of(thread[0]) > _time_of(thread[-1]) for thread in threads.values()]
    pairs = zip(threads.values(), falling, strict=True)
    return [sorted(thread[::-1] if is_falling else thread, key=_time_of) for thread, is_falling in pairs]


def _time_of(row: Foreign) -> float:
    time = row.get("created_at")
    return time if isinstance(time, int | float) else 0.0


def _thread(rows: Sequence[Foreign], path: Path) -> ChatRow:
    fault = next((row["last_error"] for row in rows if row.get("last_error")), None)
    thread = str(rows[0].get("thread_id"))
    return ChatRow(
        [message for row in rows for message in ([row] if row["object"] == MESSAGE else _of_step(row))],
        None,
        task_id=thread,
        agent=next((row["assistant_id"] for row in rows if row.get("assistant_id")), None),
        fault=text_of(fault) if fault else "",
        keys=(thread, *sorted({str(row["run_id"]) for row in rows if row.get("run_id")})),
    )


def _of_step(row: Foreign) -> Iterator[Message]:
    """Yield the calls of a step and their outputs. Tools of OpenAI's own hold their input beside several outputs."""
    calls = _calls(row)
    inner = [call[call["type"]] for call in calls]
    if calls:
        pairs = zip(calls, inner, strict=True)
        yield calling([call_entry(p.get("name") or c["type"], p.get("arguments", p), c["id"]) for c, p in pairs])
    for call, part in zip(calls, inner, strict=True):
        output = next((part[name] for name in ("output", "outputs", "results") if part.get(name) is not None), None)
        if output is not None:
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": call["id"], "content": text}


RUN_STEPS = FileFormat("OpenAI Assistants run steps", _recognizes, _thread, _threads)
