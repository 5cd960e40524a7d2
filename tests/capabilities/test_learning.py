"""Kinds of tools and keys of records are learnt from rollouts, whatever tools are called and look like."""

import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.domains import cellar
from support.domains.copies import copy_domain
from support.domains.domain import tool

from captrain.benchmarks import open_worlds
from captrain.benchmarks.spoken import ContractWorld
from captrain.capabilities import ProgrammaticAnalyst, Toolbox, label_runs, learn_toolbox, learning, select
from captrain.capabilities.learning import PASSES, VARIED
from captrain.contract import CheckedEnvironment, tool_call
from captrain.diagnosis import needed_causes
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import derive
from captrain.errors import InfrastructureError, UserError
from captrain.records import Capability, JsonObject, Message, Rollout, Score, Task
from captrain.run import Component, SelectionSettings

RULE = SelectionSettings(
    delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200, ranking="product"
)
HABITS = cellar.Demonstrations.habits
READING = tool("get_reading", "A spot of a wheel.", "wheel", "spot")


def target(tools: Sequence[JsonObject] = cellar.TOOLS, **declared: Any) -> CheckedEnvironment:
    environment: Any = type("Cellar", (cellar.Cellar,), {"tools": [*tools], **declared})()
    return CheckedEnvironment(environment, "support.domains.cellar", "cellar")


def played(agent: CheckedEnvironment, count: int, habits: Collection[str] | None = None) -> list[Rollout]:
    """Rollouts of an agent that has some habits, or all in the demonstrations' shares."""
    rollouts = []
    for task in agent.tasks("discovery", count):
        draw = random.Random(task.id)
        lapses = {habit for habit, share in HABITS.items() if draw.random() < share} if habits is None else {*habits}
        messages = agent.play(task, cellar.Cellar().solution(task.data, lapses))
        score = agent.score(task, messages)
        rollouts.append(
            Rollout(
                id=task.id, environment="cellar", task=task, trial=0, purpose="diagnosis", policy="script",
                messages=messages, reference=agent.reference(task), score=score,
                outcome="passed" if score.success else "failed",
            )
        )  # fmt: skip
    return rollouts


def selected(agent: CheckedEnvironment, rollouts: Sequence[Rollout]) -> tuple[set[str], list[Capability]]:
    with open_worlds(target=agent) as worlds:
        candidates, labels = label_runs(
            ProgrammaticAnalyst(), rollouts, agent.declared_tools, 10, seed=0, worlds=worlds
        )
    report = select(labels, candidates, RULE, count=10, seed=0).report
    return {entry["id"] for entry in report["candidates"] if entry["selected"]}, candidates


def requiring(*required: str) -> list[JsonObject]:
    """The cellar's tools, of whose look-up only these arguments are required."""
    tools = [*cellar.TOOLS]
    function = tools[1]["function"]
    tools[1] = {**tools[1], "function": {**function, "parameters": {**function["parameters"], "required": [*required]}}}
    return tools


@pytest.mark.parametrize("required", [(), ("wheel",), ("spot",), ("wheel", "spot")])
def test_planted_habits_are_selected_and_nothing_else_whatever_a_schema_requires(required: tuple[str, ...]) -> None:
    agent = target(requiring(*required))
    slugs, candidates = selected(agent, played(agent, 150))
    assert slugs == {"missing_lookup", "wrong_record", "missing_write"}
    assert candidates[0].details["kinds"] == {"roll": "read", "gauge": "read"}


def test_what_an_agent_never_does_right_is_selected_by_proof_where_no_contrast_can_show_it() -> None:
    agent = target()
    rollouts = played(agent, 150, {"first", "stop"})
    with open_worlds(target=agent) as worlds:
        candidates, labels = label_runs(
            ProgrammaticAnalyst(), rollouts, agent.declared_tools, 10, seed=0, worlds=worlds
        )
    needs = needed_causes(rollouts, agent, None)
    assert {*needs} == {rollout.id for rollout in rollouts if rollout.outcome == "failed"}
    by_contrast, by_proof = (
        select(labels, candidates, RULE.model_copy(update={"proof": share}), count=10, seed=0, needs=needs)
        for share in (None, 0.1)
    )
    assert [capability.id for capability in by_contrast.capabilities] == ["wrong_record"]
    assert [capability.id for capability in by_proof.capabilities] == ["wrong_record", "missing_write"]
    assert [c["id"] for c in by_proof.report["candidates"] if c.get("by_proof")] == ["missing_write"]


ASK: Message = {"role": "user", "content": "Do it."}


def made(tool: str, result: str = '{"ok": true}', **arguments: str) -> list[Message]:
    return [tool_call(tool, arguments), {"role": "tool", "content": result}]


def rollout(messages: Sequence[Message], reference: Sequence[Message] = (), name: str = "r") -> Rollout:
    task = Task(id=f"cellar/{name}", split="discovery", data={})
    return Rollout(
        id=name, environment="cellar", task=task, trial=0, purpose="diagnosis", policy="log", messages=[*messages],
        reference=[*reference], outcome="passed", score=Score(reward=1.0, success=True),
    )  # fmt: skip


def test_a_record_goes_by_one_name_though_its_look_up_and_its_change_call_it_differently() -> None:
    tools = [tool("get_reading", "", "id", "spot"), tool("turn", "", "wheel", "days")]
    messages = [ASK, *made("get_reading", '{"reading": "soft"}', id="W7", spot="core"), *made("turn", wheel="W7")]
    assert learn_toolbox([rollout(messages)], tools).keys == {"wheel": "wheel", "id": "wheel"}


def test_what_a_search_was_told_is_no_key_beside_what_opened_a_record() -> None:
    tools = [tool("find_wheels", "", "town"), READING, tool("ship", "", "wheel", "town")]
    search, ship = made("find_wheels", '["W7"]', town="Cork"), made("ship", wheel="W7", town="Cork")
    opening = made("get_reading", '{"reading": "soft"}', wheel="W7", spot="core")
    assert learn_toolbox([rollout([ASK, *search, *opening, *ship])], tools).keys == {"wheel": "wheel"}
    assert learn_toolbox([rollout([ASK, *search, *ship])], tools).keys == {"town": "town"}


def test_a_key_is_told_in_half_of_the_changes_of_references_or_of_rollouts() -> None:
    reading, tools = made("get_reading", '{"reading": "soft"}', wheel="W7", spot="core"), [READING, cellar.TOOLS[2]]
    careless = [rollout([ASK, *reading, *made("turn", wheel="W8", days="3")], name=str(at)) for at in range(2)]
    careful = rollout([ASK, *reading, *made("turn", wheel="W7", days="3")])
    taught = careless[0].model_copy(update={"reference": [reading[0], tool_call("turn", {"wheel": "W7"})]})
    for rollouts, keys in (([*careless], set()), ([*careless, careful], set()), ([careless[0], careful], {"wheel"})):
        assert {*learn_toolbox(rollouts, tools).keys} == keys
    assert {*learn_toolbox([*careless, taught], tools).keys} == {"wheel"}


def test_a_tool_does_what_is_said_then_declared_then_shown_by_replay_then_by_rollouts_then_by_its_name() -> None:
    agent = target()
    skilled, hasty = played(agent, 40, ()), played(agent, 40, ("guess",))
    lucky = [one for one in hasty if one.outcome == "passed" and "gauge" in str(one.reference)]
    assert learn_toolbox(skilled, agent.tools).kind("gauge") == "unknown"
    assert len(lucky) >= PASSES and len({str(one.task.data["wheels"]) for one in skilled}) >= VARIED
    assert learn_toolbox([*skilled, *hasty], agent.tools).kind("gauge") == "read"
    with open_worlds(target=agent) as worlds:
        shown = learn_toolbox(skilled, agent.tools, worlds)
        assert {tool: shown.kind(tool) for tool in shown.schemas} == {
            "roll": "read", "gauge": "read", "turn": "write", "wash": "write", "label": "write"
        }  # fmt: skip
    declaring = target(kinds={"gauge": "write", "roll": "handover"})
    with open_worlds(target=declaring) as worlds:
        toolbox = learn_toolbox(skilled, declaring.declared_tools, worlds, {"gauge": "read"})
    assert (toolbox.kind("gauge"), toolbox.kind("roll"), toolbox.kind("turn")) == ("read", "handover", "write")


def test_mcps_hint_is_a_declaration_and_what_a_benchmark_declares_is_never_shown_to_the_agent() -> None:
    hinted = [{**cellar.TOOLS[1], "annotations": {"readOnlyHint": True}}, *cellar.TOOLS[2:]]
    assert Toolbox(hinted).kind("gauge") == "read" and Toolbox(cellar.TOOLS).kind("gauge") == "unknown"
    declaring = target(kinds={"gauge": "read"})
    assert Toolbox(declaring.declared_tools).kind("gauge") == "read" and declaring.tools == cellar.TOOLS


def test_a_look_up_at_another_spot_is_not_the_one_that_was_due() -> None:
    agent = target()
    rollouts = played(agent, 60, ())
    one = next(one for one in rollouts if one.task.data["kind"] == "turn" and one.task.data["named"])
    messages = json.loads(json.dumps(one.messages).replace('"core"', '"rind"'))
    other = one.model_copy(update={"id": "other", "messages": messages, "outcome": "failed"})
    _, candidates = selected(agent, [*rollouts, other])
    lacking = {candidate.id: candidate.examples for candidate in candidates}
    assert lacking["missing_lookup"] == ["other"]


def test_an_environment_is_derived_with_the_kinds_that_were_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Component.model_validate({"_target_": f"{copy_domain('cellar', tmp_path).stem}:Cellar"})
    monkeypatch.syspath_prepend(tmp_path)
    kinds = {"roll": "read", "gauge": "read"}
    lacking = Capability(id="missing_lookup", name="Missing look-up", description="Looks.", details={"kinds": kinds})
    text = derive(Brief(lacking, cellar.TOOLS, benchmark=own), own, [])
    assert "WRITES = ('turn', 'wash', 'label')" in text


@pytest.mark.parametrize("trouble", [UserError("no such call", "none"), InfrastructureError("the worker died")])
def test_a_world_that_refuses_a_reference_shows_nothing_of_tools_and_the_others_are_played(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, plays = target(), list[int]()
    play = ContractWorld.play

    def refusing(world: ContractWorld, replays: Any) -> Any:
        plays.append(1)
        if len(plays) % 2:
            raise trouble
        return play(world, replays)

    monkeypatch.setattr(ContractWorld, "play", refusing)
    with open_worlds(target=agent) as worlds:
        shown = learn_toolbox(played(agent, 40, ()), agent.tools, worlds)
        assert len(plays) > 2 and [shown.kind(tool) for tool in ("gauge", "turn")] == ["read", "write"]


def test_habits_are_selected_where_no_task_has_a_reference_and_nothing_else() -> None:
    agent = target(reference=lambda _, task: [])
    rollouts = [rollout.model_copy(update={"reference": []}) for rollout in played(target(), 200)]
    names, candidates = selected(agent, rollouts)
    # A reading that is guessed is right in a third: so few rollouts need not tell that from luck.
    assert {"wrong_record", "missing_write"} <= names <= {"missing_lookup", "wrong_record", "missing_write"}
    tools = {tool["function"]["name"] for tool in agent.tools}
    by_id = {candidate.id: candidate for candidate in candidates}
    assert {*by_id["missing_write"].details["tools"]} <= tools and by_id["missing_write"].examples


TICKETS = [tool("ward_roster", "", "ward"), tool("page", "", "nurse", "ward"), tool("open_case", "", "ward")]


def shifts(lookup: str, later: tuple[str, ...] = (), answer: str = '{"id": "N7"}') -> list[Rollout]:
    """Three passed rollouts that page whom a tool names, and two failed ones that page another without it."""
    rollouts = []
    for at in range(5):
        named = made(lookup, json.dumps({"nurse": f"N{at}"}), ward=f"W{at}")
        page, other = made("page", ward=f"W{at}", nurse=f"N{at}"), made("page", answer, ward=f"W{at}", nurse="N9")
        ends = [message for name in later for message in made(name, ward=f"W{at}")]
        one = rollout([ASK, *(named + page if at < 3 else other), *ends], [named[0], page[0], *ends[::2]], str(at))
        rollouts.append(one if at < 3 else one.model_copy(update={"outcome": "failed"}))
    return rollouts


def test_what_names_a_value_that_a_change_is_made_without_and_wrongly_is_a_look_up_whatever_its_name() -> None:
    assert learn_toolbox(shifts("ward_roster"), TICKETS).kind("ward_roster") == "read"
    assert learn_toolbox(shifts("ward_roster")[:4], TICKETS).kind("ward_roster") == "unknown", "one may be a slip"
    told = [one.model_copy(update={"messages": [*one.reference]}) for one in shifts("ward_roster")]
    assert learn_toolbox(told, TICKETS).kind("ward_roster") == "unknown", "no answer shows that it tells anything"


def test_what_a_change_creates_and_the_last_call_of_a_reference_are_no_look_ups() -> None:
    refused = shifts("open_case", answer='{"error": "no such nurse"}')
    assert learn_toolbox(refused, TICKETS).kind("open_case") == "write"
    assert learn_toolbox(shifts("open_case"), TICKETS).kind("open_case") == "read"
    assert learn_toolbox(shifts("open_case", ("open_case",)), TICKETS).kind("open_case") == "write"


def test_a_replay_that_misses_a_tool_outweighs_what_its_answers_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: Any = SimpleNamespace(of=lambda _: SimpleNamespace(kinds={}))
    for kind, learnt in (("write", "unknown"), ("read", "read")):
        monkeypatch.setattr(learning, "_kinds_by_replay", lambda *_, kind=kind: {"ward_roster": kind})
        assert learn_toolbox(shifts("ward_roster"), TICKETS, worlds).kind("ward_roster") == learnt
