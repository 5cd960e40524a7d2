"""The groups that GRPO plays: tasks drawn from a job's environments, with keys and hints; and their scored rollouts.

Which rollouts a step is made of is decided by the job and its groups' numbers, and by neither the
trainer that learns from them nor the number of processes that share them.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from captrain.agents import score_of, scored
from captrain.contract import CheckedEnvironment, GuardedEpisode, RunningEpisode, closing_episodes
from captrain.environments import audit
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Score, Task, digest
from captrain.run import takes
from captrain.training import collectives
from captrain.training.jobs import EnvironmentFile, Job, Learner
from captrain.training.recipe import GRPO

REPEATS = 2
"""Further attempts at a rollout that came to nothing, before its group is drawn anew; each is counted as an error, and
none as a score."""


@dataclass(frozen=True)
class PlannedRollout:
    """A rollout to be played: the number of its environment, that of its group among those of the environment, its
    task, its trial, its key and its hint."""

    environment: int
    group: int
    task: Task
    trial: int
    key: str
    hint: str


@dataclass(frozen=True)
class ScoredPlay:
    """One rollout of a step, and what came of it."""

    rollout: PlannedRollout
    play: RunningEpisode
    score: Score


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

    def __init__(self, recipe: GRPO, policy: Learner, targets: Sequence[CheckedEnvironment], job: Job) -> None:
        self.recipe, self.policy, self.targets, self.job = recipe, policy, targets, job
        # An even share of each environment at once, so that one with too few tasks shows before anything is spent.
        self.tasks: list[list[Task]] = [[] for _ in targets]
        for index in range(len(targets)):
            self._task(index, min(self._planned(), self._size(index)) - 1)

    def plan(self, groups: Iterable[int]) -> list[PlannedRollout]:
        """Plan the rollouts of groups, in order: each environment has its turn."""
        turns = (divmod(group, len(self.targets)) for group in groups)
        return [rollout for number, index in turns for rollout in self._group(index, number)]

    def _group(self, index: int, number: int) -> list[PlannedRollout]:
        """Plan the rollouts of a group, by its number among those of its environment."""
        turn, place = divmod(number, self._size(index))
        task = self._task(index, place)
        # Environments may call their tasks alike.
        within = f"{self.job.environments[index].name}/{task.id}" if len(self.targets) > 1 else task.id
        trials = range(turn * self.recipe.group_size, (turn + 1) * self.recipe.group_size)
        keys = [f"{self.job.seed}/{within}/{trial}" for trial in trials]
        return [
            PlannedRollout(index, number, task, trial, key, self._hint(self.targets[index], task, key))
            for trial, key in zip(trials, keys, strict=True)
        ]

    def begin(
        self, adapter: Path, plan: Sequence[PlannedRollout], rows: int, before: int, pool: Executor | None
    ) -> Callable[[], tuple[list[ScoredPlay], int]]:
        """Begin to play rollouts by all processes together: each its own rows, or the first all of them where a policy
        starts servers, which belong to one process.

        A rollout that comes to nothing is attempted again. Where that does not help its group is drawn anew, of a task
        that the training would not have come to, so that the budget is met whatever fails.

        Args:
            adapter: folder of the one to act with.
            plan: the rollouts of all processes.
            rows: of one process.
            before: rollouts of earlier steps that came to nothing.
            pool: plays beside what this process does meanwhile; None: when the end is asked for.

        Returns:
            What waits for the end, called by all processes: every rollout with its score, in order, and how many came
            to nothing before. It raises a UserError where these are too large a share (trainer.max_error_share).
        """
        start = collectives.rank() * rows
        part = plan[start : start + rows]
        if takes(self.job.policy, "machine"):
            part = plan if collectives.rank() == 0 else []

        def play() -> tuple[list[ScoredPlay], int]:
            plays, errors = self._play(str(adapter), part, before) if part else ([], 0)
            for scored_play in plays * (collectives.size() > 1):
                del scored_play.play.episode  # it is over, and of this process alone
            return plays, errors

        wait = play if pool is None else pool.submit(play).result

        def end() -> tuple[list[ScoredPlay], int]:
            parts = collectives.together(wait)
            return [scored_play for plays, _ in parts for scored_play in plays], sum(errors for _, errors in parts)

        return end

    def hints(self, target: CheckedEnvironment) -> bool:
        """Tell if rollouts of an environment may read a hint."""
        return self.recipe.hint_range[1] > 0 and hasattr(target.environment, "hint")

    def _hint(self, target: CheckedEnvironment, task: Task, key: str) -> str:
        """Draw the hint that a rollout reads, "" for none, by its key, so that it does not depend on the batch. A
        task's share of hinted rollouts is drawn evenly from the recipe's range."""
        low, high = self.recipe.hint_range
        share = low + (high - low) * _drawn("hints", key.rpartition("/")[0])
        if not self.hints(target) or _drawn("hint", key) >= share:
            return ""
        environment: Any = target.environment
        hint = target.call("hint", task.id, lambda: environment.hint(task.model_dump()))
        if not isinstance(hint, str):
            raise EnvironmentFault(
                f"environment {target.name} ({target.source}) gave {hint!r:.40} as the hint of {task.id}",
                "return text from hint(task)",
            )
        return hint

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

    def _planned(self) -> int:
        """Count each environment's groups of the whole training; the next ones replace what comes to nothing."""
        return math.ceil(math.ceil(self.job.rollouts / self.recipe.group_size) / len(self.targets))

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

    def _play(self, adapter: str, plan: Sequence[PlannedRollout], before: int) -> tuple[list[ScoredPlay], int]:
        """Play rollouts until each has come to something; returns them, and how many came to nothing before."""
        plan, results = [*plan], dict[int, ScoredPlay]()
        due, errors, attempt = list(range(len(plan))), 0, 0
        while due:
            # A key of its own, because a prompt or a request that came to nothing would do so again.
            suffix = f"/again/{attempt}" if attempt % (REPEATS + 1) else ""
            episodes = {
                index: self.targets[plan[index].environment].open(plan[index].task, plan[index].key) for index in due
            }
            plays = {
                index: RunningEpisode(f"{plan[index].key}{suffix}", episodes[index], adapter, plan[index].hint)
                for index in due
            }
            indices = {id(play): index for index, play in plays.items()}

            def score(
                play: RunningEpisode, episodes: dict[int, GuardedEpisode] = episodes, indices: dict[int, int] = indices
            ) -> Score | None:
                index = indices[id(play)]
                episodes[index].close()
                rollout = plan[index]
                return score_of(self.targets[rollout.environment], rollout.task, play) if play.mask else None

            # Others may be open while one is scored: whatever is raised then, all are closed.
            with closing_episodes(episodes.values()):
                for play, verdict in scored(self.policy.play([*plays.values()]), score):
                    if verdict is not None:
                        index = indices[id(play)]
                        results[index] = ScoredPlay(plan[index], play, verdict)
            due, attempt = [index for index in due if index not in results], attempt + 1
            errors += len(due)
            if before + errors > self.recipe.max_error_share * (self.job.rollouts + before + errors):
                self._end(plays[due[0]], before + errors)
            if attempt % (REPEATS + 1) == 0 and due:
                anew = {(plan[index].environment, plan[index].group) for index in due}
                due = [index for index, rollout in enumerate(plan) if (rollout.environment, rollout.group) in anew]
                errors += sum(results.pop(index, None) is not None for index in due)
                replaced = {group: self._group(group[0], group[1] + self._planned()) for group in anew}
                for index in due:
                    place = plan[index].trial % self.recipe.group_size
                    plan[index] = replaced[plan[index].environment, plan[index].group][place]
        return [results[index] for index in range(len(plan))], errors

    def _end(self, play: RunningEpisode, errors: int) -> NoReturn:
        """End a training in which too many rollouts came to nothing, as the play."""
        share = f"above trainer.max_error_share = {self.recipe.max_error_share:g} of {self.job.rollouts}"
        reason = f"the model has no room for the prompt of {play.key} ({play.truncated})"
        remedy = "choose a model of longer context, or raise policy.max_length"
        if play.error:
            reason = f"{play.key} ended in an infrastructure error ({play.error})"
            remedy = "mend its cause and run again: training goes on from its last checkpoint"
        raise UserError(f"training {self.job.name}: {errors} rollouts came to nothing, {share}; {reason}", remedy)


def _drawn(*names: str) -> float:
    """Draw a number below 1, by these names alone."""
    return int(digest(*names), 16) / 16**16


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Compute the advantages of one group's rollouts: (reward - mean) / (std + 1e-4), with std over n - 1 as in TRL
    (paper, section 3.3). They are the same on every CPU: sums are exact, and the rest is rounded by IEEE 754."""
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    variance = math.fsum(value * value for value in differences) / max(1, len(rewards) - 1)
    scale = math.sqrt(variance) + 1e-4
    return [value / scale for value in differences]
