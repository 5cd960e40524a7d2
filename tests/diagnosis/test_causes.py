"""Causes of failed rollouts, and suspect references, on small dialogues of a desk with a policy."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.logged_desk import (
    CANCEL,
    ITEMS,
    OLD,
    POLICY,
    READ,
    RECENT,
    Desk,
    Message,
    calls,
    gold,
    profile,
    record,
    says,
    user,
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


CANCEL_CALL = calls("cancel_reservation", {"reservation_id": "AAA111"}, reservation_id="AAA111")
HANDOVER = calls("transfer_to_human_agents", "Transfer successful", summary="give up")
CHAIRS = [{"item_id": "c1", "price": 50}, {"item_id": "c2", "price": 90}]
CASES: dict[str, tuple[str, list[Message], list[object]]] = {
    "a cancellation that the policy forbids": (
        "undue_compliance",
        user("Cancel AAA111, I am ann_1.") + record() + says("Shall I cancel AAA111?") + user("Yes.") + CANCEL_CALL,
        [READ],
    ),
    "a write on the user's word": (
        "unverified_claim",
        user("Please cancel AAA111, I booked it ten hours ago.") + CANCEL_CALL + says("Done."),
        [READ, gold("update_reservation_baggages", reservation_id="AAA111", total_baggages=1)],
    ),
    "a look-up that the assistant thinks it has not": (
        "missing_lookup",
        user("Which of my trips is the longest? Cancel that one.")
        + profile()
        + says("I do not have access to flight durations. Tell me which one it is."),
        [gold("search_direct_flight", origin="A"), CANCEL],
    ),
    "some records of several": (
        "incomplete_search",
        user("Cancel my trip to Rome.") + profile() + record() + says("Neither AAA111 nor CCC333 goes there."),
        [gold("get_reservation_details", reservation_id="CCC333"), gold("cancel_reservation", reservation_id="CCC333")],
    ),
    "a refusal of what is allowed": (
        "partial_refusal",
        user("Cancel AAA111.") + record(**RECENT) + says("I am sorry, AAA111 cannot be cancelled."),
        [READ, gold("cancel_reservation", reservation_id="AAA111")],
    ),
    "an omission": (
        "missing_write",
        user("Cancel AAA111.") + record(**RECENT) + says("All is done."),
        [READ, CANCEL],
    ),
    "a wrong value": (
        "wrong_argument",
        user("Two bags for AAA111.")
        + record()
        + calls("update_reservation_baggages", {}, reservation_id="AAA111", total_baggages=3),
        [READ, gold("update_reservation_baggages", reservation_id="AAA111", total_baggages=2)],
    ),
    "a value that was not told": (
        "missing_information",
        user("How many bags has AAA111?") + record() + says("Some."),
        [READ],
    ),
    "a hand-over instead of an answer": (
        "over_escalation",
        user("Can I still cancel AAA111?") + record() + HANDOVER + says("Please hold on."),
        [READ],
    ),
    "a write that closes the record for the next": (
        "wrong_operation",
        user("New boots and a new address for order W1.")
        + calls("get_order", {"order_id": "W1"}, order_id="W1")
        + calls("modify_items", {}, order_id="W1", items=["b2"])
        + calls("modify_address", "Error: the order is closed", error=True, order_id="W1", city="Rome"),
        [
            gold("get_order", order_id="W1"),
            gold("modify_address", order_id="W1", city="Rome"),
            gold("modify_items", order_id="W1", items=["b2"]),
        ],
    ),
    "an address out of nowhere": (
        "fabricated_fact",
        user("Send order W1 to my other address.")
        + calls("modify_address", {}, order_id="W1", street="123 Main St"),
        [gold("get_order", order_id="W1"), gold("modify_address", order_id="W1", street="9 Elm Rd")],
    ),
    "a look-up of an identifier copied with a slip": (
        "wrong_argument",
        user("Cancel QX7RT2 please.")
        + calls("get_reservation_details", "Error: not found", error=True, reservation_id="QX7TT2")
        + says("There is no such trip."),
        [gold("get_reservation_details", reservation_id="QX7RT2"), gold("cancel_reservation", reservation_id="QX7RT2")],
    ),
    "money for a flight of which nobody complains": (
        "undue_compliance",
        user("Cancel AAA111, and give me money.")
        + profile()
        + record(**RECENT)
        + CANCEL_CALL
        + calls("send_certificate", {}, user_id="ann_1", amount=100),
        [READ, CANCEL],
    ),
    "a standing for which no record was read": (
        "unverified_claim",
        user("I am a gold member: cancel AAA111.") + record(**RECENT) + says("As a gold member you may keep it."),
        [gold("get_user_details", user_id="ann_1"), CANCEL],
    ),
    "an item of several that was refused": (
        "missing_write",
        user("Return the boots and the kettle of order W1.")
        + calls("get_order", {"order_id": "W1", "items": ITEMS}, order_id="W1")
        + says("I am sorry, the kettle cannot be returned. Shall I return the boots?")
        + user("Yes.")
        + calls("return_items", {}, order_id="W1", items=["b1"]),
        [gold("get_order", order_id="W1"), gold("return_items", order_id="W1", items=["b1", "k1"])],
    ),
    "an answer without a single look-up": (
        "missing_lookup",
        user("Cancel AAA111, I am entitled to it.") + says("Why?") + user("I am ill.") + says("It is cancelled."),
        [READ, CANCEL],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_cause_is_found_with_its_message(case: str, desk: Desk) -> None:
    kind, messages, actions = CASES[case]
    [row] = desk.add(messages, *actions, informs=["1990-01-01"] if kind == "missing_information" else []).explained()
    cause = row.cause(kind)
    assert cause is not None, row.causes
    assert cause.evidence and 0 <= cause.message <= len(messages)


def test_what_the_log_does_not_prove_is_unexplained(desk: Desk) -> None:
    [row] = desk.add(user("Is AAA111 booked?") + record() + says("Yes, it is."), READ).explained()
    assert row.primary is None and row.standing == "contrasted"


def test_the_earliest_cause_is_primary_and_causes_that_were_repaired_are_none(desk: Desk) -> None:
    refused = calls("cancel_reservation", "Error: try again", error=True, reservation_id="AAA111")
    messages = user("Cancel AAA111, booked an hour ago.") + record(**RECENT) + refused + CANCEL_CALL
    [row] = desk.add(messages + says("Done."), READ, CANCEL).explained()
    assert row.causes == []
    late = record() + says("I am sorry, AAA111 cannot be cancelled.") + HANDOVER
    [_, row] = desk.add(user("Cancel AAA111.") + late, READ, CANCEL).explained()
    assert row.primary is not None and row.primary.cause == "partial_refusal"
    assert [cause.cause for cause in row.secondary] == ["over_escalation"]


def test_a_loop_tells_how_often_and_what_it_repeats_is_no_further_cause(desk: Desk) -> None:
    again = calls("cancel_reservation", {}, reservation_id="AAA111")
    messages = user("Cancel AAA111, booked an hour ago.") + record(**RECENT) + again * 6
    [row] = desk.add(messages, READ, CANCEL, termination_reason="max_steps").explained()
    assert [cause.cause for cause in row.causes] == ["loop"]
    assert "6 times with the same arguments, until max steps" in row.causes[0].evidence


def test_short_words_after_each_change_are_a_courtesy(desk: Desk) -> None:
    bags = [calls("update_reservation_baggages", {}, reservation_id="AAA111", total_baggages=n) for n in range(6)]
    messages = [message for change in bags for message in user("One more.") + change + says("Done.")]
    bagged = user("Bags for AAA111.") + record() + messages
    [row] = desk.add(bagged, READ, CANCEL, termination_reason="max_steps").explained()
    assert row.cause("loop") is None and row.causes


SUSPECTS: dict[str, Callable[[Desk], Desk]] = {
    "within the last 24 hrs|can be cancelled if any": lambda desk: desk.add(
        user("Cancel AAA111.") + record() + says("That is not allowed."), READ, CANCEL
    ),
    "where records say 1990-01-01": lambda desk: desk.add(
        user("Book for Ann Lee.") + record() + says("No."),
        gold("book_reservation", passengers=[{"first_name": "Ann", "last_name": "Lee", "dob": "1991-02-02"}]),
    ),
    "is in no record": lambda desk: desk.add(
        user("Book for my brother.") + record() + says("No."),
        gold("book_reservation", passengers=[{"first_name": "Bo", "last_name": "Ek"}]),
    ),
    "no reservation was changed or cancelled": lambda desk: desk.add(
        user("My flight was delayed.") + record() + says("Sorry."), gold("send_certificate", user_id="ann_1", amount=50)
    ),
}


@pytest.mark.parametrize("reason", SUSPECTS)
def test_a_reference_that_policy_or_records_contradict_is_suspect_and_not_contrasted(reason: str, desk: Desk) -> None:
    [row] = SUSPECTS[reason](desk).explained()
    assert row.standing == "suspect"
    assert any(part in suspicion for part in reason.split("|") for suspicion in row.suspicions), row.suspicions
    kinds = {cause.cause for cause in row.causes}
    assert not kinds & {"missing_write", "wrong_argument", "partial_refusal"}


def test_a_clause_is_in_force_only_where_the_policy_has_its_sentence(desk: Desk) -> None:
    desk.policy = "Be kind."
    [row] = desk.add(user("Cancel AAA111.") + record() + says("That is not allowed."), READ, CANCEL).explained()
    assert not row.suspicions


@pytest.mark.parametrize(
    ("policy", "status"), [("A booking can only be cancelled if its status is 'open'.", "flown"), ("Be kind.", "")]
)
def test_a_sentence_that_asks_a_record_for_a_value_is_a_clause_of_any_policy(
    policy: str, status: str, desk: Desk
) -> None:
    desk.policy = policy
    read = calls("get_booking", {"booking_id": "B1", "status": "flown"}, booking_id="B1")
    cancel = calls("cancel_booking", {}, booking_id="B1")
    messages = user("Cancel B1.") + read + says("Shall I cancel B1?") + user("Yes") + cancel + says("Done.")
    refund = calls("refund_booking", {}, booking_id="B1")
    [row] = desk.add(
        messages + refund, gold("get_booking", booking_id="B1"), gold("refund_booking", booking_id="B1")
    ).explained()
    cause = row.cause("undue_compliance")
    assert (cause is not None and "the policy says" in cause.evidence) == bool(status)
    assert not status or cause is None or f'its status is {status}; the policy says "{policy[:-1]}"' in cause.evidence


def test_clauses_are_those_of_tau_bench_too_and_the_allowance_of_bags_is_the_policys_own(desk: Desk) -> None:
    desk.policy = """The current time is 2024-05-15 15:00:00 EST.
- All reservations can be cancelled within 24 hours of booking, or if the airline cancelled the flight. Otherwise not.
- If the user is a silver member, 1 free checked bag for each economy passenger. If the user is a gold member, 2 free
checked bags for each economy passenger. Each extra baggage is 50 dollars."""
    bags = {"reservation_id": "AAA111", "total_baggages": 3, "payment_id": "x"}
    add = calls("update_reservation_baggages", {}, **bags, nonfree_baggages=0)
    goal = gold("update_reservation_baggages", **bags, nonfree_baggages=1)
    desk.add(user("Cancel AAA111.") + record() + says("No."), READ, CANCEL)
    desk.add(user("Three bags for AAA111.") + profile() + record() + add, READ, goal)
    suspect, charged = desk.explained()
    assert suspect.standing == "suspect" and "can be cancelled within 24 hours" in suspect.suspicions[0]
    assert charged.primary is not None and "0 of 3 bags charged, 1 due" in charged.primary.evidence


def test_a_reference_that_alone_is_wrong_is_the_primary_cause_and_not_an_agent_that_declines(desk: Desk) -> None:
    declined = user("Cancel AAA111.") + record() + HANDOVER + says("Please hold on.")
    [row] = desk.add(declined, READ, CANCEL).explained()
    assert [cause.cause for cause in row.causes] == ["suspect_reference"]


@pytest.mark.parametrize(("script", "kind"), [("Cancel AAA111.", "undue_compliance"), ("Add bags.", "extra_write")])
def test_what_the_script_asks_for_and_the_reference_never_does_is_undue_compliance(
    script: str, kind: str, desk: Desk
) -> None:
    messages = user("Cancel AAA111.") + record(**RECENT) + CANCEL_CALL + says("Cancelled.")
    goal = gold("update_reservation_baggages", reservation_id="BBB222", total_baggages=2)
    [row] = desk.add(messages, READ, goal, script=script).explained()
    assert row.primary is not None and row.cause(kind) is not None, row.causes


def test_a_reply_that_goes_on_with_the_request_refuses_nothing(desk: Desk) -> None:
    text = "I cannot cancel AAA111 within the hour. Would you like me to proceed with cancelling AAA111 today?"
    messages = user("Cancel AAA111 at once.") + record(**RECENT) + says(text) + user("No.") + says("Fine.")
    [row] = desk.add(messages, READ, CANCEL).explained()
    assert row.cause("partial_refusal") is None


def test_a_user_who_stops_before_asking_or_while_asked_spoils_the_rollout(desk: Desk) -> None:
    desk.add(user("###STOP###"), READ, CANCEL)
    desk.add(
        user("Cancel AAA111.") + record(**RECENT) + says("Please confirm: AAA111?") + user("Yes ###STOP###"),
        READ,
        CANCEL,
    )
    assert [row.standing for row in desk.explained()] == ["spoilt", "spoilt"]


def test_a_rollout_that_passed_is_never_spoilt_by_its_user(desk: Desk) -> None:
    [row] = desk.add(user("Cancel AAA111.") + user("###OUT-OF-SCOPE###"), READ, reward=1.0).explained()
    assert row.standing == "contrasted" and row.primary is None


def test_what_an_earlier_write_locked_is_neither_refused_nor_left_out(desk: Desk) -> None:
    messages = (
        user("New boots and a new address for order W1.")
        + calls("get_order", {"order_id": "W1"}, order_id="W1")
        + calls("modify_items", {}, order_id="W1", items=["b2"])
        + calls("modify_address", "Error: the order is closed", error=True, order_id="W1", city="Rome")
        + says("I am sorry, the address of W1 cannot be changed any more.")
    )
    address = gold("modify_address", order_id="W1", city="Rome")
    [row] = desk.add(messages, address, gold("modify_items", order_id="W1", items=["b2"])).explained()
    assert [cause.cause for cause in row.causes if not cause.cause.startswith("missing_look")] == ["wrong_operation"]


@pytest.mark.parametrize(
    "notice",
    [
        "Note that AAA111 cannot be cancelled again afterwards. Shall I look into it?",
        "BBB222 cannot be cancelled.",
    ],
)
def test_notices_and_refusals_of_other_records_refuse_nothing(notice: str, desk: Desk) -> None:
    messages = user("Cancel AAA111.") + record(**RECENT) + says(notice) + user("I see.") + says("Goodbye.")
    [row] = desk.add(messages, READ, CANCEL).explained()
    assert row.cause("partial_refusal") is None and row.cause("missing_write") is not None


@pytest.mark.parametrize(("words", "standing"), [("Ask for it.", "suspect"), ("Rome is on me.", "contrasted")])
def test_a_reference_of_another_task_is_suspect(words: str, standing: str, desk: Desk) -> None:
    script = "You are bob_7777 and want XYZ789 cancelled."
    goal = gold("cancel_reservation", reservation_id="XYZ789")
    named = user(f"Cancel AAA111. {words}") if standing == "suspect" else user("I am bob_7777. Cancel AAA111.")
    [row] = desk.add(named + record() + says("AAA111 is not mine to cancel."), goal, script=script).explained()
    assert row.standing == standing
    assert standing == "contrasted" or "it is of another task" in row.suspicions[0]


@pytest.mark.parametrize(("reason", "is_covered"), [("I am ill", True), ("I am not ill, plans changed", False)])
def test_a_reason_that_the_user_denies_covers_nothing(reason: str, is_covered: bool, desk: Desk) -> None:
    desk.policy = POLICY + "- The user has travel insurance and the reason is covered by it.\n"
    insured = record(insurance="yes")
    messages = user(f"Cancel AAA111: {reason}.") + insured + says("Shall I cancel AAA111?") + user("Yes.") + CANCEL_CALL
    [row] = desk.add(messages + says("Cancelled."), READ).explained()
    cause = row.cause("undue_compliance")
    assert ("health or weather" in cause.evidence if cause else False) != is_covered


def test_a_user_who_agrees_and_leaves_before_the_call_spoils_the_rollout(desk: Desk) -> None:
    offer = "I can cancel this trip for you. Shall I go ahead and cancel it?"
    messages = user("Cancel AAA111.") + record(**RECENT) + says(offer) + user("Yes, please do. ###TRANSFER###")
    [row] = desk.add(messages, READ, CANCEL).explained()
    assert row.primary is not None and row.primary.cause == "user_simulator_fault"
    assert "agrees to" in row.primary.evidence


def test_steps_of_the_agents_harness_are_no_extra_write(desk: Desk) -> None:
    bags = {"reservation_id": "AAA111", "total_baggages": 2}
    add = calls("update_reservation_baggages", {}, **bags)
    step = calls("goto_node", "ok", node="AUTH")
    [row] = desk.add(
        user("Two bags for AAA111.") + step + record() + add + says("Done."),
        READ,
        gold("update_reservation_baggages", **bags),
    ).explained()
    assert row.cause("extra_write") is None


def test_a_colleague_whom_the_user_asked_for_after_a_refusal_comes_second(desk: Desk) -> None:
    refused = record(**RECENT) + says("I am sorry, AAA111 cannot be cancelled.")
    messages = user("Cancel AAA111.") + refused + user("Then escalate it to somebody.") + HANDOVER
    [row] = desk.add(messages, READ, CANCEL).explained()
    assert [cause.cause for cause in row.causes] == ["partial_refusal", "over_escalation"]


def test_a_list_that_lacks_what_is_due_is_an_omission(desk: Desk) -> None:
    messages = (
        user("I need my money back.")
        + calls("get_order", {"order_id": "W1", "items": ITEMS}, order_id="W1")
        + says("W1 has boots and a kettle.")
        + user("All of order W1.")
        + calls("return_items", {}, order_id="W1", items=["b1"])
        + says("Done.")
    )
    due = gold("return_items", order_id="W1", items=["b1", "k1"])
    [row] = desk.add(messages, gold("get_order", order_id="W1"), due, script="Return everything.").explained()
    assert [cause.cause for cause in row.causes] == ["missing_write"]


def test_what_an_agent_does_after_it_has_gone_wrong_is_no_further_cause(desk: Desk) -> None:
    again = calls("update_reservation_baggages", {}, reservation_id="AAA111", total_baggages=4)
    first = user("Cancel AAA111, I am ann_1.") + record() + says("Shall I cancel AAA111?") + user("Yes.") + CANCEL_CALL
    [row] = desk.add(first + again + says("Done."), READ).explained()
    assert [cause.cause for cause in row.causes] == ["undue_compliance"]


def test_a_tool_that_passed_rollouts_call_and_no_reference_does_is_of_no_account(desk: Desk) -> None:
    note = calls("write_note", "ok", text="AAA111")
    messages = user("Is AAA111 booked?") + record() + note + says("Yes, it is.")
    [row] = desk.add(messages, READ).explained()
    assert [cause.cause for cause in row.causes] == ["extra_write"]
    row, _ = desk.add(messages, READ, reward=1.0).explained()
    assert row.causes == []


def test_records_left_unopened_explain_nothing_where_the_one_that_counts_was_opened(desk: Desk) -> None:
    messages = user("Cancel my trip to Rome.") + profile() + record(**RECENT) + says("Good bye.")
    other = gold("get_reservation_details", reservation_id="CCC333")
    [row] = desk.add(messages, READ, other, CANCEL).explained()
    assert [cause.cause for cause in row.causes] == ["missing_write"]


ORDER = calls("get_order", {"order_id": "W1", "status": "pending", "items": ITEMS}, order_id="W1")
CHANGE = gold("modify_items", order_id="W1", items=["b2"])


def test_another_operation_in_the_stead_of_one_that_was_refused_is_wrong(desk: Desk) -> None:
    messages = (
        user("Please change the boots of order W1 to size 9.")
        + ORDER
        + says("I am sorry, items of W1 cannot be changed. I can cancel the entire order W1. Shall I?")
        + user("If there is no other way, yes.")
        + calls("cancel_order", {"order_id": "W1"}, order_id="W1")
        + says("Done.")
    )
    [row] = desk.add(messages, gold("get_order", order_id="W1"), CHANGE).explained()
    assert [cause.cause for cause in row.causes] == ["wrong_operation"]


def test_names_of_two_people_are_no_third_person_and_records_are_known_by_what_they_were_asked_for_by(
    desk: Desk,
) -> None:
    desk.policy += "If the user is a gold member, 2 free checked bags for each economy passenger. "
    desk.policy += "Each extra baggage is 50 dollars."
    brother = gold("book_trip", user_id="ann_1", passengers=[{"first_name": "Bo", "last_name": "Ek"}])
    desk.add(user("Book for Bo.") + record() + says("Who?") + user("Or for Eva Ek.") + says("No."), brother)
    wallet = calls("get_user_details", {"membership": "gold"}, user_id="ann_1")
    bags = gold("update_reservation_baggages", reservation_id="AAA111", total_baggages=2, nonfree_baggages=2)
    desk.add(user("Two bags for AAA111.") + wallet + record() + says("No."), READ, bags)
    stranger, charged = desk.explained()
    assert "is in no record" in " ".join(stranger.suspicions)
    assert "2 of 2 bags charged, 0 due" in " ".join(charged.suspicions)


def test_a_cabin_that_was_changed_before_is_the_one_that_a_clause_asks_for(desk: Desk) -> None:
    upgrade = gold("update_reservation_flights", reservation_id="AAA111", cabin="business", flights=[])
    [row] = desk.add(user("Upgrade AAA111 and cancel it.") + record() + says("No."), READ, upgrade, CANCEL).explained()
    assert not row.suspicions


def test_who_names_several_records_has_not_taken_one_for_another(desk: Desk) -> None:
    due = [
        gold("get_reservation_details", reservation_id="CCC333"),
        gold("cancel_reservation", reservation_id="CCC333"),
    ]
    looked = user("Cancel my trip to Rome.") + profile() + record()
    [row] = desk.add(looked + says("Your trip AAA111 goes elsewhere, and so does CCC333."), *due).explained()
    assert row.cause("incomplete_search") is not None and row.cause("wrong_record") is None


def test_a_hand_over_left_out_after_a_breach_is_its_sequel(desk: Desk) -> None:
    messages = user("Cancel AAA111.") + record() + says("Shall I cancel AAA111?") + user("Yes.") + CANCEL_CALL
    [row] = desk.add(messages + says("Done."), READ, gold("transfer_to_human_agents", summary="x")).explained()
    assert [cause.cause for cause in row.causes] == ["undue_compliance"]


def test_what_a_suspect_reference_does_beside_its_fault_may_still_be_left_out(desk: Desk) -> None:
    recent = calls("get_reservation_details", {**OLD, **RECENT, "reservation_id": "BBB222"}, reservation_id="BBB222")
    due = gold("cancel_reservation", reservation_id="BBB222")
    messages = user("Cancel AAA111 and BBB222.") + record() + recent + says("I will see to it.")
    [row] = desk.add(messages, READ, CANCEL, due).explained()
    assert row.standing == "suspect" and [cause.cause for cause in row.causes] == ["missing_write"]


def test_what_a_reply_says_of_the_record_that_it_names_refuses_no_other(desk: Desk) -> None:
    reply = "BBB222 is not yours. It cannot be cancelled."
    messages = user("Cancel AAA111.") + record(**RECENT) + says(reply) + user("I see.") + says("Goodbye.")
    [row] = desk.add(messages, READ, CANCEL).explained()
    assert row.cause("partial_refusal") is None and row.cause("missing_write") is not None


def test_words_owed_of_a_choice_follow_from_the_other_one_that_was_made(desk: Desk) -> None:
    places = [{"name": "Olive", "stars": "4.9"}, {"name": "Fig", "stars": "4.1"}]
    shown = user("Book me the better place, and name it with its stars.") + calls("list_places", places)
    due = gold("list_places"), gold("book_table", place="Olive")
    for place, told in (("Fig", "Fig is booked."), ("Olive", "Olive is booked.")):
        booked = calls("book_table", "booked", place=place) + says(told) + user("Thanks.") + says("Goodbye.")
        desk.add(shown + booked, *due, informs=["Olive", "4.9"])
    other, silent = ([cause.cause for cause in row.causes] for row in desk.explained())
    assert len(other) == 1 and other != silent == ["missing_information"]


def test_a_user_who_leaves_on_a_question_of_its_own_has_stopped_too_soon(desk: Desk) -> None:
    asks = user("Cancel AAA111.") + record(**RECENT) + says("Shall I cancel AAA111?")
    for words in (
        "Do that, but is all else well? ###STOP###",
        "No, leave all of it just as the record has it now. ###STOP###",
    ):
        desk.add(asks + user(words), READ, CANCEL)
    first, second = (row.causes[0].cause for row in desk.explained())
    assert first == "user_simulator_fault" and second != first


def test_a_refused_call_on_the_record_that_stays_undone_is_not_repaired(desk: Desk) -> None:
    refused = calls("update_reservation_flights", "Error: flown", error=True, reservation_id="AAA111", flights=[])
    bags = calls("update_reservation_baggages", {}, reservation_id="AAA111", total_baggages=2)
    due = [READ, CANCEL, gold("update_reservation_baggages", reservation_id="AAA111", total_baggages=2)]
    for further in ([], bags):
        messages = user("Cancel AAA111.") + record(**RECENT) + refused + further + says("That is all.")
        desk.add(messages, *(due if further else due[:2]))
    first, second = (row.causes[0] for row in desk.explained())
    assert (first.cause, first.message) == ("invalid_call", 4)
    assert second.cause == "missing_write"  # the record took another change afterwards


def test_steps_after_one_that_had_all_it_needs_are_left_out_with_it(desk: Desk) -> None:
    later = [
        gold("get_reservation_details", reservation_id="BBB222"),
        gold("cancel_reservation", reservation_id="BBB222"),
    ]
    messages = user("Cancel AAA111 and BBB222.") + record(**RECENT) + says("That is everything.")
    [row] = desk.add(messages, READ, CANCEL, *later).explained()
    assert [cause.cause for cause in row.causes] == ["missing_write"]


def test_a_name_that_stands_nowhere_is_invented_where_the_due_one_was_never_shown(desk: Desk) -> None:
    mail = calls("update_reservation_contact", {}, reservation_id="AAA111", contact="ann@guess.example")
    due = gold("update_reservation_contact", reservation_id="AAA111", contact="ann@lee.example")
    for words in ("Put my mail into AAA111.", "Put my mail ann@lee.example into AAA111."):
        desk.add(user(words) + record() + mail + says("Done."), READ, due)
    assert [row.causes[0].cause for row in desk.explained()] == ["fabricated_fact", "wrong_argument"]


def test_what_the_reference_says_too_is_no_invention(desk: Desk) -> None:
    mail = calls("update_reservation_contact", {}, reservation_id="AAA111", contact="ann@lee7.example")
    due = gold("update_reservation_contact", reservation_id="AAA111", contact="ann@lee7.example")
    desk.add(user("Put my mail into AAA111.") + record() + mail + says("Done."), READ, due, reward=1.0)
    assert [row.causes for row in desk.explained()] == [[]]


def test_a_record_has_to_be_read_before_a_write_only_where_the_reference_reads_it_before(desk: Desk) -> None:
    due = gold("update_reservation_baggages", reservation_id="AAA111", total_baggages=1)
    bag = calls("update_reservation_baggages", {}, reservation_id="AAA111", total_baggages=1)
    desk.add(user("One bag for AAA111.") + record() + bag + says("Done."), READ, due, reward=1.0)
    desk.add(user("One bag for AAA111.") + bag + record() + says("Done."), due, READ, reward=1.0)
    assert [[cause.cause for cause in row.causes] for row in desk.explained()] == [[], []]
