"""The ramp: environments that failures vote for, then the target; and the same adapter whatever happens on the way."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.curriculum import verdict
from support.letters import LETTERS
from support.training import ROOT, groups, inside, job, kill, passport, project, published, stage, targets_of

from captrain.baselines.curriculum import curriculum_jobs
from captrain.config import build, compose_spec, load_spec, publish_spec
from captrain.config.components import Component
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.policies import LocalPolicy
from captrain.records import Capability, Label, RolloutLabels, Score, load, publish
from captrain.training.curriculum import Curriculum, CurriculumJob, shares, votes
from captrain.training.jobs import EnvironmentFile, TrainingEnvironment
from captrain.training.recipe import GRPO
from captrain.training.runs import train

Letters = Callable[..., Path]
NAMES = ("alpha", "beta", "alpha+beta")
KNOWN = tuple(Capability(id=name, name=name, description=name) for name in NAMES[:2])
RAMP = {"start": 0.3, "slope": 0.7, "window": 10}


def ramp_job(tiny: Path, letters: Letters, **changes: Any) -> CurriculumJob:
    """A ramp over two environments and their pair, of eight steps of two groups."""
    settings = {**RAMP, **changes.pop("trainer", {})}
    folder = changes.pop("folder", letters().parent)
    places = [TrainingEnvironment("target", Component.model_validate({"_target_": "support.curriculum.Talk"}))]
    for name in NAMES:
        path = letters(name, folder=folder)
        places.append(TrainingEnvironment(name, EnvironmentFile(folder, passport(path)), skip=2))
    plain = job(tiny, letters(), rollouts=64, environments=tuple(places), trainer=settings)
    trainer = Component.model_validate(
        {**plain.trainer.model_dump(by_alias=True), "_target_": "captrain.training.curriculum.Curriculum"}
    )
    more: dict[str, Any] = {
        "capabilities": KNOWN, "needs": ("alpha", None, "beta", ""), "code": "",
        "analyst": Component.model_validate({"_target_": "support.curriculum.Analyst"}), **changes,
    }  # fmt: skip
    return CurriculumJob(**{**vars(plain), "name": "curriculum", "trainer": trainer, **more})


def trainer_of(one: CurriculumJob, folder: Path) -> Any:
    """TRL's trainer for a job, before its first step."""
    from captrain.training.grpo import make_trainer

    return make_trainer(
        build(one.trainer, GRPO), one, build(one.policy, LocalPolicy, model=one.base), targets_of(one), folder
    )


def test_a_set_of_lacking_capabilities_votes_for_its_own_environment_or_for_the_largest_within_it() -> None:
    single, paired = ["a", "b", "c"], ["a", "b", "c", "a+b"]
    assert shares("a+b", paired) == {"a+b": 1.0} and shares("c", paired) == {"c": 1.0}
    assert shares("a+b", single) == {"a": 0.5, "b": 0.5}
    assert shares("a+b+c", paired) == {"c": 0.5, "a+b": 0.5}
    assert shares("a+b+c", [*paired, "b+c"]) == {"a+b": 0.5, "b+c": 0.5}
    assert shares("a+d", single) == {"a": 1.0} and shares("d", paired) == {}
    assert votes(["a", "a+b", None, "", "a", "d"], single) == {"a": 2.5, "b": 0.5, "c": 0.0}


def test_the_share_of_groups_on_the_target_rises_from_start_by_slope(tiny: Path, letters: Letters) -> None:
    one = ramp_job(tiny, letters, rollouts=4 * 4000, needs=("alpha", "alpha", "alpha", "beta"))
    ramp = build(one.trainer, Curriculum)
    drawn = [ramp.choose_environment(one, group, []) for group in range(4000)]
    first, last = drawn[:400], drawn[-400:]
    assert first.count(0) / 400 == pytest.approx(0.335, abs=0.06) and last.count(0) / 400 > 0.93
    counts = Counter(drawn)
    assert counts[3] == 0 and counts[1] / (counts[1] + counts[2]) == pytest.approx(0.75, abs=0.05)
    assert [ramp.choose_environment(replace(one, seed=1), group, []) for group in range(50)] != drawn[:50]


def test_the_last_rollouts_on_the_target_decide_and_those_of_the_diagnosis_leave_the_window(
    tiny: Path, letters: Letters
) -> None:
    one = ramp_job(tiny, letters, rollouts=4 * 4000, needs=("alpha",) * 20, trainer={"start": 0.0, "slope": 0.0})
    ramp = build(one.trainer, Curriculum)

    def drawn(*steps: list[str | None]) -> set[int]:
        return {ramp.choose_environment(one, group, [{"needs": step} for step in steps]) for group in range(200)}

    assert drawn() == drawn([None] * 9) == {1}
    assert drawn(["beta"] * 4, ["alpha+beta"] * 5) == {1, 2, 3}
    assert drawn(["beta"] * 4, ["alpha+beta"] * 6) == {2, 3}
    assert drawn(["beta"] * 40, ["alpha+beta"] * 10) == {3}
    # Nobody votes: all passed, or lack nothing that an environment trains.
    assert drawn([None] * 10) == drawn([""] * 10) == {0}


def test_the_target_pays_for_success_alone_and_environments_pay_as_they_do(tiny: Path, letters: Letters) -> None:
    one = ramp_job(tiny, letters)
    ramp = build(one.trainer, Curriculum)
    almost, whole = Score(reward=0.4, success=False), Score(reward=0.6, success=True)
    assert [ramp.reward(one, 0, score) for score in (almost, whole)] == [0.0, 1.0]
    assert [ramp.reward(one, 2, score) for score in (almost, whole)] == [0.4, 0.6]


def test_advantages_are_divided_by_a_constant_and_rollouts_on_the_target_are_labelled(
    tiny: Path, letters: Letters, tmp_path: Path
) -> None:
    import torch

    one = ramp_job(tiny, letters, rollouts=8 * 4, trainer={"groups_per_step": 8, "slope": 0.0})
    trainer = trainer_of(one, tmp_path / "checkpoints")
    earned: list[float] = []
    play = trainer.rollout_func

    def remembered(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        out = play(prompts, trainer)
        earned.extend(out["environment_reward"])
        return out

    trainer.rollout_func = remembered
    batch = trainer._generate_and_score_completions(groups(8))
    rewards = torch.tensor(earned).view(8, 4)
    spread = (rewards.amax(1) - rewards.amin(1)) > 1e-6
    expected = ((rewards - rewards.mean(1, keepdim=True)) / 0.5)[spread].flatten().double()
    learnt = (batch["tool_mask"] * batch["completion_mask"]).any(1)
    torch.testing.assert_close(batch["advantages"].flatten()[learnt], expected, rtol=1e-4, atol=1e-5)
    [step] = trainer.history
    on_target = step["places"]["target"]
    assert 0 < on_target < 8 and len(step["needs"]) == 4 * on_target
    passed = sum(sum(group) for group in _target_rewards(one, rewards))
    assert step["needs"].count(None) == passed
    expected_needs = {"", "alpha", "beta", "alpha+beta", None}
    assert set(step["needs"]) <= expected_needs and len(set(step["needs"])) > 1


def _target_rewards(one: CurriculumJob, rewards: Any) -> list[list[float]]:
    ramp = build(one.trainer, Curriculum)
    return [rewards[group].tolist() for group in range(8) if ramp.choose_environment(one, group, []) == 0]


def test_what_the_diagnosis_found_is_part_of_a_job(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    one = ramp_job(tiny, letters, rollouts=16)
    with inside(tmp_path / "work"):
        for changed in (one, one, replace(one, needs=("beta",)), replace(one, capabilities=KNOWN[:1])):
            train(changed)
        assert len(list(Path(".cache/adapters").iterdir())) == 3


def rampable(folder: Path, tiny: Path, *more: str, pair: bool = True) -> Path:
    """A project as far as pairs, on the benchmark of this file."""
    folder = project(folder, tiny, *NAMES[:2], more=more)
    chosen = load_spec(folder / "results/spec.yaml")
    ours = {name: Component.model_validate({"_target_": f"support.curriculum.{part}"}) for name, part in PARTS.items()}
    publish_spec(chosen.model_copy(update=ours), folder / "results/spec.yaml")
    publish(folder / "results/capabilities/capabilities.jsonl", KNOWN)
    labels = [
        RolloutLabels(
            run=run, rollout=f"r{at}", outcome="failed" if at % 3 else "passed", count=1,
            labels={name: Label(verdict=verdict(f"r{at}", name)) for name in NAMES[:2]},
        )
        for run in range(2) for at in range(12)
    ]  # fmt: skip
    publish(folder / "artifacts/labels/labels.jsonl", labels)
    if pair:
        (folder / "results/pairs").mkdir()
        path = folder / "results/pairs/alpha+beta.py"
        path.write_text(LETTERS.format(name="alpha+beta", flat=0))
        path.with_suffix(".passport.json").write_text(passport(path).model_dump_json())
    return folder


PARTS = {"benchmark": "Talk", "analyst": "Analyst"}
SPENT = [
    LedgerEntry(stage="rollouts", purpose="diagnosis", method="trace", rollouts=24),
    LedgerEntry(stage="environments", purpose="calibration", method="trace", item="alpha", rollouts=9),
    LedgerEntry(stage="adapters", purpose="training", method="trace", item="alpha", rollouts=50),
]


def test_the_job_takes_what_diagnosis_environments_and_pairs_have_left(tiny: Path, tmp_path: Path) -> None:
    folder = rampable(tmp_path / "project", tiny)
    chosen = load_spec(folder / "results/spec.yaml")
    [one] = curriculum_jobs(chosen, folder, SPENT)
    assert isinstance(one, CurriculumJob)
    assert [(place.name, place.skip) for place in one.environments] == [
        ("target", 0), ("alpha", 3), ("beta", 3), ("alpha+beta", 3)
    ]  # fmt: skip
    assert (one.rollouts, one.name, one.capabilities, len(one.needs)) == (50, "curriculum", KNOWN, 12)
    lacking = [{name for name in NAMES[:2] if verdict(f"r{at}", name) == "LACKING"} for at in range(12)]
    assert list(one.needs) == ["+".join(sorted(held)) if at % 3 else None for at, held in enumerate(lacking)]
    settings = chosen.baselines.curriculum
    assert one.trainer.settings() == {
        **chosen.trainer.settings(), "learning_rate": settings.learning_rate, "start": settings.start,
        "slope": settings.slope, "window": settings.window,
    }  # fmt: skip
    (folder / "artifacts/labels/labels.jsonl").unlink()
    with pytest.raises(UserError, match=r"labels\.jsonl is missing"):
        curriculum_jobs(chosen, folder, SPENT)


def test_without_pairs_single_environments_do_and_without_any_there_is_no_job(tiny: Path, tmp_path: Path) -> None:
    folder = rampable(tmp_path / "project", tiny, pair=False)
    chosen = load_spec(folder / "results/spec.yaml")
    [one] = curriculum_jobs(chosen, folder, SPENT)
    assert [place.name for place in one.environments] == ["target", "alpha", "beta"]
    for path in (folder / "results/environments").iterdir():
        path.unlink()
    assert curriculum_jobs(chosen, folder, SPENT) == [] == build(one.trainer, GRPO).jobs(chosen, folder)


def test_a_ramp_killed_on_the_way_resumes_to_the_identical_adapter(tiny: Path, tmp_path: Path, warm: Path) -> None:
    """Through the adapters stage, whose one adapter it then is."""
    killed, undisturbed = (
        rampable(tmp_path / name, tiny, "trainer=curriculum", "trainer.window=8", "adapters.rollouts=40")
        for name in ("killed", "undisturbed")
    )
    kill(killed, "adapters", warm, Path(__file__).parents[1])
    assert stage(killed, "adapters") == stage(undisturbed, "adapters") == 0
    assert published(killed) == published(undisturbed)
    index = json.loads((killed / "results/adapters/index.json").read_text())
    assert {name: one["rollouts"] for name, one in index.items()} == {"curriculum": 80}
    [ledger] = load(killed / "results/adapters/ledger.jsonl", LedgerEntry)
    assert (ledger.rollouts, ledger.method, ledger.item) == (80, "trace", "curriculum")
    [result] = killed.glob(".cache/adapters/*/result.json")
    history = json.loads(result.read_text())["history"]
    chosen = load_spec(killed / "results/spec.yaml")
    ramp = build(chosen.trainer, Curriculum)
    [one] = ramp.jobs(chosen, killed)

    def drawn(history: list[dict[str, Any]]) -> list[Counter[str]]:
        steps = [
            [ramp.choose_environment(one, 2 * at + group, history[:at]) for group in range(2)]
            for at in range(len(history))
        ]
        return [Counter(one.environments[place].name for place in step) for step in steps]

    assert drawn(history) == [step["places"] for step in history]
    # What this training saw on the target has decided something that the diagnosis alone would not have.
    assert drawn([{**step, "needs": []} for step in history]) != drawn(history)


@pytest.mark.parametrize("wrong", ["start=1.5", "slope=-0.1", "window=0", "group_size=1", "targets=[]", "pace=1"])
def test_impossible_settings_of_the_ramp_end_before_anything_runs(wrong: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.{wrong.partition('=')[0]}"):
        compose_spec("smoke", 0, ["trainer=curriculum", f"trainer.{wrong}"], ROOT / "conf")
