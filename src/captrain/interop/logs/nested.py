"""Trials nested in a row: a task with a list of its runs, in any row format, or with a list of lists of messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from captrain.interop.logs.chat import is_message, messages_in
from captrain.interop.logs.outcomes import names_outcome
from captrain.interop.logs.records import with_siblings
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.steps import TRACES

TASK = ("task_id", "instance_id", "id", "task", "name")
"""Fields that may name the task of a row, the most likely first."""


def trials_in(rows: Iterable[tuple[str, object]], is_trial: Callable[[Foreign], bool]) -> Iterator[tuple[str, object]]:
    """Yield (place, trial) for the trials nested in each row. A row without trials is yielded as it is.

    Trials get the task and the other texts and numbers of their row. The outcome of a row with several trials is left
    out, because it is no outcome of each.
    """
    for place, row in rows:
        lists = _lists(row, is_trial) if isinstance(row, dict) else {}
        if not lists:
            yield place, row
        for name, trials in lists.items():
            shared = {key: value for key, value in row.items() if isinstance(value, str | int | float)}
            if len(trials) > 1:
                shared = {key: value for key, value in shared.items() if not names_outcome(key)}
            task = name if len(lists) > 1 else next((row[key] for key in TASK if row.get(key) is not None), place)
            for number, trial in enumerate(with_siblings({**row, name: trials}, name), start=1):
                yield f"{place}, {name} {number}", {"task_id": task, **shared, **trial}


def _lists(row: Foreign, is_trial: Callable[[Foreign], bool]) -> dict[str, list[Foreign]]:
    """Return name -> trials for each list of trials in a row."""
    found: dict[str, list[Foreign]] = {}
    for name, value in row.items():
        if not isinstance(value, list) or name in TRACES:
            continue
        are_dialogues = all(isinstance(part, list) and part and all(map(is_message, part)) for part in value)
        parts = [{"messages": part} for part in value] if are_dialogues else value
        trials = [part for part in parts if isinstance(part, dict) and is_trial(part)]
        if trials and len(trials) == len(parts) and not _are_requests(trials):
            found[name] = trials
    return found


def _are_requests(trials: Sequence[Foreign]) -> bool:
    """Return whether the lists of messages are the requests of one run: each repeats the one before it."""
    dialogues = [messages_in(trial) or [] for trial in trials]
    pairs = [*zip(dialogues, dialogues[1:], strict=False)]
    return bool(pairs) and all(len(after) > len(before) and after[: len(before)] == before for before, after in pairs)
