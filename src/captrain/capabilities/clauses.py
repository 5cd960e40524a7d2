"""Policies, and those of their sentences that records can decide: writes are held against them, a reference's as well.

Clauses are data: those of benchmarks lie beside their workers, anybody's own in a file (docs/diagnose.md has the
format). One is in force where the log's own policy holds its sentence, and nowhere else. In any policy those sentences
count that ask a record for a value ("an order can only be cancelled if its status is 'pending'"). What a policy says in
other words is not judged here; whoever wants it judged asks a language model.

Records are those shown before anything was written, over all rollouts of an environment: every task of a benchmark
begins with the same ones, and a rollout that never opened one may still be judged by what another was shown of it. What
they do not show is not held against anybody: an expression that cannot be worked out forbids nothing.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, cached_property
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from re import Pattern
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from captrain.capabilities.calls import Call
from captrain.capabilities.text import plain
from captrain.capabilities.toolbox import Toolbox
from captrain.records import JsonObject, Record, parse_yaml, read_yaml

NOW = re.compile(r"current (?:date|time)\D{0,40}(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?", re.IGNORECASE)
REQUIREMENT = re.compile(r"\ban? (\w+) can only be (\w+) if its (\w+) is ['\"‘“]([\w ]+)['\"’”]", re.IGNORECASE)
"""A sentence that asks a record for a value: noun of the record, participle of the operation, field, value."""
BEYOND = (ast.Attribute, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.JoinedStr)
"""Kinds of syntax that an expression of a clause may not hold."""
FUNCTIONS = {
    **{function.__name__: function for function in (len, sum, any, all, min, max, sorted, str, int)},
    "begins": str.startswith,
    "day": lambda moment: moment.date().isoformat(),
    "findall": re.findall,
    "hours": lambda count: timedelta(hours=count),
    "join": str.join,
    "replace": str.replace,
    "text": str.format,
    "time": datetime.fromisoformat,
}
"""Functions that expressions may call, beside those of a write (`Clause.objection`)."""
SCOPE = ("arguments", "record", "now", "policy", "earlier", "touched", "look", "by_now", "said")
"""Names that an expression may use for what is known of a write."""
IDENTIFIERS = ("_id", "_number", "id", "number")
REMEDY = "docs/diagnose.md has the format of clauses"


def _expression(text: str) -> str:
    """Refuse what is no expression, or could reach beyond what it is given."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression") from error
    if any(isinstance(node, BEYOND) for node in ast.walk(tree)):
        raise ValueError(f"{text} reaches beyond its names")
    return text


Expression = Annotated[str, AfterValidator(_expression)]


class RecordBook:
    """Objects that look-ups returned, by the names and values of their identifiers."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], list[JsonObject]] = {}
        self._people: dict[tuple[str, str], list[JsonObject]] = {}

    def add(self, acts: list[Call]) -> None:
        """Keep what the look-ups of a rollout returned before its first write."""
        for act in takewhile(lambda act: act.kind != "write" or act.failed, acts):
            if act.kind == "read" and not act.failed:
                # A record that does not say its own key is known by the one it was asked for by.
                result = {**act.arguments, **act.result} if isinstance(act.result, dict) else act.result
                for record in objects(result):
                    keys = {
                        (k, str(v)) for k, v in record.items() if k.endswith(IDENTIFIERS) and isinstance(v, str | int)
                    }
                    for key in keys:
                        entries = self._records.setdefault(key, [])
                        entries += [] if any(record.keys() <= entry.keys() for entry in entries) else [record]
                    if "first_name" in record and "last_name" in record:
                        people = self._people.setdefault(_person(record), [])
                        people += [record] if record not in people else []

    def record(self, name: str, value: object, *fields: str) -> JsonObject | None:
        """The record of this identifier that has these fields, as it was before any write; None if none was shown."""
        entries = self._records.get((name, str(value)), [])
        return next((entry for entry in entries if all(field in entry for field in fields)), None)

    def people(self, person: Mapping[str, object]) -> list[JsonObject]:
        """Return the records of persons of this name."""
        return self._people.get(_person(person), [])


def _person(record: Mapping[str, object]) -> tuple[str, str]:
    return str(record.get("first_name")).lower(), str(record.get("last_name")).lower()


def objects(value: object) -> Iterator[JsonObject]:
    """Every JSON object inside a value, the outermost first."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(item)


class Clause(Record):
    """A sentence of a policy, or several of which policies have one, and the tools that it governs.

    forbidden: true of a write that it forbids, "" where it forbids none by itself. names: expressions by the names that
    others use, in order. record: the argument that names the record of a write, and the fields that must be shown of
    it. reason: what is wrong, with names in braces. breach: what it is to make such a write. proof: a pattern that some
    result before an agent's write must show; claimed: a pattern of words by which users claim it.
    """

    sentences: list[str]
    tools: list[str]
    breach: Literal["undue_compliance", "wrong_argument"] = "undue_compliance"
    record: list[str] = []
    names: dict[str, Expression] = {}
    forbidden: Expression | Literal[""] = ""
    reason: str
    proof: Pattern[str] | None = None
    claimed: Pattern[str] = re.compile("(?!)")

    def objection(
        self,
        act: Call,
        earlier: Sequence[Call],
        wishes: str,
        setting: "DiagnosisContext",
        patterns: Mapping[str, Pattern[str]],
    ) -> str | None:
        """Say what is wrong with a write, None where nothing is.

        Args:
            act: the write.
            earlier: the writes before it.
            wishes: all that the user said or was told to say, as `plain` has it.
            setting: policy and records.
            patterns: by the names that expressions use.
        """
        key, fields = (self.record or [""])[0], self.record[1:]
        peers = [peer for peer in earlier if key in act.arguments and peer.arguments.get(key) == act.arguments[key]]
        record = setting.book.record(key, act.arguments.get(key), *fields)

        def by_now(field: str) -> object:
            values = [peer.arguments[field] for peer in [act, *peers] if field in peer.arguments]
            return values[-1] if values else (record or {})[field]

        def said(pattern: str | Pattern[str], negated: str | Pattern[str] = "(?!)") -> bool:
            matches = re.finditer(pattern, wishes)
            return any(not re.search(negated, wishes[: match.start()]) for match in matches)

        scope: JsonObject = {"__builtins__": {}, **FUNCTIONS, **patterns, "by_now": by_now, "said": said}
        scope |= {"arguments": act.arguments, "record": record, "now": setting.now, "policy": setting.rules}
        scope |= {"earlier": [peer.tool for peer in earlier], "touched": bool(peers), "look": setting.book.record}
        try:
            for name, expression in self.names.items():
                scope[name] = eval(expression, scope)
            return self.reason.format(**scope) if eval(self.forbidden or "False", scope) else None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None


class Clauses(Record):
    """Clauses of policies, and patterns that their expressions use by name."""

    patterns: dict[str, Pattern[str]] = {}
    clauses: list[Clause]

    @model_validator(mode="after")
    def _with_known_names(self) -> "Clauses":
        for clause in self.clauses:
            allowed = {*FUNCTIONS, *SCOPE, *self.patterns, *clause.names}
            fields = [re.split(r"\W", name)[0] for _, name, *_ in Formatter().parse(clause.reason) if name]
            for expression in (*clause.names.values(), clause.forbidden or "0", *fields):
                names = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)]
                bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
                if unknown := {name.id for name in names} - allowed - bound:
                    raise ValueError(f"expressions know no {min(unknown)}: {expression}")
        return self


@dataclass(frozen=True)
class Violation:
    """A write that a clause forbids: the clause, its sentence in the policy, and why."""

    act: Call
    clause: Clause
    sentence: str
    reason: str

    def __str__(self) -> str:
        return f'{self.act}: {self.reason}; the policy says "{self.sentence}"'


@cache
def shipped_clauses() -> tuple[Clauses, ...]:
    """The clauses of captrain's own benchmarks."""
    folder = files("captrain").joinpath("benchmarks/workers")
    paths = sorted((path for path in folder.iterdir() if path.name.endswith("_clauses.yaml")), key=str)
    return tuple(parse_yaml(path.read_text(encoding="utf-8"), Clauses, path.name, REMEDY) for path in paths)


def read_clauses(path: Path) -> Clauses:
    """Read clauses of one's own.

    Raises:
        UserError: it is no such file.
    """
    return read_yaml(path, Clauses, REMEDY)


def _stated(policy: str, toolbox: Toolbox) -> Iterator[Clause]:
    """A clause for each sentence of the policy that asks a record for a value, whatever the domain."""
    for match in REQUIREMENT.finditer(policy):
        noun, participle, field, value = match.groups()
        stem = re.sub(r"(l?led|d|ed)$", "", participle.lower())
        yield Clause(
            sentences=[match.group()],
            tools=[name for name in toolbox.schemas if name.startswith(stem) and noun.lower() in name],
            record=[f"{noun.lower()}_id", field],
            names={"state": f"str(record[{field!r}])"},
            forbidden=f"not touched and not begins(state, {value!r})",
            reason=f"its {field} is {{state}}",
        )


@dataclass(frozen=True)
class DiagnosisContext:
    """Common ground of the rollouts of an environment: the tools, the policy ("" where the log has none), the
    records that were shown before anything was written, the tools that were called in rollouts that passed and that no
    reference calls (`idle`: what they do is of no account), those by which rollouts that passed have handed over where
    their own reference does not (`needless`), and clauses beside those of captrain's benchmarks (`additions`)."""

    toolbox: Toolbox
    policy: str
    book: RecordBook
    idle: set[str]
    needless: set[str]
    additions: Sequence[Clauses] = ()

    @cached_property
    def rules(self) -> str:
        """The policy in lower case, spaces and dashes as one space."""
        return plain(self.policy)

    @cached_property
    def now(self) -> datetime | None:
        """The time that the policy gives as the present one."""
        match = NOW.search(self.policy)
        return datetime.fromisoformat(" ".join(part for part in match.groups() if part)) if match else None

    @cached_property
    def in_force(self) -> list[tuple[Clause, str, Mapping[str, Pattern[str]]]]:
        """The clauses whose sentence the policy holds, each with that sentence and the patterns of its file."""
        sources = (*shipped_clauses(), *self.additions, Clauses(clauses=[*_stated(self.policy, self.toolbox)]))
        return [
            (clause, sentence, source.patterns)
            for source in sources
            for clause in source.clauses
            for sentence in [sentence for sentence in clause.sentences if plain(sentence) in self.rules][:1]
        ]


def violations(acts: Sequence[Call], wishes: str, setting: DiagnosisContext) -> Iterator[Violation]:
    """The writes that some clause forbids.

    Args:
        acts: writes in their order, of a reference or of an agent.
        wishes: all that the user said or was told to say, as `plain` has it.
        setting: policy and records.
    """
    for clause, sentence, patterns in setting.in_force:
        for place, act in enumerate(acts):
            if act.tool in clause.tools:
                reason = clause.objection(act, acts[:place], wishes, setting, patterns)
                if reason:
                    yield Violation(act, clause, sentence, reason)
