"""What tools do, and which of their arguments name records."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from captrain.benchmarks import ToolKind, annotated
from captrain.records import JsonObject

READS = re.compile(
    "check|compare|count|describe|fetch|find|get|list|look|lookup|query|read|retrieve|search|show|validate|verify|view"
)
WRITES = re.compile(
    "accept|activate|add|append|apply|approve|archive|assign|attach|ban|block|book|borrow|buy|"
    "cancel|change|charge|claim|clear|close|complete|confirm|connect|copy|create|deactivate|decline|"
    "delete|deny|deploy|deposit|detach|disable|disconnect|dispatch|draw|drop|edit|email|enable|"
    "exchange|extend|file|fill|flag|follow|grant|insert|invite|issue|join|kill|label|leave|lend|"
    "link|loan|lock|make|mark|merge|modify|move|mute|notify|open|order|pay|ping|place|post|print|"
    "publish|purchase|put|rebook|reboot|recharge|record|redeem|refill|refuel|refund|register|reject|"
    "release|remove|rename|renew|reorder|repair|replace|replenish|reply|reschedule|reserve|reset|"
    "resolve|restart|restock|resume|return|revoke|rollback|scale|schedule|sell|send|set|share|ship|"
    "start|stop|submit|suspend|swap|switch|tag|terminate|toggle|top|transfer|turn|unblock|undo|"
    "unlink|unlock|unsubscribe|update|upgrade|upload|waive|water|withdraw|wrap|write"
)
THINKS = re.compile("calculate|calculator|compute|convert|estimate|scratchpad|think|thinking")
INFORMATION = re.compile("balance|count|details|history|info|information|list|price|report|status|summary")
HANDOVERS = re.compile("escalate|handoff|handover")
COLLEAGUES = re.compile("agent|agents|human|humans|operator|specialist|support|supervisor")
MACHINES = re.compile(
    "bash|bing|browser|code|command|cmd|directory|editor|file|files|google|internet|ipython|jupyter|"
    "notebook|page|patch|powershell|python|repl|script|shell|sql|terminal|url|web|webpage|website|"
    "wikipedia"
)
USES = re.compile(
    "apply|based|cell|click|create|edit|exec|execute|exit|fetch|find|go|goto|grep|insert|"
    "interpreter|link|list|multi|navigate|open|query|read|replace|run|scroll|search|session|str|"
    "submit|text|to|tool|type|view|visit|write"
)
ENVIRONMENTS = re.compile(
    "click|computer|create|done|edit|finish|glob|goto|grep|hover|insert|ls|multiedit|open|press|read|screenshot|scroll|"
    "search|stop|submit|type|view|wait|write"
)
"""Whole tool names, including single words and tools that end a run with its answer."""
SUBJECTS = re.compile("book|charge|claim|email|file|issue|label|link|loan|order|post|record|schedule|tag|ticket")
"""Words that are nouns if another verb follows, as in `email_get_message`."""
CHANGES = ("write", "unknown")
"""Kinds of tools that may change something."""
EFFECTS = (*CHANGES, "handover")
"""Kinds of tools whose calls are compared with those of a reference."""


@cache
def kind_of(tool: str) -> ToolKind:
    """Guess from a tool's whole name what it does; "unknown" if the name does not show it."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", tool).lower())
    first, others = "".join(words[:1]), words[1:]
    if any(map(HANDOVERS.fullmatch, words)) or ("transfer" in words and any(map(COLLEAGUES.fullmatch, words))):
        return "handover"
    is_composed = all(MACHINES.fullmatch(word) or USES.fullmatch(word) for word in words)
    if ENVIRONMENTS.fullmatch(tool.lower()) or (is_composed and any(map(MACHINES.fullmatch, words))):
        return "environment"
    # "check_out_book", "find_and_replace" and "order_status" are not what their first words say.
    is_compound = bool({*others[:1]} & {"in", "off", "out"} or {*others} & {"and", "or"})
    if is_compound or (WRITES.fullmatch(first) and any(map(INFORMATION.fullmatch, others[-1:]))):
        return "unknown"
    if SUBJECTS.fullmatch(first) and others and any(verbs.fullmatch(others[0]) for verbs in (READS, WRITES)):
        first = others[0]
    kinds: dict[ToolKind, re.Pattern[str]] = {"think": THINKS, "read": READS, "write": WRITES}
    named: list[ToolKind] = [kind for kind, verbs in kinds.items() if verbs.fullmatch(first)]
    return named[0] if named else "unknown"


class Toolbox:
    """What each tool does, and by which arguments tools name records.

    Args:
        tools: their schemas.
        kinds: what tools do, as far as known. For other tools, annotations of the schemas or names decide.
        keys: arguments that name records, each with the common name of its kind of record. None: arguments that a read
            and a change share.
        fields: tool -> fields that each of its answers has, as far as known.
    """

    def __init__(
        self,
        tools: Iterable[JsonObject],
        kinds: Mapping[str, ToolKind] | None = None,
        keys: Mapping[str, str] | None = None,
        fields: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        tools = [*tools]
        self.declared: dict[str, ToolKind] = {**annotated(tools), **(kinds or {})}
        self.schemas: dict[str, JsonObject] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self.fields = {**(fields or {})}
        self.keys = {**(self.shared_names((), (), ()) if keys is None else keys)}

    @property
    def unnamed(self) -> dict[str, ToolKind]:
        """Kinds of the tools whose names suggest another kind. An uninformative name suggests a change."""
        kinds = {name: (self.kind(name), kind_of(name)) for name in self.schemas}
        differing = [name for name, pair in kinds.items() if pair[0] != pair[1] and {*pair} - {*CHANGES}]
        return {name: self.kind(name) for name in differing}

    def kind(self, tool: str) -> ToolKind:
        """Return what a call of the tool does."""
        return self.declared.get(tool) or kind_of(tool)

    def shared_names(self, keys: Collection[str], lookups: Collection[str], changes: Collection[str]) -> dict[str, str]:
        """Return the argument names that a change without a key shares with a read tool.

        Reads that search are left out. A pair is also left out if both tools were called, since then values would have
        shown the key.
        """
        names = {tool: {*schema.get("properties", {})} for tool, schema in self.schemas.items()}
        pairs = [
            (change, lookup)
            for change in names
            for lookup in names
            if self.kind(change) in CHANGES and self.kind(lookup) == "read" and self.fields.get(lookup, True)
        ]
        return {
            name: name
            for change, lookup in pairs
            if not names[change] & {*keys} and not (lookup in lookups and change in changes)
            for name in names[change] & names[lookup]
        }

    def accepts(self, tool: str, arguments: Mapping[str, object]) -> bool:
        """Return whether the tool exists, takes these arguments, and gets all required ones."""
        schema = self.schemas.get(tool)
        return schema is not None and {*schema.get("required", [])} <= {*arguments} <= {*schema.get("properties", {})}
