"""Every record that crosses a stage, field by field, and how it is read and written.

Records are frozen and JSON through and through. Files are JSON lines, one record a line, published atomically
(written aside, renamed at the end). Whatever is read, a user or another program may have written: `read_json`,
`read_yaml`, `read_table` and `scan` are the one way in (a test holds all code to it), and what is no whole record of
its kind is a `UserError` that names the file, the place and the remedy. Nothing here holds a time or a duration: equal
runs give equal bytes.
"""

import csv
import hashlib
import html
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from captrain.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

JsonObject = dict[str, Any]
"""A JSON object as a file, a server or a library gives it: what is in it is checked where it is read."""
Message = JsonObject
"""An OpenAI-style chat message: role, content, and where it applies tool_calls or name."""

Split = Literal["discovery", "training", "test"]
Purpose = Literal["diagnosis", "calibration", "training", "validation", "evaluation"]
Verdict = Literal["NA", "PRESENT", "LACKING"]
LONGEST_NAME = 120
"""Characters of a name that becomes a file's: with endings it stays below the 255 bytes of any file system."""


def _file_name(text: str) -> str:
    """The text, if it can be a file's name anywhere and leads nowhere else.

    Raises:
        ValueError: it cannot.
    """
    if not text or len(text.encode(errors="replace")) > LONGEST_NAME:
        raise ValueError(f"a name has 1 to {LONGEST_NAME} bytes")
    if not text.isprintable() or text[0] in ". -" or set(text) & set("/\\"):
        raise ValueError("a name has printable signs alone, no slash, and does not begin with a dot, space or dash")
    return text


FileName = Annotated[str, AfterValidator(_file_name)]
"""A name that becomes a part of a path: checked once, where the record is read."""


def require_file_name(text: str, place: str) -> str:
    """The text, if it can be a `FileName`.

    Args:
        text: the name.
        place: whose name it is, for the message.

    Raises:
        UserError: it cannot.
    """
    try:
        return _file_name(text)
    except ValueError as error:
        raise UserError(
            f"{place}: {plain(text[:LONGEST_NAME])!r} is no name of a file ({error})", "rename it"
        ) from None


class Record(BaseModel):
    """Base of all records: immutable, unknown fields and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Task(Record):
    """One task of an environment. `data` is all the environment needs to open it again, anywhere."""

    id: str
    split: Split
    data: JsonObject


class Score(Record):
    """What an environment says of a finished episode: reward in [0, 1], success, and named parts."""

    reward: float
    success: bool
    parts: dict[str, float] = {}


class Usage(Record):
    """Tokens of one rollout: read (prompt, tool results, user replies) and written by the model."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Rollout(Record):
    """One episode of one policy on one task, token-exact.

    `token_ids`, `mask` (1 = written by the model) and `logprobs` (the sampler's, 0.0 where mask is 0) have equal
    length and cover prompt and episode; they are empty for policies that do not show their tokens. `reference` is
    the environment's own solution (assistant messages). `outcome` is `error` when infrastructure failed: `score`
    is then None, and the rollout counts as spent but never as failed. `retries` counts earlier attempts that
    ended in an infrastructure error (each one was a rollout spent, too). `truncated` says why a dialogue that has
    outgrown the model ended before its time; it is scored as it is, and one that never began has failed. `rerendered`
    counts turns of a served model that would have read other tokens, had the dialogue been rendered anew for them.
    """

    id: str
    environment: str
    task: Task
    trial: int
    purpose: Purpose
    policy: str
    adapter: str | None = None
    messages: list[Message]
    reference: list[Message] = []
    token_ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    usage: Usage = Usage()
    score: Score | None = None
    outcome: Literal["passed", "failed", "error"]
    error: str | None = None
    truncated: str = ""
    rerendered: int = 0
    retries: int = 0


class Capability(Record):
    """A capability an agent may lack: domain-general name, description, and the evidence it was proposed from.

    `id` is a snake_case slug; `examples` are ids of failed rollouts that lack it; `details` is what the analyst
    found out about it in this target (tool names, argument names) for the synthesizer.
    """

    id: FileName
    name: str
    description: str
    details: JsonObject = {}
    examples: list[str] = []


class Label(Record):
    """One verdict on one (rollout, capability) pair; `evidence` says why, `message` is the index it points at."""

    verdict: Verdict
    evidence: str = ""
    message: int | None = None


class RolloutLabels(Record):
    """Labels of one rollout in one labelling run. `count`: how often the run's resample drew this rollout
    (0: not drawn, but labelled all the same). A capability absent from `labels` was not a candidate of the run.
    `task`: what it is a rollout of, where there are several of one task; "" where it is the only one of its task."""

    run: int
    rollout: str
    task: str = ""
    outcome: Literal["passed", "failed"]
    count: int
    labels: dict[str, Label]


class Check(Record):
    """One proof that an environment gave or failed to give: what was measured, the bound it was held against, and for
    a failure what to know about it and the `task` (its seed) that shows it."""

    name: str
    passed: bool
    measured: float | None
    bound: str
    detail: str = ""
    task: str = ""


class Passport(Record):
    """All checks of one environment. `environment` is the fingerprint of the file that was checked, `attempt` the
    synthesizer's, `calibration_tasks` the training tasks spent, from the first on. `trusted`: its text is our own, and
    it may run outside of the sandbox."""

    capability: FileName
    environment: str
    attempt: int
    passed: bool
    trusted: bool
    calibration_tasks: int
    checks: list[Check]

    def complaints(self) -> str:
        """The failed checks in one line."""
        return "; ".join(
            f"{check.name} is {check.measured}, asked is {check.bound}{f' ({check.detail})' if check.detail else ''}"
            for check in self.checks
            if not check.passed
        )


class IndexEntry(Record):
    """What a stage has left to act with, as its `index.json` has it by name: an adapter with the digest of its content
    and its folder, "" where there is none and `guidance`, lines of the system prompt, is all. Of its making there stand
    the rollouts it has spent, those discarded among them, what it was at `checkpoints` (digests, by the rollouts spent
    till then), and what else its stage says."""

    model_config = ConfigDict(extra="allow")

    digest: str
    path: str
    guidance: list[str] = []
    rollouts: int = 0
    discarded: int = 0
    checkpoints: dict[Annotated[str, Field(pattern=r"^\d+$")], str] = {}


R = TypeVar("R", bound=Record)
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
BLOCK = 1 << 20
"""Bytes of a file that are in memory at once where its size must not matter."""
MOST = 1 << 28
"""Bytes of a document that is read at once; one that we wrote has some millions."""
REPRO = "run `dvc repro` to make it again"


def digest(*parts: object) -> str:
    """SHA-256 (hex, first 16 digits) of the canonical JSON of the parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"not JSON: {type(value).__name__}")


def file_digest(*paths: Path) -> str:
    """SHA-256 (hex, first 16 digits) over the bytes of the files, in the given order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                total.update(block)
    return total.hexdigest()[:16]


def bytes_digest(content: bytes) -> str:
    """What `file_digest` gives of a file with this content."""
    return hashlib.sha256(content).hexdigest()[:16]


def plain(text: str) -> str:
    """Text of anyone's, fit for a terminal and for any file: what is no printable sign, space or line break is shown as
    one that stands for it, so that nobody moves a cursor, changes a colour or turns a line around."""
    return (
        text
        if text.isprintable()
        else "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
    )


def as_markdown(text: str) -> str:
    """Text of anyone's in a page of Markdown, where it neither breaks a table nor counts as markup."""
    return html.escape(plain(text), quote=False).translate({ord(sign): f"\\{sign}" for sign in "|`*_[]"})


def require_regular(path: Path, remedy: str = REPRO) -> None:
    """Refuse what is no file that can be read to its end.

    Raises:
        UserError: there is nothing, or a folder, a pipe, a device.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing", remedy) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}", remedy) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "no regular file"
        raise UserError(f"{path} is {kind}", "name a file")


def read_bytes(path: Path, remedy: str = REPRO, most: int = MOST) -> bytes:
    """The content of a file.

    Args:
        path: of the file.
        remedy: what the reader can do where it cannot be read.
        most: bytes that it may have.

    Raises:
        UserError: it is missing, cannot be read, is no regular file, or is larger than that.
    """
    require_regular(path, remedy)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}", remedy) from None
    if len(content) > most:
        raise UserError(f"{path} has more than {most >> 20} MiB, which nothing of its kind has", remedy)
    return content


def read_text(path: Path, remedy: str = REPRO) -> str:
    """The content of a file as text.

    Raises:
        UserError: as `read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, remedy)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 (byte {error.start})", remedy) from None


def read_json(path: Path, kind: type[T], remedy: str = REPRO) -> T:
    """The one JSON document in a file, as a value of this type: a record, or a type of plain values.

    Raises:
        UserError: as `read_bytes`, or it is damaged or no such value; the first place where it is not is named.
    """
    try:
        return _adapter(kind).validate_json(read_bytes(path, remedy))
    except ValidationError as error:
        raise _not_whole(str(path), kind, error, remedy) from None


def read_yaml(path: Path, kind: type[T], remedy: str = REPRO) -> T:
    """The one YAML document in a file, as `read_json` gives JSON.

    Raises:
        UserError: as `read_text`, or it is damaged or no such value; the first place where it is not is named.
    """
    return parse_yaml(read_text(path, remedy), kind, str(path), remedy)


def parse_yaml(text: str, kind: type[T], place: str, remedy: str = REPRO) -> T:
    """The YAML document that a text is; `place` says whose, and otherwise as `read_yaml`."""
    import yaml

    try:
        return _adapter(kind).validate_python(yaml.safe_load(text))
    except ValidationError as error:
        raise _not_whole(place, kind, error, remedy) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else plain(" ".join(str(error).split()))
        raise UserError(f"{place} is not YAML: {reason}", remedy) from None


def _not_whole(place: str, kind: type[object], error: ValidationError, remedy: str) -> UserError:
    name = kind.__name__.lstrip("_") if isinstance(kind, type) and issubclass(kind, BaseModel) else "document"
    return UserError(f"{place} is not a whole {name} ({first_fault(error)})", remedy)


def read_index(path: Path, remedy: str = REPRO) -> dict[str, IndexEntry]:
    """What a stage has left to act with, by name.

    Raises:
        UserError: as `read_json`.
    """
    return read_json(path, dict[str, IndexEntry], remedy)


def read_table(
    path: Path, remedy: str = REPRO, *, words: bool = False, kinds: "Mapping[str, type] | type[str] | None" = None
) -> "pd.DataFrame":
    """The CSV table in a file; "" is NaN, and with `words` everything else that pandas would take for it stays a word.
    `kinds` names the type of all columns, or of some; the rest are what their cells look like.

    Raises:
        UserError: as `read_text`, or it is no whole table: it has no heading, its last line has no end, or a line has
            another number of fields.
    """
    import pandas as pd

    text = read_text(path, remedy)
    fault = "it is empty" if not text.strip() else "its last line has no end" if not text.endswith("\n") else ""
    if not fault:
        try:
            lengths = [len(row) for row in csv.reader(io.StringIO(text, newline="")) if row]
            number = next((number for number, length in enumerate(lengths, 1) if length != lengths[0]), 0)
            fault = f"row {number} has {lengths[number - 1]} fields, and the heading {lengths[0]}" if number else ""
        except csv.Error as error:
            fault = str(error)
    if fault:
        raise UserError(f"{path} is not a whole table ({fault})", remedy)
    options: dict[str, Any] = {"dtype": kinds}
    options |= {"keep_default_na": False, "na_values": [""]} if words else {}
    return pd.read_csv(io.StringIO(text), **options)


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def first_fault(error: ValidationError) -> str:
    """The first of the faults that a validation found: what, and at which place."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = ".".join(str(part) for part in first["loc"])
    return plain(f"{first['msg']}{f' at {location}' if location else ''}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def place_aside(path: Path, mark: str = "") -> Iterator[Path]:
    """A place beside a file or folder where it is written first. What lies there is removed, before the block and after
    it, however that ends: on a full disk nothing half-written stays.

    Args:
        path: where it is to be renamed to.
        mark: that tells several writers apart, who then do not remove what one that was killed has left.
    """
    aside = path.with_name(f".{path.name}{mark}.tmp")
    _discard(aside)
    try:
        yield aside
    finally:
        _discard(aside)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_text(path: Path, text: str) -> None:
    """Write atomically: aside first, then rename."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, content: bytes) -> None:
    """Write atomically: aside first, then rename; nothing stays aside where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        aside.write_bytes(content)
        aside.replace(path)


def publish_folder(aside: Path, folder: Path) -> None:
    """Rename a folder that was written aside; one that another process has put there first is as good."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)


def publish_json(path: Path, value: object) -> None:
    """Publish one JSON document, indented, keys as given."""
    publish_text(path, json.dumps(value, indent=1, default=_plain) + "\n")


def publish(path: Path, records: Iterable[Record]) -> None:
    """Publish records as JSON lines, atomically; they are written as they come, so that they need not be in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        with aside.open("w") as file:
            file.writelines(line_of(record) for record in records)
        aside.replace(path)


def line_of(record: Record) -> str:
    """A record as it stands in a file, with the end of its line."""
    return record.model_dump_json(exclude_defaults=True) + "\n"


def load(path: Path, kind: type[M], remedy: str = "") -> list[M]:
    """Read all records of a JSON-lines file; empty lines are passed over.

    Raises:
        UserError: the file is missing, or a line is corrupt, truncated or not a record of this kind.
    """
    return [record for _, record in scan(path, kind, remedy)]


def scan(path: Path, kind: type[M], remedy: str = "") -> Iterator[tuple[int, M]]:
    """Read the records of a JSON-lines file one by one, each with the offset of its line in bytes.

    Raises:
        As `load`, when the line is reached.
    """
    require_regular(path, remedy or REPRO)
    offset = 0
    # Of bytes: text has more line breaks than JSON lines have.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield offset, kind.model_validate_json(line.rstrip(b"\r\n"))
            except ValidationError as error:
                raise UserError(
                    f"{path}, line {number} is not a whole {kind.__name__} record ({first_fault(error)})",
                    remedy or f"delete {path} and run `dvc repro`: what is cached is restored, the rest is made again",
                ) from None
            offset += len(line)


def remains(path: Path, kind: type[T]) -> list[T | None]:
    """What is left of JSON lines whose writer may be at work, or was killed: a value of this type for each line, None
    where it is not whole; nothing where there is no file.

    Raises:
        UserError: it is no regular file.
    """
    if not path.exists():
        return []
    require_regular(path)
    values: list[T | None] = []
    with path.open("rb") as file:
        for line in file:
            try:
                values.append(_adapter(kind).validate_json(line) if line.endswith(b"\n") else None)
            except ValidationError:
                values.append(None)
    return values


class Spool(Generic[R]):
    """Records on disk instead of in memory: added one by one, read in that order as often as need be, gone with the
    process however it ends, because no folder has ever named their file for longer than it takes to open it."""

    def __init__(self, kind: type[R]) -> None:
        self._kind, self._count, self._end = kind, 0, 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with the object)

    def add(self, record: R) -> None:
        """Add a record at the end."""
        self._file.seek(self._end)
        self._end += self._file.write(line_of(record).encode())
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __contains__(self, record: object) -> bool:
        return any(entry == record for entry in self)

    def __iter__(self) -> Iterator[R]:
        offset = 0
        while offset < self._end:
            self._file.seek(offset)  # others may read and write between two records
            line = self._file.readline()
            offset += len(line)
            yield self._kind.model_validate_json(line)
