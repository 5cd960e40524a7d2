"""Trials nested in a row: a task with a list of its runs, each in a row format or as a list of messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from captrain.interop.logs.chat import is_message, messages_in
from captrain.interop.logs.records import with_siblings
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.steps import CALLS, TRACES
from captrain.interop.logs.verdicts import names_outcome

TASK = ("task_id", "instance_id", "id", "task", "name")
"""Fields that may name the task of a row, the most likely first."""
OF_TASK = ("tools", "reference")
"""Fields of a row that hold for all of its trials, as its texts and numbers do."""


def trials_in(rows: Iterable[tuple[str, object]], is_trial: Callable[[Foreign], bool]) -> Iterator[tuple[str, object]]:
    """Yield (place, trial) for the trials nested in each row. A row without trials is yielded as it is.

    The outcome of a row with several trials is left out, because it is not the outcome of each.
    """
    for place, row in rows:
        lists = _lists(row, is_trial) if isinstance(row, dict) else {}
        if not isinstance(row, dict) or not lists:
            yield place, row
            continue
        task = next((row[key] for key in TASK if row.get(key) is not None), place)
        shared = {key: value for key, value in row.items() if isinstance(value, str | int | float) or key in OF_TASK}
        if sum(map(len, lists.values())) > 1:
            shared = {key: value for key, value in shared.items() if not names_outcome(key)}
        for name, trials in lists.items():
            for number, trial in enumerate(with_siblings({**row, name: trials}, name), start=1):
                if isinstance(trial, dict):
                    yield f"{place}, {name} {number}", {"task_id": task, **shared, **trial}


def _lists(row: Foreign, is_trial: Callable[[Foreign], bool]) -> dict[str, list[Foreign]]:
    """Return name -> trials for each list of trials in a row."""
    found: dict[str, list[Foreign]] = {}
    for name, value in row.items():
        if isinstance(value, list) and value and name not in (*TRACES, *CALLS):
            trials: list[Foreign] = [part if isinstance(part, dict) else {"messages": part} for part in value]
            if all(map(_has_dialogue, value)) and all(map(is_trial, trials)) and not _are_requests(trials):
                found[name] = trials
    return found


def _has_dialogue(part: object) -> bool:
    """Return whether a trial is an object or a list of messages."""
    return isinstance(part, dict) or (isinstance(part, list) and bool(part) and all(map(is_message, part)))


def _are_requests(trials: Sequence[Foreign]) -> bool:
    """Return whether the dialogues are the requests of one run: each repeats the one before and goes on."""
    dialogues = [messages_in(trial) or [] for trial in trials]
    return len(dialogues) > 1 and all(
        len(after) > len(before) and after[: len(before)] == before for before, after in pairwise(dialogues)
    )
