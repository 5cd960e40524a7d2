"""The adapter that is taught by the environments' own solutions."""

import json
from pathlib import Path

import pytest
from support.letters import LETTERS
from support.training import ROOT, inside, passport, project, stage

from captrain.baselines.solutions import WRONG, solution_lessons, teach_solutions
from captrain.config import Spec, compose_spec
from captrain.contract import Target, load_file
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models.lora import Adapter, adapter_digest
from captrain.policies.policy import load_policy
from captrain.records import Task, load, publish_json
from captrain.rollouts.collection import collect, pass_rate
from captrain.training.jobs import Learner
from captrain.training.sft import TOO_LONG, FineTuned

# Pays for the very word of its solutions.
EXACT = (
    "sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))",
    'float(said == "yes" * task["data"]["turns"])',
)
SMALL = [
    # A model this small, with random weights, is never sure: sampled cold, it shows what it has learnt.
    "policy.temperature=0.1",
    "policy.max_turns=3", "policy.max_tokens=8", "policy.precision=float32", "trainer.rank=8", "trainer.alpha=16",
    "baselines.solutions.run=true", "baselines.solutions.demonstrations=41", "baselines.solutions.epochs=6",
    "baselines.solutions.learning_rate=2e-2", "machine.workers=1", "machine.batch=1",
]  # fmt: skip


def chosen(*overrides: str) -> Spec:
    return compose_spec("smoke", 0, [*SMALL, *overrides], ROOT / "conf")


def written(folder: Path, name: str, change: tuple[str, str] = ("", "")) -> None:
    """An environment with its passport, the pair in a folder of its own."""
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
        [lesson] = solution_lessons(chosen(*overrides))
        return teach_solutions(lesson)


@pytest.fixture(scope="module")
def home(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name in ("alpha", "beta", "alpha+beta"):
        written(folder, name, EXACT)
    return folder


@pytest.fixture(scope="module")
def one(home: Path, tiny: Path) -> FineTuned:
    return taught(home, tiny)


def test_solutions_of_all_environments_alike_teach_what_these_pay_for(home: Path, tiny: Path, one: FineTuned) -> None:
    card = (home / one.folder / "README.md").read_text()
    assert [line.split()[4:] for line in card.splitlines() if line.startswith("| of these from")] == [
        [f"{name},", "fingerprint", load_file(home / f"results/{kind}/{name}.py").fingerprint, "|", count, "|"]
        for kind, name, count in
        (("environments", "alpha", "14"), ("environments", "beta", "14"), ("pairs", "alpha+beta", "13"))
    ]  # fmt: skip
    assert one.demonstrations == 41 and one.left_out == {} and one.losses[-1] < one.losses[0]
    target: Target = load_file(home / "results/environments/alpha.py")
    policy = load_policy(chosen().policy, tiny, chosen().machine, Learner)
    with inside(home):
        rates = [
            pass_rate(collect(policy, target, target.tasks("test", 30), purpose="evaluation", seed=0, adapter=acting,
                              quiet=True))
            for acting in (None, Adapter(str(home / one.folder), one.digest))
        ]  # fmt: skip
    assert rates[0] == 0.0 and rates[1] is not None and rates[1] > 0.8


def test_solutions_are_of_training_tasks_that_calibration_has_not_played(
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


def test_what_is_no_solution_or_cannot_be_read_is_left_out_and_counted(tiny: Path, tmp_path: Path) -> None:
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


def test_equal_seeds_give_equal_bytes_and_others_do_not(home: Path, tiny: Path, one: FineTuned, tmp_path: Path) -> None:
    for name in ("alpha", "beta", "alpha+beta"):
        written(tmp_path, name, EXACT)
    assert taught(tmp_path, tiny).digest == one.digest
    with inside(tmp_path):
        [lesson] = solution_lessons(compose_spec("smoke", 1, SMALL, ROOT / "conf"))
        assert teach_solutions(lesson).digest != one.digest


def test_the_stage_leaves_an_adapter_that_cost_no_rollout_or_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(tmp_path / "project", tiny, "alpha", "beta", more=SMALL)
    assert stage(folder, "solutions") == 0
    assert "solutions: 41 demonstrations, left out 0" in capsys.readouterr().out
    row = json.loads((folder / "results/solutions/index.json").read_text())["solutions"]
    assert (row["rollouts"], row["demonstrations"]) == (0, 41)
    assert row["digest"] == adapter_digest(folder / row["path"])
    assert load(folder / "results/solutions/ledger.jsonl", LedgerEntry) == []
    without = project(tmp_path / "without", tiny, more=SMALL)
    assert stage(without, "solutions") == 0
    assert json.loads((without / "results/solutions/index.json").read_text()) == {}
