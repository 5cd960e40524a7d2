"""Dialogues of several agents: Who&When, Magentic-One, and any file that is a list of messages of one dialogue.

Every message keeps its index, because labels name a step by the index of its message. A request of an orchestrator to
another agent becomes a call, and that agent's reply becomes its result.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from captrain.interop.logs.autogen import is_autogen
from captrain.interop.logs.beside import task_of
from captrain.interop.logs.chat import OTHER_ROLES, ROLES, is_message, is_spoken, oldest_first, unwrapped
from captrain.interop.logs.messages import is_item, is_langchain, is_sharegpt
from captrain.interop.logs.records import ChatRow, FileFormat, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, text_of
from captrain.interop.logs.turns import speaker_of
from captrain.interop.logs.verdicts import OUTCOMES

REQUEST = re.compile(r"(.*?)\s*\(-> (.+)\)")
ASIDE = re.compile(r"\s*\(.*\)$")
"""Remark after a speaker's name, such as "(thought)"."""
TERMINAL = re.compile(r"terminal|executor|code_interpreter", re.IGNORECASE)
"""Names of speakers that run code and report."""


def of_speakers(items: Sequence[Foreign]) -> list[object]:
    """Convert the messages of several agents. Each message keeps its index."""
    messages: list[object] = []
    asked = ""
    for place, item in enumerate(items):
        role, text = str(item.get("role") or ""), text_of(item.get("content"))
        speaker = str(item.get("name") or role)
        request = REQUEST.fullmatch(speaker)
        if request:
            call = call_entry(request[2], {"request": text})
            messages.append({**calling([call]), "name": request[1]})
        elif asked and speaker == asked:
            messages.append({"role": "tool", "content": text})
        elif place == 0 or role in ("system", "human") or (role == "user" and not item.get("name")):
            messages.append({"role": "system" if role == "system" else "user", "content": text})
        elif TERMINAL.search(speaker):
            messages.append({"role": "user", "content": text})
        else:
            messages.append({"role": "assistant", "content": text, "name": ASIDE.sub("", speaker)})
        asked = request[2] if request else "" if speaker == asked else asked
    return messages


def _is_labelled(row: Foreign) -> bool:
    return isinstance(row.get("history"), list) and "ground_truth" in row and "question" in row


def _labelled(row: Foreign, path: Path) -> ChatRow:
    """Convert a task of Who&When. Human labels of the failure are left out."""
    return ChatRow(
        of_speakers(row["history"]),
        next((row[name] for name in ("is_correct", "is_corrected") if row.get(name) is not None), None),
        task_id=row.get("question_ID") or path.stem,
        expected={"ground_truth": row.get("ground_truth")},
        keys=(path.stem,),
    )


def _is_dialogue(rows: Sequence[Foreign]) -> bool:
    turns = _turns(rows)
    is_rewarded = any(name in row for row in turns if speaker_of(row) != "tool" for name in OUTCOMES)
    return len(turns) > 1 and all(map(is_message, turns)) and is_spoken(turns) and not is_rewarded


def _turns(rows: Sequence[Foreign]) -> list[Foreign]:
    """Return the messages among the rows of a file. The first row may describe the session."""
    turns = [turn for row in rows if isinstance(turn := unwrapped(row), Mapping)]
    return turns if not turns or is_message(turns[0]) else turns[1:]


def _dialogue(rows: Sequence[Foreign], path: Path) -> ChatRow:
    rows = [row for row in oldest_first([*_turns(rows)]) or () if isinstance(row, Mapping)]
    known = {*ROLES, *OTHER_ROLES}
    kinds = (is_item, is_langchain, is_sharegpt, is_autogen)
    is_foreign = any(is_one(row) for row in rows for is_one in kinds) or not any("role" in row for row in rows)
    is_plain = is_foreign or all(str(row.get("role")).lower() in known or speaker_of(row) for row in rows)
    shown = [row for row in rows if row.get("role") != "exit"]
    return ChatRow(shown if is_plain else of_speakers(rows), None, task_id=task_of(path))


WHO_AND_WHEN = RowFormat("Who&When tasks", _is_labelled, _labelled)
DIALOGUE = FileFormat("messages of one dialogue", _is_dialogue, _dialogue)
