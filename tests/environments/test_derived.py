"""Environments derived from a benchmark without a model or a template."""

from pathlib import Path
from typing import Any

import pytest
from support.domains.copies import copy_domain
from support.needs import further
from support.rooms import Rooms

from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import load_benchmark
from captrain.capabilities import CAUSES
from captrain.contract import load_file, tool_call
from captrain.environments.checks import demands_words
from captrain.environments.evidence import make_standard
from captrain.environments.passport import run_checks
from captrain.environments.synthesis import make_brief, synthesize_each
from captrain.environments.synthesizer import Brief, NoTemplate
from captrain.environments.templates import TemplateSynthesizer, derivable, derive
from captrain.errors import EnvironmentFault, UserError
from captrain.planning.estimate import Node
from captrain.planning.plan import make_plan
from captrain.records import Capability, Message
from captrain.run import Component, ModelAccess, compose_spec
from captrain.run.machine import Machine

CONF = Path(__file__).parents[2] / "conf"
ROOMS = Component.model_validate({"_target_": "support.rooms.Rooms", "busy": 4})
RECORDS = {"tools": ["move_meeting", "cancel_meeting", "book_room"], "arguments": ["meeting_id"]}
VALUES = {"tools": ["move_meeting", "book_room"], "arguments": ["time", "room"]}
DETAILS = {"wrong_record": RECORDS, "wrong_computation": RECORDS, "wrong_argument": VALUES}


def brief(name: str, benchmark: Component = ROOMS) -> Brief:
    capability = Capability(id=name, name=name, description="d", details=DETAILS.get(name, {}))
    return Brief(capability, Rooms.tools, (), benchmark)


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(TemplateSynthesizer(ModelAccess()).synthesize(brief(name), []))
    return path


@pytest.mark.parametrize(
    "name", further(sorted(name for name, kind in CAUSES.items() if kind.step and name != "missing_lookup"), 3)
)
def test_what_is_derived_for_a_family_passes_every_check_that_needs_no_model(tmp_path: Path, name: str) -> None:
    """`missing_lookup` does not occur in this benchmark."""
    bounds = compose_spec("default", 0, ["environments.seeds=20"], CONF).environments
    standard = make_standard(load_benchmark(ROOMS), 20, bounds)
    path = written(tmp_path, name)
    failed = [check for check in run_checks(load_file(path), path, standard, ()) if not check.passed]
    assert not failed


def test_tasks_are_the_benchmarks_own_training_tasks_that_ask_for_the_capability(tmp_path: Path) -> None:
    target = load_file(written(tmp_path, "missing_write"))
    own = {task["id"]: task for task in Rooms(busy=4).tasks("training", 500)}
    for task in target.tasks("training", 50):
        assert own[task.id]["data"] == task.data and len(task.data["wishes"]) > 1
    with pytest.raises(UserError, match="there is no split test"):
        target.tasks("test", 1)


def test_the_capabilitys_step_is_paid_without_success_and_trying_everything_is_not(tmp_path: Path) -> None:
    target = load_file(written(tmp_path, "wrong_argument"))
    task = next(task for task in target.tasks("training", 50) if len(task.data["wishes"]) == 1)
    [[tool, arguments]] = task.data["wishes"]
    right, closing = tool_call(tool, arguments), target.reference(task)[-1]
    other = next(m["id"] for m in task.data["meetings"] if m["id"] != arguments["meeting_id"])
    rewards = {
        "solved": [right, closing],
        "step alone": [right],
        "wrong": target.environment.broken(task.model_dump()),  # pyright: ignore[reportAttributeAccessIssue]
        "everything": [right, tool_call("cancel_meeting", {"meeting_id": other}), closing],
        "nothing": [closing],
    }
    paid = {kind: target.score(task, target.play(task, messages)).reward for kind, messages in rewards.items()}
    assert paid == {"solved": 1.0, "step alone": 0.5, "wrong": pytest.approx(0.15), "everything": 0.0, "nothing": 0.0}


def test_environments_are_synthesized_for_a_benchmark_without_template_and_what_has_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base solves every other rollout. A capability of words has no environment; the others continue."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("captrain.environments.synthesis.is_own_text", lambda _text: True)  # no sandbox, which is slow
    # A busy machine must not end the examination.
    long = "environments.seconds=600"
    settings = ["environments.seeds=30", "environments.groups=4", "environments.group_size=4", long]
    spec = compose_spec("default", 0, settings, CONF)
    target = load_benchmark(ROOMS)
    standard = make_standard(target, 20, spec.environments)

    capabilities = [
        Capability(id=name, name=name, description="d", details=DETAILS.get(name, {}))
        for name in ("wrong_argument", "reply_wording")
    ]
    briefs = [make_brief(capability, target.tools, [], ROOMS) for capability in capabilities]
    machine = Machine(workers=1, batch=1)
    policy = ScriptedPolicy(skill=0.5)
    [result] = synthesize_each(briefs, TemplateSynthesizer(ModelAccess()), policy, standard, machine, 0)
    assert result.passed, result.best.passport.complaints()
    assert "no environment can be derived for reply_wording" in capsys.readouterr().out
    with pytest.raises(UserError, match="for reply_wording"):
        synthesize_each(briefs[1:], TemplateSynthesizer(ModelAccess()), policy, standard, machine, 0)


def test_a_benchmark_that_stands_on_more_than_its_file_is_refused_by_the_plan() -> None:
    with pytest.raises(UserError, match="imports .*captrain"):
        derivable(Component.model_validate({"_target_": "captrain.benchmarks.toolsandbox.ToolSandbox"}))
    spec = compose_spec("default", 0, ["benchmark=toolsandbox"], CONF)
    problems = [error.problem for error in make_plan(spec, Node()).refusals]
    assert any("no environment can be derived from captrain.benchmarks.toolsandbox" in problem for problem in problems)
    other = compose_spec(
        "default", 0, ["benchmark=toolsandbox", "synthesizer=openai", "synthesizer.name=some-model"], CONF
    )
    assert not any("derived" in error.problem for error in make_plan(other, Node()).refusals)


def test_the_embedded_target_has_its_templates_as_before() -> None:
    spec = compose_spec("default", 0, [], CONF)
    capability = Capability(id="wrong_record", name="n", description="d")
    synthesizer = TemplateSynthesizer(ModelAccess())
    texts = [synthesizer.synthesize(Brief(capability, [], (), target), []) for target in (None, spec.benchmark)]
    assert texts[0] == texts[1]
    with pytest.raises(NoTemplate):
        synthesizer.synthesize(
            Brief(Capability(id="premature_stop", name="n", description="d"), [], (), spec.benchmark), []
        )


def test_of_an_environment_no_more_variety_is_asked_than_its_benchmark_has(tmp_path: Path) -> None:
    bounds = compose_spec("default", 0, ["environments.seeds=20"], CONF).environments
    single = Component.model_validate({"_target_": "support.rooms.OneKind"})
    path = tmp_path / "wrong_argument.py"
    path.write_text(TemplateSynthesizer(ModelAccess()).synthesize(brief("wrong_argument", single), []))

    def variety(of: Component) -> tuple[bool, float | None, str, str]:
        checks = run_checks(load_file(path), path, make_standard(load_benchmark(of), 20, bounds), ())
        [check] = [check for check in checks if check.name == "structures among the tasks"]
        return check.passed, check.measured, check.bound, check.detail

    assert variety(single) == (True, 1.0, "at least 1", "")
    passed, measured, bound, detail = variety(ROOMS)
    assert (passed, measured) == (False, 1.0) and bound > "at least 1" and "environments.structures=1" in detail


def test_a_benchmark_whose_solutions_call_every_tool_once_has_its_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world of few tools, calling every tool is the solution and no shortcut."""
    bounds = compose_spec("default", 0, ["environments.seeds=20"], CONF).environments
    monkeypatch.syspath_prepend(tmp_path)
    toll = Component.model_validate({"_target_": f"{copy_domain('toll', tmp_path).stem}:Toll"})
    details = {"kinds": {"vehicle": "read", "charge": "write"}}
    capability = Capability(id="missing_lookup", name="n", description="d", details=details)
    path = tmp_path / "missing_lookup.py"
    path.write_text(derive(Brief(capability, load_benchmark(toll).tools, (), toll), toll, []))
    failed = [
        check
        for check in run_checks(load_file(path), path, make_standard(load_benchmark(toll), 20, bounds), ())
        if not check.passed
    ]
    assert not failed
    every = load_file(path).tasks("training", 500, fewer=True)  # fifty plates, four numbers of axles
    assert 150 < len(every) <= 200
    with pytest.raises(EnvironmentFault, match="500 were requested"):
        load_file(path).tasks("training", 500)


def test_a_score_that_asks_for_words_that_nobody_told_is_refused_by_the_plan() -> None:
    def told(name: str) -> list[str]:
        spec = compose_spec("default", 0, [f"benchmark._target_=support.rooms.{name}"], CONF)
        return [
            error.remedy
            for error in make_plan(spec, Node()).refusals
            if "words that the agent is never told" in error.problem
        ]

    assert not told("Rooms")
    [remedy] = told("Wordy")
    assert "state them in the policy" in remedy


def test_each_reference_is_asked_for_once_to_learn_if_a_score_asks_for_words(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = load_benchmark(ROOMS), list[str]()
    answer = target.environment.reference

    def reference(task: dict[str, Any]) -> list[Message]:
        asked.append(task["id"])
        return answer(task)

    monkeypatch.setattr(target.environment, "reference", reference)
    assert not demands_words(target, 5) and len(asked) == len({*asked}) == 5


def test_a_line_of_a_derived_file_is_one_whatever_an_analyst_has_written() -> None:
    said = 'A "room"\tthat\n\nnobody\\asked for. '
    capability = Capability(id="wrong_argument", name="Wrong\n  room", description=said)
    text = derive(Brief(capability, Rooms.tools), ROOMS, [])
    assert text.startswith('"""Wrong room: A \'room\' that nobody/asked for.\n\nDerived from ')


def test_a_benchmark_without_references_is_refused_by_the_plan_whatever_its_class_declares() -> None:
    spec = compose_spec("default", 0, ["benchmark._target_=support.rooms.Unsolved"], CONF)
    made = make_plan(spec, Node())
    assert any("support.rooms.Unsolved: it has no reference solutions" in error.problem for error in made.refusals)
    assert any("returns [] for its first tasks" in text for text in made.warnings)
    assert any("analyst=openai" in text for text in made.warnings)


def test_a_base_that_would_learn_another_domain_is_refused_with_the_key_that_mends_it() -> None:
    spec = compose_spec("default", 0, ["benchmark._target_=support.rooms.Rooms"], CONF)
    [error] = [error for error in make_plan(spec, Node()).refusals if "it would pass nothing" in error.problem]
    assert "book_room" in error.problem and "base.demonstrations._target_=" in error.remedy
    idle = "base.demonstrations._target_=support.rooms.Speechless"
    taught = make_plan(compose_spec("default", 0, ["benchmark._target_=support.rooms.Rooms", f"+{idle}"], CONF), Node())
    assert not taught.refusals
    embedded = make_plan(compose_spec("default", 0, [], CONF), Node())
    served = make_plan(
        compose_spec("default", 0, ["benchmark._target_=support.rooms.Rooms", "policy=openai", "policy.name=m"], CONF),
        Node(),
    )
    assert not embedded.refusals and not any("pass nothing" in error.problem for error in served.refusals)
