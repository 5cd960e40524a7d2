"""Other people's logs as rollouts: tau2-bench results, ToolSandbox results, and chats with a reward.

What a file is, is told by its content. Embedded tasks are used, because an installed benchmark may hold others under
the same ids. Only known fields are taken, so no setting or header of a run comes along, and values under
credential-like names inside tool arguments are replaced. Nothing is silently skipped: what cannot be read is listed
with its reason.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop.logs.source import Source
from captrain.records import JsonObject, Rollout


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
    inferred from the calls seen. skipped: what was not read. sources: for each file its name, format, where known
    version, domain, agent and user model, and how many entries it holds, of which how many imported and skipped.
    """

    rollouts: list[Rollout]
    tools: list[JsonObject]
    skipped: list[Skipped]
    sources: list[JsonObject]


def read_logs(paths: Sequence[Path]) -> Logs:
    """Read files and folders.

    Args:
        paths: tau2 result files (0.x, or a folder of 1.0), ToolSandbox result folders, chat JSONL files; any other
            folder is searched for them.

    Raises:
        UserError: a path does not exist, or there is not one rollout in all of them; the reasons are named.
    """
    rollouts: list[Rollout] = []
    skipped: list[Skipped] = []
    sources: list[JsonObject] = []
    tools: dict[str, JsonObject] = {}
    for path in _files(paths):
        try:
            source = _read(path)
        except Unreadable as error:
            skipped.append(Skipped(path.name, "file", str(error)))
            sources.append({"file": path.name, "format": "unknown", "entries": 0, "imported": 0, "skipped": 1})
            continue
        fresh = [entry for _, entry in source.entries if isinstance(entry, Rollout)]
        reasons = [Skipped(path.name, place, entry) for place, entry in source.entries if isinstance(entry, str)]
        counts = {"entries": len(source.entries), "imported": len(fresh), "skipped": len(reasons)}
        sources.append({"file": path.name, **source.about, **counts})
        rollouts += fresh
        skipped += reasons
        tools |= {tool["function"]["name"]: tool for tool in source.tools}
    if not rollouts:
        reasons = [f"{entry.source}, {entry.place}: {entry.reason}" for entry in skipped[:5]]
        names = ", ".join(path.name for path in paths)
        raise UserError(f"there is no rollout in {names}: {'; '.join(reasons) or 'the folders are empty'}", REMEDY)
    return Logs(_distinct(rollouts), [*(inferred_tools(rollouts) | tools).values()], skipped, sources)


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

    text = path.read_bytes()
    if path.suffix == ".jsonl":
        return chat.read_chats(path, text)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    formats: tuple[tuple[str, Callable[[Path, JsonObject], Source]], ...] = (
        ("per_scenario_results", toolsandbox.read_toolsandbox),
        ("simulations", tau2.read_tau2),
        ("simulation_index", tau2.read_tau2),
    )
    for key, reader in formats:
        if isinstance(data, dict) and key in data:
            return reader(path, data)
    raise Unreadable("it is of no known format: neither tau2 nor ToolSandbox results")


def inferred_tools(rollouts: Iterable[Rollout]) -> dict[str, JsonObject]:
    """Schemas by tool name, from the calls that agents and references made: every argument seen, and as required those
    that every call has."""
    arguments_of: dict[str, list[set[str]]] = {}
    for rollout in rollouts:
        for message in (*rollout.messages, *rollout.reference):
            for name, arguments in calls_of(message) if message["role"] == "assistant" else []:
                arguments_of.setdefault(name, []).append({str(key) for key in arguments if key != ""})
    tools = {}
    for name, calls in sorted(arguments_of.items()):
        properties = {argument: {} for argument in sorted(set.union(*calls))}
        parameters = {"type": "object", "properties": properties, "required": sorted(set.intersection(*calls))}
        tools[name] = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return tools


def _distinct(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """A file given twice counts once."""
    return [*{rollout.id: rollout for rollout in rollouts}.values()]
