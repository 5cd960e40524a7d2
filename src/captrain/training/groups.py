"""The groups that GRPO plays: tasks drawn from a job's environments, with keys and hints; and their scored rollouts.

Which rollouts a step is made of is decided by the job, its groups' numbers and the steps before, and by neither the
trainer that learns from them nor the number of processes that share them.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from captrain.config import takes
from captrain.contract import GuardedEpisode, Target, closing_episodes
from captrain.environments import audit
from captrain.errors import EnvironmentFault, UserError
from captrain.policies import Play
from captrain.records import Score, Task, digest
from captrain.training import collectives
from captrain.training.jobs import EnvironmentFile, Job, Learner
from captrain.training.recipe import GRPO, ScoredPlay, Step

REPEATS = 2
"""Further attempts at a rollout that came to nothing; each is counted as an error, and none as a score."""


@dataclass(frozen=True)
class PlannedRollout:
    """A rollout to be played: the number of its environment, its task, its trial, its key and its hint."""

    environment: int
    task: Task
    trial: int
    key: str
    hint: str


class Groups:
    """The groups of one training: which rollouts each is made of, and the playing of them.

    Args:
        recipe: which environment a group is drawn from, and how often its rollouts read a hint.
        policy: samples.
        targets: the job's environments.
        job: what is trained.

    Raises:
        UserError: calibration has left an environment no training task, or its tasks are not such as its passport has
            measured.
        EnvironmentFault: an environment has too few tasks.
    """

    def __init__(self, recipe: GRPO, policy: Learner, targets: Sequence[Target], job: Job) -> None:
        self.recipe, self.policy, self.targets, self.job = recipe, policy, targets, job
        # An even share of each environment at once, so that one with too few tasks shows before anything is spent.
        share = math.ceil(math.ceil(job.rollouts / recipe.group_size) / len(targets))
        self.tasks: list[list[Task]] = [[] for _ in targets]
        for index in range(len(targets)):
            self._task(index, min(share, self._size(index)) - 1)

    def plan(self, groups: Sequence[int], history: Sequence[Step]) -> list[PlannedRollout]:
        """Plan the rollouts of a step, in order."""
        counts = Counter[str]()
        for step in history:
            counts.update(step["places"])
        plan: list[PlannedRollout] = []
        for group in groups:
            index = group % len(self.job.environments)
            name = self.job.environments[index].name
            turn, number = divmod(counts[name], self._size(index))
            task = self._task(index, number)
            counts[name] += 1
            # Environments may call their tasks alike.
            within = f"{name}/{task.id}" if len(self.targets) > 1 else task.id
            for trial in range(turn * self.recipe.group_size, (turn + 1) * self.recipe.group_size):
                key = f"{self.job.seed}/{within}/{trial}"
                plan.append(PlannedRollout(index, task, trial, key, self._hint(self.targets[index], task, key)))
        return plan

    def play(self, adapter: str, plan: Sequence[PlannedRollout], rows: int) -> tuple[list[ScoredPlay], int]:
        """Play rollouts by all processes together: each its own rows, or the first all of them where a policy starts
        servers, which belong to one process.

        Args:
            adapter: folder of the one to act with.
            plan: the rollouts of all processes.
            rows: of one process.

        Returns:
            Every rollout with its score, in order, and how many attempts at one came to nothing before.

        Raises:
            UserError: a rollout came to nothing each time, or cannot be trained on.
        """
        if collectives.size() == 1:
            return self._play(adapter, plan)
        start = collectives.rank() * rows
        part = plan[start : start + rows]
        if takes(self.job.policy, "machine"):
            part = plan if collectives.rank() == 0 else []

        def play() -> tuple[list[tuple[Play, Score]], int]:
            plays, errors = self._play(adapter, part) if part else ([], 0)
            for scored in plays:
                del scored.play.episode  # it is over, and of this process alone
            return [(scored.play, scored.score) for scored in plays], errors

        parts = collectives.together(play)
        pairs = [pair for pairs, _ in parts for pair in pairs]
        plays = [self._scored(rollout, *pair) for rollout, pair in zip(plan, pairs, strict=True)]
        return plays, sum(errors for _, errors in parts)

    def _scored(self, rollout: PlannedRollout, play: Play, score: Score) -> ScoredPlay:
        index = rollout.environment
        return ScoredPlay(index, self.targets[index], rollout.task, rollout.trial, play, score)

    def unhinted(self, plan: Sequence[PlannedRollout], scores: Sequence[Score]) -> dict[str, int]:
        """Count the rollouts of a step that saw no hint and those of them that passed; {} where no target is hinted."""
        passed = [score.success for rollout, score in zip(plan, scores, strict=True) if not rollout.hint]
        hinting = any(self._hinting(target) for target in self.targets)
        return {"unhinted": len(passed), "unhinted_passed": sum(passed)} if hinting else {}

    def _size(self, index: int) -> int:
        """Count the training tasks of an environment, after which they are used again; no end where it names none."""
        target, skip = self.targets[index], self.job.environments[index].skip
        size = target.size("training")
        if size is not None and size <= skip:
            raise UserError(
                f"training {self.job.name}: calibration has spent all {size} training tasks of {target.name}",
                "lower environments.groups, or train in another environment",
            )
        return sys.maxsize if size is None else size - skip

    def _task(self, index: int, number: int) -> Task:
        """Look up a training task of an environment, by its number among those that are for training."""
        if number >= len(self.tasks[index]):
            environment, before = self.job.environments[index], self.tasks[index]
            self.tasks[index] = self.targets[index].tasks("training", environment.skip + number + 1)[environment.skip :]
            if isinstance(environment.source, EnvironmentFile):
                if self.tasks[index][: len(before)] != before:
                    raise EnvironmentFault(
                        f"environment {environment.name} gives other tasks where more are asked for",
                        "remove it with its passport, and run `dvc repro environments`",
                    )
                new = self.tasks[index][len(before) :]
                audit(self.targets[index], environment.source.passport, new, self.job.seed)
        return self.tasks[index][number]

    def _hinting(self, target: Target) -> bool:
        return self.recipe.hint_range[1] > 0 and hasattr(target.environment, "hint")

    def _hint(self, target: Target, task: Task, key: str) -> str:
        """Draw the hint that a rollout reads, "" for none, by its key, so that it does not depend on the batch."""
        if not self._hinting(target) or _drawn("hint", key) >= self._hinted_share(key.rpartition("/")[0]):
            return ""
        environment: Any = target.environment
        hint = target.call("hint", task.id, lambda: environment.hint(task.model_dump()))
        if not isinstance(hint, str):
            raise EnvironmentFault(
                f"environment {target.name} ({target.source}) gave {hint!r:.40} as the hint of {task.id}",
                "return text from hint(task)",
            )
        return hint

    def _hinted_share(self, task: str) -> float:
        """Draw the share of a task's rollouts that are hinted, evenly from the recipe's range."""
        low, high = self.recipe.hint_range
        return low + (high - low) * _drawn("hints", task)

    def _play(self, adapter: str, plan: Sequence[PlannedRollout]) -> tuple[list[ScoredPlay], int]:
        scored: dict[int, ScoredPlay] = {}
        due, errors = list(range(len(plan))), 0
        for attempt in range(REPEATS + 1):
            # A key of its own, because a prompt or a request that came to nothing would do so again.
            suffix = f"/again/{attempt}" if attempt else ""
            episodes = {index: self._open(plan[index]) for index in due}
            plays = {
                index: Play(f"{plan[index].key}{suffix}", episodes[index], adapter, plan[index].hint) for index in due
            }
            indices = {id(play): index for index, play in plays.items()}
            # Others may be open while one is scored: whatever is raised then, all are closed.
            with closing_episodes(episodes.values()):
                for play in self.policy.play([*plays.values()]):
                    index = indices[id(play)]
                    if play.mask and not play.error:
                        target = self.targets[plan[index].environment]
                        score = target.score(plan[index].task, play.messages)
                        scored[index] = self._scored(plan[index], play, score)
                    episodes[index].close()
            due = [index for index in due if index not in scored]
            if not due:
                break
            errors += len(due)
            if attempt == REPEATS:
                raise self._fruitless(plays[due[0]])
        return [scored[index] for index in range(len(plan))], errors

    def _open(self, rollout: PlannedRollout) -> GuardedEpisode:
        return self.targets[rollout.environment].open(rollout.task, rollout.key)

    def _fruitless(self, play: Play) -> UserError:
        if play.error:
            return UserError(
                f"training {self.job.name}: rollout {play.key} ended in an infrastructure error ({play.error})",
                "mend its cause and run again: training goes on from its last checkpoint",
            )
        return UserError(
            f"training {self.job.name}: the model has no room for the prompt of rollout {play.key} ({play.truncated})",
            "choose a model of longer context, or raise policy.max_length",
        )


def _drawn(*names: str) -> float:
    """Draw a number below 1, by these names alone."""
    return int(digest(*names), 16) / 16**16


def advantages(rewards: Sequence[float]) -> list[float]:
    """Compute the advantages of one group's rollouts, (r - mean) / (std + 1e-4) (paper, section 3.3; std as TRL's, over
    n - 1).

    Sums are exact and all else is rounded as IEEE 754 says: they are the same on every CPU.
    """
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    variance = math.fsum(value * value for value in differences) / max(1, len(rewards) - 1)
    scale = math.sqrt(variance) + 1e-4
    return [value / scale for value in differences]
