"""Reads evaluation logs of Inspect: `.eval` archives (deflate or zstd) and logs in JSON.

A sample is a rollout, an epoch a trial. The value of the first score counts: "C" is 1, "P" is 0.5, "I" and "N" are 0. A
target that consists of calls, as captrain writes it, is the reference. Any other target is kept as the ground truth,
with the scorer's explanation. Placeholders of attachments are replaced by their texts. An invalidated sample is
skipped. A sample with an error has no verdict.
"""

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from captrain.errors import UserError
from captrain.interop.logs.chat import chat_entry
from captrain.interop.logs.records import ChatRow
from captrain.interop.logs.source import (
    MALFORMED,
    Entry,
    Foreign,
    Read,
    Source,
    call_entry,
    calling,
    entries_of,
    reason_of,
)
from captrain.records import MOST, Message, file_digest

ATTACHED = 1 << 26
"""Maximum number of characters of a sample's attachments. An attachment counts each time it is used."""
ZSTD = 93
"""Compression method of a zip entry that Python 3.11 cannot read."""
ENCRYPTED = 1
"""Flag of a zip entry that needs a password."""
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error)
"""Exceptions that a damaged zip entry raises when it is read."""
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
ATTACHMENT = re.compile(r"attachment://([0-9a-f]+)")
CALL = re.compile(r"(\w+)\((\{.*\})\)", re.DOTALL)


def is_archive(path: Path) -> bool:
    """Return whether a file is a zip, or begins like one because it is cut off."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04" or zipfile.is_zipfile(path)


def read_archive(path: Path) -> Source:
    """Read the samples of an `.eval` archive.

    Raises:
        ValueError: it is not a log of Inspect, is encrypted, or is cut off.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError("it is cut off: copy or download it again")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        start = next((name for name in ("header.json", "_journal/start.json") if name in names), None)
        if start is None:
            raise ValueError("the archive has no header.json: it is not a log of Inspect")
        header = json.loads(_member(archive, archive.getinfo(start)))
    return _source(path, header, _samples(path))


def read_document(path: Path, members: Foreign, samples: Iterator[object]) -> Source:
    """Read the samples of a log in JSON."""
    return _source(path, members, ((f"sample {place}", sample) for place, sample in enumerate(samples)))


def _source(path: Path, header: Foreign, samples: Iterator[tuple[str, object]]) -> Source:
    file, evaluation = file_digest(path), header.get("eval") or {}
    about = {"format": "Inspect", "version": header.get("version"), "task": evaluation.get("task")}
    model = evaluation.get("model")
    entries = entries_of(samples, partial(_read, file, model or "unknown"))
    return Source(file, {**about, "agent": {"model": model}}, entries)


def _samples(path: Path) -> Iterator[tuple[str, object]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith("samples/") and entry.filename.endswith(".json"):
                try:
                    yield entry.filename, json.loads(_member(archive, entry))
                except (*MALFORMED, *DAMAGED) as error:
                    yield entry.filename, f"it cannot be unpacked: {reason_of(error)}"


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.flag_bits & ENCRYPTED:
        raise ValueError("it is encrypted: unpack it with its password and pack it again without one")
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
    """Unpack a zip entry, up to the size limit of a document. The size that the zip states may be wrong."""
    content = member.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    return content


class _Attachments:
    """Attachments of a sample: id -> text. One attachment may be used many times, so the total size is limited."""

    def __init__(self, texts: Mapping[str, object]) -> None:
        self.texts, self.length = texts, 0

    def fill(self, content: object) -> object:
        """Replace placeholders in a text by their attachments. Return other content unchanged."""
        return ATTACHMENT.sub(self._text, content) if isinstance(content, str) else content

    def _text(self, match: re.Match[str]) -> str:
        text = str(self.texts.get(match.group(1), match.group()))
        self.length += len(text)
        if self.length > ATTACHED:
            raise ValueError(f"its attachments come to more than {ATTACHED >> 20} MiB")
        return text


def _read(file: str, model: object, number: int, sample: Foreign) -> Read:
    if sample.get("invalidation"):
        return "the sample was invalidated"
    scores, error, limit = sample.get("scores") or {}, sample.get("error"), sample.get("limit")
    score = next(iter(scores.values()), {})
    value = score.get("value")
    attachments = _Attachments(sample.get("attachments") or {})
    messages: list[Message] = []
    for message in sample.get("messages") or []:
        content = attachments.fill(message.get("content"))
        calls = [
            call_entry(call.get("function"), call.get("arguments"), call.get("id"))
            for call in message.get("tool_calls") or []
        ]
        messages.append({**message, "content": content, "error": bool(message.get("error")), "tool_calls": calls})
    reference = _reference(sample.get("target"))
    row = ChatRow(
        messages,
        VALUES.get(value, value) if isinstance(value, str) else value,
        task_id=sample.get("id"),
        trial=max(0, int(sample.get("epoch") or 1) - 1),
        model=model,
        reference=reference,
        fault=str(error.get("message", error) if isinstance(error, dict) else error) if error else "",
        limit=str(limit.get("type") or limit) if isinstance(limit, dict) else str(limit or ""),
        grading=attachments.fill(score.get("explanation")),
        submission=score.get("answer") or None,
        expected={} if reference else {"target": sample.get("target")},
    )
    entry = chat_entry(file, number, row)
    if not isinstance(entry, Entry) or not isinstance(value, dict) or not value:
        return entry
    name, [part, *_] = next(iter(scores)), [*value]
    parts = {key: float(number) for key, number in value.items() if isinstance(number, int | float)}
    missing = f"its score has several parts ({', '.join(map(str, value))}): add --outcome scores.{name}.value.{part}"
    return replace(entry, reward=None, missing=missing, parts=parts)


def _reference(target: object) -> list[Message]:
    """Return the calls in a target as assistant messages; [] if it contains anything else."""
    texts = target if isinstance(target, list) else [target]
    matches = [CALL.fullmatch(text) if isinstance(text, str) else None for text in texts]
    if not all(matches):
        return []
    return [calling([call_entry(match[1], match[2])]) for match in matches if match]
