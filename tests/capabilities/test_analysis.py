"""The programmatic analyst on rollouts as logs hold them: reference actions, values to be told, milestones, faults."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.faults import fault_of
from captrain.capabilities.learning import learn_toolbox
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.capabilities.rules import CAUSES
from captrain.capabilities.text import same
from captrain.capabilities.toolbox import Toolbox, kind_of
from captrain.contract import tool_call
from captrain.records import Capability, Label, Message, Rollout, Score, Task

SHARED = Path(__file__).parents[3] / "shared/data/tau2"
CANDIDATES = [
    Capability(id=slug, name=cause.name, description=cause.description)
    for slug, cause in CAUSES.items()
    if cause.occasions
]
OK = '{"ok": true}'


def schema(name: str, required: str, optional: str = "") -> dict[str, Any]:
    properties = {one: {"type": "string"} for one in (required + " " + optional).split()}
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    schema("find_guest_by_email", "email"),
    schema("get_guest", "guest_id"),
    schema("get_booking", "booking_id"),
    schema("search_rooms", "city date"),
    schema("cancel_booking", "booking_id"),
    schema("change_room", "booking_id room", "payment_id"),
    schema("add_extras", "booking_id items new_items payment_id"),
    schema("change_address", "guest_id city zip"),
    schema("calculate", "expression"),
    schema("transfer_to_human_agents", "summary"),
]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def told(*values: str) -> Message:
    return {"role": "assistant", "content": "", "informs": [*values]}


def result(content: str = OK) -> Message:
    return {"role": "tool", "content": content}


def call(name: str, /, **arguments: Any) -> Message:
    return tool_call(name, arguments)


def made(name: str, content: str = OK, /, **arguments: Any) -> list[Message]:
    return [call(name, **arguments), result(content)]


def rollout(
    messages: Sequence[Message | list[Message]],
    reference: Sequence[Message] = (),
    outcome: Literal["passed", "failed", "error"] = "failed",
    parts: Mapping[str, float] | None = None,
    **data: Any,
) -> Rollout:
    flat = [one for message in messages for one in (message if isinstance(message, list) else [message])]
    return Rollout(
        id="r", environment="hotel", task=Task(id="hotel/1", split="discovery", data=data), trial=0,
        purpose="diagnosis", policy="log", messages=flat, reference=[*reference], outcome=outcome,
        score=None if outcome == "error" else Score(reward=0.0, success=outcome == "passed", parts={**(parts or {})}),
    )  # fmt: skip


def labels(one: Rollout, tools: list[dict[str, Any]] = TOOLS) -> dict[str, Label]:
    (labelled,) = ProgrammaticAnalyst().label([LabelRequest(0, one, CANDIDATES)], tools)
    return labelled


def lacks(one: Rollout, tools: list[dict[str, Any]] = TOOLS) -> dict[str, int | None]:
    """The causes that the rollout lacks, each with the message that shows it."""
    return {slug: label.message for slug, label in labels(one, tools).items() if label.verdict == "LACKING"}


ASK = user("Cancel booking B7 please, and move B9 to room 12. I am ann@example.com.")
READ_7, READ_9 = (made("get_booking", '{"booking_id": "x", "status": "open"}', booking_id=one) for one in ("B7", "B9"))
CANCEL_7 = call("cancel_booking", booking_id="B7")
MOVE_9 = call("change_room", booking_id="B9", room="12", payment_id="card_1")
ENDS = [says("Done."), user("Thanks. ###STOP###")]
BOTH = [READ_7[0], CANCEL_7, READ_9[0], MOVE_9, told()]
ONE = [READ_7[0], CANCEL_7, told()]


def test_a_missing_write_is_charged_where_nothing_was_written() -> None:
    one = rollout([ASK, READ_7, *ENDS], ONE)
    assert lacks(one) == {"missing_write": 3}
    assert labels(one)["missing_write"].evidence == "0 of 1 operations carried out, cancel_booking(B7) left out"
    assert lacks(rollout([ASK, READ_7, *ENDS], BOTH)) == {"missing_write": 3}


def test_giving_up_by_a_hand_over_is_charged_once_and_quoted() -> None:
    given_up = made("transfer_to_human_agents", summary="Cannot do it.")
    one = rollout([ASK, READ_7, given_up, says("Please hold."), user("###TRANSFER###")], ONE)
    assert lacks(one) == {"missing_write": 5}
    assert labels(one)["missing_write"].evidence.endswith("transfer_to_human_agents was called instead")


def test_stopping_after_the_first_of_several_writes_is_a_lack_of_completion() -> None:
    one = rollout([ASK, READ_7, [CANCEL_7, result()], *ENDS], BOTH)
    assert lacks(one) == {"missing_write": 5}
    assert "change_room(B9, 12, card_1) left out" in labels(one)["missing_write"].evidence


def test_a_wrong_value_that_the_user_said_and_one_that_follows_from_records_are_two_capabilities() -> None:
    goal = [READ_9[0], MOVE_9, told()]
    copied = made("change_room", booking_id="B9", room="21", payment_id="card_1")
    assert lacks(rollout([ASK, READ_9, copied, *ENDS], goal)) == {"wrong_argument": 3}
    derived = rollout([ASK, READ_9, made("change_room", booking_id="B9", room="12", payment_id="card_2"), *ENDS], goal)
    assert lacks(derived) == {"wrong_argument": 3}
    evidence = labels(derived)["wrong_argument"].evidence
    assert evidence == "change_room: payment_id card_2 should be card_1, which the user did not say"


def test_only_the_arguments_that_a_reference_call_names_are_compared() -> None:
    goal = call("change_room", booking_id="B9", room="12", payment_id="card_1")
    goal["tool_calls"][0]["compare"] = ["booking_id", "room"]
    other = made("change_room", booking_id="B9", room="12", payment_id="card_2")
    assert lacks(rollout([ASK, READ_9, other, *ENDS], [READ_9[0], goal, told()])) == {}


def test_a_write_that_was_refused_and_then_corrected_is_no_wrong_argument() -> None:
    refused = made("change_room", "Error: no such room", booking_id="B9", room="21", payment_id="card_1")
    one = rollout([ASK, READ_9, refused, [MOVE_9, result()], *ENDS], [READ_9[0], MOVE_9, told()])
    assert lacks(one) == {"invalid_call": 3}


def test_a_write_done_twice_is_extra_and_one_agreed_with_the_user_was_to_be_declined() -> None:
    done = [CANCEL_7, result()]
    assert lacks(rollout([ASK, READ_7, done, done, *ENDS], ONE)) == {"extra_write": 5}
    agreed = [says("Shall I cancel B8, too?"), user("Yes."), made("cancel_booking", booking_id="B8")]
    beside = rollout([ASK, READ_7, done, *agreed, *ENDS], ONE)
    assert lacks(beside) == {"undue_compliance": 7}
    instead = rollout([user("Cancel B8."), *agreed, *ENDS], [told()])
    assert lacks(instead) == {"undue_compliance": 3}
    assert labels(rollout([ASK, says("That is not allowed."), ENDS[1]], [told()]))["undue_compliance"].verdict == (
        "PRESENT"
    )


def test_a_write_before_the_needed_read_is_charged_with_the_decision_or_without_one() -> None:
    assert lacks(rollout([ASK, [CANCEL_7, result()], *ENDS], ONE)) == {"missing_lookup": 1}
    reads_only = [READ_7[0], told()]
    asked = [ASK, says("Cancel B7?"), user("Yes.")]
    assert lacks(rollout([*asked, [CANCEL_7, result()], *ENDS], reads_only)) == {"missing_lookup": 3}
    assert lacks(rollout([*asked, READ_7, [CANCEL_7, result()], *ENDS], reads_only)) == {"undue_compliance": 5}


def test_a_record_that_another_call_has_shown_needs_no_reading() -> None:
    listed = made("search_rooms", '[{"booking_id": "B7", "status": "open"}]', city="Rome", date="May 1")
    only_named = made("search_rooms", '{"bookings": ["B7", "B9"]}', city="Rome", date="May 1")
    assert lacks(rollout([ASK, listed, [CANCEL_7, result()], *ENDS], ONE)) == {}
    assert "missing_lookup" in lacks(rollout([ASK, only_named, [CANCEL_7, result()], *ENDS], ONE))


def test_an_act_on_a_wrong_record_is_one_lack_where_it_was_named_and_another_where_it_had_to_be_found() -> None:
    wrong = [made("get_booking", booking_id="B8"), made("cancel_booking", booking_id="B8")]
    assert lacks(rollout([ASK, *wrong, *ENDS], ONE)) == {"wrong_record": 3}
    assert lacks(rollout([user("Cancel my last booking."), *wrong, *ENDS], ONE)) == {"wrong_record": 3}


def test_another_operation_on_the_right_record_is_a_wrong_choice() -> None:
    other = made("change_room", booking_id="B7", room="1", payment_id="card_1")
    assert lacks(rollout([ASK, READ_7, other, *ENDS], [CANCEL_7, told()])) == {"wrong_operation": 3}
    assert lacks(rollout([ASK, READ_7, other, *ENDS], ONE)) == {"wrong_operation": 3}


@pytest.mark.parametrize(
    ("value", "said", "found"),
    [("327", "That is $327.00.", True), ("1327", "That is $1,327.", True), ("Mastercard", "Your MASTERCARD.", True),
     ("327", "That is $372.00.", False)],
)  # fmt: skip
def test_missing_information_is_judged_as_the_benchmark_reads_it(value: str, said: str, found: bool) -> None:
    # Any message counts, not the last only.
    one = rollout([ASK, says(said), user("I see."), says("Bye."), user("###STOP###")], [told(value)])
    assert lacks(one) == ({} if found else {"missing_information": 3})


def test_evidence_says_only_what_the_log_holds_at_that_moment() -> None:
    """A value that a user names or says only after the write was not named and not said for it."""
    wrong = [made("get_booking", booking_id="B8"), made("cancel_booking", booking_id="B8")]
    late = [user("Cancel my last booking."), *wrong, says("B8 is cancelled."), user("No, B7 it was!"), *ENDS]
    assert "wrong_record" not in lacks(rollout(late, ONE))
    copied = made("change_room", booking_id="B9", room="21", payment_id="card_1")
    talk = [user("Move B9 to a better room."), READ_9, copied, says("Room 21."), user("I meant room 12."), *ENDS]
    assert "wrong_argument" not in lacks(rollout(talk, [READ_9[0], MOVE_9, told()]))
    cut = rollout([ASK, READ_7, call("cancel_booking", wrong="B7")], ONE)
    assert labels(cut)["invalid_call"].evidence.endswith("does not fit the schema of its tool, and got no result")


def test_a_word_of_courtesy_is_no_information_and_a_short_value_is_told_as_a_word() -> None:
    reply = {"role": "assistant", "content": "Done."}
    finished = made("get_booking", '{"booking_id": "B7", "state": "done"}', booking_id="B7")
    assert "missing_information" not in lacks(rollout([ASK, finished, says("All set."), ENDS[1]], [READ_7[0], reply]))
    bags = [user("How many bags?"), READ_7, says("Booking B14 has some."), ENDS[1]]
    assert lacks(rollout(bags, [READ_7[0], told("4")])) == {"missing_information": 3}
    assert lacks(rollout([*bags[:2], says("It has 4 bags."), ENDS[1]], [READ_7[0], told("4")])) == {}


def test_causes_made_for_references_with_words_say_nothing_where_the_reference_has_none() -> None:
    one = rollout([ASK, says("Hello?"), user("Go on."), READ_7, [CANCEL_7, result()], *ENDS], ONE)
    desk = ("missing_confirmation", "reply_wording", "missing_escalation", "missing_information")
    assert {labels(one)[slug].verdict for slug in desk} == {"NA"}


def test_there_are_several_ways_to_begin() -> None:
    goal = [call("find_guest_by_email", email="ann@example.com"), *ONE]
    assert lacks(rollout([ASK, READ_7, [CANCEL_7, result()], *ENDS], goal)) == {}
    invented = made("find_guest_by_email", "Error: not found", email="bob@example.com")
    assert lacks(rollout([ASK, invented, READ_7, [CANCEL_7, result()], *ENDS], goal)) == {"invalid_call": 1}


def test_a_hand_over_is_missing_unless_the_user_leaves_on_its_offer() -> None:
    due = [call("transfer_to_human_agents", summary="Not allowed."), told()]
    assert lacks(rollout([ASK, says("No."), user("Bye. ###STOP###")], due)) == {"missing_escalation": 1}
    assert lacks(rollout([ASK, says("Shall I transfer you?"), user("Yes. ###TRANSFER###")], due)) == {}


def test_a_rollout_that_is_cut_off_lacks_a_closing() -> None:
    assert lacks(rollout([ASK, READ_7, [CANCEL_7, result()]], ONE)) == {"premature_stop": 3}


def test_a_write_agreed_without_naming_its_record_was_to_be_declined_and_one_made_unasked_is_extra() -> None:
    sold = made("change_address", guest_id="g1", city="Rome", zip="1")
    agreed = [says("I can note Rome as your address. Shall I go ahead?"), user("Yes.")]
    assert lacks(rollout([ASK, *agreed, sold, *ENDS], [told()])) == {"undue_compliance": 3}
    assert lacks(rollout([ASK, says("Which city?"), user("Rome."), sold, *ENDS], [told()])) == {"extra_write": 3}


def test_a_refused_look_up_of_what_the_user_said_is_no_malformed_call() -> None:
    vain = made("find_guest_by_email", "Error: Guest not found", email="ann@example.com")
    assert lacks(rollout([ASK, vain, READ_7, [CANCEL_7, result()], *ENDS], ONE)) == {}


def test_schemas_inferred_from_calls_condemn_no_call_that_the_tool_accepted() -> None:
    narrow = [schema("get_booking", "booking_id"), schema("cancel_booking", "booking_id reason")]
    assert lacks(rollout([ASK, READ_7, [CANCEL_7, result()], *ENDS], ONE), narrow) == {}
    refused = [CANCEL_7, {"role": "tool", "content": "closed", "error": True}]
    assert lacks(rollout([ASK, READ_7, refused, *ENDS], [told()]), narrow) == {"invalid_call": 3}


def test_the_users_own_tool_calls_are_no_acts_of_the_agent() -> None:
    own = {**call("cancel_booking", booking_id="B7"), "role": "user"}
    assert lacks(rollout([ASK, own, result(), READ_7, *ENDS], ONE)) == {"missing_write": 5}


def test_without_a_reference_only_calls_are_judged() -> None:
    one = rollout([ASK, [CANCEL_7, result()], made("change_room", "Error", booking_id="B9", room="1"), *ENDS])
    assert lacks(one) == {"invalid_call": 3}
    assert {slug for slug, label in labels(one).items() if label.verdict != "NA"} == {"invalid_call", "premature_stop"}


def test_keys_of_records_are_what_look_ups_were_told_before_a_change_of_the_same() -> None:
    # `zip`, `payment_id` or `items` may be shared by any number of tools.
    guest = made("get_guest", '{"city": "Rome", "zip": "2"}', guest_id="g1")
    moved = made("change_address", guest_id="g1", city="Oslo", zip="1")
    read = [rollout([ASK, READ_7, [CANCEL_7, result()], *guest, *moved, *ENDS])]
    tools = [*TOOLS, schema("change_zip", "zip booking_id payment_id")]
    assert {*learn_toolbox(read, tools).keys} == {"booking_id", "guest_id"}
    # Without a rollout that shows it, names that look-ups and changes share must do.
    assert {*Toolbox(TOOLS).keys} == {"booking_id", "guest_id", "city"}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (["1", "2"], ["2", "1"], True), (["1", "1"], ["1"], False), (50, "50", True), (50, 50.0, True),
        (["12345678901234567"], ["12345678901234568"], False), ("07", "7", False), (True, 1, False),
        ("Suite 5", "suite 5", False), (None, None, True),
        ([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}], False), ({"a": 1, "b": "x"}, {"b": "x", "a": "1"}, True),
        ([{"a": 1}], [{"a": 1, "more": 2}], True), ([{"a": 1, "more": 2}], [{"a": 1}], False),
    ],
)  # fmt: skip
def test_values_are_compared_as_the_resulting_records_would_be(one: Any, other: Any, expected: bool) -> None:
    assert same(one, other) is expected


def test_lists_that_go_together_stay_together() -> None:
    def extras(items: list[str], new: list[str]) -> Message:
        return call("add_extras", booking_id="B9", items=items, new_items=new, payment_id="p")

    goal = [READ_9[0], extras(["1", "2"], ["3", "4"]), told()]
    both = [rollout([ASK, READ_9, extras(["2", "1"], new), result(), *ENDS], goal) for new in (["4", "3"], ["3", "4"])]
    assert [lacks(one) for one in both] == [{}, {"wrong_argument": 3}]


def test_thinking_and_calculating_write_nothing() -> None:
    assert {kind_of(tool) for tool in ("think", "calculate")} == {"think"}
    assert {kind_of(tool) for tool in ("verify_identity", "get_status")} == {"read"}
    spare = [made("calculate", "4", expression="2+2"), READ_9]
    assert lacks(rollout([ASK, *spare, READ_7, [CANCEL_7, result()], *ENDS], ONE)) == {}


MILESTONES = [
    {"tool": "search_contacts", "arguments": {"name": "Ann"}},
    {"namespace": "REMINDER", "values": {"content": "call Ann"}},
    {"message": "I have set the reminder."},
]
SEARCH = made("search_contacts", "[]", name="Bob")


@pytest.mark.parametrize(
    ("messages", "scores", "expected"),
    [
        ([says("I cannot.")], (0.0, 0.0, 0.0), {"missing_lookup": 1}),
        ([SEARCH, says("No such contact.")], (0.0, 0.0, 0.0), {"wrong_argument": 1}),
        ([SEARCH, says("Set.")], (1.0, 0.4, 0.1), {"missing_write": 1}),
        ([SEARCH, says("Well.")], (1.0, 1.0, 0.2), {"missing_information": 3}),
        ([SEARCH, says("The reminder is set.")], (1.0, 1.0, 0.7), {}),
    ],
)  # fmt: skip
def test_the_first_unmet_milestone_is_charged_by_what_it_asks_for(
    messages: list[Message], scores: tuple[float, ...], expected: dict[str, int]
) -> None:
    parts = {f"milestone {at}": score for at, score in enumerate(scores, start=1)}
    one = rollout([user("Remind me to call Ann."), *messages], parts=parts, milestones=MILESTONES)
    assert lacks(one, []) == expected


def test_an_act_in_a_minefield_is_a_lack_of_withholding() -> None:
    mine = {"tool": "send_message", "minefield": True}
    sent = [user("Text Ann."), made("send_message", to="1"), says("Sent.")]
    hit = rollout(sent, parts={"milestone 1": 0.0}, milestones=[mine])
    assert lacks(hit, []) == {"undue_compliance": 1}
    kept = rollout([user("Text Ann."), says("Which Ann?")], parts={"milestone 1": 1.0}, milestones=[mine])
    assert labels(kept, [])["undue_compliance"].verdict == "PRESENT"


def test_milestones_without_a_score_or_without_a_description_are_not_judged() -> None:
    assert lacks(rollout([user("Hi."), says("Hi.")], milestones=MILESTONES), []) == {}
    assert lacks(rollout([user("Hi."), says("Hi.")], parts={"milestone 1": 0.0}), []) == {}
    assert lacks(rollout([user("Hi."), says("Hi.")], parts={"milestone 1": 0.0}, milestones=[{}]), []) == {
        "missing_write": 1
    }


ASKED = says("I can cancel booking B7. Do you confirm? Please reply yes to proceed.")
FAULTS = {
    "left its instructions": [ASK, says("Your PIN?"), user("###OUT-OF-SCOPE###")],
    "stopped before it stated a request": [says("Hi!"), user("###STOP###")],
    "said nothing": [says("Hi!"), user("")],
    "speaks as the agent": [ASK, says("One moment."), user("Hello! How can I help you today?")],
    "left while asked about cancel_booking(B7)": [ASK, READ_7, ASKED, user("Thank you! ###STOP###")],
}
NO_FAULTS = {
    "the user declines": [ASK, READ_7, ASKED, user("No, I will keep it. ###STOP###")],
    "the user changes its mind": [ASK, READ_7, ASKED, user("I don’t want that. ###STOP###")],
    "the question is about something else": [ASK, READ_7, says("Would you like a coffee?"), user("Bye. ###STOP###")],
    "the write was made": [ASK, READ_7, ASKED, user("Yes."), [CANCEL_7, result()], ASKED, user("Bye. ###STOP###")],
    "the user calls a tool of its own": [ASK, {**call("get_status"), "role": "user", "content": ""}, result("on")],
    "all is well": [ASK, READ_7, [CANCEL_7, result()], *ENDS],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_simulated_user_is_told_with_its_message(fault: str) -> None:
    one = rollout(FAULTS[fault], ONE)
    found = fault_of(one)
    assert found is not None and fault in found and found.startswith(f"message {len(one.messages) - 1}:")


@pytest.mark.parametrize("case", NO_FAULTS)
def test_what_the_log_does_not_prove_is_no_fault(case: str) -> None:
    assert fault_of(rollout(NO_FAULTS[case], ONE)) is None


def test_an_infrastructure_error_is_a_fault() -> None:
    one = rollout([ASK], outcome="error").model_copy(update={"error": "worker died"})
    assert fault_of(one) == "infrastructure: worker died"


@cache
def real(domain: str) -> list[Rollout]:
    """The shared result file, read by hand: the analyst is to be tested here, not the import."""
    path = SHARED / f"gpt-4.1_{domain}_1trial.json"
    file = json.loads(path.read_text())
    criteria = {task["id"]: task["evaluation_criteria"] for task in file["tasks"]}
    rollouts = []
    for one in file["simulations"]:
        wanted = criteria[one["task_id"]]
        reference = [call(action["name"], **action["arguments"]) for action in wanted["actions"] or []]
        messages = [
            {"role": m["role"], "content": m["content"] or ""}
            | ({"tool_calls": [call(c["name"], **c["arguments"])["tool_calls"][0] for c in calls]} if calls else {})
            for m in one["messages"]
            for calls in [m.get("tool_calls")]
        ]
        passed = one["reward_info"]["reward"] == 1
        read = rollout(
            messages, [*reference, told(*(wanted["communicate_info"] or []))], "passed" if passed else "failed"
        )
        rollouts.append(read.model_copy(update={"id": one["task_id"]}))
    return rollouts


def inferred(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Schemas of the tools that occur: every argument seen, required where no call goes without it."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for one in rollouts:
        for message in [*one.messages, *one.reference]:
            for made_call in message.get("tool_calls") or []:
                seen.setdefault(made_call["function"]["name"], []).append(made_call["function"]["arguments"])
    return [
        schema(name, " ".join(set.intersection(*map(set, some))), " ".join(set().union(*some)))
        for name, some in seen.items()
    ]


# What a reader of each failed rollout found, by hand, is in the comments.
READ_BY_HAND = {
    "airline": {
        "2": {"wrong_argument"},  # a certificate of 100 for two passengers, where 50 was due
        "22": {"wrong_argument"},  # paid by credit card without asking, charged a bag that is free
        "24": {"undue_compliance", "wrong_argument"},  # cancelled against policy; dearer return flight
        "25": {"wrong_argument", "invalid_call"},  # a bag that nobody asked for; a price worked out wrongly first
        "26": {"undue_compliance"},  # cancelled against policy
        "32": {"missing_write"},  # handed over, after the user had named a wrong destination
        "35": {"undue_compliance", "wrong_argument"},  # cancelled against policy; only direct flights searched
        "37": {"undue_compliance"},  # cancelled one booking too many, against policy
        "44": {"missing_write"},  # handed over, having looked for durations in the wrong place
        "48": {"missing_lookup"},  # cancelled unread, on the user's word
    },
    "retail": {
        "36": {"wrong_operation"},  # took a dearer variant for the cheapest, and so cancelled the order
        "55": {"wrong_argument"},  # returned two items, where all were meant
        "62": {"undue_compliance", "invalid_call"},  # sold a replacement nobody wanted, after three refused calls
        "79": {"wrong_argument"},  # asked for the colour, got another than the task means
        "86": {"missing_write"},  # said that a pending order cannot be changed
        "101": {"missing_write"},  # never read the third order, where the address was
    },
}


@pytest.mark.needs("shared")
@pytest.mark.parametrize("domain", READ_BY_HAND)
def test_real_failures_are_labelled_as_they_were_read_by_hand(domain: str) -> None:
    rollouts = real(domain)
    tools = inferred(rollouts)
    found = {one.id: {*lacks(one, tools)} for one in rollouts if one.outcome == "failed"}
    assert found == READ_BY_HAND[domain]


@pytest.mark.needs("shared")
def test_causes_of_failure_flag_hardly_any_real_rollout_that_passed() -> None:
    flagged: dict[str, list[str]] = {}
    for domain in READ_BY_HAND:
        rollouts = real(domain)
        tools = inferred(rollouts)
        for one in rollouts:
            for slug in lacks(one, tools) if one.outcome == "passed" else ():
                flagged.setdefault(slug, []).append(f"{domain} {one.id}")
    # Calls that were refused without harm; two references whose own write the benchmark refuses; a hand-over that the
    # benchmark does not count.
    assert {slug: len(names) for slug, names in flagged.items()} == {
        "invalid_call": 4,
        "missing_write": 2,
        "missing_escalation": 1,
        "over_escalation": 1,
    }


@pytest.mark.needs("shared")
@pytest.mark.parametrize("domain", READ_BY_HAND)
def test_labels_of_real_rollouts_point_at_messages_of_the_assistant(domain: str) -> None:
    rollouts = real(domain)
    tools = inferred(rollouts)
    # In one the agent had erred before; when it asked for consent to the right write at last, the user left.
    assert [one.id for one in rollouts if fault_of(one)] == {"airline": [], "retail": ["101"]}[domain]
    for one in rollouts:
        for label in labels(one, tools).values():
            assert label.evidence
            if label.verdict != "NA":
                assert label.message is not None and one.messages[label.message]["role"] == "assistant"


def test_trials_of_one_task_are_one_piece_of_evidence_on_what_a_tool_does() -> None:
    def passed(task: str, page: int) -> Rollout:
        synced = made("sync_rows", f'{{"row": "r{page}"}}', page=str(page))
        one = rollout([ASK, synced, made("ping", OK), says("Done.")], outcome="passed")
        return one.model_copy(update={"task": one.task.model_copy(update={"id": task})})

    trials = [passed("hotel/1", page) for page in range(4)]
    tasks = [passed(f"hotel/{page}", page) for page in range(4)]

    tools = [schema("sync_rows", "page")]
    kinds = [learn_toolbox(rollouts, tools).kind("sync_rows") for rollouts in (trials, tasks)]

    assert kinds == ["unknown", "read"]
