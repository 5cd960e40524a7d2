"""Inputs of strangers' logs, each of which once got a false cause: what `captrain diagnose` says of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from captrain.cli.app import app
from captrain.records import JsonObject as Row

REPRO = Path(__file__).parents[3] / "shared/data/strangers/repro"


def diagnosed(folder: Path, log: Path, *options: object) -> tuple[list[Row], str]:
    """What `captrain diagnose` writes of each rollout, and what it prints."""
    done = CliRunner().invoke(
        app, ["diagnose", str(log), "--out", str(folder / "out"), *map(str, options)], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (folder / "out/causes.jsonl").read_text().splitlines()], done.output


def causes(row: Row) -> list[str]:
    return [cause["cause"] for cause in [row.get("primary"), *row.get("secondary", [])] if cause]


def call(tool: str, **arguments: object) -> Row:
    entry = {"id": "c0", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [entry]}


def turn(tool: str, result: object, **arguments: object) -> list[Row]:
    content = result if isinstance(result, str) else json.dumps(result)
    return [call(tool, **arguments), {"role": "tool", "tool_call_id": "c0", "content": content}]


def ask(text: str) -> Row:
    return {"role": "user", "content": text}


def say(text: str) -> Row:
    return {"role": "assistant", "content": text}


def written(folder: Path, *rows: Row) -> Path:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps({"task_id": f"t{number}", **row}) + "\n" for number, row in enumerate(rows)))
    return log


@pytest.mark.needs("shared")
@pytest.mark.parametrize(
    "name",
    [
        "shell_command_identifier.jsonl", "shell_whois_known_ip.jsonl", "search_query_identifier.jsonl",
        "json_escape_identifier.jsonl", "function_call_as_text.jsonl", "verify_request_is_refusal.jsonl",
        "untold_value_blames_other_lookup_tau_task2.json", "null_actions_blake_grok3.json",
        "max_steps_blamed_on_agent.json",
    ],
)  # fmt: skip
def test_nothing_is_printed_as_a_cause_of_the_agent_where_nothing_is_sure(name: str, tmp_path: Path) -> None:
    rows, _ = diagnosed(tmp_path, REPRO / name)
    assert [kind for row in rows for kind in causes(row) if kind != "harness_limit"] == []
    assert all(row["outcome"] == "failed" for row in rows)


@pytest.mark.needs("shared")
def test_a_limit_of_the_harness_is_counted_on_the_first_line_and_not_contrasted(tmp_path: Path) -> None:
    [row], printed = diagnosed(tmp_path, REPRO / "max_steps_blamed_on_agent.json")
    assert (row["standing"], causes(row)) == ("limit", ["harness_limit"])
    assert "1 rollout: 0 passed, 1 failed, 1 stopped at a limit of steps, time or tokens" in printed.splitlines()[0]


@pytest.mark.needs("shared")
def test_arguments_as_python_prints_them_are_those_of_the_reference(tmp_path: Path) -> None:
    [row], _ = diagnosed(tmp_path, REPRO / "python_repr_arguments.jsonl")
    assert causes(row) == ["missing_write"] and "refund" in row["primary"]["evidence"]


@pytest.mark.needs("shared")
@pytest.mark.parametrize("options", [[], ["--tools-as", REPRO / "calculator.yaml"]])
def test_a_calculator_left_out_is_no_missing_look_up(options: list[object], tmp_path: Path) -> None:
    [row], printed = diagnosed(tmp_path, REPRO / "calculator_as_missing_lookup.jsonl", *options)
    assert causes(row) == ["over_escalation"] and "think: calculate" in printed


@pytest.mark.needs("shared")
def test_a_grader_s_error_type_is_no_way_of_ending(tmp_path: Path) -> None:
    rows, printed = diagnosed(tmp_path, REPRO / "bfcl_error_type_is_no_end")
    assert not any("premature_stop" in causes(row) for row in rows) and "come to an end" not in printed


@pytest.mark.needs("shared")
@pytest.mark.parametrize(
    ("names", "options", "printed"),
    [
        (["chats_without_reward.jsonl"], ["--scores", REPRO / "chats_scores.csv"], "4 rollouts: 2 passed, 2 failed"),
        (["outcome_named_resolved.jsonl"], ["--outcome", "resolved"], "4 rollouts: 2 passed, 2 failed"),
        (["verifiers_results.jsonl"], [], "4 rollouts: 2 passed, 2 failed"),
        (["reward_fraction.jsonl"], ["--pass-at", 0.9], "of them pass with --pass-at 0.9"),
        (["gz_garbled_message.jsonl.gz"], [], "9 of 9 rewards are between 0 and 1 (0.02 to 0.97): only a reward of 1"),
        (["reward_minus_one.jsonl"], [], "9 rollouts: 6 passed, 3 failed"),
        (["two_agents_llm_agent.json", "two_agents_retry_agent.json"], [], "2 rollouts: 0 passed, 2 failed"),
    ],
)  # fmt: skip
def test_any_outcome_gets_in(names: list[str], options: list[object], printed: str, tmp_path: Path) -> None:
    first, *others = [REPRO / name for name in names]
    rows, output = diagnosed(tmp_path, first, *others, *options)
    assert printed in output and len({row["agent"] for row in rows}) == len(names)


@pytest.mark.needs("shared")
def test_a_field_that_looks_like_an_outcome_is_named_in_the_remedy(tmp_path: Path) -> None:
    log = REPRO / "outcome_named_resolved.jsonl"
    done = CliRunner().invoke(app, ["diagnose", str(log), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and getattr(done.exception, "remedy", "") == "add --outcome resolved"


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({"fee": 25.0, "items": ["a", "b"]}, {"fee": 25, "items": ["b", "a"]}),
        ({"fee": "25.00", "items": "['a', 'b']"}, {"fee": 25, "items": ["a", "b"]}),
        ({"fee": "25", "items": '["a", "b"]'}, {"fee": 25.0, "items": ["a", "b"]}),
    ],
)
def test_values_that_come_to_the_same_are_no_difference(given: Row, due: Row, tmp_path: Path) -> None:
    messages = [ask("Charge order #7 for a and b: 25 dollars."), *turn("charge_order", "ok", order_id="#7", **given)]
    reference = [call("charge_order", order_id="#7", **due)]
    log = written(tmp_path, {"messages": [*messages, say("Done.")], "reward": 0, "reference": reference})
    assert causes(diagnosed(tmp_path, log)[0][0]) == []


ORDER = turn("get_order", {"order_id": "#W1", "status": "pending"}, order_id="#W1")


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("I cannot cancel #W1 until you confirm your email address. What is it?", "missing_write"),
        ("I am unable to cancel #W1 before you verify your phone number. Could you share it?", "missing_write"),
        ("If you are unable to give the email of #W1, your zip code will do. Which is it?", "missing_write"),
        ("I am sorry, order #W1 cannot be cancelled. Is there anything else?", "partial_refusal"),
    ],
)
def test_a_request_for_identity_or_confirmation_is_no_refusal(reply: str, cause: str, tmp_path: Path) -> None:
    messages = [ask("Cancel #W1."), *ORDER, say(reply), ask("a@b.example"), say("Goodbye.")]
    reference = [call("get_order", order_id="#W1"), call("cancel_order", order_id="#W1")]
    log = written(tmp_path, {"messages": messages, "reward": 0, "reference": reference})
    assert causes(diagnosed(tmp_path, log)[0][0]) == [cause]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_command", {"cmd": "curl http://10.0.0.7:8080/v1"}),
        ("execute_sql", {"query": "SELECT * FROM t_1234"}),
        ("browser_navigate", {"url": "https://x.example/a/991"}),
    ],
)
def test_what_an_agent_writes_to_its_environment_is_compared_with_no_reference(
    tool: str, arguments: dict[str, str], tmp_path: Path
) -> None:
    reference = [call(tool, **{name: f"{text} x" for name, text in arguments.items()})]
    messages = [ask("Do it."), *turn(tool, "ok", **arguments), say("It is item ABC-1234.")]
    [row], printed = diagnosed(tmp_path, written(tmp_path, {"messages": messages, "reward": 0, "reference": reference}))
    assert causes(row) == [] and f"environment: {tool}" in printed


def coding(*steps: list[Row], last: str = "It is fixed.") -> Row:
    return {"messages": [ask("Fix the failing test."), *(m for step in steps for m in step), say(last)], "reward": 0}


EDIT = turn("str_replace_editor", "The file was edited.", command="str_replace", path="/repo/a.py", new_str="y")
FAILS = turn("bash", "Traceback (most recent call last):\n  ValueError: no", command="pytest -q tests")
PASSES = turn("bash", "3 passed", command="pytest -q tests")


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ([PASSES, EDIT], {"nothing_checked"}),
        ([EDIT, FAILS], {"last_check_failed"}),
        ([EDIT, PASSES], set()),
        ([FAILS, FAILS, FAILS, EDIT, PASSES], {"repeated"}),
        ([turn("bash", "", command="sed -i s/x/y/ a.py")], {"nothing_checked"}),
        ([turn("bash", "def grade(): ...", command="cat /opt/grader/solution.py"), EDIT, PASSES], {"oracle_read"}),
        ([turn("bash", "", command="echo 1 > solution.py"), turn("bash", "1", command="cat solution.py")], set()),
    ],
)
def test_what_an_agent_with_a_shell_did_is_observed_and_no_cause(
    steps: list[list[Row]], names: set[str], tmp_path: Path
) -> None:
    [row], printed = diagnosed(tmp_path, written(tmp_path, coding(*steps)))
    assert {remark["name"] for remark in row.get("observations", [])} == names
    assert causes(row) == [] and ("Observed, but not a cause" in printed) == bool(names)


def test_a_pass_that_read_the_solution_or_broke_the_policy_is_listed_and_counts_as_passed(tmp_path: Path) -> None:
    read = coding(turn("bash", "42", command="cat tests/expected_output.txt"), EDIT, PASSES) | {"reward": 1}
    rows, printed = diagnosed(tmp_path, written(tmp_path, read, coding(EDIT, PASSES) | {"reward": 1}))
    assert [[doubt["name"] for doubt in row.get("doubts", [])] for row in rows] == [["oracle_read"], []]
    assert "Passes that may be wrong" in printed and "2 passed, 0 failed" in printed


def test_the_truth_that_a_log_holds_stands_beside_the_agent_s_answer(tmp_path: Path) -> None:
    rollout = {
        "id": "r", "environment": "ctf", "trial": 0, "purpose": "diagnosis", "policy": "a", "outcome": "failed",
        "task": {"id": "ctf/1", "split": "test", "data": {"expected": {"target": "flag{42}"}, "grading": "no match"}},
        "messages": [ask("Find it."), *turn("bash", "-", command="ls"), *turn("submit", "no", answer="Flag{4l}")],
        "score": {"reward": 0, "success": False},
    }  # fmt: skip
    (tmp_path / "log.jsonl").write_text(json.dumps(rollout) + "\n")
    [row], _ = diagnosed(tmp_path, tmp_path / "log.jsonl")
    noted = {remark["name"]: remark["evidence"] for remark in row["observations"]}
    assert "flag{42}" in noted["truth"] and "Flag{4l}" in noted["truth"] and "no match" in noted["truth"]
    assert "is in no earlier message" in noted["answer_from_nowhere"]


def assay(number: int, *, is_sum: bool) -> Row:
    """A chat without a reference: it reserves the volume of one assay, or the sum of two."""
    first, second = 11 + number, 40 + 3 * number
    shown = turn("list_assays", {"assays": [{"volume": first}, {"volume": second}]}, study=f"S{number}00")
    reserve = turn("reserve_buffer", "ok", study=f"S{number}00", volume=first + second if is_sum else first)
    return {
        "messages": [ask(f"Reserve buffer for S{number}00."), *shown, *reserve, say("Done.")],
        "reward": int(is_sum),
    }


def test_a_value_taken_over_where_others_work_it_out_is_a_wrong_computation(tmp_path: Path) -> None:
    rows, printed = diagnosed(tmp_path, written(tmp_path, *(assay(n, is_sum=n % 2 == 0) for n in range(30))))
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert {tuple(causes(row)) for row in failed} == {("wrong_computation",)}
    assert {row["primary"]["grade"] for row in failed} == {"contrast"}
    few, _ = diagnosed(tmp_path, written(tmp_path, *(assay(n, is_sum=n % 2 == 0) for n in range(8))))
    assert not any(causes(row) for row in few)


def test_no_cause_rests_on_a_tool_of_which_nobody_knows_what_it_does(tmp_path: Path) -> None:
    row = {
        "messages": [ask("Frobnicate #W7."), *turn("get_widget", {"id": "#W7"}, id="#W7"), say("Done.")],
        "reward": 0,
        "reference": [call("get_widget", id="#W7"), call("frobnicate", id="#W7")],
    }
    log, kinds = written(tmp_path, row), tmp_path / "tools.yaml"
    [unsure], printed = diagnosed(tmp_path, log)
    assert causes(unsure) == [] and [remark["name"] for remark in unsure["observations"]] == ["missing_write"]
    assert "unknown: frobnicate" in printed and "--tools-as FILE" in printed
    kinds.write_text("frobnicate: write\n")
    assert causes(diagnosed(tmp_path, log, "--tools-as", kinds)[0][0]) == ["missing_write"]


BROKEN = turn("bash", "bash: pytset: command not found", command="pytset tests")
SEARCH = turn("search_web", "Error: no such page", query="x")
CLOSED = turn("get_order", "Error: invalid order_id", order_id="7")


@pytest.mark.parametrize("bad", [BROKEN, SEARCH, CLOSED, [call("bash", command="ls")]])
@pytest.mark.parametrize("reference", [[], [call("get_order", order_id="#7")]])
def test_what_no_reference_replay_or_contrast_shows_is_no_advice(
    bad: list[Row], reference: list[Row], tmp_path: Path
) -> None:
    # Every second rollout fails. It ends in a call that fails, and one passed rollout in two fails and goes on.
    failed = {"messages": [ask("Do it."), *ORDER, *bad], "reward": 0, "reference": reference}
    passed = {"messages": [ask("Do it."), *ORDER, *bad, say("Done.")], "reward": 1, "reference": reference}
    log = written(tmp_path, *(failed if number % 2 else passed for number in range(24)))
    rows, printed = diagnosed(tmp_path, log)
    assert not any(row.get("lacking") for row in rows) or reference
    advice = json.loads((tmp_path / "out/advice.json").read_text())
    for text in (
        printed,
        json.dumps(advice),
        *((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html")),
    ):
        assert "invalid_call" not in text and "premature_stop" not in text


def asked(*messages: Row, **data: object) -> Row:
    """A failed rollout of captrain's own format, with facts of its task."""
    return {
        "id": "r", "environment": "chat", "trial": 0, "purpose": "diagnosis", "policy": "a", "outcome": "failed",
        "task": {"id": "chat/1", "split": "test", "data": data}, "messages": [ask("Do it."), *messages],
        "score": {"reward": 0, "success": False},
    }  # fmt: skip


PAGE = turn("web_search", "Rome is old.", query="Which city?")


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (asked(call("get_area", base=1)), set()),  # a single turn: the call is the answer
        (asked(call("get_area", base=1), grading="wrong base"), {"truth"}),
        (asked(*turn("set_alarm", "ok", at="7")), set()),  # what it changed is what it hands in
        (asked(*turn("terminal", "$", keystrokes="make\n")), set()),
        (asked(*ORDER), {"no_submission"}),
        (asked(*PAGE, expected={"answer": "Rome"}), {"no_submission", "truth"}),
        (asked(*PAGE, say("Lima"), submission="Lima", expected={"answer": "Rome"}), {"answer_from_nowhere", "truth"}),
        (asked(*PASSES, say("Done."), submission="patched"), set()),  # a patch stands in no output
        (asked(*PASSES, say("Done."), submission="x = 1", expected={"patch": "diff a b\n+x = 2\n+y = 3"}), {"truth"}),
        (asked(*PASSES, *turn("finish", "ok", message="All done.")), set()),
        (asked(*PASSES, say("Done."), submission=""), {"no_submission"}),
        # Of a team, the last one closes the dialogue.
        (asked(say("Lima") | {"name": "a"}, say("TERMINATE") | {"name": "b"}, expected={"answer": "Rome"}), {"truth"}),
        (asked(say("Lima") | {"name": "a"}, say("") | {"name": "b"}, expected={"answer": "Rome"}), {"truth"}),
    ],
)
def test_an_answer_is_missed_only_where_one_is_due(row: Row, names: set[str], tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    [found], _ = diagnosed(tmp_path, tmp_path / "log.jsonl")
    assert {remark["name"] for remark in found.get("observations", [])} == names
    assert ("answer is missing" in json.dumps(found)) <= ("no_submission" in names)


@pytest.mark.parametrize(
    ("lasts", "truths", "middle", "tasks", "is_signal"),
    [
        (["ALL_DONE", "ALL_DONE", "ALL_DONE."], "abc", "", "123", True),
        (["##EXIT##", "##EXIT##", "It is Lima, I think."], "abc", "", "123", True),
        (["TERMINATE"], "a", "", "1", True),
        (["USA"], "a", "", "1", False),  # nothing shows that it is no answer
        (["USA", "USA", "USA"], "aaa", "", "111", False),  # of one question
        (["NASA", "NASA", "NASA"], ["Esa", "NASA", "Esa"], "", "123", False),  # one task expects it
        (["NASA", "It is Lima.", "It is Rome.", "NASA", "Bonn"], "abcde", "", "12345", False),  # of few dialogues
        (["YES", "YES", "YES", "NO"], "abcd", "", "1234", False),  # answers differ
        (["APPROVED", "APPROVED", "APPROVED"], "abc", "APPROVED", "123", False),  # a speaker went on after it
    ],
)
def test_a_word_ends_dialogues_of_agents_only_where_the_log_shows_it(
    lasts: list[str], truths: list[str], middle: str, tasks: str, is_signal: bool, tmp_path: Path
) -> None:
    rows: list[Row] = []
    for last, truth, task in zip(lasts, truths, tasks, strict=True):
        said = [say("Lima") | {"name": "a"}, say(middle or "Well.") | {"name": "b"}, say("Lima it is") | {"name": "a"}]
        row = asked(*said, say(last) | {"name": "b"}, expected={"answer": truth})
        rows.append({**row, "task": {**row["task"], "id": f"chat/{task}"}, "id": f"r{len(rows)}"})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = diagnosed(tmp_path, tmp_path / "log.jsonl")
    truth = [remark["evidence"] for remark in found[0]["observations"] if remark["name"] == "truth"]
    assert [f'the agent\'s answer "{lasts[0]}"' in text for text in truth] == [not is_signal]


def test_a_run_that_ends_with_a_tool_of_unknown_kind_may_have_been_checked_by_it(tmp_path: Path) -> None:
    edit = turn("write_file", "done", path="a.py", content="x = 1")
    log = written(
        tmp_path,
        {"messages": [ask("Repair a.py."), *edit, *turn("run_tests", "8 passed"), say("Repaired.")], "reward": 0},
        {"messages": [ask("Repair a.py."), *edit, say("Repaired.")], "reward": 1},
    )

    _, printed = diagnosed(tmp_path, log)

    assert "Nothing was run after the last change: 0 failed, 1 passed" in printed


def test_a_search_in_words_is_no_command_that_writes_a_file(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                ask("Make a report."),
                *turn("route", f"server {n}", query=f"<tool> a server that can write into a file {n} </tool> > one"),
                say("Done."),
            ],
            "reward": n % 2,
        }
        for n in range(6)
    ]

    _, printed = diagnosed(tmp_path, written(tmp_path, *rows))

    assert "Nothing was run after the last change" not in printed


def test_a_page_of_the_web_is_no_file_of_the_grader(tmp_path: Path) -> None:
    opened = turn("open_url", "How to return a ticket", url="https://help.club.test/support/solutions/articles/7")
    log = written(tmp_path, {"messages": [ask("Can I return my ticket?"), *opened, say("Yes.")], "reward": 0})

    _, printed = diagnosed(tmp_path, log)

    assert "opened the grader" not in printed
