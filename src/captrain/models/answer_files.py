"""Answers of models as files: one JSON file for each, in `FOLDER/<first two digits of its key>/<key>.json`.

An answer is paid for once: it is published (written aside, then renamed) before anything else is done with it, and is
named by what decides it. They are files and no database such as SQLite (which `diskcache` stands on), because jobs of a
cluster write here from several hosts over a shared file system, where SQLite's journal does not work; because a damaged
file costs one answer and not all; and because a viewer can count them without opening anything for writing.
"""

from pathlib import Path

from captrain.records import Record, publish_text

ANSWERS = Path(".cache/answers")
"""The folder of a project's answers. No output of any stage: answers belong to no single run."""


class StoredAnswer(Record):
    """An answer's text, what it took, and the model that the server says it is of."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    model: str


def answer_path(folder: Path, key: str) -> Path:
    """Return the path of the answer with this key."""
    return folder / key[:2] / f"{key}.json"


def read_answer(folder: Path, key: str) -> StoredAnswer:
    """Read the answer of a key.

    Raises:
        FileNotFoundError: there is none.
        pydantic.ValidationError: the file is not whole.
    """
    return StoredAnswer.model_validate_json(answer_path(folder, key).read_bytes())


def publish_answer(folder: Path, key: str, answer: StoredAnswer) -> None:
    """Keep an answer; it is there as a whole or not at all."""
    publish_text(answer_path(folder, key), answer.model_dump_json(indent=1) + "\n")
