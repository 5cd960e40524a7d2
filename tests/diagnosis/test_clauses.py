"""Clauses of policies as data: those of one's own beside those of captrain's benchmarks, and what they may not hold."""

import json
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import process_time

import pytest
from support.needs import SHARED
from typer.testing import CliRunner

from captrain.capabilities import Toolbox, calls_in
from captrain.capabilities.clauses import DiagnosisContext, RecordBook, read_clauses, shipped_clauses, violations
from captrain.capabilities.expressions import FUNCTIONS, Evaluation, Expression, ExpressionError, Pattern, size_of
from captrain.cli.app import app
from captrain.contract import tool_call
from captrain.errors import UserError
from captrain.records import JsonObject, Message, publish_text

PAGE = Path(__file__).parents[2] / "docs/diagnose.md"
MOMENT = datetime(2031, 3, 4, 10)
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


@pytest.mark.parametrize("record", [{"loan_id": "L1"}, {"loan_id": "L1", "waiting": 2, "due": "2031-03-05"}])
def test_a_clause_forbids_nothing_if_no_record_shows_it(path: Path, record: JsonObject) -> None:
    publish_text(
        path,
        path.read_text(encoding="utf-8").replace(
            "names: {late", 'names: {missing: \'look("loan_id", 7)["due"]\', late'
        ),
    )
    assert objections(path, record) == []


HOSTILE = [
    "().__class__",
    "(lambda: 1)()",
    "f'{record}'",
    "(total := 1)",
    "1 +",
    "",
    "9**9**9",
    "1 << 10**9",
    "'" + "\\ud800'",
    "max(1, key=len)",
    "-" * 1500 + "1",
    "1+" * 1500 + "1",
    "b'bytes'",
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_an_expression_outside_the_grammar_is_refused_with_its_place(path: Path, expression: str) -> None:
    publish_text(
        path, path.read_text(encoding="utf-8").replace("\"time(record['due']) < now\"", json.dumps(expression))
    )
    with pytest.raises(UserError, match="clauses.*names.late"):
        read_clauses(path)


REFUSED = {
    "record['wating'] > 0": ("record['waiting'] > 0", "list it under `record`"),
    "(promised[": ("\\b(promised", "not a regular expression"),
    "{waiting} readers": ("{record[waiting]} readers", "uses waiting"),
    "{record[reader]}": ("{record[waiting]}", "uses reader of the record"),
    "{now.__class__}": ("{record[waiting]}", "outside a field"),
    "{now!r}": ("{record[waiting]}", "outside a field"),
    "open('/etc/passwd')": ("time(record['due']) < now", "uses open"),
    "__import__('os')": ("time(record['due']) < now", "uses __import__"),
    "text('{}', said)": ("time(record['due']) < now", "uses said"),
}


@pytest.mark.parametrize("other", REFUSED)
def test_unknown_names_and_bad_patterns_and_fields_are_refused_when_the_file_is_read(path: Path, other: str) -> None:
    place, message = REFUSED[other]
    assert place in path.read_text(encoding="utf-8")
    publish_text(path, path.read_text(encoding="utf-8").replace(place, other))
    with pytest.raises(UserError, match=message):
        read_clauses(path)


FAILING = {
    "[[[1 for a in policy] for b in policy] for c in policy]": "more than 10000 steps",
    "join(policy, [word for word in policy for letter in policy])": "more than",
    "'a' * 10": "can only be added",
    "'%9999d' % 1": "can only be added",
    "findall('(', policy)": "not a regular expression",
    "findall('(.|.)*(.|.)*(.|.)*[QZ]', policy)": "takes longer",
    "arguments['loan_id'] + 1": "can only concatenate",
    "text('{}{}', 1)": "1 values for 2 places",
    "text('{0.__class__}', now)": "1 values for 0 places",
    "str(PROMISED)": "Pattern is not data",
    "1 / 0": "division by zero",
    "now[0]": "datetime has no items",
    "[a for a, b in ['xyz']]": "too many values|shorter|longer",
    "len()": "len",
}


@pytest.mark.parametrize("expression", FAILING)
def test_an_expression_that_fails_or_costs_too_much_is_named_with_its_clause(path: Path, expression: str) -> None:
    publish_text(
        path, path.read_text(encoding="utf-8").replace("\"time(record['due']) < now\"", json.dumps(expression))
    )
    start = process_time()
    with pytest.raises(
        ExpressionError, match=f"Extend a loan.*{re.escape(expression[:20])}.*(?:{FAILING[expression]})"
    ):
        objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-05"})
    assert process_time() - start < 5


VALUES = {
    "1 < 2 <= 2 and not 3 in [1, 2] or False": True,
    "[a + b for a, b in [['x', 'y'], 'uv'] if a != 'u']": ["xy"],
    "{'gold': 2}['gold'] + len({1, 1}) - -7 // 2 % 5": 2,
    "max(*[1, 2], 3) if [] else 'abc'[-1:]": "c",
    "findall('(a)(b)?', 'abac') + findall('c', 'cc') + findall('(c)', 'c')": [("a", "b"), ("a", ""), "c", "c", "c"],
    "day(time('2031-03-04 10:00') - hours(11))": "2031-03-03",
    "text('{} of {}', sum([1, 2]), replace('a b', ' ', '_')) + join('/', sorted('ba'))": "3 of a_ba/b",
}


@pytest.mark.parametrize("expression", VALUES)
def test_expressions_mean_what_they_mean_in_python(expression: str) -> None:
    patterns = {"findall": lambda pattern, text: Pattern.parse(pattern).find_all(text)}
    assert Evaluation(patterns).evaluate(Expression.parse(expression), {}) == VALUES[expression]


def test_expressions_reach_data_only() -> None:
    """Every function that an expression may call returns data: no object of the program is reachable."""
    samples: list[list[object]] = [
        ["ab"],
        [["a", "b"]],
        [[1]],
        ["a", "b"],
        ["a", ["b"]],
        ["a", "b", "c"],
        [2],
        [MOMENT],
    ]
    for function in FUNCTIONS.values():
        for arguments in samples:
            with suppress(TypeError, ValueError, AttributeError, ExpressionError):
                size_of(function(*arguments))
    for value in (len, re, Path, object(), FUNCTIONS["len"], Expression.parse("1")):
        with pytest.raises(ExpressionError, match="is not data"):
            size_of([{"key": value}])


@pytest.mark.parametrize("name", ["a", "b1", "bomb_pow", "bomb_re_error", "bomb_surrogate"])
@pytest.mark.needs("shared")
def test_hostile_files_of_strangers_end_with_one_message_and_write_nothing(name: str, tmp_path: Path) -> None:
    folder = SHARED / "trust3/clauses"
    run = CliRunner().invoke(
        app,
        [
            "diagnose",
            str(folder / "log.jsonl"),
            "--out",
            str(tmp_path / "out"),
            "--clauses",
            str(folder / f"{name}.yaml"),
        ],
    )
    assert isinstance(run.exception, UserError) and not (tmp_path / "out").exists()


def test_clauses_of_captrains_benchmarks_are_read_and_each_says_what_is_wrong() -> None:
    clauses = [clause for source in shipped_clauses() for clause in source.clauses]
    assert len(clauses) > 10 and all(clause.reason.text and (clause.forbidden or clause.proof) for clause in clauses)
