"""What tools do, and which of their arguments name records."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Literal

from captrain.benchmarks import annotated
from captrain.records import JsonObject

READS = re.compile(
    "calculate|check|compare|compute|convert|count|describe|estimate|fetch|find|get|list|"
    "look|lookup|query|read|retrieve|search|show|think|validate|verify|view"
)
HANDOVERS = {"escalate", "handoff", "handover"}
COLLEAGUES = {"agent", "agents", "human", "humans", "operator", "specialist", "support", "supervisor"}
Kind = Literal["read", "write", "handover"]


@cache
def kind_of(tool: str) -> Kind:
    """Tell from the words of its name whether a tool reads, writes, or transfers to a human."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", tool).lower())
    if HANDOVERS & {*words} or ("transfer" in words and COLLEAGUES & {*words}):
        return "handover"
    return "read" if words and READS.fullmatch(words[0]) else "write"


class Toolbox:
    """What each tool does, and by which arguments tools name records.

    Args:
        tools: their schemas.
        kinds: what tools do, where it is known. Otherwise annotations of the schemas tell, or the names.
        keys: arguments that name records, each with the common name of its kind of record. None: those that a read and
            another tool share.
        fields: what each read has always returned, where it is known.
    """

    def __init__(
        self,
        tools: Iterable[JsonObject],
        kinds: Mapping[str, str] | None = None,
        keys: Mapping[str, str] | None = None,
        fields: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        tools = [*tools]
        self.declared: dict[str, str] = {**annotated(tools), **(kinds or {})}
        self.schemas: dict[str, JsonObject] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self.fields = {**(fields or {})}
        self.keys = {**(self.shared_names((), (), ()) if keys is None else keys)}

    @property
    def unnamed(self) -> dict[str, Kind]:
        """Kinds of the tools whose names suggest another kind."""
        return {name: self.kind(name) for name in self.schemas if self.kind(name) != kind_of(name)}

    def kind(self, tool: str) -> Kind:
        """Tell what a call of the tool does."""
        match self.declared.get(tool):
            case "read" | "write" | "handover" as kind:
                return kind
            case None:
                return kind_of(tool)
        return "read"

    def shared_names(self, keys: Collection[str], lookups: Collection[str], changes: Collection[str]) -> dict[str, str]:
        """Argument names shared by a keyless write and a read tool.

        Reads that search are left out. A pair is also left out if both tools were called, since then values would have
        shown the key.
        """
        names = {tool: {*schema.get("properties", {})} for tool, schema in self.schemas.items()}
        pairs = [
            (change, lookup)
            for change in names
            for lookup in names
            if self.kind(change) == "write" and self.kind(lookup) == "read" and self.fields.get(lookup, True)
        ]
        return {
            name: name
            for change, lookup in pairs
            if not names[change] & {*keys} and not (lookup in lookups and change in changes)
            for name in names[change] & names[lookup]
        }

    def accepts(self, tool: str, arguments: Mapping[str, object]) -> bool:
        """Tell whether the tool exists, takes these arguments, and has all required ones."""
        schema = self.schemas.get(tool)
        return schema is not None and {*schema.get("required", [])} <= {*arguments} <= {*schema.get("properties", {})}
