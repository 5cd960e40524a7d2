"""Other people's logs as rollouts, of any format in docs/diagnose.md.

The format is detected from the content. Embedded tasks are used, because an installed benchmark may hold others under
the same ids. Only known fields are read, so that no settings or headers of a run come along; values under
credential-like names inside tool arguments are replaced. Nothing is skipped silently: every unreadable entry is listed
with its reason.

Logs may be larger than memory: files are read entry by entry, and rollouts are kept on disk.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop.logs import (
    agentdojo,
    atif,
    bfcl,
    chat,
    exchange,
    inspect,
    langfuse,
    langsmith,
    nemo_gym,
    own,
    spans,
    tau2,
    tau_bench,
    toolsandbox,
    verifiers,
)
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.records import OF_JSON, first_objects, has_columns, is_lines, is_table
from captrain.interop.logs.source import MALFORMED, Foreign, Source, reason_of, schemas_by_name
from captrain.interop.logs.traces import NO_REWARD, TraceFormat, read_traces
from captrain.records import JsonObject, Rollout, Spool, censored, plain, require_regular

if TYPE_CHECKING:
    import pandas as pd

Value = TypeVar("Value")
SAMPLES = "samples"
UNKNOWN = "unknown"
NO_FORMAT = "it is of no known format"
FEW_ENTRIES = 9
"""A larger file is refused if most of its entries cannot be read: its format was probably misjudged."""
TRACES = (
    TraceFormat("OpenTelemetry spans", spans.recognizes_spans, spans.span_runs),
    TraceFormat("LangSmith runs", langsmith.recognizes_langsmith, langsmith.langsmith_runs),
    TraceFormat("Langfuse export", langfuse.recognizes_langfuse, langfuse.langfuse_runs),
)
ROWS = (
    own.ROLLOUTS,
    verifiers.VERIFIERS,
    nemo_gym.NEMO_GYM,
    atif.ATIF,
    agentdojo.AGENTDOJO,
    tau_bench.TAU_BENCH,
    exchange.RESPONSES,
    chat.LANGCHAIN,
    chat.SHAREGPT,
    chat.ITEMS,
    chat.CHAT,
)
"""Formats of rows, the more specific first."""
IN_MEMORY = "rows in memory.jsonl"
EXAMPLE = """\
{"messages": [{"role": "user", "content": "Cancel order 7."},
              {"role": "assistant", "content": "Order 7 is cancelled."}],
 "reward": 1}"""
"""The simplest chat: one such object, or one a line."""
FORMATS = ", ".join(
    dict.fromkeys(["tau2", "ToolSandbox", "Inspect", "BFCL results", *(entry.name for entry in (*ROWS, *TRACES))])
)
REMEDY = (
    f"docs/diagnose.md lists what each format needs: {FORMATS}. ToolSandbox is named by its folder with "
    "result_summary.json. Or give an object like this for each dialogue, reward 1 for passed and 0 for failed:\n"
    f"{EXAMPLE}"
)
UTF_16 = "it is text in UTF-16"
REMEDIES = {
    NO_REWARD: f"give the rewards by --scores FILE, a CSV of {spans.SCORES}, a line for each trace",
    UTF_16: "save it in UTF-8",
    UNKNOWN: REMEDY,
    chat.CHAT.name: f"write each dialogue like this, 1 for passed and 0 for failed:\n{EXAMPLE}",
}
"""Remedies, by the reason why entries cannot be read, or else by the format."""
LIST_LENGTH = 200
"""Skipped entries that are listed; of more only the number is kept."""


@dataclass(frozen=True)
class Skipped:
    """An entry that could not be read: the file, the place in it, and the reason."""

    source: str
    place: str
    reason: str


@dataclass(frozen=True)
class Logs:
    """Rollouts of the logs that were read, and what could not be read.

    rollouts: of all files, as records of diagnosis. tools: OpenAI schemas, from the files or else inferred from the
    calls; inferred: the names of the latter. policies: what agents were told, by environment, if the files hold it.
    skipped: entries that could not be read, at most `LIST_LENGTH`. sources: for each file its name, format, if known
    version, domain, agent and user model, and the numbers of its entries, imported and skipped.
    """

    rollouts: Spool[Rollout]
    tools: list[JsonObject]
    policies: dict[str, str]
    skipped: list[Skipped]
    sources: list[JsonObject]
    inferred: frozenset[str]

    @property
    def known_tools(self) -> list[JsonObject]:
        """The schemas that the files hold."""
        return [tool for tool in self.tools if tool["function"]["name"] not in self.inferred]

    @property
    def unread(self) -> int:
        """Number of entries that could not be read, listed or not."""
        return sum(source["skipped"] for source in self.sources)


def read_logs(paths: Sequence[Path], scores: Path | None = None, *, keep_secrets: bool = False) -> Logs:
    """Read files and folders.

    Args:
        paths: files of any format in docs/diagnose.md; ToolSandbox and tau2 1.0 result folders; any other folder is
            searched for files.
        scores: a CSV of `trace_id,reward` for spans, which hold no reward.
        keep_secrets: whether what looks like a key stays in the texts.

    Raises:
        UserError: a path does not exist, there is no rollout in any of them, most entries of a file cannot be read, or
            scores are given and no file holds traces.
    """
    rewards = spans.read_scores(scores) if scores is not None else {}
    reader = _Reader(keep_secrets)
    for path in _files(paths):
        try:
            source = _read(path, rewards)
        except Unreadable as error:
            reader.skip_file(path, str(error))
        else:
            reader.add(path, source)
    names = ", ".join(path.name for path in paths)
    if not reader.rollouts:
        raise reader.empty(names)
    formats = {source["format"] for source in reader.sources}
    if scores is not None and not formats & {entry.name for entry in TRACES}:
        raise UserError(
            f"{scores} gives rewards to traces, and {names} holds none",
            "leave --scores out: rows have their rewards beside their messages",
        )
    return reader.logs()


class _Reader:
    """Logs under construction."""

    def __init__(self, keep_secrets: bool = False) -> None:
        self.keep_secrets = keep_secrets
        self.rollouts, self.calls = Spool(Rollout), _CallShapes()
        self.skipped: list[Skipped] = []
        self.sources: list[JsonObject] = []
        self.tools: dict[str, JsonObject] = {}
        self.policies: dict[str, str] = {}
        self.digests: set[str] = set()

    def censor(self, value: Value) -> Value:
        """Remove what looks like a key, unless keys are to stay."""
        return value if self.keep_secrets else censored(value)

    def skip_file(self, path: Path, reason: str) -> None:
        """List a file that cannot be read at all."""
        self.skipped.append(Skipped(path.name, "file", reason))
        self.sources.append({"file": path.name, "format": UNKNOWN, "entries": 0, "imported": 0, "skipped": 1})

    def add(self, path: Path, source: Source) -> None:
        """Read the entries of a file, as far as they can be read.

        Raises:
            UserError: most of them cannot be read.
        """
        counts = {"entries": 0, "imported": 0, "skipped": 0}
        reasons, first_places = Counter[str](), dict[str, str]()
        for place, entry in _entries(source):
            counts["entries"] += 1
            counts["imported" if isinstance(entry, Rollout) else "skipped"] += 1
            if isinstance(entry, str):
                skipped = Skipped(path.name, plain(place), plain(self.censor(entry)))
                reasons[skipped.reason] += 1
                first_places.setdefault(skipped.reason, skipped.place)
                if len(self.skipped) < LIST_LENGTH:
                    self.skipped.append(skipped)
            elif source.file not in self.digests:  # a file given twice counts once
                self.add_rollout(self.censor(entry))
        if counts["skipped"] > counts["imported"] and counts["entries"] > FEW_ENTRIES:
            [(reason, number)] = reasons.most_common(1)
            raise UserError(
                f"{path}, read as {source.about['format']}: {counts['skipped']} of {counts['entries']} entries cannot "
                f"be read, {number} of them since {reason}, the first {first_places[reason]}",
                _remedy(source.about["format"], [reason]),
            )
        self.digests.add(source.file)
        self.sources.append({"file": path.name, **source.about, **counts})
        self.tools |= self.censor(source.tools)
        self.policies |= self.censor(source.policies)

    def add_rollout(self, rollout: Rollout) -> None:
        """Keep a rollout, and learn tools from its calls."""
        self.rollouts.add(rollout)
        self.calls.add(rollout)

    def empty(self, names: str) -> UserError:
        """Say why there is no rollout in these files."""
        reasons = [f"{entry.source}, {entry.place}: {entry.reason}" for entry in self.skipped[:5]]
        nothing = "the file is empty" if self.sources else "the folders hold no file of results"
        return UserError(
            f"there is no rollout in {names}: {'; '.join(reasons) or nothing}",
            _remedy(self.sources[-1]["format"] if self.sources else UNKNOWN, (entry.reason for entry in self.skipped)),
        )

    def logs(self) -> Logs:
        """Return the logs."""
        schemas = self.calls.schemas()
        inferred = frozenset(schemas) - frozenset(self.tools)
        tools = [*(schemas | self.tools).values()]
        return Logs(self.rollouts, tools, self.policies, self.skipped, self.sources, inferred)


def _remedy(source_format: str, reasons: Iterable[str]) -> str:
    """Choose the remedy for entries of a format that cannot be read for these reasons."""
    remedies = (REMEDIES[key] for key in (*reasons, source_format) if key in REMEDIES)
    return next(remedies, "correct these entries; docs/diagnose.md has an example of each format")


def _entries(source: Source) -> Iterator[tuple[str, Rollout | str]]:
    """Yield the entries of a file, up to a place from where it cannot be read."""
    try:
        yield from source.entries
    except (OSError, *MALFORMED) as error:
        yield "the remainder", f"it cannot be read: {reason_of(error)}"


def logs_of_rollouts(rollouts: Iterable[Rollout]) -> Logs:
    """Return logs of rollouts in memory.

    Raises:
        UserError: there are none.
    """
    reader = _Reader()
    for rollout in rollouts:
        reader.add_rollout(reader.censor(rollout))
    count = len(reader.rollouts)
    if not count:
        raise UserError("there is no rollout to diagnose", REMEDY)
    reader.sources.append(
        {"file": "rollouts in memory", "format": "rollouts", "entries": count, "imported": count, "skipped": 0}
    )
    return reader.logs()


def logs_of_rows(rows: "Iterable[object] | pd.DataFrame", scores: Path | None = None) -> Logs:
    """Read rows in memory as a file of them is read.

    Args:
        rows: objects of any format of rows in docs/diagnose.md, in which messages may be objects of LangChain or
            pydantic; or a frame with a row for each rollout, whose cells may be JSON text.
        scores: see `read_logs`.

    Raises:
        UserError: a row is no object, or the rows cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, IN_MEMORY)
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(_records(rows)):
                content = _plain(row)
                if not isinstance(content, Mapping):
                    raise UserError(f"row {number} is not an object but {type(row).__name__}", REMEDY)
                try:
                    file.write(json.dumps({**content}, default=_plain) + "\n")
                except (TypeError, ValueError, RecursionError):
                    raise UserError(f"row {number} holds values that JSON cannot express", REMEDY) from None
        return read_logs([path], scores)


def _records(rows: "Iterable[object] | pd.DataFrame") -> Iterable[object]:
    """Convert the rows of a frame to objects without missing values, with JSON text parsed."""
    if not hasattr(rows, "columns"):
        return rows
    frame: pd.DataFrame = rows  # pyright: ignore[reportAssignmentType]
    names = [str(name) for name in frame.columns]
    missing = frame.isna().to_numpy()
    rows = (zip(names, row, missing[number], strict=True) for number, row in enumerate(frame.itertuples(False, None)))
    return ({name: exchange.loaded(value) for name, value, is_none in row if not is_none} for row in rows)


def _plain(value: object) -> object:
    """Convert a value that JSON does not know: pydantic records by their fields, arrays as lists, the rest as text."""
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        if method := getattr(value, name, None):
            return method(**options)
    return value if isinstance(value, Mapping) else str(value)


class Unreadable(Exception):
    """A file of no known format, or a damaged one."""


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to read: those given, and in folders those that look like results."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", "name a file or folder that does")
        if not path.is_dir():
            require_regular(path, "name a file that can be read")
            yield path
        elif (path / "result_summary.json").exists():
            yield path / "result_summary.json"
        elif (path / "results.json").exists():
            yield path / "results.json"
        else:
            files = {file for file in path.rglob("*") if file.is_file() and _may_hold_dialogues(file)}
            # Harbor's result of a trial is no rollout of its own.
            trajectories = [file for file in files if file.name.startswith("trajectory")]
            trials = {folder / atif.RESULT for file in trajectories for folder in (file.parent, file.parent.parent)}
            absolute = {file.absolute() for file in files}  # score files are read with their results
            yield from sorted(file for file in files - trials if bfcl.results_of(file) not in absolute)


def _may_hold_dialogues(file: Path) -> bool:
    """Return whether a file in a folder is JSON, or a table with a column of messages."""
    is_named_table = file.suffix in (".csv", ".tsv")
    return file.suffix in OF_JSON or (is_named_table and has_columns(file, (*chat.MESSAGES, "input")))


def _read(path: Path, scores: Mapping[str, float]) -> Source:
    """Read a file as what its content is: an archive, an object with lists of its own, or rows."""
    try:
        source = _read_document(path)
        if source is not None:
            return source
        rows = first_objects(path)
    except (*MALFORMED, *inspect.DAMAGED) as error:
        raise Unreadable(f"it is not JSON: {reason_of(error)}") from None
    for trace_format in TRACES:
        if any(_holds(trace_format.recognizes, row) for row in rows):
            return read_traces(path, trace_format, scores)
    if rows and tau2.is_simulation(rows[0]):
        return tau2.read_simulations(path)
    if rows and bfcl.is_bfcl(rows[0]):
        try:
            return bfcl.read_bfcl(path)
        except MALFORMED as error:
            raise Unreadable(f"its scores cannot be read: {reason_of(error)}") from None
    row_format = next((entry for row in rows for entry in ROWS if _holds(entry.recognizes, row)), None)
    if row_format is None and (rows or path.suffix != ".jsonl"):
        raise Unreadable(NO_FORMAT)
    source = chat.read_rows(path, row_format or chat.CHAT)
    if row_format is own.ROLLOUTS:
        source.tools.update(schemas_by_name(own.tools_beside(path)))
    return source


def _read_document(path: Path) -> Source | None:
    """Read an archive, or an object with lists of its own; None if the file holds rows."""
    if inspect.is_archive(path):
        return inspect.read_archive(path)
    if is_table(path) or is_lines(path):
        with path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise Unreadable(UTF_16)
        return None
    document = JsonDocument(path, (toolsandbox.SCENARIOS, tau2.SIMULATIONS, SAMPLES))
    members = document.members.keys() | document.counts.keys()
    if toolsandbox.SCENARIOS in members:
        return toolsandbox.read_toolsandbox(document)
    if {tau2.SIMULATIONS, "simulation_index"} & members:
        return tau2.read_tau2(document)
    if SAMPLES in members:
        return inspect.read_document(path, document.members, document.elements(SAMPLES))
    return None


def _holds(recognizes: Callable[[Foreign], bool], row: Foreign) -> bool:
    try:
        return recognizes(row)
    except MALFORMED:
        return False


class _CallShapes:
    """Schemas inferred from the calls of agents and references: all arguments seen; those in every call are
    required."""

    def __init__(self) -> None:
        self._possible: dict[str, set[str]] = {}
        self._required: dict[str, set[str]] = {}

    def add(self, rollout: Rollout) -> None:
        """Count the calls of a rollout."""
        for message in (*rollout.messages, *rollout.reference):
            if message["role"] == "assistant":
                for name, arguments in calls_of(message):
                    names = {str(key) for key in arguments if key != ""}
                    self._possible.setdefault(name, set()).update(names)
                    self._required.setdefault(name, names).intersection_update(names)

    def schemas(self) -> dict[str, JsonObject]:
        """Return schemas by tool name, in the order of the names."""
        tools: dict[str, JsonObject] = {}
        for name, possible in sorted(self._possible.items()):
            properties = {argument: {} for argument in sorted(possible)}
            parameters = {"type": "object", "properties": properties, "required": sorted(self._required[name])}
            tools[name] = {"type": "function", "function": {"name": name, "parameters": parameters}}
        return tools
