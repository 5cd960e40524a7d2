"""A simulated user with tools of its own: what it does is not the agent's, what it was to do has to be asked for."""

from pathlib import Path
from typing import Any

import pytest
from support.logged_desk import Desk, Message, calls, gold, says, user

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
        ["missing_escalation"],
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
