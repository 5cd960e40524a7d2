"""Proposing, labelling and selecting capabilities, on rollouts of a scripted agent with known flaws."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
from support.needs import further
from support.stages import stage

from captrain.benchmarks.loading import load_benchmark
from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.labelling import label_runs
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.capabilities.rules import CAUSES
from captrain.capabilities.selection import SelectionResult, select
from captrain.capabilities.selection_rule import CandidateAccount, SelectionAccount, replay
from captrain.capabilities.toolbox import kind_of
from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import UserError
from captrain.records import (
    Capability,
    JsonObject,
    Label,
    Message,
    Rollout,
    RolloutLabels,
    Task,
    Verdict,
    load,
    publish,
    read_json,
)
from captrain.reporting import figures, loaders
from captrain.reporting.pages.rollouts import majority_lacks
from captrain.run import Component, compose_spec, publish_spec, spec
from captrain.training.base.demonstrations import SHORTCUTS, take_shortcuts

ROOT = Path(__file__).parents[2]
CAUSE_OF = {
    "check": "missing_lookup",
    "pick": "wrong_record",
    "steps": "missing_write",
    "copy": "wrong_argument",
}
PLANTED = {*CAUSE_OF.values()}
THRESHOLDS = spec.SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=1000)
CANDIDATES = [
    Capability(id=slug, name=cause.name, description=cause.description)
    for slug, cause in CAUSES.items()
    if cause.occasions
]
CANDIDATES = [one.model_copy(update={"details": {"values": ["delivered", "pending", "shipped"]}}) for one in CANDIDATES]


def desk(mix: str) -> CheckedEnvironment:
    target = "captrain.benchmarks.servicedesk.ServiceDesk"
    return load_benchmark(Component.model_validate({"_target_": target, "mix": mix}))


def record(target: CheckedEnvironment, task: Task, actions: Sequence[Message], name: str = "") -> Rollout:
    messages = target.play(task, actions)
    score = target.score(task, messages)
    return Rollout(
        id=name or task.id, environment=target.name, task=task, trial=0, purpose="diagnosis", policy="scripted",
        messages=messages, reference=target.reference(task), score=score,
        outcome="passed" if score.success else "failed",
    )  # fmt: skip


@cache
def sample(mix: str, seed: int, count: int = 240) -> tuple[CheckedEnvironment, list[Rollout]]:
    """Rollouts of an agent that takes each shortcut as often as the demonstrations do."""
    target, rollouts = desk(mix), []
    for task in target.tasks("discovery", count):
        rng = random.Random(f"{seed}/{task.id}")
        taken = {shortcut for shortcut, p in SHORTCUTS.items() if rng.random() < p}
        rollouts.append(record(target, task, take_shortcuts(task.data, taken, rng)))
    return target, rollouts


def labelled(rollout: Rollout, target: CheckedEnvironment) -> dict[str, Label]:
    (labels,) = ProgrammaticAnalyst().label([LabelRequest(0, rollout, CANDIDATES)], target.tools)
    return labels


def verdicts(rollout: Rollout, target: CheckedEnvironment) -> dict[str, Verdict]:
    return {slug: label.verdict for slug, label in labelled(rollout, target).items()}


def lacking(rollout: Rollout, target: CheckedEnvironment) -> set[str]:
    return {slug for slug, verdict in verdicts(rollout, target).items() if verdict == "LACKING"}


def calls(messages: Iterable[Message]) -> list[Any]:
    return [message.get("tool_calls") for message in messages]


def bent(mix: str, taken: set[str], count: int = 150) -> list[tuple[CheckedEnvironment, Rollout, bool]]:
    """Rollouts with exactly these shortcuts taken, and whether that shows in the calls."""
    target = desk(mix)
    found = []
    for task in target.tasks("discovery", count):
        actions = take_shortcuts(task.data, taken, random.Random(task.id))
        found.append((target, record(target, task, actions), calls(actions) != calls(target.reference(task))))
    return found


def find_task(target: CheckedEnvironment, fits: Callable[[dict[str, Any]], bool]) -> Task:
    return next(task for task in target.tasks("discovery", 200) if fits(task.data))


@pytest.mark.parametrize("mix", ["single", "mixed", "compound"])
@pytest.mark.parametrize("shortcut", CAUSE_OF)
def test_a_shortcut_alone_is_charged_to_its_cause_and_no_other(shortcut: str, mix: str) -> None:
    rollouts = bent(mix, {shortcut})
    assert sum(shows for _, _, shows in rollouts) >= 15
    for target, rollout, shows in rollouts:
        assert lacking(rollout, target) - {"reply_wording"} == ({CAUSE_OF[shortcut]} if shows else set()), rollout.id


@pytest.mark.parametrize("pair", [*combinations(CAUSE_OF, 2)], ids="+".join)
def test_shortcuts_taken_together_are_charged_to_their_causes_only(pair: tuple[str, str]) -> None:
    together = {CAUSE_OF[shortcut] for shortcut in pair}
    found = [lacking(rollout, target) - {"reply_wording"} for target, rollout, _ in bent("compound", {*pair})]
    assert together in found
    assert set().union(*found) <= together


@pytest.mark.parametrize("mix", ["mixed", "rare", "compound"])
def test_a_reference_solution_lacks_nothing_and_every_cause_of_the_desk_is_exercised(mix: str) -> None:
    target = desk(mix)
    found = [verdicts(record(target, task, target.reference(task)), target) for task in target.tasks("discovery", 150)]
    assert all("LACKING" not in labels.values() for labels in found)
    exercised = {slug for labels in found for slug, verdict in labels.items() if verdict == "PRESENT"}
    assert exercised == {one.id for one in CANDIDATES}


def test_every_label_carries_evidence_and_points_at_a_message() -> None:
    target, rollouts = sample("mixed", seed=0, count=60)
    for rollout in rollouts:
        for label in labelled(rollout, target).values():
            assert label.evidence
            if label.verdict != "NA":
                assert label.message is not None and rollout.messages[label.message]["role"] == "assistant"


def test_evidence_quotes_the_call() -> None:
    target = desk("single")
    task = find_task(target, lambda data: data["kind"] == "check")
    order, verb = task.data["operations"][0]["order"], task.data["operations"][0]["verb"]
    rollout = record(target, task, take_shortcuts(task.data, {"check"}, random.Random(0)))
    label = labelled(rollout, target)["missing_lookup"]
    assert label.evidence == f"{verb}_order({order}) without reading the record first"


def test_labels_do_not_change_when_the_task_data_is_emptied() -> None:
    target, rollouts = sample("mixed", seed=1, count=80)
    blind = [one.model_copy(update={"task": one.task.model_copy(update={"data": {}})}) for one in rollouts]
    first, second = (label_runs(ProgrammaticAnalyst(), some, target.tools, 2, seed=0) for some in (rollouts, blind))
    assert first == second


def test_a_wrong_record_that_was_not_read_either_shows_both_lacks() -> None:
    target = desk("compound")
    task = find_task(
        target, lambda data: data["kind"] == "check+pick" and data["orders"][0]["id"] != data["operations"][0]["order"]
    )
    rollout = record(target, task, take_shortcuts(task.data, {"check", "pick"}, random.Random(0)))
    assert lacking(rollout, target) & PLANTED == {"missing_lookup", "wrong_record"}


def test_a_record_read_and_then_treated_wrongly_is_a_wrong_choice_of_the_operation() -> None:
    target = desk("single")
    task = find_task(target, lambda data: data["kind"] == "check")
    actions = target.reference(task)
    at = next(i for i, action in enumerate(actions) if "deny_request" in str(action))
    order = task.data["operations"][0]["order"]
    actions[at] = tool_call("cancel_order", {"order_id": order})
    rollout = record(target, task, actions)
    assert lacking(rollout, target) == {"wrong_operation"}


def hand_made(request: str, statuses: Mapping[str, str], operations: Sequence[tuple[str, str, str]]) -> Task:
    """A task of customer 7; operations are (verb, order, zip), order ages are 10 days."""
    data = {
        "kind": "hand-made", "customer": "77", "request": request, "question": "", "human": False, "anonymous": False,
        "orders": [{"id": order, "status": status, "age": "10 days"} for order, status in statuses.items()],
        "operations": [{"verb": verb, "selector": "", "order": order, "zip": code} for verb, order, code in operations],
    }  # fmt: skip
    return Task(id="hand-made", split="discovery", data=data)


LOOK = tool_call("list_orders", {"customer_id": "77"})
CLOSE = {"role": "assistant", "content": "Done. Thank you!"}
REFUNDS = hand_made(
    "Cancel order #10 and cancel the newest order.",
    {"#20": "shipped", "#10": "shipped", "#30": "pending"},
    [("cancel", "#10", ""), ("cancel", "#30", "")],
)
NAMED = hand_made(
    "Cancel order #10 and cancel order #20.",
    {"#30": "pending", "#10": "shipped", "#20": "shipped"},
    [("cancel", "#10", ""), ("cancel", "#20", "")],
)
CODES = hand_made(
    "Change the zip code of the oldest order to 1122 and change the zip code of the newest order to 3344.",
    {"#20": "shipped", "#10": "shipped", "#30": "pending"},
    [("zip", "#10", "1122"), ("zip", "#30", "3344")],
)
UNLIKE = hand_made(
    "Cancel order #10 and change the zip code of the newest order to 3344.",
    {"#20": "shipped", "#10": "shipped", "#30": "pending"},
    [("cancel", "#10", ""), ("zip", "#30", "3344")],
)
WRAPS = hand_made(
    "Gift-wrap order #10 and gift-wrap order #20 and gift-wrap order #30.",
    {"#30": "pending", "#10": "shipped", "#20": "shipped", "#40": "shipped"},
    [("wrap", "#10", ""), ("wrap", "#20", ""), ("wrap", "#30", "")],
)


def on(tool: str, order: str, **more: str) -> Message:
    return tool_call(tool, {"order_id": order, **more})


def at_once(*actions: Message) -> Message:
    return {**actions[0], "tool_calls": [call for action in actions for call in action["tool_calls"]]}


DENY_10 = [on("get_order", "#10"), on("deny_request", "#10")]
CODE_10 = on("update_zip", "#10", zip="1122")
WRAP_10_20 = [on("wrap_order", "#10"), on("wrap_order", "#20")]


@pytest.mark.parametrize(
    ("task", "actions", "expected"),
    [
        pytest.param(
            REFUNDS, [on("cancel_order", "#10")], {"missing_lookup", "missing_write"},
            id="a wrong decision on a named record is not taken for a wrong pick of another",
        ),
        pytest.param(
            REFUNDS, [*DENY_10, on("get_order", "#20"), on("deny_request", "#20")], {"wrong_record"},
            id="a decision on a wrong record is not judged as a decision",
        ),
        pytest.param(
            REFUNDS, [*DENY_10, at_once(on("get_order", "#30"), on("cancel_order", "#30"))],
            {"missing_lookup"}, id="a record read in the same message was not read before",
        ),
        pytest.param(
            NAMED, [*DENY_10, on("get_order", "#30"), on("cancel_order", "#30")], {"wrong_record"},
            id="a slip on a named record is nothing left out",
        ),
        pytest.param(
            NAMED, [*DENY_10, *DENY_10], {"missing_write", "extra_write"},
            id="a record treated twice does not stand for one that was left out",
        ),
        pytest.param(
            CODES, [on("update_zip", "#20", zip="3344")], {"wrong_record", "missing_write"},
            id="the value tells which of two operations was carried out",
        ),
        pytest.param(
            CODES, [CODE_10, on("update_zip", "#10", zip="3344")], {"wrong_record"},
            id="a record treated twice may be a wrong pick",
        ),
        pytest.param(
            UNLIKE, [on("update_zip", "#20", zip="4433")],
            {"wrong_record", "wrong_argument", "missing_write"},
            id="the tool tells which of two operations was carried out",
        ),
        pytest.param(
            CODES, [CODE_10, on("update_zip", "#30", zip="3e44"), on("update_zip", "#30", zip="3344")],
            {"invalid_call"},
            id="a refused write is no write",
        ),
        pytest.param(
            WRAPS, [*WRAP_10_20, on("wrap_order", "#30"), on("wrap_order", "#10")], {"extra_write"},
            id="a write done twice is an extra one",
        ),
        pytest.param(
            WRAPS, [*WRAP_10_20, on("wrap_order", "#20")], {"extra_write", "missing_write"},
            id="a write done twice completes nothing",
        ),
        pytest.param(
            WRAPS, [*WRAP_10_20, on("return_order", "#30")], {"wrong_operation"},
            id="another operation on the right record is neither left out nor extra",
        ),
        pytest.param(
            WRAPS, [*WRAP_10_20, on("wrap_order", "#40")], {"wrong_record"},
            id="a slip at the third record is nothing left out",
        ),
    ],
)  # fmt: skip
def test_each_mismatch_is_charged_once(task: Task, actions: list[Message], expected: set[str]) -> None:
    target = desk("mixed")
    assert lacking(record(target, task, [LOOK, *actions, CLOSE]), target) == expected


def test_other_faults_are_charged_to_the_causes_that_are_not_planted() -> None:
    target = desk("mixed")
    status = find_task(target, lambda data: data["question"] and not data["anonymous"])
    look, read, _ = target.reference(status)
    wrong = next(
        word for word in ("pending", "shipped", "delivered") if word not in target.reference(status)[-1]["content"]
    )
    assert lacking(record(target, status, [look, read, reply(f"The status is {wrong}. Thank you!")]), target) == {
        "missing_information"
    }
    assert lacking(record(target, status, [look, read, reply("Well.")]), target) == {"missing_information"}
    transfer = tool_call("transfer_to_human", {})
    assert lacking(record(target, status, [look, read, transfer]), target) == {"over_escalation", "missing_information"}
    human = find_task(target, lambda data: data["human"])
    assert lacking(record(target, human, [reply("Done. Thank you!")]), target) == {"missing_escalation"}
    asked = find_task(target, lambda data: data["anonymous"])
    invented = tool_call("list_orders", {"customer_id": "00"})
    assert {"missing_confirmation", "invalid_call"} <= lacking(
        record(target, asked, [invented, reply("Done.")]), target
    )
    spelt = reply('<tool_call>\n{"name": "get_order"}\n</tool_call>')
    assert {"invalid_call", "premature_stop"} <= lacking(record(target, status, [look, spelt]), target)
    elsewhere = tool_call("list_orders", {"customer_id": "00"})
    assert lacking(record(target, status, [elsewhere, look, read, target.reference(status)[-1]]), target) == {
        "invalid_call"
    }


def reply(content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ("get_order_details", "read"), ("find_user_id_by_email", "read"), ("calculate", "think"),
        ("searchContacts", "read"), ("transfer_to_human_agents", "handover"), ("escalate_case", "handover"),
        ("transfer_money", "write"), ("modify_user_address", "write"), ("getaway_booking", "unknown"),
        ("check_out_book", "unknown"), ("find_and_replace", "unknown"), ("order_status", "unknown"),
        ("bash", "environment"), ("execute_python_code", "environment"), ("str_replace_editor", "environment"),
        ("web_search", "environment"), ("Read", "environment"), ("search_direct_flight", "read"),
        ("send_email", "write"), ("code_review_assignments", "unknown"), ("stop", "environment"),
        ("email_get_message", "read"), ("email_search_messages", "read"), ("email_delete_message", "write"),
        ("email_customer", "write"), ("stop_server", "write"),
    ],
)  # fmt: skip
def test_what_a_tool_does_is_told_by_its_name(tool: str, kind: str) -> None:
    assert kind_of(tool) == kind


def selected(target: CheckedEnvironment, rollouts: Sequence[Rollout], seed: int = 0) -> SelectionResult:
    candidates, labels = label_runs(ProgrammaticAnalyst(), rollouts, target.tools, 10, seed)
    return select(labels, candidates, THRESHOLDS, 4, seed)


@pytest.mark.parametrize("seed", further(range(3)))
@pytest.mark.parametrize(("mix", "count"), [("single", 240), ("mixed", 240), ("rare", 720)])
def test_exactly_the_planted_capabilities_are_selected(mix: str, count: int, seed: int) -> None:
    found = selected(*sample(mix, seed, count), seed)
    assert {one.id for one in found.capabilities} == PLANTED
    assert [row["id"] for row in found.report["candidates"] if row["selected"]] == [
        one.id for one in found.capabilities
    ]


@pytest.mark.parametrize("seed", range(4))
def test_where_planted_failures_are_few_a_missed_one_is_explained_and_no_distractor_selected(seed: int) -> None:
    found = selected(*sample("rare", seed), seed)
    assert {one.id for one in found.capabilities} <= PLANTED
    missed = [row for row in found.report["candidates"] if row["id"] in PLANTED and not row["selected"]]
    assert len(missed) <= 2
    assert all("coverage below" in row["reason"] or "no passed rollout" in row["reason"] for row in missed)


def test_slips_that_are_no_habit_are_proposed_and_rejected() -> None:
    target, rollouts = sample("mixed", seed=0)
    slipped = []
    for rollout in rollouts:
        rng = random.Random(f"slip {rollout.id}")
        actions = [message for message in rollout.messages if message["role"] == "assistant"]
        at = rng.randrange(len(actions))
        if rng.random() < 0.08:
            actions[at] = rng.choice(
                [actions[at - 1], reply("Well."), tool_call("transfer_to_human", {}), tool_call("get_order", {})]
            )
        slipped.append(record(target, rollout.task, actions))
    found = selected(target, slipped)
    assert {one.id for one in found.capabilities} == PLANTED
    rejected = {row["id"] for row in found.report["candidates"] if not row["selected"]}
    assert {"invalid_call", "premature_stop", "missing_information"} <= rejected


def test_examples_are_failed_rollouts_that_lack_the_capability() -> None:
    target, rollouts = sample("mixed", seed=0)
    by_id = {rollout.id: rollout for rollout in rollouts}
    candidates, _ = label_runs(ProgrammaticAnalyst(), rollouts, target.tools, 3, seed=0)
    for candidate in candidates:
        assert 1 <= len(candidate.examples) <= 5
        for name in candidate.examples:
            assert by_id[name].outcome == "failed"
            assert candidate.id in lacking(by_id[name], target)


def test_candidates_say_which_tools_and_arguments_they_are_about() -> None:
    target, rollouts = sample("mixed", seed=0)
    candidates, _ = label_runs(ProgrammaticAnalyst(), rollouts, target.tools, 3, seed=0)
    details = {candidate.id: candidate.details for candidate in candidates}
    assert details["wrong_argument"] == {"tools": ["update_zip"], "arguments": ["zip"], "values": []}
    assert details["missing_lookup"]["tools"] == [
        "cancel_order",
        "deny_request",
        "get_order",
        "return_order",
    ]
    assert details["wrong_record"]["arguments"] == ["order_id"]


def test_a_rollout_that_ended_in_an_error_is_never_counted() -> None:
    target, rollouts = sample("mixed", seed=0, count=80)
    fault = {"outcome": "error", "score": None, "error": "worker died"}
    errors = [rollout.model_copy(update=fault | {"id": f"error {i}"}) for i, rollout in enumerate(rollouts[:30])]
    with_errors = label_runs(ProgrammaticAnalyst(), [*errors, *rollouts], target.tools, 3, seed=0)
    assert with_errors == label_runs(ProgrammaticAnalyst(), rollouts, target.tools, 3, seed=0)


def test_each_run_counts_its_own_resample_and_labels_every_rollout() -> None:
    target, rollouts = sample("mixed", seed=0, count=80)
    _, rows = label_runs(ProgrammaticAnalyst(), rollouts, target.tools, 3, seed=0)
    counts = {run: [row.count for row in rows if row.run == run] for run in range(3)}
    assert all(len(drawn) == 80 and sum(drawn) == 80 and 0 in drawn for drawn in counts.values())
    assert counts[0] != counts[1] != counts[2]


def test_a_test_task_among_the_rollouts_is_refused() -> None:
    target, rollouts = sample("mixed", seed=0, count=10)
    task = target.tasks("test", 1)[0]
    with pytest.raises(UserError, match="test split but was given to diagnosis"):
        label_runs(ProgrammaticAnalyst(), [*rollouts, record(target, task, target.reference(task))], target.tools, 2, 0)


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_without_both_outcomes_there_is_one_message_with_a_remedy(outcome: Literal["passed", "failed"]) -> None:
    target, rollouts = sample("mixed", seed=0, count=40)
    alike = [rollout for rollout in rollouts if rollout.outcome == outcome]
    with pytest.raises(UserError, match=rf"of {len(alike)} diagnostic (.|\n)*rollouts\.tasks"):
        label_runs(ProgrammaticAnalyst(), alike, target.tools, 2, 0)


class WaveringAnalyst:
    """Says LACKING of every failed rollout, in even runs only; proposes a second capability in run 1 only."""

    deterministic = False

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[dict[str, Any]]) -> list[list[Capability]]:
        slugs = [(["a"], ["a", "b"])[run % 2] for run in range(len(samples))]
        return [[Capability(id=slug, name=slug, description=slug) for slug in some] for some in slugs]

    def label(self, requests: Sequence[LabelRequest], tools: list[dict[str, Any]]) -> list[dict[str, Label]]:
        return [self._label(one) for one in requests]

    def _label(self, one: LabelRequest) -> dict[str, Label]:
        verdict: Verdict = "LACKING" if one.rollout.outcome == "failed" and one.run % 2 == 0 else "PRESENT"
        return {capability.id: Label(verdict=verdict, evidence="so") for capability in one.capabilities}


def test_an_analyst_that_wavers_is_asked_in_every_run_and_counts_in_parts() -> None:
    target, rollouts = sample("mixed", seed=0, count=40)
    candidates, rows = label_runs(WaveringAnalyst(), rollouts, target.tools, 4, seed=0)
    found = select(rows, candidates, THRESHOLDS.model_copy(update={"agreement": 2}), 4, seed=0)
    first, second = found.report["candidates"]
    assert (first["id"], first["runs_retained"], first["gap"]) == ("a", 2, 0.5)
    assert (second["id"], second["per_run"][0]) == ("b", {"gap": None, "coverage": None})
    assert "not proposed in 2" in second["reason"]


LETTERS: dict[str, Verdict] = {"L": "LACKING", "P": "PRESENT", "-": "NA"}


def labels_of(
    capabilities: Mapping[str, tuple[str, str]], runs: int = 10
) -> tuple[list[RolloutLabels], list[Capability]]:
    """Labels from one string for the failed and one for the passed rollouts, one letter each, alike in every run."""
    candidates = [Capability(id=slug, name=slug, description=slug) for slug in capabilities]
    rows = []
    failed, passed = (len(strings) for strings in next(iter(capabilities.values())))
    for run in range(runs):
        for i in range(failed + passed):
            labels = {slug: Label(verdict=LETTERS["".join(strings)[i]]) for slug, strings in capabilities.items()}
            outcome: Literal["passed", "failed"] = "failed" if i < failed else "passed"
            rows.append(RolloutLabels(run=run, rollout=f"r{i}", outcome=outcome, count=1, labels=labels))
    return rows, candidates


def rows_of(capabilities: Mapping[str, tuple[str, str]], count: int = 4, **changes: object) -> dict[str, JsonObject]:
    found = select(*labels_of(capabilities), THRESHOLDS.model_copy(update=changes), count, seed=0)
    return {row["id"]: {**row} for row in found.report["candidates"]}


def test_gap_and_coverage_are_the_papers() -> None:
    row = rows_of({"a": ("LLLLLP----" * 4, "LPPPPPPP--" * 4)})["a"]
    assert row["er_failed"] == pytest.approx(5 / 6, abs=1e-6)
    assert row["er_passed"] == pytest.approx(1 / 8)
    assert row["gap"] == pytest.approx(5 / 6 - 1 / 8, abs=1e-6)
    assert row["coverage"] == 0.5
    assert row["per_run"] == [{"gap": row["gap"], "coverage": row["coverage"]}] * 10
    assert row["gap_low"] < row["gap"] < row["gap_high"]
    assert row["selected"] and row["runs_retained"] == 10


def test_a_run_weighs_rollouts_by_its_resample_and_the_pool_counts_each_once() -> None:
    rows, candidates = labels_of({"a": ("LP-", "LPP")})
    weighted = [
        row.model_copy(update={"count": weight}) for row, weight in zip(rows, [3, 1, 0, 0, 1, 2] * 10, strict=True)
    ]
    (row,) = select(weighted, candidates, THRESHOLDS, 4, seed=0).report["candidates"]
    assert row["per_run"] == [{"gap": 0.75, "coverage": 0.75}] * 10
    assert (row["er_failed"], row["er_passed"], row["coverage"]) == (0.5, 0.333333, 0.333333)


def test_a_rate_without_a_denominator_is_undefined_and_selects_nothing() -> None:
    rows = rows_of({"a": ("L" * 40, "-" * 40), "b": ("-" * 40, "P" * 40), "c": ("-" * 40, "-" * 40)})
    assert (rows["a"]["er_passed"], rows["a"]["gap"], rows["a"]["gap_low"]) == (None, None, None)
    assert (rows["a"]["er_failed"], rows["a"]["coverage"]) == (1.0, 1.0)
    assert "undefined: no passed rollout exercised it in 10" in rows["a"]["reason"]
    assert "undefined: no failed rollout exercised it in 10" in rows["b"]["reason"]
    assert rows["b"]["coverage"] == 0.0
    assert all(row["resamples_undefined"] == 1000 and not row["selected"] for row in rows.values())


def test_resamples_without_a_gap_are_dropped_and_counted() -> None:
    few = rows_of({"a": ("L" * 40, "P" * 3 + "-" * 37)})["a"]
    assert 0 < few["resamples_undefined"] < 500
    assert few["gap_low"] == 1.0
    hardly = rows_of({"a": ("L" + "-" * 39, "P" + "-" * 39)}, coverage=0.01)["a"]
    assert (hardly["gap"], hardly["runs_retained"], hardly["gap_low"]) == (1.0, 10, None)
    assert hardly["resamples_undefined"] > 500
    assert hardly["reason"] == f"gap undefined in {hardly['resamples_undefined']} of 1000 resamples"


def test_a_wide_gap_on_few_rollouts_is_rejected_by_its_lower_bound() -> None:
    row = rows_of({"a": ("LLLLL" + "PPPPP" + "-" * 30, "L" + "PPPPP" + "-" * 34)})["a"]
    assert row["gap"] > 0.2 and row["coverage"] > 0.1 and row["runs_retained"] == 10
    assert not row["selected"]
    assert "lower bound of the gap" in row["reason"]


def test_thresholds_are_reached_where_they_are_met_exactly() -> None:
    edge = {"a": ("LLLLLLLPPP" * 20, "LLLLLPPPPP" * 20)}
    assert rows_of(edge)["a"]["runs_retained"] == 10
    assert rows_of(edge, delta=0.2001)["a"]["runs_retained"] == 0


def test_candidates_are_ranked_by_coverage_times_gap_and_ties_by_id() -> None:
    strong, weak = ("L" * 30 + "P" * 10, "P" * 40), ("L" * 10 + "-" * 30, "P" * 40)
    rows = rows_of({"z": weak, "m": strong, "b": strong, "none": ("P" * 40, "P" * 40)}, count=2)
    assert [*rows] == ["b", "m", "z", "none"]
    assert [row["selected"] for row in rows.values()] == [True, True, False, False]
    assert rows["z"]["reason"] == "retained, but it ranks 3 and 2 are kept"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with a derived spec and diagnostic rollouts, in which the two stages can run."""
    _, rollouts = sample("mixed", seed=0)
    publish(tmp_path / "artifacts/rollouts/discovery.jsonl", rollouts)
    publish_spec(compose_spec("default", 0, [], ROOT / "conf"), tmp_path / "results/spec.yaml")
    return tmp_path


def run_stage(workspace: Path, name: str) -> subprocess.CompletedProcess[str]:
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); assert 'torch' not in sys.modules"
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT / f"stages/{name}.py")],
        cwd=workspace, env={"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}, capture_output=True, text=True,
    )  # fmt: skip


def run_here(workspace: Path, name: str) -> int:
    """Run a stage in this process; its exit status."""
    (workspace / "stages").mkdir(exist_ok=True)
    shutil.copy(ROOT / f"stages/{name}.py", workspace / "stages")
    return stage(workspace, name)


def test_thresholds_replay_from_cached_labels_in_seconds_and_to_the_byte(workspace: Path) -> None:
    done = run_stage(workspace, "labels")
    assert done.returncode == 0, done.stderr
    assert "240 rollouts, 0 left out as faulty" in done.stdout
    (workspace / "artifacts/rollouts/discovery.jsonl").unlink()
    results = workspace / "results/capabilities"
    before = os.times()
    done = run_stage(workspace, "capabilities")
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) < 10
    assert done.returncode == 0, done.stderr
    first = {path.name: path.read_bytes() for path in results.iterdir()}
    assert {*first} == {"selection.json", "capabilities.jsonl", "stability.csv"}
    assert {one.id for one in load(results / "capabilities.jsonl", Capability)} == PLANTED
    assert all(slug in done.stdout for slug in PLANTED)
    run_stage(workspace, "capabilities")
    assert {path.name: path.read_bytes() for path in results.iterdir()} == first


def test_what_the_stages_write_is_what_loaders_report_and_figures_read(workspace: Path) -> None:
    for name in ("labels", "capabilities"):
        assert run_here(workspace, name) == 0
    rows = load(workspace / "artifacts/labels/labels.jsonl", RolloutLabels)
    labels = loaders.load_labels(workspace)
    assert len(labels) == sum(len(row.labels) for row in rows) > 0
    assert {*labels.run} == {*range(10)} and {*labels.outcome} == {"passed", "failed"}
    assert {*labels.verdict} == {"NA", "PRESENT", "LACKING"} and labels.message.notna().any()
    selection, capabilities = loaders.load_selection(workspace), loaders.load_capabilities(workspace)
    candidates = load(workspace / "results/labels/candidates.jsonl", Capability)
    assert {*selection.id} == {candidate.id for candidate in candidates} == {*labels.capability}
    selected = [capability.id for capability in capabilities]
    assert [*selection[selection.selected].id] == selected == [*selection.id[: len(selected)]]
    account = read_json(workspace / "results/capabilities/selection.json", SelectionAccount)
    assert replay(account, THRESHOLDS.delta, THRESHOLDS.coverage) == selected
    # The page of a failed rollout names what its labels find lacking.
    lacking = {rollout: {lack.capability for lack in lacks} for rollout, lacks in majority_lacks(rows).items()}
    failed = labels[(labels.outcome == "failed") & (labels.verdict == "LACKING")]
    assert lacking == failed.groupby("rollout").capability.agg(set).to_dict()
    assert figures.stability(workspace / "results").axes and figures.thresholds(workspace / "results").axes


def test_when_nothing_is_selected_the_results_say_so_and_are_still_written(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = compose_spec("default", 0, ["selection.coverage=0.9"], ROOT / "conf")
    run_here(workspace, "labels")
    publish_spec(strict, workspace / "results/spec.yaml")
    assert run_here(workspace, "capabilities") == 0
    assert "0 of 5 candidates selected: none" in capsys.readouterr().out
    assert load(workspace / "results/capabilities/capabilities.jsonl", Capability) == []
    report = json.loads((workspace / "results/capabilities/selection.json").read_text())
    assert report["thresholds"]["coverage"] == 0.9
    assert all("coverage below 0.9" in row["reason"] for row in report["candidates"])


def test_a_stage_without_its_input_ends_in_one_message(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(workspace, "capabilities") == 2
    said = capsys.readouterr().err
    assert "labels.jsonl is missing" in said and "remedy:" in said


def test_a_run_whose_gap_is_undefined_has_no_say() -> None:
    rows, candidates = labels_of({"a": ("L" * 20 + "-" * 20, "P" + "-" * 39)})
    exercised = next(row.rollout for row in rows if row.outcome == "passed" and row.labels["a"].verdict == "PRESENT")

    def undefined_in(runs: int) -> CandidateAccount:
        drawn = [
            row.model_copy(update={"count": 0 if row.rollout == exercised and row.run < runs else 1}) for row in rows
        ]
        return select(drawn, candidates, THRESHOLDS, 4, seed=0).report["candidates"][0]

    assert undefined_in(3)["runs_retained"] == 7
    assert undefined_in(6)["runs_retained"] == 4
    assert all("needed" not in undefined_in(runs)["reason"] for runs in (3, 6, 9))
    assert "8 needed" in undefined_in(10)["reason"]
