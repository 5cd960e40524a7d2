"""Plans, plays and scores the groups of GRPO, in a job's environments.

The plan of a step depends only on the job and the numbers of its groups. It is the same for every trainer and any
number of processes.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from captrain.agents import score_of, scored
from captrain.contract import CheckedEnvironment, RunningEpisode, closing_episodes
from captrain.environments import audit
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Score, Task, counted, digest
from captrain.run import takes
from captrain.training import collectives
from captrain.training.jobs import EnvironmentFile, Job, Learner
from captrain.training.recipe import GRPO

REPEATS = 2
"""Retries of a failed rollout before its group is replaced. Each retry counts as an error."""


@dataclass(frozen=True)
class PlannedRollout:
    """A rollout to play. `environment` is the environment's index, `group` the group's index within it."""

    environment: int
    group: int
    task: Task
    trial: int
    key: str
    hint: str


@dataclass(frozen=True)
class ScoredPlay:
    """A planned rollout, its episode and its score."""

    rollout: PlannedRollout
    play: RunningEpisode
    score: Score


class Groups:
    """Plans and plays the groups of one training.

    Args:
        recipe: group size and hints.
        policy: the policy that samples.
        targets: the job's environments.
        job: the job to train.

    Raises:
        UserError: calibration has used up an environment's training tasks, or the tasks differ from those that its
            passport has measured.
        EnvironmentFault: an environment has too few tasks.
    """

    def __init__(self, recipe: GRPO, policy: Learner, targets: Sequence[CheckedEnvironment], job: Job) -> None:
        self.recipe, self.policy, self.targets, self.job = recipe, policy, targets, job
        # Load each environment's tasks now, so that one with too few tasks fails before anything is spent.
        self.tasks: list[list[Task]] = [[] for _ in targets]
        for index in range(len(targets)):
            self._task(index, min(self._planned(), self._size(index)) - 1)

    def plan(self, groups: Iterable[int]) -> list[PlannedRollout]:
        """Plan the rollouts of groups, given by number. Environments take turns."""
        turns = (divmod(group, len(self.targets)) for group in groups)
        return [rollout for number, index in turns for rollout in self._group(index, number)]

    def _group(self, index: int, number: int) -> list[PlannedRollout]:
        """Plan a group, given by its number within its environment."""
        turn, place = divmod(number, self._size(index))
        task = self._task(index, place)
        # Tasks of two environments may have the same id.
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
        """Start playing rollouts in all processes. Each process plays its own rows.

        If the policy starts servers, which belong to one process, rank 0 plays all rollouts.

        A failed rollout is retried. If retries fail, its group is replaced by one of a task beyond the plan, so that
        the budget is always met.

        Args:
            adapter: folder of the adapter to act with.
            plan: the rollouts of all processes.
            rows: number of rollouts per process.
            before: failed attempts of earlier steps.
            pool: plays in the background; None: play when the result is asked for.

        Returns:
            A function that waits for the end, to be called by all processes. It returns the scored rollouts in order
            and the number of failed attempts, and raises a UserError if too many failed (trainer.max_error_share).
        """
        start = collectives.rank() * rows
        part = plan[start : start + rows]
        if takes(self.job.policy, "machine"):
            part = plan if collectives.rank() == 0 else []

        def play() -> tuple[list[ScoredPlay], int]:
            plays, errors = self._play(str(adapter), part, before) if part else ([], 0)
            if collectives.size() > 1:
                for scored_play in plays:
                    del scored_play.play.episode  # the episode is over, and cannot be sent to other processes
            return plays, errors

        wait = play if pool is None else pool.submit(play).result

        def end() -> tuple[list[ScoredPlay], int]:
            parts = collectives.together(wait)
            return [scored_play for plays, _ in parts for scored_play in plays], sum(errors for _, errors in parts)

        return end

    def hints(self, target: CheckedEnvironment) -> bool:
        """Return whether rollouts of an environment may read a hint."""
        return self.recipe.hint_range[1] > 0 and hasattr(target.environment, "hint")

    def _hint(self, target: CheckedEnvironment, task: Task, key: str) -> str:
        """Return the hint of a rollout; "" if it reads none.

        The draw is seeded by the keys of rollout and task, so the hint does not depend on the batch.
        """
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
        """Count the training tasks that calibration left; `sys.maxsize` if the environment is unlimited."""
        target, skip = self.targets[index], self.job.environments[index].skip
        size = target.size("training")
        if size is not None and size <= skip:
            raise UserError(
                f"training {self.job.name}: calibration has spent all {size} training tasks of {target.name}",
                "lower environments.groups, or train in another environment",
            )
        return sys.maxsize if size is None else size - skip

    def _planned(self) -> int:
        """Count each environment's groups in the whole training. Groups of higher numbers replace failed ones."""
        return math.ceil(math.ceil(self.job.rollouts / self.recipe.group_size) / len(self.targets))

    def _task(self, index: int, number: int) -> Task:
        """Return a task of an environment, counted after those of calibration. Load and audit more tasks if needed."""
        environment, known = self.job.environments[index], self.tasks[index]
        if number >= len(known):
            tasks = self.targets[index].tasks("training", environment.skip + number + 1)[environment.skip :]
            if isinstance(environment.source, EnvironmentFile):
                if tasks[: len(known)] != known:
                    raise EnvironmentFault(
                        f"environment {environment.name} changes its tasks when more are requested",
                        "remove it with its passport, and run `dvc repro environments`",
                    )
                audit(self.targets[index], environment.source.passport, tasks[len(known) :], self.job.seed)
            self.tasks[index] = tasks
        return self.tasks[index][number]

    def _play(self, adapter: str, plan: Sequence[PlannedRollout], before: int) -> tuple[list[ScoredPlay], int]:
        """Play rollouts until all have a score; return them and the number of failed attempts."""
        plan, results = [*plan], dict[int, ScoredPlay]()
        due, errors, attempt = list(range(len(plan))), 0, 0
        while due:
            # A retry has its own key, because the same key would sample the same failure again.
            suffix = f"/again/{attempt}" if attempt % (REPEATS + 1) else ""
            played = self._attempt(adapter, [plan[index] for index in due], suffix)
            for index, result in zip(due, played, strict=True):
                if isinstance(result, ScoredPlay):
                    results[index] = result
            failed = [result for result in played if isinstance(result, RunningEpisode)]
            due, attempt, errors = [index for index in due if index not in results], attempt + 1, errors + len(failed)
            if failed and before + errors > self.recipe.max_error_share * (self.job.rollouts + before + errors):
                self._end(failed[0], before + errors)
            if attempt % (REPEATS + 1) == 0 and due:
                replaced = {(plan[index].environment, plan[index].group) for index in due}
                due = [index for index, rollout in enumerate(plan) if (rollout.environment, rollout.group) in replaced]
                errors += sum(results.pop(index, None) is not None for index in due)
                for index in due:
                    rollout = plan[index]
                    group = self._group(rollout.environment, rollout.group + self._planned())
                    plan[index] = group[rollout.trial % self.recipe.group_size]
        return [results[index] for index in range(len(plan))], errors

    def _attempt(self, adapter: str, plan: Sequence[PlannedRollout], suffix: str) -> list[ScoredPlay | RunningEpisode]:
        """Play each rollout once, with a suffix on its key. Return its score, or the episode if it failed."""
        episodes = [self.targets[rollout.environment].open(rollout.task, rollout.key) for rollout in plan]
        plays = [
            RunningEpisode(f"{rollout.key}{suffix}", episode, adapter, rollout.hint)
            for rollout, episode in zip(plan, episodes, strict=True)
        ]
        numbers = {id(play): number for number, play in enumerate(plays)}
        results: list[ScoredPlay | RunningEpisode] = [*plays]

        def score(play: RunningEpisode) -> Score | None:
            number = numbers[id(play)]
            episodes[number].close()
            rollout = plan[number]
            return score_of(self.targets[rollout.environment], rollout.task, play) if play.mask else None

        # Close all episodes if scoring one raises.
        with closing_episodes(episodes):
            for play, verdict in scored(self.policy.play(plays), score):
                if verdict is not None:
                    number = numbers[id(play)]
                    results[number] = ScoredPlay(plan[number], play, verdict)
        return results

    def _end(self, play: RunningEpisode, errors: int) -> NoReturn:
        """Raise the error for too many failed rollouts; its message shows one of them."""
        share = f"above trainer.max_error_share = {self.recipe.max_error_share:g} of {self.job.rollouts}"
        reason = f"the model has no room for the prompt of {play.key} ({play.truncated})"
        remedy = "choose a model of longer context, or raise policy.max_length"
        if play.error:
            reason = f"{play.key} ended in an infrastructure error ({play.error})"
            remedy = "fix its cause and run again: training resumes from its last checkpoint"
        raise UserError(f"training {self.job.name}: {counted(errors, 'rollout')} failed, {share}; {reason}", remedy)


def _drawn(*names: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the names."""
    return int(digest(*names), 16) / 16**16


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Compute the advantages of one group: (reward - mean) / (std + 1e-4), with std over n - 1 as in TRL.

    Source: paper, section 3.3. Results are the same on every CPU: sums are exact, and IEEE 754 rounds the rest.
    """
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    variance = math.fsum(value * value for value in differences) / max(1, len(rewards) - 1)
    scale = math.sqrt(variance) + 1e-4
    return [value / scale for value in differences]
