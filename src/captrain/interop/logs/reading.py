"""Reads other tools' logs, in any format in docs/formats.md, and returns them as rollouts.

The format is detected from the content. If a log embeds its tasks, these are used: an installed benchmark may have
different tasks under the same ids. Only known fields are read, so the settings and headers of a run are never copied.
Values under credential-like names inside tool arguments are replaced. Every entry that cannot be read is listed with
its reason.

Logs may be larger than memory: files are read entry by entry, and rollouts are kept on disk.
"""

import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop.logs import (
    adk,
    agentdojo,
    answers,
    atif,
    bedrock,
    bfcl,
    chat,
    exchange,
    inspect,
    langfuse,
    langsmith,
    medagent,
    nemo_gym,
    openai_evals,
    openhands,
    own,
    promptfoo,
    requests,
    sessions,
    spans,
    speakers,
    steps,
    swe,
    tau2,
    tau_bench,
    templated,
    terminal_bench,
    toolbench,
    toolsandbox,
    verifiers,
)
from captrain.interop.logs.agents import Origin, origin_of, settle
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.nested import trials_in
from captrain.interop.logs.outcomes import (
    AS_READ,
    NO_FIELD,
    NO_REWARD,
    OUT_OF_RANGE,
    Choices,
    Judge,
    Scores,
    scores_for,
)
from captrain.interop.logs.packed import is_packed, unpacked
from captrain.interop.logs.records import (
    OF_JSON,
    RowFormat,
    first_objects,
    has_columns,
    is_binary,
    is_lines,
    is_table,
    rows_in,
    rows_of,
)
from captrain.interop.logs.source import (
    MALFORMED,
    NO_DIALOGUE,
    Entry,
    Foreign,
    Read,
    Source,
    json_of,
    reason_of,
    schemas_by_name,
)
from captrain.interop.logs.traces import NO_MESSAGES, Rows, TraceFormat, read_traces
from captrain.interop.logs.written import executed
from captrain.records import JsonObject, Rollout, Spool, censored, counted, digest, plain, require_regular, tracked

if TYPE_CHECKING:
    import pandas as pd

Value = TypeVar("Value")
SAMPLES = "samples"
UNKNOWN = "unknown"
NO_FORMAT = "it is of no known format"
OPTION = re.compile(r"add (--\w+ (?:'[^']+'|\S+))$")
"""A reason may end by naming the command-line option to add."""
EVENT_FILE = re.compile(r"(?:event-)?\d+(?:-[\w-]+)?\.json")
"""Name of an OpenHands file that holds a single event."""
FEW_ENTRIES = 9
"""A file with more entries than this is refused if most of them are unreadable: its format was probably misjudged."""
TRACES = (
    TraceFormat("OpenTelemetry spans", spans.recognizes_spans, spans.span_runs),
    TraceFormat("LangSmith runs", langsmith.recognizes_langsmith, langsmith.langsmith_runs),
    TraceFormat("Langfuse export", langfuse.recognizes_langfuse, langfuse.langfuse_runs),
    TraceFormat("OpenAI evals", openai_evals.recognizes_evals, openai_evals.evals_runs),
    requests.REQUESTS_OF_TRACES,
)
ROWS = (
    own.ROLLOUTS,
    verifiers.VERIFIERS,
    verifiers.RESULTS,
    nemo_gym.NEMO_GYM,
    atif.ATIF,
    agentdojo.AGENTDOJO,
    tau_bench.TAU_BENCH,
    openhands.OUTPUT,
    swe.SWE_AGENT,
    terminal_bench.TERMINAL_BENCH,
    answers.SMOLAGENTS,
    answers.TAPES,
    speakers.WHO_AND_WHEN,
    medagent.MEDAGENT,
    adk.ADK,
    toolbench.TOOLBENCH,
    promptfoo.PROMPTFOO,
    exchange.RESPONSES,
    chat.LANGCHAIN,
    chat.SHAREGPT,
    chat.AUTOGEN,
    chat.ITEMS,
    chat.CHAT,
    steps.STEPS,
    templated.TEMPLATED,
)
"""Row formats in the order they are tried, the most specific first."""
FILES = (
    sessions.SESSIONS,
    openhands.EVENTS,
    bedrock.BEDROCK,
    speakers.DIALOGUE,
    requests.REQUESTS_OF_RUN,
    steps.STEPS_OF_FILE,
)
"""Formats of files that hold exactly one dialogue."""
IN_MEMORY = "rows in memory.jsonl"
EXAMPLE = """\
{"messages": [{"role": "user", "content": "Cancel order 7."},
              {"role": "assistant", "content": "Order 7 is cancelled."}],
 "reward": 1}"""
"""The simplest chat log: one such object, or one per line."""
REFERENCE = (
    '{"reference": [{"role": "assistant", "tool_calls": [{"function": {"name": "cancel_order", '
    '"arguments": {"order_id": 7}}}]}]}'
)
"""A solution, as a field of a row."""
FORMATS = ", ".join(
    dict.fromkeys(
        ["tau2", "ToolSandbox", "Inspect", "BFCL results", *(entry.name for entry in (*ROWS, *FILES, *TRACES))]
    )
)
REMEDY = (
    "write each dialogue like this, 1 for passed and 0 for failed:\n"
    f"{EXAMPLE}\nOr name logs of another format. docs/formats.md says what each needs; for ToolSandbox, name the "
    f"folder with result_summary.json.\nFormats: {FORMATS}"
)
MORE_ROWS = "add a row for each rollout to the file of --scores, for example"
NO_ROW = "correct the file of --scores, none of whose rows names a rollout of these logs; they must be like these"
NO_JSON = "it is not JSON"
UTF_16 = "it is text in UTF-16"
BINARY = "it is a binary file"
REMEDIES = {
    NO_REWARD: "add --outcome FIELD if a field of the log holds the outcome, or else --scores FILE, a CSV that begins "
    "like this",
    UTF_16: "save it in UTF-8",
    f"{NO_JSON}: Expecting value (char 0)": "a transcript in Markdown or plain text holds no calls; write each "
    f"dialogue like this:\n{EXAMPLE}",
    BINARY: "name a log in JSON, JSON lines, CSV or Inspect's .eval; .gz, .zip and .tar are unpacked",
    NO_MESSAGES: "record the spans with the content of messages, which instrumentations leave out unless told so "
    "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true)",
    bfcl.NO_SCORES: "run `bfcl evaluate`, put the score file that it writes beside the results, and name their folder",
    bfcl.UNREADABLE: "put the result file and the score file of one evaluation side by side, and name their folder",
    adk.EXPECTED: "name the results that `adk eval` wrote: .adk/eval_history/*.evalset_result.json",
    terminal_bench.NO_EPISODES: "name the session files that the agent itself wrote, with `--scores FILE`, a CSV of "
    "outcomes that begins with the line task_id,reward",
    "its reference ": f"write the solution as the assistant's messages, as a field of the row:\n{REFERENCE}",
    UNKNOWN: REMEDY,
    chat.NO_WORDS: f"write each dialogue like this, 1 for passed and 0 for failed:\n{EXAMPLE}",
    chat.CHAT.name: f"write each dialogue like this, 1 for passed and 0 for failed:\n{EXAMPLE}",
}
"""Remedy for each reason why an entry is unreadable. Falls back to the remedy of the format."""
WHOLE = ("file", "the file")
"""Values of `Skipped.place` that mean the whole file."""
SCORED = 3
"""Most rollouts that the example of a score table scores."""
LIST_LENGTH = 200
"""Most skipped entries that are listed. Further ones are only counted."""


@dataclass(frozen=True)
class Skipped:
    """An entry that could not be read: the file, the place in it, and the reason."""

    source: str
    place: str
    reason: str


@dataclass(frozen=True)
class Logs:
    """The rollouts of all logs, and the entries that could not be read.

    Attributes:
        rollouts: the rollouts of all files.
        tools: OpenAI tool schemas, from the files or inferred from the calls.
        policies: environment -> the agent's instructions, if the files hold them.
        skipped: entries that could not be read, at most `LIST_LENGTH`.
        sources: one object per file: its name and format; its version, domain, agent and user model if known; and the
            numbers of entries read, imported and skipped.
        inferred: names of the tools whose schemas were inferred from calls.
        notes: sentences for the user about decisions made while reading, such as graded rewards, repeated rollouts,
            several agents in one log, or files without a dialogue.
    """

    rollouts: Spool[Rollout]
    tools: list[JsonObject]
    policies: dict[str, str]
    skipped: list[Skipped]
    sources: list[JsonObject]
    inferred: frozenset[str]
    notes: tuple[str, ...] = ()

    @property
    def known_tools(self) -> list[JsonObject]:
        """Tool schemas that the files themselves contain."""
        return [tool for tool in self.tools if tool["function"]["name"] not in self.inferred]

    @property
    def unread(self) -> int:
        """Number of entries that could not be read, listed or not."""
        return sum(source["skipped"] for source in self.sources)


def read_logs(
    paths: Sequence[Path],
    scores: Path | None = None,
    *,
    keep_secrets: bool = False,
    choices: Choices = AS_READ,
) -> Logs:
    """Read files and folders.

    Args:
        paths: files of any format in docs/formats.md, packed or not; result folders; any other folder is searched for
            files.
        scores: a CSV of outcomes, by trace, session, file or task.
        keep_secrets: keep text that looks like an API key.
        choices: fields that the user named for outcomes, messages and agents.

    Raises:
        UserError: a path does not exist, there is no rollout in any of them, most entries of a file cannot be read, a
            reward is out of range, or no score matches a rollout.
    """
    reader = _Reader(keep_secrets, Judge(choices, Scores(scores) if scores is not None else None))
    with ExitStack() as folders:
        files = [*_files(paths, folders)]
        for file in tracked(files, "reading", len(files)):
            try:
                source = _read(file.path, choices)
            except Unreadable as error:
                reader.skip_file(file, str(error), may_be_dialogue=error.may_be_dialogue)
            else:
                reader.add(file, source)
    if not reader.rollouts:
        raise reader.empty([*map(str, paths)])
    if reader.judge.scores is not None and len(reader.judge.scores.unused()) == len(reader.judge.scores.lines):
        [name, *_] = reader.judge.scores.lines
        raise UserError(
            f"no score of {scores} matches a rollout: it scores {plain(name)}, and a task of the logs is "
            f"{plain(reader.origins[0].task.partition('/')[2])}",
            "give the trace, session, file or task of a rollout in the first column",
        )
    return reader.logs()


class _Reader:
    """Logs under construction."""

    def __init__(self, keep_secrets: bool = False, judge: Judge | None = None) -> None:
        self.keep_secrets, self.judge = keep_secrets, judge or Judge(AS_READ)
        self.rollouts, self.calls = Spool(Rollout), _CallShapes()
        self.origins: list[Origin] = []
        self.skipped: list[Skipped] = []
        self.passed_over: list[Skipped] = []
        """Files of a searched folder that hold no dialogue. They are not errors."""
        self.unknown: list[str] = []
        """Files without a known format that look like a dialogue. The user is told about them."""
        self.sources: list[JsonObject] = []
        self.tools: dict[str, JsonObject] = {}
        self.policies: dict[str, str] = {}
        self.read: set[str] = set()
        """Digests of files, and of rollouts with their task, agent, trial and outcome (see `unread`)."""
        self.unscored: list[str] = []
        """Lines of an example score table for the first rollouts without an outcome, shown in the remedy."""

    def censor(self, value: Value) -> Value:
        """Remove text that looks like an API key, unless `keep_secrets`. Keys of the environment are always removed."""
        return censored(value, shapes=not self.keep_secrets)

    def skip_file(self, file: "_File", reason: str, *, may_be_dialogue: bool = False) -> None:
        """Record a file that cannot be read at all. In a searched folder, an unknown format is no error."""
        if file.is_found and reason.startswith(NO_FORMAT):
            self.passed_over.append(Skipped(file.name, "file", NO_DIALOGUE))
            self.unknown += [file.name] if may_be_dialogue else []
            return
        self.skipped.append(Skipped(file.name, "file", reason))
        self.sources.append({"file": file.name, "format": UNKNOWN, "entries": 0, "imported": 0, "skipped": 1})

    def add(self, file: "_File", source: Source) -> None:
        """Import every readable entry of a file.

        Raises:
            UserError: most entries cannot be read, or a reward is out of range.
        """
        counts = {"entries": 0, "imported": 0, "skipped": 0}
        reasons, first_places, listed = Counter[str](), dict[str, str](), len(self.skipped)
        for place, entry, row in _entries(source):
            counts["entries"] += 1
            entry, record = self.judged(file, source.file, entry, row)
            counts["imported" if isinstance(record, Rollout) else "skipped"] += 1
            if isinstance(record, str):
                if isinstance(entry, Entry) and record.startswith(NO_REWARD) and len(self.unscored) <= SCORED:
                    header, line = scores_for(entry, file.path)
                    self.unscored += [] if self.unscored else [header]
                    # All lines need the same columns, and a rollout needs one line only.
                    self.unscored += [line] if header == self.unscored[0] and line not in self.unscored else []
                skipped = Skipped(file.name, plain(place), plain(record))
                if skipped.reason.startswith(OUT_OF_RANGE):
                    raise UserError(f"{file.shown}, {skipped.place}: {skipped.reason}", self.remedy("", [record]))
                reasons[skipped.reason] += 1
                first_places.setdefault(skipped.reason, skipped.place)
                if len(self.skipped) < LIST_LENGTH:
                    self.skipped.append(skipped)
            elif (rollout := self.unread(source.file, entry, record)) is not None:
                self.add_rollout(rollout)
                self.origins.append(origin_of(rollout, entry, file.argument, file.path))
        if file.is_found and reasons and all(map(_is_aside, reasons)) and not counts["imported"]:
            self.skipped = self.skipped[:listed]
            self.passed_over += [Skipped(file.name, place, reason) for reason, place in first_places.items()]
            return
        unjudged = sum(number for reason, number in reasons.items() if reason.startswith(NO_REWARD))
        is_partly_judged = unjudged > counts["imported"] > 0
        if is_partly_judged or (counts["skipped"] > counts["imported"] and counts["entries"] > FEW_ENTRIES):
            [(reason, number)] = reasons.most_common(1)
            same = "" if number == counts["skipped"] else f"; {number} have the same fault"
            raise UserError(
                f"{file.shown}, read as {source.about['format']}: {counts['skipped']} of {counts['entries']} entries "
                f"cannot be read{same}, the first at {first_places[reason]}: {reason}",
                self.remedy(source.about["format"], [reason]),
            )
        self.read.add(source.file)
        self.sources.append({"file": file.name, **source.about, **counts})
        self.tools |= self.censor(source.tools)
        self.policies |= self.censor(source.policies)

    def judged(self, file: "_File", digest: str, entry: Read, row: Foreign) -> tuple[Read, Rollout | str]:
        """Apply the user's choices to an entry. Return the entry, and its rollout or the reason why it has none."""
        if not isinstance(entry, Entry):
            return entry, self.censor(entry)
        try:
            entry = self.judge.chosen(replace(entry, messages=executed(entry.messages)), row, file.path)
            return entry, self.censor(self.judge.rollout(digest, entry, row, file.path))
        except MALFORMED as error:
            return entry, reason_of(error) if type(error) is ValueError else f"it cannot be read: {reason_of(error)}"

    def unread(self, file: str, entry: Read, record: Rollout) -> Rollout | None:
        """Return the rollout, or None if it was read before. A file that is given twice counts once.

        Two files with equal bytes are still two rollouts if their task, agent, trial or outcome differs. Outcomes, for
        example, may come from files beside them. The second rollout then gets an id of its own.
        """
        names = (entry.agent, entry.keys) if isinstance(entry, Entry) else ()
        beside = record.task.id, record.trial, record.policy, record.outcome, record.score, record.error, names
        mark = digest(file, record.id, *beside)
        if mark in self.read:
            return None
        self.read.add(mark)
        return record.model_copy(update={"id": mark[:12]}) if file in self.read else record

    def add_rollout(self, rollout: Rollout) -> None:
        """Keep a rollout, and learn tools from its calls."""
        self.rollouts.add(rollout)
        self.calls.add(rollout)

    def empty(self, names: Sequence[str]) -> UserError:
        """Return the error for files without any rollout. It names each reason once."""
        places: dict[str, list[str]] = {}
        is_one = len(names) == 1 and Path(names[0]).is_file()
        is_unjudged = any(entry.reason.startswith(NO_REWARD) for entry in self.skipped)
        # If dialogues lack outcomes, the files that hold no dialogue are taken for results or reports.
        for entry in (*self.skipped, *([] if is_unjudged else self.passed_over)):
            place = "" if entry.place in WHOLE else entry.place
            place = place if is_one else ", ".join(filter(None, (entry.source, place)))
            places.setdefault(entry.reason, []).append(place)
        reasons = [
            f"{first}{f' and {len(others)} more' if others else ''}: {reason}".removeprefix(": ")
            for reason, [first, *others] in [*places.items()][:5]
        ]
        nothing = (
            "the file is empty, or its run ended before the first sample"
            if self.sources
            else "these folders contain no log that captrain can read"
        )
        return UserError(
            f"there is no rollout in {', '.join(names)}: {'; '.join(reasons) or nothing}",
            self.remedy(self.sources[-1]["format"] if self.sources else UNKNOWN, [*places]),
        )

    def remedy(self, source_format: str, reasons: Sequence[str]) -> str:
        """Choose the remedy to show, given the file's format and the reasons why its entries are unreadable."""
        for reason in reasons:
            if option := OPTION.search(reason):
                return f"add {option[1]}"
            if reason.startswith(OUT_OF_RANGE):
                mark = reason.rpartition(" ")[2]
                return f"say what passes: --pass-at {mark}, for example, counts a reward of {mark} or more as passed"
            if reason.startswith(NO_REWARD) and self.unscored:
                scores = self.judge.scores
                no_row = MORE_ROWS if scores and len(scores.unused()) < len(scores.lines) else NO_ROW
                remedy = REMEDIES[NO_REWARD] if scores is None else no_row
                return "\n".join([f"{remedy}:", *self.unscored])
        keys = [key for reason in reasons for key in REMEDIES if reason.startswith(key)]
        remedies = (REMEDIES[key] for key in (*keys, source_format) if key in REMEDIES)
        return next(remedies, "correct these entries; docs/formats.md has an example of each format")

    def logs(self) -> Logs:
        """Return the logs. Each rollout now has the final name of its agent and the number of its trial."""
        notes = [*self.judge.notes(), *settle(self.origins)]
        if self.unknown:
            count, first = counted(len(self.unknown), "file"), plain(self.unknown[0])
            notes.append(f"passed over: {count} of no known format, such as {first}; name it alone to see why")
        rollouts = self.rollouts
        if any(origin.is_changed for origin in self.origins):
            rollouts, self.calls = Spool(Rollout), _CallShapes()
            for origin, rollout in zip(self.origins, self.rollouts, strict=True):
                if origin.kept:
                    renamed = rollout.model_copy(update={"policy": origin.label, "trial": origin.number})
                    rollouts.add(renamed)
                    self.calls.add(renamed)
        schemas = self.calls.schemas()
        inferred = frozenset(schemas) - frozenset(self.tools)
        tools = [*(schemas | self.tools).values()]
        return Logs(rollouts, tools, self.policies, self.skipped, self.sources, inferred, tuple(notes))


def _is_aside(reason: str) -> bool:
    """Return whether an entry was skipped because it holds no run: no dialogue, a request alone, or an eval case."""
    return reason.startswith((NO_DIALOGUE, chat.REQUEST, adk.EXPECTED))


def _entries(source: Source) -> Iterator[tuple[str, Read, Foreign]]:
    """Yield the entries of a file. If the file breaks off, the last item is the reason why the rest is unreadable."""
    try:
        yield from source.entries
    except (OSError, *MALFORMED) as error:
        yield "the remainder", f"it cannot be read: {reason_of(error)}", {}


def logs_of_rollouts(rollouts: Iterable[Rollout]) -> Logs:
    """Return the logs of rollouts in memory.

    Raises:
        UserError: `rollouts` is empty.
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


def logs_of_rows(
    rows: "Iterable[object] | pd.DataFrame", scores: Path | None = None, choices: Choices = AS_READ
) -> Logs:
    """Read rows in memory exactly like a JSON-lines file with the same rows.

    Args:
        rows: either objects in any row format in docs/formats.md, whose messages may be LangChain or pydantic objects;
            or a pandas frame with one row per rollout, whose cells may be JSON text.
        scores, choices: see `read_logs`.

    Raises:
        UserError: a row is not an object, or the rows cannot be read.
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
        return read_logs([path], scores, choices=choices)


def _records(rows: "Iterable[object] | pd.DataFrame") -> Iterable[object]:
    """Convert the rows of a frame to objects: missing cells are left out, and JSON text is parsed."""
    if not hasattr(rows, "columns"):
        return rows
    frame: pd.DataFrame = rows  # pyright: ignore[reportAssignmentType]
    names = [str(name) for name in frame.columns]
    missing = frame.isna().to_numpy()
    rows = (zip(names, row, missing[number], strict=True) for number, row in enumerate(frame.itertuples(False, None)))
    return ({name: exchange.loaded(value) for name, value, is_none in row if not is_none} for row in rows)


def _plain(value: object) -> object:
    """Convert a value for JSON: a pydantic object to its fields, an array to a list, any other object to text."""
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        if method := getattr(value, name, None):
            return method(**options)
    return value if isinstance(value, Mapping) else str(value)


class Unreadable(Exception):
    """A file of no known format, or a damaged one."""

    def __init__(self, reason: str, *, may_be_dialogue: bool = False) -> None:
        super().__init__(reason)
        self.may_be_dialogue = may_be_dialogue


@dataclass(frozen=True)
class _File:
    """A file to read.

    argument: the path that the user gave. shown: the name in messages. is_found: the file was found in a folder or an
    archive, not named by the user.
    """

    path: Path
    argument: Path
    shown: str
    is_found: bool = False

    @property
    def name(self) -> str:
        return self.path.name


def _files(paths: Sequence[Path], folders: ExitStack) -> Iterator[_File]:
    """Yield the files to read. Packed files are unpacked, and folders are searched for files that may be logs."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", "check the path: name a log file, or a folder of them")
        if path.is_dir():
            found = [*_found(path)]
            joined = [*_joined_events(found, folders)]
            parts = {part for _, pieces in joined for part in pieces}
            yield from (_File(file, path, str(file), True) for file in found if file not in parts)
            yield from (_File(file, path, str(pieces[0].parent), True) for file, pieces in joined)
            continue
        require_regular(path, "name a file that can be read")
        if not is_packed(path):
            yield _File(path, path, str(path))
            continue
        place = unpacked(path, Path(folders.enter_context(tempfile.TemporaryDirectory())))
        if place.is_file():
            yield _File(place, place, str(path))
        else:
            yield from (_File(file, place, f"{path}: {file.relative_to(place)}", True) for file in _found(place))


def _found(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that may hold dialogues."""
    if (folder / "result_summary.json").exists():
        yield folder / "result_summary.json"
    elif (folder / "results.json").exists() and (folder / "simulations").is_dir():
        yield folder / "results.json"
    else:
        files = {file for file in folder.rglob("*") if file.is_file() and _may_hold_dialogues(file)}
        # Score files and run summaries are read together with the files they describe.
        files -= {file for file in files if terminal_bench.is_summary(file)}
        absolute = {file.absolute() for file in files}
        yield from sorted(file for file in files if bfcl.results_of(file) not in absolute)


def _joined_events(files: Iterable[Path], folders: ExitStack) -> Iterator[tuple[Path, list[Path]]]:
    """Join OpenHands' one-event files to one file per folder. Yield each joined file with the files it was made of."""
    groups: dict[Path, list[Path]] = {}
    for file in files:
        if EVENT_FILE.fullmatch(file.name):
            groups.setdefault(file.parent, []).append(file)
    for folder, parts in groups.items():
        parts.sort(key=lambda part: int(re.findall(r"\d+", part.name)[0]))
        try:
            is_event = _holds(openhands.EVENTS.recognizes, [json_of(parts[0])])
            events = [json_of(part) for part in parts] if is_event else []
        except MALFORMED:
            continue  # each file is then reported by itself
        if events:
            name = folder.parent.name if folder.name == "events" else folder.name
            joined = Path(folders.enter_context(tempfile.TemporaryDirectory()), f"{name}.jsonl")
            joined.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
            yield joined, parts


def _may_hold_dialogues(file: Path) -> bool:
    """Return whether a file in a folder is JSON, or a table with a column of messages."""
    is_named_table = file.suffix in (".csv", ".tsv")
    return file.suffix in OF_JSON or (is_named_table and has_columns(file, (*chat.MESSAGES, "input")))


def _read(path: Path, choices: Choices) -> Source:
    """Detect the format of a file from its content and return its reader.

    A file is an archive, a JSON object that a benchmark wrote as one document, or rows.
    """
    if is_binary(path) and not inspect.is_archive(path):
        raise Unreadable(BINARY)
    try:
        source = _read_document(path)
        if source is not None:
            return source
        rows = first_objects(rows_of(path))
    except (*MALFORMED, *inspect.DAMAGED) as error:
        raise Unreadable(f"{NO_JSON}: {reason_of(error)}") from None
    formats = [steps.named(choices.messages)] if choices.messages else ROWS

    def is_row(row: Foreign) -> bool:
        return any(_holds(entry.recognizes, row) for entry in formats)

    inner = [*rows_in(rows[0], is_row)] if len(rows) == 1 and not is_lines(path) else []

    def whole() -> Iterator[tuple[str, object]]:
        return rows_of(path)

    layouts: tuple[Rows, ...] = (
        whole,
        lambda: iter(inner),
        lambda: trials_in(whole(), is_row),
        lambda: trials_in(inner, is_row),
    )
    for layout in layouts:
        source = _read_rows(path, rows if layout is whole else first_objects(layout()), layout, formats)
        if source is not None:
            return source
    rows += first_objects(inner)
    if rows or path.suffix != ".jsonl":
        raise Unreadable(_without_dialogue(rows, choices), may_be_dialogue=steps.resembles_dialogue([*rows]))
    return chat.read_rows(path, chat.CHAT, rows_of(path))


def _without_dialogue(rows: Sequence[Foreign], choices: Choices) -> str:
    """Return the reason why a file has no known format. It names the fields of the first row."""
    if choices.messages:
        return f"{NO_FIELD} {choices.messages}"
    fields = ", ".join(plain(str(name))[:40] for name in [*(rows[0] if rows else ())][:8])
    field = next((name for row in rows[:2] for name in steps.likely_messages(row)), "")
    hint = f"; `{field}` may be one: add --messages {shlex.quote(field)}" if field else ""
    return f"{NO_FORMAT}: {NO_DIALOGUE}, but the fields {fields}{hint}" if fields else NO_FORMAT


def _read_rows(path: Path, first: Sequence[Foreign], rows: Rows, formats: Sequence[RowFormat]) -> Source | None:
    """Read rows in the first format that recognizes them. Return None if no format does."""
    for trace_format in TRACES:
        if any(_holds(trace_format.recognizes, row) for row in first):
            return read_traces(path, trace_format, rows)
    if first and tau2.is_simulation(first[0]):
        return tau2.read_simulations(path, rows())
    if first and bfcl.is_bfcl(first[0]):
        try:
            return bfcl.read_bfcl(path)
        except MALFORMED as error:
            raise Unreadable(f"{bfcl.UNREADABLE}: {reason_of(error)}") from None
    row_format = next((entry for row in first for entry in formats if _holds(entry.recognizes, row)), None)
    file_format = next((entry for entry in FILES if first and _holds(entry.recognizes, first)), None)
    if row_format is None and file_format is not None:
        return chat.read_whole(path, file_format, [row for _, row in rows() if isinstance(row, dict)])
    if row_format is None:
        return None
    source = chat.read_rows(path, row_format, rows())
    if row_format is own.ROLLOUTS:
        source.tools.update(schemas_by_name(own.tools_beside(path)))
    return source


def _read_document(path: Path) -> Source | None:
    """Read an Inspect archive, or a document of ToolSandbox, tau2 or Inspect. Return None if the file holds rows."""
    if inspect.is_archive(path):
        try:
            return inspect.read_archive(path)
        except (*MALFORMED, *inspect.DAMAGED) as error:
            raise Unreadable(f"the archive cannot be read: {reason_of(error)}") from None
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
    if SAMPLES in members and "eval" in members:
        return inspect.read_document(path, document.members, document.elements(SAMPLES))
    return None


def _holds(recognizes: Callable[[Value], bool], row: Value) -> bool:
    try:
        return recognizes(row)
    except MALFORMED:
        return False


class _CallShapes:
    """Tool schemas inferred from the calls of agents and references.

    A schema has every argument seen in any call. Arguments present in every call are required.
    """

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
        """Return tool name -> schema, sorted by name."""
        tools: dict[str, JsonObject] = {}
        for name, possible in sorted(self._possible.items()):
            properties = {argument: {} for argument in sorted(possible)}
            parameters = {"type": "object", "properties": properties, "required": sorted(self._required[name])}
            tools[name] = {"type": "function", "function": {"name": name, "parameters": parameters}}
        return tools
