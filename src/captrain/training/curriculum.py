"""One adapter on a ramp from targeted environments to the target itself.

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
  many failures, which on the ramp is most often chance. The constant is .5, the most that the standard deviation of
  rewards in [0, 1] can be, so that evenly split groups weigh what they weigh in GRPO and others less. No KL term.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captrain.capabilities import Analyst, LabelRequest, fault_of, needs
from captrain.config import Component, Count, Level, Rate, Share, Spec, build
from captrain.execution import code_digest
from captrain.records import Capability, Rollout, RolloutLabels, Score, digest, load
from captrain.rollouts import rollout_record
from captrain.training.jobs import Job, Place, places_of
from captrain.training.recipe import GRPO, LINEAR, Layers, Played, Size, Step


@dataclass(frozen=True)
class RampJob(Job):
    """An adapter to train on a ramp. Its first place is the target, the others are environments of one capability or
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

    def decisive(self) -> list[Any]:
        """See `Job.decisive`."""
        return [*super().decisive(), self.capabilities, self.needs, self.analyst, self.code]


class Ramp(GRPO):
    """The trainer. Settings are GRPO's, and:

    Args:
        start: share of groups on the target at the beginning.
        slope: what is added to it by the end.
        window: rollouts on the target that vote.
    """

    scale = 0.5

    def __init__(
        self, *, group_size: Size, groups_per_step: Count, epochs: Count, rank: Count, alpha: Count,
        learning_rate: Rate, clip: Level, checkpoint_every: Count, hints: Share = 0.0, targets: Layers = LINEAR,
        start: Share, slope: Share, window: Count,
    ) -> None:  # fmt: skip
        super().__init__(
            group_size=group_size, groups_per_step=groups_per_step, epochs=epochs, rank=rank, alpha=alpha,
            learning_rate=learning_rate, clip=clip, checkpoint_every=checkpoint_every, hints=hints, targets=targets,
        )  # fmt: skip
        self.start, self.slope, self.window = start, slope, window
        self._analyst: Analyst | None = None

    def jobs(self, spec: Spec, project: Path = Path()) -> list[Job]:
        """One adapter, with as many rollouts as an adapter for each environment would have."""
        count = len(places_of(project / "results/environments"))
        return [job(spec, project, spec.trainer, count * spec.adapters.rollouts)] if count else []

    def place(self, job: Job, group: int, history: Sequence[Step]) -> int:
        """See `GRPO.place`."""
        assert isinstance(job, RampJob)
        groups = math.ceil(job.rollouts / self.group_size)
        if _drawn(job.seed, group, "target") < self.start + self.slope * group / groups:
            return 0
        seen = [*job.needs, *(need for step in history for need in step["needs"])]
        names = [place.name for place in job.places]
        return _chosen(votes(seen[-self.window :], names[1:]), names, _drawn(job.seed, group, "environment"))

    def reward(self, job: Job, place: int, score: Score) -> float:
        """See `GRPO.reward`."""
        return float(score.success) if place == 0 else score.reward

    def noted(self, job: Job, played: Sequence[Played]) -> dict[str, Any]:
        """`needs`, as `RampJob` has them, of the step's rollouts on the target; faults of its user are left out."""
        assert isinstance(job, RampJob)
        on_target = [one for one in played if one.place == 0]
        rollouts = [_recorded(one, job) for one in on_target]
        scored = [rollout for rollout in rollouts if fault_of(rollout) is None]
        failed = [rollout for rollout in scored if rollout.outcome == "failed"]
        lacking: Mapping[str, frozenset[str]] = {}
        if failed:
            self._analyst = self._analyst or build(job.analyst, Analyst, access=job.machine.asking)
            asked = [LabelRequest(0, rollout, job.capabilities) for rollout in failed]
            given = self._analyst.label(asked, on_target[0].target.tools)
            rows = [
                RolloutLabels(run=0, rollout=rollout.id, outcome="failed", count=1, labels=labels)
                for rollout, labels in zip(failed, given, strict=True)
            ]
            lacking = needs(rows, [one.id for one in job.capabilities])
        return {"needs": [_joined(lacking.get(rollout.id)) for rollout in scored]}


def votes(needs: Sequence[str | None], environments: Sequence[str]) -> dict[str, float]:
    """How many votes each environment has; each failed rollout that lacks something an environment trains has one.

    Args:
        needs: as `RampJob.needs`.
        environments: their names.
    """
    found = dict.fromkeys(environments, 0.0)
    for lacking, rollouts in Counter(need for need in needs if need).items():
        for name, share in shares(lacking, environments).items():
            found[name] += share * rollouts
    return found


def shares(lacking: str, environments: Sequence[str]) -> dict[str, float]:
    """The environments that a set of capabilities votes for, and how its vote is divided.

    That of exactly this set, if there is one. Otherwise, in equal parts, those within the set that no other one within
    it contains: of {a, b, c} the pair a+b and c, where there is no other pair; a and b, where there is no a+b.
    """
    wanted = set(lacking.split("+"))
    within = {name: set(name.split("+")) for name in environments if wanted >= set(name.split("+"))}
    best = [name for name, held in within.items() if not any(held < other for other in within.values())]
    return {name: 1 / len(best) for name in best}


def job(spec: Spec, project: Path, trainer: Component, rollouts: int) -> RampJob:
    """One adapter on the ramp from the environments of a project, single or pair, to its target.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trainer: a `Ramp` component.
        rollouts: of the training.

    Raises:
        UserError: there are no labels, or no selection.
    """
    results = project / "results"
    selected = load(results / "capabilities/capabilities.jsonl", Capability)
    labels = load(project / "artifacts/labels/labels.jsonl", RolloutLabels)
    lacking = needs(labels, [one.id for one in selected])
    environments = [*places_of(results / "environments"), *places_of(results / "pairs")]
    return RampJob(
        name="curriculum", base=project / "artifacts/base", policy=spec.exploring(), trainer=trainer,
        places=(Place("target", spec.benchmark), *environments), rollouts=rollouts, seed=spec.seed,
        machine=spec.machine, capabilities=tuple(selected),
        needs=tuple(_joined(lacking.get(name)) for name in dict.fromkeys(row.rollout for row in labels)),
        analyst=spec.analyst, code=code_digest(RampJob),
    )  # fmt: skip


def _chosen(votes: Mapping[str, float], names: Sequence[str], drawn: float) -> int:
    """The number of the place that a draw from [0, 1) falls to; the target's where nobody votes."""
    left = drawn * sum(votes.values())
    for at, name in enumerate(names):
        if (left := left - votes.get(name, 0.0)) < 0:
            return at
    return 0


def _drawn(seed: int, group: int, what: str) -> float:
    """A number in [0, 1) by its name, so that it is the same whatever was drawn before."""
    return int(digest("ramp", seed, group, what), 16) / 16**16


def _joined(lacking: Collection[str] | None) -> str | None:
    return None if lacking is None else "+".join(sorted(lacking))


def _recorded(one: Played, job: Job) -> Rollout:
    name = digest("ramp", job.seed, one.task.id, one.trial)[:12]
    return rollout_record(one.play, one.target, one.task, one.trial, "training", "", None, one.score, 0, name)
