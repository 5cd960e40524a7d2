"""Trials of Terminal-Bench: `results.json` of a trial, and the episodes of its agent in `agent-logs/` beside it.

The `results.json` of a run lists the results of all trials. Their folders are below it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from captrain.interop.logs.beside import RESULTS, of_terminal_bench
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import NO_DIALOGUE, Foreign, call_entry, calling, json_of, loaded
from captrain.records import Message, read_text

NO_EPISODES = f"{NO_DIALOGUE}: no agent-logs/episode-0 is beside it"


def _recognizes(row: Foreign) -> bool:
    return "is_resolved" in row and "trial_name" in row


def is_summary(path: Path) -> bool:
    """Return whether a file lists the results of trials. Each trial has its own file in a folder below."""
    return path.name == RESULTS and any(map(_is_trial, path.parent.glob(f"*/*/{RESULTS}")))


def _is_trial(path: Path) -> bool:
    with suppress(ValueError, RecursionError):
        return _recognizes(json_of(path))
    return False


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    own = path.parent / Path(str(row.get("task_id"))).name / Path(row["trial_name"]).name
    folder = own if own.is_dir() else path.parent
    episodes = sorted(folder.glob("agent-logs/episode-*"), key=lambda folder: int(folder.name[8:] or 0))
    if not episodes:
        return NO_EPISODES
    messages = [message for number, folder in enumerate(episodes) for message in _episode(folder, number)]
    read = of_terminal_bench(ChatRow(messages, None, expected={}), row)
    return replace(read, result=str(folder / RESULTS)) if read else NO_EPISODES


def _episode(folder: Path, number: int) -> Iterator[Message]:
    """Read what an agent was shown, and the keys that it answered with."""
    shown = folder / "prompt.txt"
    if shown.is_file():
        yield {"role": "tool" if number else "user", "content": read_text(shown, "repair it")}
    answer = next((folder / name for name in ("response.json", "response.txt") if (folder / name).is_file()), None)
    if answer is None:
        return
    text = read_text(answer, "repair it")
    found = re.search(r"\{.*\}", text, re.DOTALL)
    response = loaded(found[0]) if found else {}
    commands = response.get("commands") if isinstance(response, Mapping) else None
    keys = [entry.get("keystrokes", "") if isinstance(entry, Mapping) else str(entry) for entry in commands or []]
    yield calling([call_entry("terminal", {"keystrokes": entry}) for entry in keys], text)


TERMINAL_BENCH = RowFormat("Terminal-Bench trials", _recognizes, _chat_row)
