"""Other people's logs as rollouts, of any format that docs/diagnose.md lists.

What a file is, is told by its content. Embedded tasks are used, because an installed benchmark may hold others under
the same ids. Only known fields are taken, so no setting or header of a run comes along, and values under
credential-like names inside tool arguments are replaced. Nothing is silently skipped: what cannot be read is listed
with its reason.

Logs may be larger than memory: files are read entry by entry, and rollouts wait on disk for whoever reads them.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

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
from captrain.interop.logs.document import ARRAY, JsonDocument
from captrain.interop.logs.records import OF_JSON, first_objects, has_columns, is_lines, is_table
from captrain.interop.logs.source import MALFORMED, Source, reason_of, schemas_by_name
from captrain.interop.logs.traces import NO_REWARD, read_traces
from captrain.records import JsonObject, Rollout, Spool, censored, plain, require_regular

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = "samples"
UNKNOWN = "unknown"
FEW_ENTRIES = 9
"""A file of more entries of which most do not read is refused: it is not what it was taken for."""
TRACES = (
    ("OpenTelemetry spans", spans.recognizes_spans, spans.span_runs),
    ("LangSmith runs", langsmith.recognizes_langsmith, langsmith.langsmith_runs),
    ("Langfuse export", langfuse.recognizes_langfuse, langfuse.langfuse_runs),
)
"""Formats of traces: what their rows are called, how one is known, and how it is read."""
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
"""Formats of rows, the more particular first."""
IN_MEMORY = "rows in memory.jsonl"
EXAMPLE = """\
{"messages": [{"role": "user", "content": "Cancel order 7."},
              {"role": "assistant", "content": "Order 7 is cancelled."}],
 "reward": 1}"""
"""The simplest that is read: one such object, or one a line."""
REMEDY = (
    "give a format that docs/diagnose.md lists (ToolSandbox by its folder with result_summary.json), or an object like "
    f"this for each dialogue, 1 for passed and 0 for failed:\n{EXAMPLE}"
)
UTF_16 = "it is text in UTF-16"
REMEDIES = {
    NO_REWARD: f"give the rewards by --scores FILE, a CSV of {spans.SCORES}, a line for each trace",
    UTF_16: "save it in UTF-8",
    UNKNOWN: REMEDY,
    chat.CHAT.name: f"write each dialogue like this, 1 for passed and 0 for failed:\n{EXAMPLE}",
}
"""Remedies, by why entries do not read, or else by the format."""
SHAPES: dict[str, tuple[str, ...]] = {
    "chats": ("messages", "reward"),
    "ShareGPT": ("conversations", "reward"),
    "OpenAI Responses items": ("input", "output", "reward"),
    "runs of LangSmith": ("id", "trace_id", "run_type", "inputs", "outputs", "feedback_stats"),
    "observations of Langfuse": ("id", "traceId", "type", "input", "output"),
    "spans of OpenTelemetry": ("trace_id", "attributes"),
    "tau-bench": ("task_id", "traj", "info", "reward"),
    "tau2": ("tasks", "simulations"),
    "ToolSandbox": ("per_scenario_results",),
    "Inspect": ("eval", "samples"),
    "verifiers": ("task", "traces"),
    "NeMo Gym": ("responses_create_params", "response", "reward"),
    "AgentDojo": ("suite_name", "user_task_id", "messages", "utility"),
    "ATIF": ("schema_version", "agent", "steps"),
    "BFCL": ("id", "result", "inference_log"),
    "captrain's rollouts": ("task", "policy", "messages", "outcome"),
}
"""The members by which each is known, the simplest first: it is named where nothing speaks for another."""
RARITY = {name: 1 / sum(name in shape for shape in SHAPES.values()) for shape in SHAPES.values() for name in shape}
"""Weigh how much a member says of the format that it is in."""
LIKE = 0.75
"""Likeness of names from which on one stands for the other."""
NAMES = 8
"""Members of an unknown file that are told."""
LIST_LENGTH = 200
"""Entries that were not read and are listed one by one; of more there is the number alone."""


@dataclass(frozen=True)
class Skipped:
    """Entry that could not be read: the file, the place in it, and the reason."""

    source: str
    place: str
    reason: str


@dataclass(frozen=True)
class Logs:
    """Rollouts of the logs that were read, and what could not be read.

    rollouts: of all files, as records of diagnosis. tools: OpenAI schemas, from the files where they hold any, else
    inferred from the calls seen; inferred: the names of the latter. policies: what agents were told, by environment,
    where the files hold it. skipped: what was not read, the first of them where they are more than `LIST_LENGTH`.
    sources: for each file its name, format, where known version, domain, agent and user model, and how many entries it
    holds, of which how many imported and skipped.
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
        """Number of entries that were not read, listed or not."""
        return sum(source["skipped"] for source in self.sources)


def read_logs(paths: Sequence[Path], scores: Path | None = None, *, keep_secrets: bool = False) -> Logs:
    """Read files and folders, each by what it holds.

    Args:
        paths: files of any format that docs/diagnose.md lists; ToolSandbox and tau2 1.0 result folders; any other
            folder is searched for files.
        scores: a CSV of `trace_id,reward`, for spans, which hold no reward.
        keep_secrets: whether what looks like a key stays in the texts.

    Raises:
        UserError: a path does not exist, there is not one rollout in all of them, most entries of a file do not read,
            or scores are given and no file is of traces; the reasons are named.
    """
    rewards = spans.read_scores(scores) if scores is not None else {}
    censor = (lambda value: value) if keep_secrets else censored
    rollouts, calls = Spool(Rollout), _CallShapes()
    skipped: list[Skipped] = []
    sources: list[JsonObject] = []
    tools: dict[str, JsonObject] = {}
    policies: dict[str, str] = {}
    digests: set[str] = set()
    for path in _files(paths):
        try:
            source = _read(path, rewards)
        except Unreadable as error:
            skipped.append(Skipped(path.name, "file", str(error)))
            sources.append({"file": path.name, "format": UNKNOWN, "entries": 0, "imported": 0, "skipped": 1})
            continue
        counts = {"entries": 0, "imported": 0, "skipped": 0}
        for place, entry in _entries(source):
            counts["entries"] += 1
            counts["imported" if isinstance(entry, Rollout) else "skipped"] += 1
            if isinstance(entry, str):
                reason = plain(censor(entry))
                skipped += [Skipped(path.name, plain(place), reason)] if len(skipped) < LIST_LENGTH else []
            elif source.file not in digests:  # a file given twice counts once
                entry = censor(entry)  # noqa: PLW2901
                rollouts.add(entry)
                calls.add(entry)
        if counts["skipped"] > counts["imported"] and counts["entries"] > FEW_ENTRIES:
            reasons = Counter(entry.reason for entry in skipped if entry.source == path.name)
            reason, number = reasons.most_common(1)[0] if reasons else ("unknown", 0)
            first = next((f", the first {e.place}" for e in skipped if (e.source, e.reason) == (path.name, reason)), "")
            raise UserError(
                f"{path}, read as {source.about['format']}: {counts['skipped']} of {counts['entries']} entries do not "
                f"read, {number} of them since {reason}{first}",
                _remedy(source.about["format"], [reason]),
            )
        digests.add(source.file)
        sources.append({"file": path.name, **source.about, **counts})
        tools |= censor(source.tools)
        policies |= censor(source.policies)
    if not rollouts:
        reasons = [f"{entry.source}, {entry.place}: {entry.reason}" for entry in skipped[:5]]
        names = ", ".join(path.name for path in paths)
        empty = "nothing is written there" if sources else "the folders hold no file of results"
        raise UserError(
            f"there is no rollout in {names}: {'; '.join(reasons) or empty}",
            _remedy(sources[-1]["format"] if sources else UNKNOWN, (entry.reason for entry in skipped)),
        )
    if scores is not None and not {source["format"] for source in sources} & {name for name, _, _ in TRACES}:
        raise UserError(
            f"{scores} gives rewards to traces, and {', '.join(path.name for path in paths)} holds none",
            "leave --scores out: rows have their rewards beside their messages",
        )
    schemas = calls.schemas()
    inferred = frozenset(schemas) - frozenset(tools)
    return Logs(rollouts, [*(schemas | tools).values()], policies, skipped, sources, inferred)


def _remedy(source_format: str, reasons: Iterable[str]) -> str:
    """Choose what can be done where entries of a format do not read for these reasons."""
    remedies = (REMEDIES[key] for key in (*reasons, source_format) if key in REMEDIES)
    return next(remedies, "mend these entries; docs/diagnose.md says what is read")


def _entries(source: Source) -> Iterator[tuple[str, Rollout | str]]:
    """Yield the entries of a file, up to where it can be read on."""
    try:
        yield from source.entries
    except (OSError, *MALFORMED) as error:
        yield "the remainder", f"it does not read: {reason_of(error)}"


def logs_of_rollouts(rollouts: Iterable[Rollout]) -> Logs:
    """Make logs of rollouts that are in memory.

    Raises:
        UserError: there are none.
    """
    spool, calls = Spool(Rollout), _CallShapes()
    for rollout in map(censored, rollouts):
        spool.add(rollout)
        calls.add(rollout)
    if not spool:
        raise UserError("there is no rollout to diagnose", REMEDY)
    counts = {"entries": len(spool), "imported": len(spool), "skipped": 0}
    source = {"file": "rollouts in memory", "format": "rollouts", **counts}
    schemas = calls.schemas()
    return Logs(spool, [*schemas.values()], {}, [], [source], frozenset(schemas))


def logs_of_rows(rows: "Iterable[object] | pd.DataFrame", scores: Path | None = None) -> Logs:
    """Read rows as a file of such lines is read.

    Args:
        rows: objects of any format of rows that docs/diagnose.md lists, messages of LangChain or pydantic inside them
            as they are; or a frame with a row for each rollout, whose cells may be JSON text.
        scores: as of `read_logs`.

    Raises:
        UserError: a row is no object, or they do not read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, IN_MEMORY)
        with path.open("w") as file:
            for number, row in enumerate(_records(rows)):
                content = _plain(row)
                if not isinstance(content, Mapping):
                    raise UserError(f"row {number} is not an object but {type(row).__name__}", REMEDY)
                try:
                    file.write(json.dumps({**content}, default=_plain) + "\n")
                except (TypeError, ValueError, RecursionError):
                    raise UserError(f"row {number} holds what JSON cannot say", REMEDY) from None
        return read_logs([path], scores)


def _records(rows: "Iterable[object] | pd.DataFrame") -> Iterable[object]:
    """Convert the rows of a frame to objects, its JSON texts to what they say, without what is missing."""
    if not hasattr(rows, "columns"):
        return rows
    frame: pd.DataFrame = rows  # pyright: ignore[reportAssignmentType]
    names = [str(name) for name in frame.columns]
    missing = frame.isna().to_numpy()
    rows = (zip(names, row, missing[number], strict=True) for number, row in enumerate(frame.itertuples(False, None)))
    return ({name: exchange.loaded(value) for name, value, is_none in row if not is_none} for row in rows)


def _plain(value: object) -> object:
    """Convert a value that JSON does not know: pydantic records by their fields, arrays as lists, all else as text."""
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        if method := getattr(value, name, None):
            return method(**options)
    return value if isinstance(value, Mapping) else str(value)


class Unreadable(Exception):
    """A file that is of no known format, or is damaged."""


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files behind the paths that hold results: those given, and in folders those that look like results."""
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
            # A table may be of anything: its columns tell whether it holds dialogues.
            files = {
                file
                for file in path.rglob("*")
                if file.is_file()
                and (
                    file.suffix in OF_JSON
                    or (file.suffix in (".csv", ".tsv") and has_columns(file, (*chat.MESSAGES, "input")))
                )
            }
            # Harbor's result of a trial stands for no rollout of its own.
            trajectories = [file for file in files if file.name.startswith("trajectory")]
            trials = {folder / atif.RESULT for file in trajectories for folder in (file.parent, file.parent.parent)}
            absolute = {file.absolute() for file in files}  # of scores that are read with their results
            yield from sorted(file for file in files - trials if bfcl.results_of(file) not in absolute)


def _read(path: Path, scores: Mapping[str, float]) -> Source:
    """Read a file by what it holds: an archive, an object with lists of its own, or rows."""
    members: Collection[str] = ()
    try:
        if inspect.is_archive(path):
            return inspect.read_archive(path)
        if is_table(path) or is_lines(path):
            with path.open("rb") as file:
                if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                    raise Unreadable(UTF_16)
        else:
            document = JsonDocument(path, (toolsandbox.SCENARIOS, tau2.SIMULATIONS, SAMPLES))
            members = {*document.members, *document.counts} - {ARRAY}
            if toolsandbox.SCENARIOS in members:
                return toolsandbox.read_toolsandbox(document)
            if {tau2.SIMULATIONS, "simulation_index"} & members:
                return tau2.read_tau2(document)
            if SAMPLES in members:
                return inspect.read_document(path, document.members, document.elements(SAMPLES))
        rows = first_objects(path)
    except (*MALFORMED, *inspect.DAMAGED) as error:
        raise Unreadable(f"it is not JSON: {reason_of(error)}") from None
    for name, recognizes, runs_of in TRACES:
        if any(_holds(recognizes, row) for row in rows):
            return read_traces(path, name, runs_of, scores)
    if rows and tau2.is_simulation(rows[0]):
        return tau2.read_simulations(path)
    if rows and bfcl.is_bfcl(rows[0]):
        try:
            return bfcl.read_bfcl(path)
        except MALFORMED as error:
            raise Unreadable(f"its scores do not read: {reason_of(error)}") from None
    matches = (entry for row in rows for entry in ROWS if _holds(entry.recognizes, row))
    row_format = next(matches, None)
    if row_format is None and (rows or path.suffix != ".jsonl"):
        raise Unreadable(f"it is of no known format: {_nearest_shape(rows[0] if rows else members)}")
    source = chat.read_rows(path, row_format or chat.CHAT)
    if row_format is own.ROLLOUTS:
        source.tools.update(schemas_by_name(own.tools_beside(path)))
    return source


def _holds(recognizes: Callable[[JsonObject], bool], row: JsonObject) -> bool:
    try:
        return recognizes(row)
    except MALFORMED:
        return False


def _nearest_shape(members: Collection[str]) -> str:
    """Name the known format that has the most of these members, what of it is missing, and what is there instead."""
    names = sorted(plain(str(name)[:80]) for name in members)
    if {"role", "content"} <= {*names} or {"from", "value"} <= {*names}:
        return "it looks nearest to chats: a message is a row of its own, where a row holds a list of `messages`"
    lacks = {shape: [name for name in keys if name not in names] for shape, keys in SHAPES.items()}
    close = {shape: [get_close_matches(name, names, 1, LIKE) for name in missing] for shape, missing in lacks.items()}
    support = {
        shape: sum(RARITY[name] for name in {*keys} - {*lacks[shape]})
        + sum(RARITY[name] for name, match in zip(lacks[shape], close[shape], strict=True) if match) / 2
        for shape, keys in SHAPES.items()
    }
    best = max(SHAPES, key=lambda name: (not lacks[name], support[name], -len(lacks[name])))
    shape = best if support[best] else next(iter(SHAPES))
    like = [f" (it has {match[0]})" if match else "" for match in close[shape]]
    missing = [f"{name}{hint}" for name, hint in zip(lacks[shape], like, strict=True)]
    if not missing:
        return f"it looks nearest to {shape}: its {SHAPES[shape][0]} is of another form"
    holds = f"; it holds {', '.join(names[:NAMES])}{' ...' if len(names) > NAMES else ''}" if names else ""
    return f"it looks nearest to {shape}: lacks {', '.join(missing)}{holds}"


class _CallShapes:
    """The calls that agents and references made, as schemas: every argument seen, and as required those that every
    call has."""

    def __init__(self) -> None:
        self._possible: dict[str, set[str]] = {}
        self._required: dict[str, set[str]] = {}

    def add(self, rollout: Rollout) -> None:
        """Count the calls of a rollout in."""
        for message in (*rollout.messages, *rollout.reference):
            for name, arguments in calls_of(message) if message["role"] == "assistant" else []:
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
