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
from captrain.interop.logs.source import MALFORMED, Source, call_entry, entries_of, reason_of
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
    model = evaluation.get("model")
    entries = entries_of(samples, partial(_rollout, file, model or "unknown"))
    return Source(file, {**about, "agent": {"model": model}}, entries, {})


def _samples(path: Path) -> Iterator[tuple[str, object]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith("samples/") and entry.filename.endswith(".json"):
                try:
                    yield entry.filename, json.loads(_member(archive, entry))
                except (*MALFORMED, *DAMAGED) as error:
                    yield entry.filename, f"it does not unpack: {reason_of(error)}"


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


def _rollout(file: str, model: object, number: int, sample: JsonObject) -> Rollout | str:
    if sample.get("invalidation"):
        return "the sample was invalidated"
    scores, error = sample.get("scores") or {}, sample.get("error")
    value = next(iter(scores.values()), {}).get("value") if scores else None
    # Each attachment is put in as often as it is referred to, but bounded altogether.
    texts, length = sample.get("attachments") or {}, 0

    def attachment(match: re.Match[str]) -> str:
        nonlocal length
        text = str(texts.get(match.group(1), match.group()))
        length += len(text)
        if length > ATTACHED:
            raise ValueError(f"its attachments come to more than {ATTACHED >> 20} MiB")
        return text

    messages: list[JsonObject] = []
    for message in sample.get("messages") or []:
        text = message.get("content")
        content = ATTACHMENT.sub(attachment, text) if isinstance(text, str) else text
        calls = [
            call_entry(call.get("function"), call.get("arguments"), call.get("id"))
            for call in message.get("tool_calls") or []
        ]
        messages.append({**message, "content": content, "error": bool(message.get("error")), "tool_calls": calls})
    row = {
        "messages": messages,
        "reward": 0.0 if error and value is None else VALUES.get(value, value) if isinstance(value, str) else value,
        "task_id": sample.get("id"),
        "trial": max(0, int(sample.get("epoch") or 1) - 1),
        "model": model,
        "reference": _reference(sample.get("target")),
        "fault": str(error.get("message", error) if isinstance(error, dict) else error) if error else None,
    }
    return chat_rollout(file, number, row)


def _reference(target: object) -> list[JsonObject]:
    """List the calls of a target, where it is calls and nothing else."""
    texts = target if isinstance(target, list) else [target]
    matches = [CALL.fullmatch(text) if isinstance(text, str) else None for text in texts]
    if not all(matches):
        return []
    return [
        {"role": "assistant", "content": "", "tool_calls": [call_entry(match[1], match[2])]}
        for match in matches
        if match
    ]
