"""Clauses of policies as data: those of one's own beside those of captrain's benchmarks, and what they may not hold."""

import re
from pathlib import Path

import pytest

from captrain.capabilities import Toolbox, calls_in
from captrain.capabilities.clauses import DiagnosisContext, RecordBook, read_clauses, shipped_clauses, violations
from captrain.contract import tool_call
from captrain.errors import UserError
from captrain.records import JsonObject, Message, publish_text

PAGE = Path(__file__).parents[2] / "docs/diagnose.md"
POLICY = "Today's current time is 2031-03-04 10:00:00. Extend a loan only while nobody else has asked for the book."
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"loan_id": {"type": "string"}}}}}
    for name in ("get_loan", "extend_loan")
]


def objections(path: Path, record: JsonObject, wishes: str = "") -> list[str]:
    """Objections to an extension, by the clauses of a file and a record that was shown before."""
    toolbox, book = Toolbox(SCHEMAS), RecordBook()
    shown: Message = {"role": "tool", "content": str(record).replace("'", '"')}
    book.add(calls_in([tool_call("get_loan", {"loan_id": "L1"}), shown], toolbox))
    setting = DiagnosisContext(toolbox, POLICY, book, set(), set(), [read_clauses(path)])
    writes = calls_in([tool_call("extend_loan", {"loan_id": "L1"})], toolbox)
    return [str(violation) for violation in violations(writes, wishes, setting)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the documentation's example."""
    (text,) = re.findall(r"```yaml\n(patterns:\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    publish_text(tmp_path / "clauses.yaml", text)
    return tmp_path / "clauses.yaml"


def test_a_clause_of_ones_own_forbids_what_its_expression_says_of_the_record_that_was_shown(path: Path) -> None:
    sentence = "Extend a loan only while nobody else has asked for the book."
    reason = f'extend_loan(L1): 2 readers wait; the policy says "{sentence}"'
    assert objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-01"}) == [reason]
    assert objections(path, {"loan_id": "L1", "waiting": 0, "due": "2031-03-01"}) == []
    assert objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-01"}, "it was promised to me") == []


@pytest.mark.parametrize("record", [{"loan_id": "L1"}, {"loan_id": "L1", "waiting": "two", "due": "2031-03-01"}])
def test_what_no_record_shows_and_what_cannot_be_worked_out_forbids_nothing(path: Path, record: JsonObject) -> None:
    assert objections(path, record) == []


@pytest.mark.parametrize("expression", ["().__class__", "(lambda: 1)()", "f'{record}'", "(total := 1)", "1 +", ""])
def test_an_expression_that_reaches_beyond_its_names_or_is_none_is_refused_with_its_place(
    path: Path, expression: str
) -> None:
    text = path.read_text().replace("time(record['due']) < now", expression)
    publish_text(path, text)
    with pytest.raises(UserError, match="clauses.*names.late"):
        read_clauses(path)


@pytest.mark.parametrize(("place", "other"), [("\\b(promised", "(promised["), ("{record[waiting]}", "{waiting}")])
def test_a_pattern_that_is_none_and_a_reason_with_an_unknown_name_are_refused(
    path: Path, place: str, other: str
) -> None:
    assert place in path.read_text()
    publish_text(path, path.read_text().replace(place, other))
    with pytest.raises(UserError, match="Clauses"):
        read_clauses(path)


@pytest.mark.parametrize("call", ["open('/etc/passwd')", "__import__('os')", "eval('1')"])
def test_an_expression_has_no_function_but_its_own(path: Path, call: str) -> None:
    publish_text(path, path.read_text().replace("time(record['due']) < now", call))
    with pytest.raises(UserError, match=f"expressions know no {re.split('[(]', call)[0]}"):
        read_clauses(path)


def test_clauses_of_captrains_benchmarks_are_read_and_each_says_what_is_wrong() -> None:
    clauses = [clause for source in shipped_clauses() for clause in source.clauses]
    assert len(clauses) > 10 and all(clause.reason and (clause.forbidden or clause.proof) for clause in clauses)
