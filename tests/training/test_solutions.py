"""Adapters taught by the environments' solutions, or by the agent's own passed rollouts."""

from pathlib import Path
from typing import Any

import pytest
from support.letters import LETTERS
from support.training import ROOT, inside, passport

from captrain.agents.collection import collect, pass_rate
from captrain.agents.policy import load_policy
from captrain.benchmarks import ServiceDesk
from captrain.comparison.baselines.rounds import RoundState
from captrain.comparison.baselines.solutions import generalist_lesson, specialist_lessons
from captrain.contract import CheckedEnvironment, load_file
from captrain.environments import Brief
from captrain.environments.templates import TemplateSynthesizer
from captrain.errors import UserError
from captrain.models.lora import Adapter
from captrain.records import Capability, Message, Task, publish_json
from captrain.run import FaultSettings, Spec, compose_spec
from captrain.training.jobs import Learner, training_environments
from captrain.training.sft import TOO_LONG, FineTuned
from captrain.training.solutions import FAILED, WRONG, SolutionLesson, solution_with_faults, teach_solutions

pytestmark = pytest.mark.usefixtures("vouched")

# Rewards only the word of its solutions.
EXACT = (
    "sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))",
    'float(said == "yes" * task["data"]["turns"])',
)
SMALL = [
    # A small model with random weights is never sure: a low temperature shows what it has learnt.
    "policy.temperature=0.1",
    "policy.max_turns=3", "policy.max_tokens=8", "policy.precision=float32", "trainer.rank=8", "trainer.alpha=16",
    "baselines.solutions.run=true", "baselines.solutions.demonstrations=41", "baselines.solutions.epochs=6",
    "baselines.solutions.learning_rate=2e-2", "machine.workers=1", "machine.batch=1",
]  # fmt: skip


def chosen(*overrides: str) -> Spec:
    return compose_spec("smoke", 0, [*SMALL, *overrides], ROOT / "conf")


def written(folder: Path, name: str, change: tuple[str, str] = ("", "")) -> None:
    """Write an environment with its passport; pairs have a folder of their own."""
    path = folder / f"results/{'pairs' if '+' in name else 'environments'}/{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LETTERS.format(name=name, flat=0).replace(*change))
    played = {"calibration_tasks": 0} if "+" in name else {}
    publish_json(path.with_suffix(".passport.json"), passport(path).model_copy(update=played))


def taught(folder: Path, base: Path, *overrides: str) -> FineTuned:
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    if not (folder / "artifacts/base").exists():
        (folder / "artifacts/base").symlink_to(base)
    with inside(folder):
        return teach_solutions(lesson_of(chosen(*overrides)))


def lesson_of(spec: Spec) -> SolutionLesson:
    """Plan the lesson over all environments of the working folder."""
    folders = (Path("results/environments"), Path("results/pairs"))
    environments = tuple(item for folder in folders for item in training_environments(folder))
    return generalist_lesson(spec, Path("artifacts/base"), RoundState([], [], {}, [], environments))


@pytest.fixture(scope="module")
def home(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name in ("alpha", "beta", "alpha+beta"):
        written(folder, name, EXACT)
    return folder


@pytest.fixture(scope="module")
def one(home: Path, tiny: Path) -> FineTuned:
    return taught(home, tiny)


def test_solutions_of_all_environments_teach_what_is_rewarded(home: Path, tiny: Path, one: FineTuned) -> None:
    card = (home / one.folder / "README.md").read_text()
    assert [line.split()[4:] for line in card.splitlines() if line.startswith("| of these from")] == [
        [f"{name},", "fingerprint", load_file(home / f"results/{kind}/{name}.py").fingerprint, "|", count, "|"]
        for kind, name, count in
        (("environments", "alpha", "14"), ("environments", "beta", "14"), ("pairs", "alpha+beta", "13"))
    ]  # fmt: skip
    assert one.demonstrations == 41 and one.left_out == {} and one.losses[-1] < one.losses[0]
    target: CheckedEnvironment = load_file(home / "results/environments/alpha.py")
    policy = load_policy(chosen().policy, tiny, chosen().machine, Learner)
    with inside(home):
        rates = [
            pass_rate(collect(policy, target, target.tasks("test", 30), purpose="evaluation", seed=0, adapter=acting,
                              quiet=True))
            for acting in (None, Adapter(str(home / one.folder), one.digest))
        ]  # fmt: skip
    assert rates[0] == 0.0 and rates[1] is not None and rates[1] > 0.8


def test_solutions_are_of_training_tasks_beyond_calibration(
    tiny: Path,
    tmp_path: Path,
    opened: list[Task],  # noqa: F811
) -> None:
    for name in ("alpha", "alpha+beta"):
        written(tmp_path, name)
    taught(tmp_path, tiny, "baselines.solutions.demonstrations=5")
    assert [task.id for task in opened] == [
        *(f"alpha/training/{at}" for at in (3, 4, 5)), *(f"alpha+beta/training/{at}" for at in (0, 1)),
    ]  # fmt: skip


def test_wrong_and_overlong_solutions_are_left_out_and_counted(tiny: Path, tmp_path: Path) -> None:
    written(tmp_path, "alpha", ('"content": "yes"', '"content": "yes" if task["data"]["i"] % 2 else "1234"'))
    written(tmp_path, "beta", ('"content": "yes"', '"content": "yes" * (1 + 4000 * (task["data"]["i"] == 4))'))
    few = "class Environment:\n    def size(self, split):\n        return 5\n"
    written(tmp_path, "gamma", ("class Environment:\n", few))
    found = taught(tmp_path, tiny, "baselines.solutions.demonstrations=30")
    assert (found.demonstrations, found.left_out) == (5 + 9 + 2, {TOO_LONG: 1, WRONG: 5})
    for name in ("alpha", "beta", "gamma"):
        written(tmp_path, name, ('"content": "yes"', '"content": ""'))
    with pytest.raises(UserError, match=f"no solution of the environments can be trained on .{WRONG}: 30."):
        taught(tmp_path, tiny, "baselines.solutions.demonstrations=30")


def test_equal_seeds_give_equal_adapters_and_others_do_not(
    home: Path, tiny: Path, one: FineTuned, tmp_path: Path
) -> None:
    for name in ("alpha", "beta", "alpha+beta"):
        written(tmp_path, name, EXACT)
    assert taught(tmp_path, tiny).digest == one.digest
    with inside(tmp_path):
        assert teach_solutions(lesson_of(compose_spec("smoke", 1, SMALL, ROOT / "conf"))).digest != one.digest


def test_the_agents_own_passed_rollouts_teach_and_all_are_counted(tiny: Path, tmp_path: Path) -> None:
    written(tmp_path, "alpha")
    tuned = taught(
        tmp_path, tiny, "baselines.solutions.source=rollouts", "baselines.solutions.rollouts=24",
        "baselines.solutions.demonstrations=48", "baselines.solutions.epochs=1", "policy.temperature=1.0",
    )  # fmt: skip
    failed = tuned.left_out[FAILED]
    assert tuned.demonstrations + failed == 24 and tuned.demonstrations > 0
    [entry] = tuned.costs
    assert (entry.rollouts, entry.purpose, entry.stage) == (24, "training", "solutions")
    assert tuned.summary()["rollouts"] == 24
    # Few pass, so each is repeated until 48 demonstrations are seen.
    updates = round(48 / tuned.demonstrations) * -(-tuned.demonstrations // 16)
    assert len(tuned.losses) == updates


def test_a_specialist_is_taught_on_its_own_environment_alone(home: Path, tiny: Path) -> None:
    with inside(home):
        environments = training_environments(Path("results/environments"))
        pairs = training_environments(Path("results/pairs"))
        evidence = RoundState([], [], {}, [], (*environments, *pairs))
        lessons = specialist_lessons(chosen("baselines.solutions.specialist=20"), Path("artifacts/base"), evidence)
    assert [(lesson.name, [(item.name, count) for item, count in lesson.counts]) for lesson in lessons] == [
        ("solutions:alpha", [("alpha", 20)]), ("solutions:beta", [("beta", 20)]),
    ]  # fmt: skip


# Faults of a known rate, in the desk's solutions


DESK = CheckedEnvironment(ServiceDesk(mix="mixed"), "servicedesk", "desk")


def faulty(task: Task, rate: float) -> list[Message]:
    return solution_with_faults(DESK, task, FaultSettings(rate=rate, kind="random", filtered=True))


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.2, 55, 105), (1.0, 400, 400)])
def test_the_rate_of_solutions_is_altered_by_their_tasks_alone(rate: float, low: int, high: int) -> None:
    tasks = DESK.tasks("training", 400)
    altered = [faulty(task, rate) != DESK.reference(task) for task in tasks]
    assert low <= sum(altered) <= high
    again = [faulty(task, rate) != DESK.reference(task) for task in reversed(tasks)]
    assert again == altered[::-1]


def test_a_random_fault_drops_a_call_or_changes_a_digit_and_fails_about_half() -> None:
    tasks, shorter, changed, refused = DESK.tasks("training", 200), 0, 0, 0
    for task in tasks:
        solution, reference = faulty(task, 1.0), DESK.reference(task)
        shorter += len(solution) == len(reference) - 1
        changed += len(solution) == len(reference)
        refused += not DESK.score(task, DESK.play(task, solution)).success
    assert shorter + changed == 200 and min(shorter, changed) > 40
    assert 80 < refused < 140  # dropping or changing a look-up may cost nothing


def test_a_systematic_fault_is_the_broken_step_of_the_environment(tmp_path: Path) -> None:
    text = TemplateSynthesizer().synthesize(
        Brief(Capability(id="wrong_record", name="Record selection", description=""), DESK.tools), []
    )
    path = tmp_path / "wrong_record.py"
    path.write_text(text)
    target = load_file(path)
    breaking: Any = target.environment
    for task in target.tasks("training", 20):
        broken = solution_with_faults(target, task, FaultSettings(rate=1.0, kind="systematic", filtered=True))
        assert broken == breaking.broken(task.model_dump()) != target.reference(task)
        assert not target.score(task, target.play(task, broken)).success


def test_without_the_filter_faulty_solutions_are_used(home: Path, tiny: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        written(tmp_path, name, ('"content": "yes"', '"content": "yes" if task["data"]["i"] % 2 else "1234"'))
    kept = taught(tmp_path, tiny, "baselines.solutions.demonstrations=12", "baselines.solutions.faults.filtered=false")
    assert kept.demonstrations == 12 and kept.left_out == {}
