"""Clauses: sentences of a policy that can be checked by records. Writes of agents and of references must obey them.

Clauses are data (docs/clauses.md has the format). captrain has files of clauses for its benchmarks, and a user can give
another file. A clause is in force if the log's own policy contains its sentence. captrain also reads one form of
sentence in every policy: "an order can only be cancelled if its status is 'pending'".

Records are collected from all rollouts of an environment, before the first write of each: every task of a benchmark
starts from the same records. A clause forbids nothing if the logs do not show the records that it needs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from time import thread_time
from typing import Annotated, Literal, TypeVar

from pydantic import FailFast, PrivateAttr, model_validator

from captrain.capabilities.calls import Call
from captrain.capabilities.expressions import (
    FUNCTIONS,
    PARTS,
    Evaluation,
    Expression,
    ExpressionError,
    MissingValue,
    Pattern,
    Template,
    look_up,
    parts_of,
)
from captrain.capabilities.text import plain, text_of
from captrain.capabilities.toolbox import CHANGES, Toolbox
from captrain.records import JsonObject, Record, leaves, parse_yaml, read_text

T = TypeVar("T")
NOW = re.compile(r"current (?:date|time)\D{0,40}(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?", re.IGNORECASE)
WORD = r"(\w{1,60})"
REQUIREMENT = re.compile(
    rf"\ban? {WORD} can only be {WORD} if its {WORD} is ['\"‘“]([\w ]{{1,60}})['\"’”]", re.IGNORECASE
)
"""A sentence that requires a value of a record: noun of the record, participle of the operation, field, value."""
SCOPE = ("arguments", "record", "now", "policy", "earlier", "touched")
"""Names that an expression can use for facts about a write."""
OF_WRITE = ("by_now", "findall", "look", "said")
"""Functions that only expressions of clauses have (`Clause.objection` defines them)."""
IDENTIFIERS = ("_id", "_number", "id", "number")
LARGEST = 1 << 16
"""Most bytes of a clauses file, because each pattern takes milliseconds to compile."""
FILE_SECONDS, CHECK_SECONDS = 1.0, 0.002
"""Time limit in seconds for all checks of a file, and the seconds that each check adds to the limit."""
CLAUSES_PAGE = "docs/clauses.md has the format of clauses"


class RecordBook:
    """Records that read tools returned, indexed by the name and value of each identifier."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], list[JsonObject]] = {}
        self._people: dict[tuple[str, str], list[JsonObject]] = {}

    def add(self, acts: list[Call]) -> None:
        """Keep the records that a rollout read before its first write."""
        for act in takewhile(lambda act: act.kind not in CHANGES or act.failed, acts):
            if act.kind == "read" and not act.failed:
                # Some records lack their own key: add the arguments of the call.
                result = {**act.arguments, **act.result} if isinstance(act.result, dict) else act.result
                for record in objects(result):
                    self._keep(record)

    def _keep(self, record: JsonObject) -> None:
        for key in {(k, str(v)) for k, v in record.items() if k.endswith(IDENTIFIERS) and isinstance(v, str | int)}:
            entries = self._records.setdefault(key, [])
            if not any(record.keys() <= entry.keys() for entry in entries):
                entries.append(record)
        if "first_name" in record and "last_name" in record:
            people = self._people.setdefault(_person(record), [])
            if record not in people:
                people.append(record)

    def record(self, name: str, value: object, *fields: str) -> JsonObject | None:
        """Return the record with this identifier and these fields, as it was before any write; None if unknown."""
        entries = self._records.get((name, str(value)), [])
        return next((entry for entry in entries if all(field in entry for field in fields)), None)

    def people(self, person: Mapping[str, object]) -> list[JsonObject]:
        """Return the records of people with the same name."""
        return self._people.get(_person(person), [])


def _person(record: Mapping[str, object]) -> tuple[str, str]:
    return str(record.get("first_name")).lower(), str(record.get("last_name")).lower()


def objects(value: object) -> Iterator[JsonObject]:
    """Yield every JSON object inside a value, the outermost first."""
    parts: Sequence[object] = []
    if isinstance(value, dict):
        yield value
        parts = [*value.values()]
    elif isinstance(value, list):
        parts = value
    for part in parts:
        yield from objects(part)


class Clause(Record):
    """A sentence of a policy, in the words of each policy that has it, and the tools that it governs.

    names: expressions, in order; later ones may use earlier ones. record: the argument that names the record of a
    write, and the fields of it that must be shown. forbidden: true of a write that the clause forbids. reason: what is
    wrong with it, with names in braces. breach: the cause that such a write counts as. proof: a pattern that some
    result before an agent's write must show. claimed: a pattern of words by which users claim the same.
    """

    sentences: list[str]
    tools: list[str]
    breach: Literal["undue_compliance", "wrong_argument"] = "undue_compliance"
    record: list[str] = []
    names: dict[str, Expression] = {}
    forbidden: Expression | None = None
    reason: Template
    proof: Pattern | None = None
    claimed: Pattern = Pattern.parse("(?!)")

    def objection(
        self,
        act: Call,
        earlier: Sequence[Call],
        wishes: str,
        context: "DiagnosisContext",
        patterns: Mapping[str, Pattern],
    ) -> str | None:
        """Return why the clause forbids a write; None if it does not, or if no record shows it.

        Args:
            act: the write.
            earlier: the writes before it.
            wishes: all that the user said or was told to say, as `plain` returns it.
            context: policy and records.
            patterns: patterns by the names that expressions use.

        Raises:
            ExpressionError: an expression fails, or exceeds a limit.
        """
        if not self.forbidden:
            return None
        key, fields = (self.record or [""])[0], self.record[1:]
        peers = [peer for peer in earlier if key in act.arguments and peer.arguments.get(key) == act.arguments[key]]
        record = context.book.record(key, act.arguments.get(key), *fields)

        def matcher(pattern: str | Pattern) -> Pattern:
            return Pattern.parse(pattern) if isinstance(pattern, str) else pattern

        def by_now(field: str) -> object:
            values = [peer.arguments[field] for peer in [act, *peers] if field in peer.arguments]
            return values[-1] if values else look_up(record, field)

        def findall(pattern: str | Pattern, text: str) -> list[object]:
            return matcher(pattern).find_all(text, evaluation.seconds)

        def said(pattern: str | Pattern, negated: str | Pattern = "(?!)") -> bool:
            exception = matcher(negated)
            matches = matcher(pattern).matches(wishes, evaluation.seconds)
            return any(not exception.search(wishes[: match.start()], evaluation.seconds) for match in matches)

        evaluation = Evaluation({"by_now": by_now, "findall": findall, "look": context.book.record, "said": said})
        scope: dict[str, object] = {"arguments": act.arguments, "record": record, "now": context.now}
        scope |= {"policy": context.rules, "earlier": [peer.tool for peer in earlier], "touched": bool(peers)}
        scope |= patterns
        try:
            for name, expression in self.names.items():
                scope[name] = evaluation.evaluate(expression, scope)
            return self.reason.fill(scope) if evaluation.evaluate(self.forbidden, scope) else None
        except MissingValue:
            return None

    def check_names(self, patterns: Mapping[str, Pattern]) -> None:
        """Check that expressions and reason use only names that exist.

        Raises:
            ValueError: a name does not exist.
        """
        expressions = [*self.names.values(), *([self.forbidden] if self.forbidden else [])]
        used = {name for expression in expressions for name in expression.names}
        used |= {name for name, _ in self.reason.fields}
        called = {name for expression in expressions for name in expression.functions}
        if unknown := (used - {*SCOPE, *patterns, *self.names}) | (called - {*FUNCTIONS, *OF_WRITE}):
            raise ValueError(f"a clause uses {min(unknown)}, which expressions do not know")
        keys = {key for expression in expressions for key in expression.keys_of("record")}
        keys |= {indices[0] for name, indices in self.reason.fields if name == "record" and indices}
        if unlisted := keys - {*self.record}:
            raise ValueError(f"a clause uses {min(unlisted)} of the record: list it under `record`")


class Clauses(Record):
    """Clauses of policies, and patterns that their expressions use by name."""

    patterns: dict[str, Pattern] = {}
    clauses: Annotated[list[Clause], FailFast()]
    _seconds: float = PrivateAttr(0.0)
    _checks: int = PrivateAttr(0)

    @model_validator(mode="before")
    @classmethod
    def _with_bounded_patterns(cls, data: object) -> object:
        if sum(map(parts_of, leaves(data))) > PARTS:
            raise ValueError(f"its patterns repeat too much: written out, they have more than {PARTS} parts")
        return data

    @model_validator(mode="after")
    def _with_known_names(self) -> "Clauses":
        for clause in self.clauses:
            clause.check_names(self.patterns)
        return self

    def charge(self, seconds: float) -> None:
        """Add the time of a check to the total.

        Raises:
            ExpressionError: the checks of this file exceed their time limit.
        """
        self._seconds, self._checks = self._seconds + seconds, self._checks + 1
        if self._seconds > FILE_SECONDS + CHECK_SECONDS * self._checks:
            raise ExpressionError(f"{self._checks} checks of this file took {self._seconds:.1f} s, more than they may")


@dataclass(frozen=True)
class Violation:
    """A write that a clause forbids, with the clause, its sentence in the policy, and the reason."""

    act: Call
    clause: Clause
    sentence: str
    reason: str

    def __str__(self) -> str:
        return f'{self.act}: {self.reason}; the policy says "{self.sentence}"'


@cache
def shipped_clauses() -> tuple[Clauses, ...]:
    """Read the clauses that captrain has for its benchmarks."""
    folder = files("captrain").joinpath("benchmarks/workers")
    paths = sorted((path for path in folder.iterdir() if path.name.endswith("_clauses.yaml")), key=str)
    return tuple(parse_yaml(path.read_text(encoding="utf-8"), Clauses, path.name, CLAUSES_PAGE) for path in paths)


def read_clauses(path: Path) -> Clauses:
    """Read a user's clauses.

    Raises:
        UserError: the file is not a valid file of clauses.
    """
    return parse_yaml(read_text(path, CLAUSES_PAGE, LARGEST), Clauses, str(path), CLAUSES_PAGE, LARGEST)


def _stated(policy: str, toolbox: Toolbox) -> Iterator[Clause]:
    """Yield a clause for each sentence of the policy that has the form of `REQUIREMENT`."""
    for match in REQUIREMENT.finditer(policy):
        noun, participle, field, value = match.groups()
        stem = re.sub(r"(l?led|d|ed)$", "", participle.lower())
        yield Clause.model_validate(
            {
                "sentences": [match.group()],
                "tools": [name for name in toolbox.schemas if name.startswith(stem) and noun.lower() in name],
                "record": [f"{noun.lower()}_id", field],
                "names": {"state": f"str(record[{field!r}])"},
                "forbidden": f"not touched and not begins(state, {value!r})",
                "reason": f"its {field} is {{state}}",
            }
        )


@dataclass(frozen=True)
class DiagnosisContext:
    """Facts that the rollouts of an environment share.

    toolbox: the tools. policy: its text; "" if the log has none. book: records before the first write. idle_tools:
    tools that passed rollouts called and no reference calls, so they do not affect the outcome. needless_transfers:
    transfer tools that passed rollouts called although the reference does not. additions: clauses of the user. signals:
    words whose only purpose is to end the dialogues of a team of agents.
    """

    toolbox: Toolbox
    policy: str
    book: RecordBook
    idle_tools: set[str]
    needless_transfers: set[str]
    additions: Sequence[Clauses] = ()
    signals: set[str] = field(default_factory=set[str])

    @cached_property
    def rules(self) -> str:
        """The policy in lower case, with runs of spaces and dashes as one space."""
        return plain(self.policy)

    @cached_property
    def now(self) -> datetime | None:
        """The current time according to the policy; None if the policy does not state it."""
        match = NOW.search(self.policy)
        return datetime.fromisoformat(" ".join(part for part in match.groups() if part)) if match else None

    @cached_property
    def in_force(self) -> list[tuple[Clause, str, Clauses]]:
        """The clauses whose sentence is in the policy, each with that sentence and all clauses of its file."""
        stated = Clauses.model_construct(clauses=[*_stated(self.policy, self.toolbox)])
        sources = (*shipped_clauses(), *self.additions, stated)
        return [
            (clause, sentence, source)
            for source in sources
            for clause in source.clauses
            for sentence in [sentence for sentence in clause.sentences if plain(sentence) in self.rules][:1]
        ]


def _checked(
    context: DiagnosisContext, acts: Sequence[Call], check: Callable[[Clause, int, Clauses], T | None]
) -> Iterator[tuple[Call, Clause, str, T]]:
    """Check each write against each clause that governs its tool. Yield write, clause, sentence and finding.

    Args:
        context: policy and records.
        acts: writes in their order.
        check: takes a clause, the index of a write, and all clauses of the same file; returns a finding or None.

    Raises:
        ExpressionError: a clause of `context.additions` fails. If a clause of captrain fails, it finds nothing, because
            the user cannot repair it.
    """
    for clause, sentence, source in context.in_force:
        is_own = any(source is addition for addition in context.additions)
        for place, act in enumerate(acts):
            if act.tool not in clause.tools:
                continue
            begin, found = thread_time(), None
            try:
                found = check(clause, place, source)
                if is_own:
                    source.charge(thread_time() - begin)
            except ExpressionError as error:
                if is_own:
                    raise ExpressionError(f'clause "{sentence}" on {act}: {error}') from None
            if found is not None:
                yield act, clause, sentence, found


def violations(acts: Sequence[Call], wishes: str, context: DiagnosisContext) -> Iterator[Violation]:
    """Yield the writes that a clause forbids.

    Args:
        acts: writes in their order, of a reference or of an agent.
        wishes: all that the user said or was told to say, as `plain` returns it.
        context: policy and records.

    Raises:
        ExpressionError: see `_checked`.
    """

    def objection(clause: Clause, place: int, source: Clauses) -> str | None:
        return clause.objection(acts[place], acts[:place], wishes, context, source.patterns) or None

    for act, clause, sentence, reason in _checked(context, acts, objection):
        yield Violation(act, clause, sentence, reason)


def unproven_writes(
    writes: Sequence[Call], calls: Sequence[Call], wishes: str, context: DiagnosisContext
) -> Iterator[tuple[Violation, bool]]:
    """Yield writes that need a proof in an earlier result and have none, and whether the user claimed the fact.

    Raises:
        ExpressionError: see `_checked`.
    """

    def claim_without_proof(clause: Clause, place: int, _: Clauses) -> bool | None:
        if clause.proof is None:
            return None
        results = (text_of(call.result).lower() for call in calls if call.message < writes[place].message)
        if any(clause.proof.search(result) for result in results):
            return None
        return clause.claimed.search(wishes)

    for act, clause, sentence, claimed in _checked(context, writes, claim_without_proof):
        yield Violation(act, clause, sentence, clause.reason.text), claimed
