"""Other people's logs as rollouts: tau2-bench results, ToolSandbox results, and chats with a reward.

What a file is, is told by its content. Embedded tasks are used, because an installed benchmark may hold others under
the same ids. Only known fields are taken, so no setting or header of a run comes along, and values under
credential-like names inside tool arguments are replaced. Nothing is silently skipped: what cannot be read is listed
with its reason.

Logs may be larger than memory: files are read entry by entry, and rollouts wait on disk for whoever reads them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.source import Source
from captrain.records import JsonObject, Rollout, Spool

LIST_LENGTH = 200
"""Entries that were not read and are listed one by one; of more there is the number alone."""


@dataclass(frozen=True)
class Skipped:
    """What could not be read: the file, the place in it, and the reason."""

    source: str
    place: str
    reason: str


@dataclass(frozen=True)
class Logs:
    """Everything that was read.

    rollouts: of all files, as records of diagnosis. tools: OpenAI schemas, from the files where they hold any, else
    inferred from the calls seen. policies: what agents were told, by environment, where the files hold it. skipped:
    what was not read, the first of them where they are more than `LIST_LENGTH`. sources: for each file
    its name, format, where known version, domain, agent and user model, and how many entries it holds, of which how
    many imported and skipped.
    """

    rollouts: Spool[Rollout]
    tools: list[JsonObject]
    policies: dict[str, str]
    skipped: list[Skipped]
    sources: list[JsonObject]

    @property
    def unread(self) -> int:
        """How many entries were not read, listed or not."""
        return sum(source["skipped"] for source in self.sources)


def read_logs(paths: Sequence[Path]) -> Logs:
    """Read files and folders.

    Args:
        paths: tau2 result files (0.x, or a folder of 1.0), ToolSandbox result folders, chat JSONL files; any other
            folder is searched for them.

    Raises:
        UserError: a path does not exist, or there is not one rollout in all of them; the reasons are named.
    """
    rollouts, calls = Spool(Rollout), _CallShapes()
    skipped: list[Skipped] = []
    sources: list[JsonObject] = []
    tools: dict[str, JsonObject] = {}
    policies: dict[str, str] = {}
    digests: set[str] = set()
    for path in _files(paths):
        try:
            source = _read(path)
        except Unreadable as error:
            skipped.append(Skipped(path.name, "file", str(error)))
            sources.append({"file": path.name, "format": "unknown", "entries": 0, "imported": 0, "skipped": 1})
            continue
        counts = {"entries": 0, "imported": 0, "skipped": 0}
        for place, entry in source.entries:
            counts["entries"] += 1
            counts["imported" if isinstance(entry, Rollout) else "skipped"] += 1
            if isinstance(entry, str):
                skipped += [Skipped(path.name, place, entry)] if len(skipped) < LIST_LENGTH else []
            elif source.file not in digests:  # a file given twice counts once
                rollouts.add(entry)
                calls.add(entry)
        digests.add(source.file)
        sources.append({"file": path.name, **source.about, **counts})
        tools |= source.tools
        policies |= source.policies
    if not rollouts:
        reasons = [f"{entry.source}, {entry.place}: {entry.reason}" for entry in skipped[:5]]
        names = ", ".join(path.name for path in paths)
        raise UserError(f"there is no rollout in {names}: {'; '.join(reasons) or 'the folders are empty'}", REMEDY)
    return Logs(rollouts, [*(calls.schemas() | tools).values()], policies, skipped, sources)


REMEDY = (
    "give tau2 result files (a JSON with `simulations`), ToolSandbox result folders (with result_summary.json), or "
    'JSONL with one {"messages": [...], "reward": number} a line'
)


class Unreadable(Exception):
    """A file that is of no known format, or is damaged."""


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files behind the paths that hold results: those given, and in folders those that look like results."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", REMEDY)
        if not path.is_dir():
            yield path
        elif (path / "result_summary.json").exists():
            yield path / "result_summary.json"
        elif (path / "results.json").exists():
            yield path / "results.json"
        else:
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl") and file.is_file())


def _read(path: Path) -> Source:
    from captrain.interop.logs import chat, tau2, toolsandbox

    if path.suffix == ".jsonl":
        return chat.read_chats(path)
    try:
        document = JsonDocument(path, (toolsandbox.SCENARIOS, tau2.SIMULATIONS))
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    formats: tuple[tuple[str, Callable[[JsonDocument], Source]], ...] = (
        (toolsandbox.SCENARIOS, toolsandbox.read_toolsandbox),
        (tau2.SIMULATIONS, tau2.read_tau2),
        ("simulation_index", tau2.read_tau2),
    )
    for key, reader in formats:
        if key in document.members or key in document.counts:
            return reader(document)
    raise Unreadable("it is of no known format: neither tau2 nor ToolSandbox results")


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
        """Schemas by tool name, in the order of the names."""
        tools: dict[str, JsonObject] = {}
        for name, possible in sorted(self._possible.items()):
            properties = {argument: {} for argument in sorted(possible)}
            parameters = {"type": "object", "properties": properties, "required": sorted(self._required[name])}
            tools[name] = {"type": "function", "function": {"name": name, "parameters": parameters}}
        return tools
