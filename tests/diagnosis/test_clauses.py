"""Clauses of policies as data: those of one's own beside those of captrain's benchmarks, and what they may not hold."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import process_time

import pytest
from support.needs import SHARED
from typer.testing import CliRunner

from captrain.capabilities import Toolbox, calls_in
from captrain.capabilities.clauses import (
    OF_WRITE,
    SCOPE,
    Clauses,
    DiagnosisContext,
    RecordBook,
    read_clauses,
    shipped_clauses,
    violations,
)
from captrain.capabilities.expressions import (
    FUNCTIONS,
    Evaluation,
    Expression,
    ExpressionError,
    MissingValue,
    Pattern,
    size_of,
)
from captrain.cli.app import app
from captrain.contract import tool_call
from captrain.errors import UserError
from captrain.records import JsonObject, Message, publish_text

PAGE = Path(__file__).parents[2] / "docs/clauses.md"
MOMENT = datetime(2031, 3, 4, 10)
POLICY = "Today's current time is 2031-03-04 10:00:00. Extend a loan only while nobody else has asked for the book."
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"loan_id": {"type": "string"}}}}}
    for name in ("get_loan", "extend_loan")
]


def objections(
    path: Path, record: JsonObject, wishes: str = "", *, policy: str = POLICY, clauses: Clauses | None = None
) -> list[str]:
    """Objections to an extension, by the clauses of a file and a record that was shown before."""
    toolbox, book = Toolbox(SCHEMAS), RecordBook()
    shown: Message = {"role": "tool", "content": str(record).replace("'", '"')}
    book.add(calls_in([tool_call("get_loan", {"loan_id": "L1"}), shown], toolbox))
    setting = DiagnosisContext(toolbox, policy, book, set(), set(), [clauses or read_clauses(path)])
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
    "(?:a{1000000}){1000000}": ("\\b(promised|guaranteed)\\b", "repeat too much"),
    "(?x)(?:a{ 9999 }){ 9999 }": ("\\b(promised|guaranteed)\\b", "repeat too much"),
    "(?x)(?:a{99} # )\n) # b\n{ 9999 }": ("\\b(promised|guaranteed)\\b", "repeat too much"),
    "(?:" + "ab|" * 600 + "q){9999}": ("\\b(promised|guaranteed)\\b", "repeat too much"),
    "findall('(?:" + "ab|" * 90 + "q){9999}', policy)": ("time(record['due']) < now", "repeat too much"),
    "(?R)?a(?R)?": ("\\b(promised|guaranteed)\\b", "is recursive"),
    "{record[²]}": ("{record[waiting]}", "outside a field"),
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


@pytest.mark.parametrize("field", ["{record[waiting][x]}", "{arguments[loan_id][x]}", f"{{earlier[{'9' * 5000}]}}"])
def test_a_reason_that_looks_up_what_cannot_be_is_named_with_its_clause(path: Path, field: str) -> None:
    publish_text(path, path.read_text(encoding="utf-8").replace("{record[waiting]}", field))
    with pytest.raises(ExpressionError, match=f"Extend a loan.*{re.escape(field[:20])}"):
        objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-01"})


def test_the_checks_of_a_file_are_limited_together(path: Path) -> None:
    slow = "len([[1 for a in policy] for b in policy[:50]]) > 0"
    publish_text(path, path.read_text(encoding="utf-8").replace("time(record['due']) < now", slow))
    clauses, start = read_clauses(path), process_time()
    with pytest.raises(ExpressionError, match="checks of this file took"):
        for _ in range(1000):
            objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-05"}, clauses=clauses)
    assert process_time() - start < 5


BULKY = {
    "aliases": "patterns: {P: &a x}\nclauses:\n  - &c {sentences: [s], tools: [t], reason: r, names: {"
    + ", ".join(f"n{i}: *a" for i in range(1500))
    + "}}\n"
    + "  - *c\n" * 600,
    "characters": "clauses: []\n# " + "x" * 70_000,
    "patterns": "clauses: []\npatterns:\n" + "".join(f"  P{i}: (?:(a.b)|c){{999}}{i}\n" for i in range(2000)),
}


@pytest.mark.parametrize("kind", BULKY)
def test_a_file_that_is_large_or_grows_by_aliases_is_refused_at_once(path: Path, kind: str) -> None:
    publish_text(path, BULKY[kind])
    start = process_time()
    with pytest.raises(UserError, match="aliases make too much of it|more than 64 KiB|patterns repeat too much"):
        read_clauses(path)
    assert process_time() - start < 2


def test_a_sentence_of_a_logs_own_policy_may_have_any_length(path: Path) -> None:
    policy = (
        f"an order can only be cancelled if its status is '{'a' * 3000}'. A ² can only be ½ if its __class__ is 'x'."
    )
    assert objections(path, {"loan_id": "L1"}, policy=policy) == []


def test_a_log_s_own_policy_may_state_any_number_of_requirements(path: Path) -> None:
    policy = " ".join(f"A loan can only be extended if its state is 's{number}'." for number in range(1000))
    assert len(objections(path, {"loan_id": "L1", "state": "s7"}, policy=policy)) == 999


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


SAMPLES: list[list[object]] = [
    *([], ["ab"], [["a", "b"]], [[1]], ["a", "b"], ["a", ["b"]], ["a", "b", "c"], [2], [MOMENT], ["loan_id", "L1"]),
    *(
        ["2031-03-04"],
        ["waiting"],
        ["loan_id", "L1", "waiting"],
        [Pattern.parse("a"), "ab"],
        [Pattern.parse("a"), Pattern.parse("b")],
    ),
]


def test_expressions_reach_data_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that an expression gets, and every value that a function returns, is data: no variable of the
    environment, file or object of the program is reachable."""
    monkeypatch.setenv("MY_PASSWORD", "hunter2-of-the-environment")
    functions, values = dict[str, Callable[..., object]](), dict[str, object]()
    evaluate = Evaluation.evaluate

    def watched(self: Evaluation, expression: Expression, scope: Mapping[str, object]) -> object:
        functions.update(self._functions)
        values.update(scope)
        return evaluate(self, expression, scope)

    monkeypatch.setattr(Evaluation, "evaluate", watched)
    assert objections(path, {"loan_id": "L1", "waiting": 2, "due": "2031-03-01"})
    assert functions.keys() == {*FUNCTIONS, *OF_WRITE} and {*SCOPE} < values.keys()
    results, returned = [value for value in values.values() if not isinstance(value, Pattern)], set[str]()
    for name, function in functions.items():
        for arguments in SAMPLES:
            with suppress(TypeError, ValueError, AttributeError, ExpressionError, MissingValue):
                results.append(function(*arguments))
                returned.add(name)
    assert returned == functions.keys()
    for result in results:
        size_of(result)
    assert "hunter2" not in str(results)
    for value in (len, re, Path, object(), FUNCTIONS["len"], Expression.parse("1"), Pattern.parse("a")):
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
