"""One adapter on a curriculum from targeted environments to the target itself.

An adapter for each capability cannot learn what arises between capabilities. So where tasks demand several at once, one
adapter is trained, at first mostly in the environments of the capabilities that failures lack, at the end mostly on the
target. It is GRPO (`captrain.training.jobs`) but for four things:

- Before a share s of the budget is spent, a group is drawn from the target with probability start + slope x s, and else
  from an environment, by vote.
- Votes are those of the last `window` rollouts on the target, of the diagnosis first and then of this training. A
  failed rollout votes for the environments of the set of capabilities that it lacks (`shares`). Where nobody votes, the
  group is drawn from the target. The run's analyst labels the failed rollouts of this training, in one run.
- On the target a rollout earns its success, and no partial credit.
- Advantages are r - mean, divided by a constant: the standard deviation of a group makes much of the one success among
  many failures, which on the curriculum is most often chance. The constant is .5, the most that the standard deviation
  of rewards in [0, 1] can be, so that evenly split groups weigh what they weigh in GRPO and others less. No KL term.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.capabilities import Analyst, LabelRequest, fault_of, needs
from captrain.config import Component, Count, Level, Rate, Share, Spec, build
from captrain.execution import code_digest
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels, Score, digest, load
from captrain.rollouts import rollout_record
from captrain.training.jobs import Job, TrainingEnvironment, training_environments
from captrain.training.recipe import GRPO, LINEAR, Layers, ScoredPlay, Size, Step

DRAW_KEY = "ramp"
"""Names the random draws; what the curriculum was first called, kept because another word would draw other groups."""


@dataclass(frozen=True)
class CurriculumJob(Job):
    """An adapter to train on a curriculum. Its first environment is the target, the others are of one capability or
    two, "<a>+<b>".

    Args:
        capabilities: those that were selected.
        needs: of the diagnostic rollouts, in order: the capabilities that a failed one lacks, joined with "+"; None for
            one that passed.
        analyst: who labels rollouts of the training.
        code: digest of what draws and labels.
    """

    capabilities: tuple[Capability, ...]
    needs: tuple[str | None, ...]
    analyst: Component
    code: str

    def plan_identity(self) -> list[object]:
        """See `Job.plan_identity`."""
        return [*super().plan_identity(), self.capabilities, self.needs, self.analyst, self.code]


class Curriculum(GRPO):
    """The trainer. Settings are GRPO's, and:

    Args:
        start: share of groups on the target at the beginning.
        slope: what is added to it by the end.
        window: rollouts on the target that vote.
    """

    scale = 0.5

    def __init__(
        self,
        *,
        group_size: Size,
        groups_per_step: Count,
        epochs: Count,
        rank: Count,
        alpha: Count,
        learning_rate: Rate,
        clip: Level,
        checkpoint_every: Count,
        hints: Share = 0.0,
        targets: Layers = LINEAR,
        start: Share,
        slope: Share,
        window: Count,
    ) -> None:
        super().__init__(
            group_size=group_size,
            groups_per_step=groups_per_step,
            epochs=epochs,
            rank=rank,
            alpha=alpha,
            learning_rate=learning_rate,
            clip=clip,
            checkpoint_every=checkpoint_every,
            hints=hints,
            targets=targets,
        )
        self.start, self.slope, self.window = start, slope, window
        self._analyst: Analyst | None = None

    def jobs(self, spec: Spec, project: Path = Path()) -> list[Job]:
        """One adapter, with as many rollouts as an adapter for each environment would have."""
        count = len(training_environments(project / "results/environments"))
        return [curriculum_job(spec, project, spec.trainer, count * spec.adapters.rollouts)] if count else []

    def choose_environment(self, job: Job, group: int, history: Sequence[Step]) -> int:
        """See `GRPO.choose_environment`."""
        assert isinstance(job, CurriculumJob)
        groups = math.ceil(job.rollouts / self.group_size)
        if _random(job.seed, group, "target") < self.start + self.slope * group / groups:
            return 0
        voters = [*job.needs, *(need for step in history for need in step["needs"])][-self.window :]
        names = [environment.name for environment in job.environments]
        return _index_at(votes(voters, names[1:]), names, _random(job.seed, group, "environment"))

    def reward(self, job: Job, environment: int, score: Score) -> float:
        """See `GRPO.reward`."""
        return float(score.success) if environment == 0 else score.reward

    def on_step_end(self, job: Job, plays: Sequence[ScoredPlay]) -> JsonObject:
        """`needs`, as `CurriculumJob` has them, of the step's rollouts on the target; faults of its user are left
        out."""
        assert isinstance(job, CurriculumJob)
        on_target = [play for play in plays if play.environment == 0]
        rollouts = [_rollout(play, job) for play in on_target]
        scored = [rollout for rollout in rollouts if fault_of(rollout) is None]
        failed = [rollout for rollout in scored if rollout.outcome == "failed"]
        lacking: Mapping[str, frozenset[str]] = {}
        if failed:
            self._analyst = self._analyst or build(job.analyst, Analyst, access=job.machine.asking)
            requests = [LabelRequest(0, rollout, job.capabilities) for rollout in failed]
            answers = self._analyst.label(requests, on_target[0].target.tools)
            rows = [
                RolloutLabels(run=0, rollout=rollout.id, outcome="failed", count=1, labels=labels)
                for rollout, labels in zip(failed, answers, strict=True)
            ]
            lacking = needs(rows, [capability.id for capability in job.capabilities])
        return {"needs": [_need_of(lacking.get(rollout.id)) for rollout in scored]}


def votes(needs: Sequence[str | None], environments: Sequence[str]) -> dict[str, float]:
    """How many votes each environment has; each failed rollout that lacks something an environment trains has one.

    Args:
        needs: as `CurriculumJob.needs`.
        environments: their names.
    """
    total = dict.fromkeys(environments, 0.0)
    for lacking, rollouts in Counter(need for need in needs if need).items():
        for name, share in shares(lacking, environments).items():
            total[name] += share * rollouts
    return total


def shares(lacking: str, environments: Sequence[str]) -> dict[str, float]:
    """The environments that a set of capabilities votes for, and how its vote is divided.

    That of exactly this set, if there is one. Otherwise, in equal parts, those within the set that no other one within
    it contains: of {a, b, c} the pair a+b and c, where there is no other pair; a and b, where there is no a+b.
    """
    capabilities = {name: set(name.split("+")) for name in environments}
    within = {name: members for name, members in capabilities.items() if members <= set(lacking.split("+"))}
    best = [name for name, members in within.items() if not any(members < larger for larger in within.values())]
    return {name: 1 / len(best) for name in best}


def curriculum_job(spec: Spec, project: Path, trainer: Component, rollouts: int) -> CurriculumJob:
    """One adapter on the curriculum from the environments of a project, single or pair, to its target.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trainer: a `Curriculum` component.
        rollouts: of the training.

    Raises:
        UserError: there are no labels, or no selection.
    """
    results = project / "results"
    selected = load(results / "capabilities/capabilities.jsonl", Capability)
    labels = load(project / "artifacts/labels/labels.jsonl", RolloutLabels)
    lacking = needs(labels, [capability.id for capability in selected])
    synthesized = (*training_environments(results / "environments"), *training_environments(results / "pairs"))
    return CurriculumJob(
        name="curriculum",
        base=project / "artifacts/base",
        policy=spec.exploring(),
        trainer=trainer,
        environments=(TrainingEnvironment("target", spec.benchmark), *synthesized),
        rollouts=rollouts,
        seed=spec.seed,
        machine=spec.machine,
        capabilities=tuple(selected),
        needs=tuple(_need_of(lacking.get(name)) for name in dict.fromkeys(row.rollout for row in labels)),
        analyst=spec.analyst,
        code=code_digest(CurriculumJob),
    )


def _index_at(votes: Mapping[str, float], names: Sequence[str], position: float) -> int:
    """The number of the environment that a draw from [0, 1) falls to; the target's where nobody votes."""
    remaining = position * sum(votes.values())
    for index, name in enumerate(names):
        if (remaining := remaining - votes.get(name, 0.0)) < 0:
            return index
    return 0


def _random(seed: int, group: int, purpose: str) -> float:
    """A number in [0, 1) by its name, so that it is the same whatever was drawn before."""
    return int(digest(DRAW_KEY, seed, group, purpose), 16) / 16**16


def _need_of(lacking: Collection[str] | None) -> str | None:
    return None if lacking is None else "+".join(sorted(lacking))


def _rollout(scored: ScoredPlay, job: Job) -> Rollout:
    name = digest(DRAW_KEY, job.seed, scored.task.id, scored.trial)[:12]
    play, target = scored.play, scored.target
    return rollout_record(play, target, scored.task, scored.trial, "training", "", None, scored.score, 0, name)
