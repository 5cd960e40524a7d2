"""Evaluation logs of Inspect: `.eval` archives, deflated or in zstd, and logs in JSON.

A sample is a rollout, an epoch a trial. The value of the first score counts: "C" is passed, "I" and "N" are not, "P" is
half; a target that is calls, as captrain writes it, is the reference. Attachments are put where they belong; an
invalidated sample is left out, one with an error has no verdict.
"""

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from captrain.errors import UserError
from captrain.interop.logs.chat import chat_rollout
from captrain.interop.logs.source import MALFORMED, Source, entry_of, reason_of
from captrain.records import MOST, JsonObject, Rollout, file_digest

ATTACHED = 1 << 26
"""Characters that the attachments of a sample may come to, where they are referred to."""
ZSTD = 93
"""The compression method of a zip that Python 3.11 does not read."""
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error)
"""Exceptions of reading a damaged member of an archive."""
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
ATTACHMENT = re.compile(r"attachment://([0-9a-f]+)")
CALL = re.compile(r"(\w+)\((\{.*\})\)", re.DOTALL)


def is_archive(path: Path) -> bool:
    """Return whether the file is a zip, by its content."""
    return zipfile.is_zipfile(path)


def read_archive(path: Path) -> Source:
    """Read the samples of an `.eval` archive.

    Raises:
        ValueError: it is no log of Inspect.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        start = next((name for name in ("header.json", "_journal/start.json") if name in names), None)
        if start is None:
            raise ValueError("the archive has no header.json: it is not a log of Inspect")
        header = json.loads(_member(archive, archive.getinfo(start)))
    return _source(path, header, _samples(path))


def read_document(path: Path, members: JsonObject, samples: Iterator[object]) -> Source:
    """Read the samples of a log in JSON."""
    return _source(path, members, ((f"sample {place}", sample) for place, sample in enumerate(samples)))


def _source(path: Path, header: JsonObject, samples: Iterator[tuple[str, object]]) -> Source:
    file, evaluation = file_digest(path), header.get("eval") or {}
    about = {"format": "Inspect", "version": header.get("version"), "task": evaluation.get("task")}
    entries = (
        (place, entry_of(partial(_rollout, file, number, sample, evaluation)))
        for number, (place, sample) in enumerate(samples, start=1)
    )
    return Source(file, {**about, "agent": {"model": evaluation.get("model")}}, entries, {})


def _samples(path: Path) -> Iterator[tuple[str, object]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith("samples/") and entry.filename.endswith(".json"):
                yield entry.filename, _document(archive, entry)


def _document(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> object:
    try:
        return json.loads(_member(archive, entry))
    except (*MALFORMED, *DAMAGED) as error:
        return f"it does not unpack: {reason_of(error)}"


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > MOST:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    assert archive.filename is not None
    if not 0 <= entry.header_offset < Path(archive.filename).stat().st_size:
        raise ValueError("its place is not in the file")
    if entry.compress_type != ZSTD:
        with archive.open(entry) as member:
            return _bounded(member)
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{archive.filename} is compressed with zstd", "pip install 'captrain[inspect]'") from None
    assert archive.fp is not None
    archive.fp.seek(entry.header_offset)
    header = archive.fp.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    archive.fp.seek(entry.header_offset + 30 + name_length + extra_length)
    data = archive.fp.read(entry.compress_size)
    try:
        return _bounded(zstandard.ZstdDecompressor().stream_reader(data))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _bounded(member: IO[bytes]) -> bytes:
    """Read what is compressed as far as a document may go: its size may be told wrong, and few bytes become many."""
    content = member.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    return content


def _rollout(file: str, number: int, sample: object, evaluation: JsonObject) -> Rollout | str:
    if not isinstance(sample, dict):
        return sample if isinstance(sample, str) else "it is not an object"
    if sample.get("invalidation"):
        return "the sample was invalidated"
    attachments = _Attachments(sample.get("attachments") or {})
    scores, error = sample.get("scores") or {}, sample.get("error")
    value = next(iter(scores.values()), {}).get("value") if scores else None
    row = {
        "messages": [_message(message, attachments) for message in sample.get("messages") or []],
        "reward": 0.0 if error and value is None else VALUES.get(value, value) if isinstance(value, str) else value,
        "task_id": sample.get("id"),
        "trial": max(0, int(sample.get("epoch") or 1) - 1),
        "model": evaluation.get("model") or "unknown",
        "reference": _reference(sample.get("target")),
        "fault": str(error.get("message", error) if isinstance(error, dict) else error) if error else None,
    }
    return chat_rollout(file, number, row)


class _Attachments:
    """Attachments of one sample, put into its texts: each as often as it is referred to, but bounded altogether."""

    def __init__(self, texts: JsonObject) -> None:
        self._texts, self._length = texts, 0

    def put(self, match: re.Match[str]) -> str:
        """Return the attachment that a reference names; the reference where there is none."""
        text = str(self._texts.get(match.group(1), match.group()))
        self._length += len(text)
        if self._length > ATTACHED:
            raise ValueError(f"its attachments come to more than {ATTACHED >> 20} MiB")
        return text


def _message(message: JsonObject, attachments: _Attachments) -> JsonObject:
    text = message.get("content")
    if isinstance(text, str):
        text = ATTACHMENT.sub(attachments.put, text)
    chat = {**message, "content": text, "error": bool(message.get("error"))}
    if calls := message.get("tool_calls"):
        chat["tool_calls"] = [
            {"id": call.get("id"), "function": {"name": call.get("function"), "arguments": call.get("arguments")}}
            for call in calls
        ]
    return chat


def _reference(target: object) -> list[JsonObject]:
    """List the calls of a target, where it is calls and nothing else."""
    texts = target if isinstance(target, list) else [target]
    matches = [CALL.fullmatch(text) if isinstance(text, str) else None for text in texts]
    if not all(matches):
        return []
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": match[1], "arguments": match[2]}}]}
        for match in matches
        if match
    ]
