"""Environments derived from benchmarks that run in workers: which text is ours, and what is trained in on an
installation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.finished import Captrain
from support.installations import interpreter
from support.taught import teach
from support.training import GRPO, inside, moved

from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.environments import load_environment, publish_environments
from captrain.environments.evidence import make_standard
from captrain.environments.loading import WORLDS, is_own_text, world_of
from captrain.environments.synthesis import synthesize
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import TemplateSynthesizer, derivable
from captrain.errors import UserError
from captrain.planning.estimate import Node
from captrain.planning.plan import make_plan
from captrain.records import Capability, Passport, Rollout, Score, read_json
from captrain.run import Component, Machine, ModelAccess, Spec, compose_spec
from captrain.training.jobs import EnvironmentFile, Job, TrainingEnvironment
from captrain.training.runs import train

CONF = Path(__file__).parents[2] / "conf"
USER = "benchmark.user={_target_: captrain.agents.scripted.ScriptedPolicy}"


def composed(*overrides: str) -> Spec:
    installed = f"+machine.benchmarks.bfcl={{python: '{interpreter('bfcl')}', processes: 1, timeout: 60.0}}"
    few = [
        "environments.seeds=4", "environments.structures=3", "environments.groups=4", "environments.group_size=4",
        "evaluation.tasks=8",
    ]  # fmt: skip
    return compose_spec("default", 0, ["benchmark=bfcl", installed, *few, *overrides], CONF)


def text_of(family: str, spec: Spec, description: str = "d") -> str:
    brief = Brief(Capability(id=family, name=family, description=description), [], (), spec.benchmark)
    return TemplateSynthesizer(ModelAccess()).synthesize(brief, [])


def plan_problems(*overrides: str) -> str:
    return "\n".join(error.problem for error in make_plan(composed(*overrides), Node()).refusals)


# Without an installation.


def test_what_narrows_a_benchmark_in_workers_is_our_own_text_to_the_byte_and_names_it() -> None:
    spec = composed()
    text = text_of("wrong_argument", spec, 'Says "yes" """\nimport os\n\\"""')
    assert is_own_text(text) and world_of(text) == spec.benchmark
    attacks = {
        "a line behind": f"{text}\nimport os\n",
        "a line before": f"import os\n{text}",
        "a changed line": text.replace("return", "return  ", 1),
        "a call": text.replace("KIND = 'argument'", "KIND = print()"),
        "two lines": text.replace("KIND = 'argument'", "KIND = 'argument'; import os"),
        "another class": text.replace("captrain.benchmarks.bfcl.Bfcl", "captrain.benchmarks.verifiers.Verifiers"),
        "a component": text.replace("'discovery': 0.4", "'discovery': {'_target_': 'os.system'}"),
        "no settings": text.replace("SETTINGS = {", "SETTINGS = 1 or {"),
    }
    for attack, changed in attacks.items():
        assert changed != text and world_of(changed) is None and not is_own_text(changed), attack


def test_the_plan_lets_pass_what_can_be_derived_and_says_why_something_cannot() -> None:
    assert "derived" not in plan_problems()
    assert "derived" not in plan_problems("benchmark=tau2")
    assert "while a model plays its user" in plan_problems("benchmark=tau2", USER)
    with pytest.raises(UserError, match="it has no reference solutions") as refusal:
        derivable(composed("benchmark=verifiers", "benchmark.taskset=some").benchmark)
    assert "synthesizer=openai" in refusal.value.remedy


# With BFCL.


def evidence(benchmark: CheckedEnvironment, count: int) -> Iterator[Rollout]:
    """Rollouts of training tasks that play the references."""
    for task in benchmark.tasks("training", count):
        reference = benchmark.reference(task)
        yield Rollout(
            id=task.id, environment=benchmark.name, task=task, trial=0, purpose="diagnosis", policy="p",
            messages=benchmark.play(task, reference), reference=reference, outcome="failed",
            score=Score(reward=0.0, success=False),
        )  # fmt: skip


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A passed environment of BFCL, and a base that solves every other task of it."""
    folder = tmp_path_factory.mktemp("derived")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        spec = composed()
        benchmark = load_benchmark(spec.benchmark, spec.machine)
        standard = make_standard(benchmark, spec.evaluation.tasks, spec.environments)
        capability = Capability(id="wrong_argument", name="Arguments", description="As the user says.")
        brief = Brief(capability, benchmark.tools, [*evidence(benchmark, 8)], spec.benchmark)
        synthesizer, policy = TemplateSynthesizer(ModelAccess()), ScriptedPolicy(skill=0.5)
        result = synthesize(brief, synthesizer, policy, standard, spec.machine, 0)
        publish_environments([result], folder / "results/environments", folder / "artifacts/environments")
        yield folder
        for world in (benchmark.environment, *WORLDS.values()):
            world.pool.close()  # pyright: ignore[reportAttributeAccessIssue]
        WORLDS.clear()


def opened(folder: Path) -> tuple[CheckedEnvironment, Passport, Machine]:
    environments, machine = folder / "results/environments", composed().machine
    passport = read_json(environments / "wrong_argument.passport.json", Passport, "")
    return load_environment(environments, passport, machine), passport, machine


@pytest.mark.needs("bfcl")
def test_an_environment_of_a_worker_benchmark_earns_its_passport_and_is_trained_in_as_any(derived: Path) -> None:
    target, passport, machine = opened(derived)
    assert passport.passed and passport.trusted and len(passport.checks) == 29
    benchmark = load_benchmark(composed().benchmark, machine)
    training = {task.id for task in benchmark.tasks("training", benchmark.size("training") or 0)}
    tasks = target.tasks("training", target.size("training") or 0)
    assert 0 < len(tasks) < len(training) and {task.id for task in tasks} < training
    broken = target.environment.broken(tasks[0].model_dump())  # pyright: ignore[reportAttributeAccessIssue]
    rewards = [target.score(tasks[0], target.play(tasks[0], m)).reward for m in (target.reference(tasks[0]), broken)]
    assert rewards[0] == 1.0 and rewards[1] < 0.5 and target.floor(tasks[0]).reward == 0.0
    assert opened(derived)[0].environment.world is target.environment.world  # pyright: ignore[reportAttributeAccessIssue]
    benchmark.environment.pool.close()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.needs("bfcl")
def test_grpo_trains_an_adapter_in_an_environment_of_a_worker_benchmark(derived: Path, tmp_path: Path) -> None:
    """The model has memorised the first task, with and without the trained step."""
    target, passport, machine = opened(derived)
    [task] = target.tasks("training", 1)
    reference = target.reference(task)
    broken = target.environment.broken(task.model_dump())  # pyright: ignore[reportAttributeAccessIssue]
    base = teach(target, [(task, reference), (task, broken)], tmp_path / "base", steps=120)
    policy = {"temperature": 1.0, "max_turns": len(reference) + 2, "max_tokens": 16}
    recipe = {"_target_": "captrain.training.recipe.GRPO", **GRPO, "groups_per_step": 1, "epochs": 1}
    place = TrainingEnvironment("wrong_argument", EnvironmentFile(derived / "results/environments", passport))
    places = (place, replace(place, name="again"))  # the first task of each, which is the same
    job = Job(
        name="wrong_argument", base=base, rollouts=8, seed=0, machine=machine, environments=places,
        policy=Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **policy}),
        trainer=Component.model_validate(recipe),
    )  # fmt: skip
    with inside(tmp_path / "work") as work:
        trained = train(job)
    assert (trained.rollouts, trained.errors, trained.discarded) == (8, 0, 0)
    assert [step.rollouts for step in trained.history] == [4, 8]
    assert all(0 < step.reward < 1 for step in trained.history), "some took the step, some did not"
    assert moved(work / trained.folder) > 1e-3


@pytest.mark.needs("bfcl")
def test_another_installation_than_the_passports_and_a_package_of_it_are_refused(
    derived: Path, captrain: Captrain
) -> None:
    _, passport, machine = opened(derived)
    elsewhere = passport.model_copy(update={"environment": "0" * 16})
    with pytest.raises(UserError, match="or captrain.benchmarks.bfcl.Bfcl is not installed as it was then"):
        load_environment(derived / "results/environments", elsewhere, machine)
    (derived / "dvc.yaml").touch()
    path = str(derived / "results/environments/wrong_argument.py")
    status, _, error = captrain(derived, "export-environment", path, "--to", "trl", "--out", "package")
    assert status == 2 and "cannot be packaged" in error and not (derived / "package").exists()
