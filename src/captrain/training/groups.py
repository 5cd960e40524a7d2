"""The groups that GRPO plays: tasks drawn from a job's places, with keys and hints; and their rollouts, with scores.

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
from captrain.contract import Target, closing_episodes
from captrain.errors import EnvironmentFault, UserError
from captrain.policies import Play
from captrain.records import Score, Task, digest
from captrain.training import collectives
from captrain.training.jobs import Job, Learner
from captrain.training.recipe import GRPO, Played, Step

AGAIN = 2
"""Further attempts at a rollout that came to nothing; each is counted as an error, and none as a score."""


@dataclass(frozen=True)
class Wanted:
    """A rollout to be played: the number of its place, its task, its number in the group, its key and its hint."""

    place: int
    task: Task
    trial: int
    key: str
    hint: str


class Groups:
    """The groups of one training: which rollouts each is made of, and the playing of them.

    Args:
        recipe: which place a group is drawn from, and how often its rollouts read a hint.
        policy: samples.
        targets: the job's places.
        job: what is trained.

    Raises:
        UserError: calibration has left a place no training task.
        EnvironmentFault: a place has too few tasks.
    """

    def __init__(self, recipe: GRPO, policy: Learner, targets: Sequence[Target], job: Job) -> None:
        self.recipe, self.policy, self.targets, self.job = recipe, policy, targets, job
        # An even share of each place at once, so that one with too few tasks shows before anything is spent.
        share = math.ceil(math.ceil(job.rollouts / recipe.group_size) / len(targets))
        self.tasks: list[list[Task]] = [[] for _ in targets]
        for place in range(len(targets)):
            self._task(place, min(share, self._most(place)) - 1)

    def wanted(self, groups: Sequence[int], history: Sequence[Step]) -> list[Wanted]:
        """The rollouts of a step, in order."""
        used = Counter[str]()
        for step in history:
            used.update(step["places"])
        wanted: list[Wanted] = []
        for group in groups:
            place = self.recipe.place(self.job, group, history)
            name = self.job.places[place].name
            turn, at = divmod(used[name], self._most(place))
            task = self._task(place, at)
            used[name] += 1
            # Environments may call their tasks alike.
            within = f"{name}/{task.id}" if len(self.targets) > 1 else task.id
            for trial in range(turn * self.recipe.group_size, (turn + 1) * self.recipe.group_size):
                key = f"{self.job.seed}/{within}/{trial}"
                wanted.append(Wanted(place, task, trial, key, self._hint(self.targets[place], task, key)))
        return wanted

    def played(self, adapter: str, wanted: Sequence[Wanted], rows: int) -> tuple[list[Played], int]:
        """Play rollouts by all processes together: each its own rows, or the first all of them where a policy starts
        servers, which belong to one process.

        Args:
            adapter: folder of the one to act with.
            wanted: the rollouts of all processes.
            rows: of one process.

        Returns:
            Every rollout with its score, in order, and how many attempts at one came to nothing before.

        Raises:
            UserError: a rollout came to nothing each time, or cannot be trained on.
        """
        if collectives.size() == 1:
            return self._played(adapter, wanted)
        start = collectives.rank() * rows
        own = slice(start, start + rows)
        if takes(self.job.policy, "machine"):
            own = slice(None) if collectives.rank() == 0 else slice(0)

        def play() -> tuple[list[tuple[Play, Score]], int]:
            played, errors = self._played(adapter, wanted[own]) if wanted[own] else ([], 0)
            for one in played:
                del one.play.episode  # it is over, and of this process alone
            return [(one.play, one.score) for one in played], errors

        parts = collectives.together(play)
        plays = [one for part, _ in parts for one in part]
        played = [
            Played(one.place, self.targets[one.place], one.task, one.trial, play, score)
            for one, (play, score) in zip(wanted, plays, strict=True)
        ]
        return played, sum(errors for _, errors in parts)

    def unhinted(self, wanted: Sequence[Wanted], scores: Sequence[Score]) -> dict[str, int]:
        """How many rollouts of a step had no hint, and how many of these passed; nothing where hints are not given."""
        alone = [score.success for one, score in zip(wanted, scores, strict=True) if not one.hint]
        given = any(self._hinting(target) for target in self.targets)
        return {"unhinted": len(alone), "unhinted_passed": sum(alone)} if given else {}

    def _most(self, place: int) -> int:
        """Training tasks that a place has, after which they are used again; no end where the environment names none."""
        target, skip = self.targets[place], self.job.places[place].skip
        size = target.size("training")
        if size is not None and size <= skip:
            raise UserError(
                f"training {self.job.name}: calibration has spent all {size} training tasks of {target.name}",
                "lower environments.groups, or train in another environment",
            )
        return sys.maxsize if size is None else size - skip

    def _task(self, place: int, at: int) -> Task:
        """A training task of a place, by its number among those that are for training."""
        if at >= len(self.tasks[place]):
            skip = self.job.places[place].skip
            self.tasks[place] = self.targets[place].tasks("training", skip + at + 1)[skip:]
        return self.tasks[place][at]

    def _hinting(self, target: Target) -> bool:
        return self.recipe.hints > 0 and hasattr(target.environment, "hint")

    def _hint(self, target: Target, task: Task, key: str) -> str:
        """The hint that a rollout reads, "" for none: drawn by its key, so that it does not depend on the batch."""
        if not self._hinting(target) or int(digest("hint", key), 16) / 16**16 >= self.recipe.hints:
            return ""
        environment: Any = target.environment
        hint = target.call("hint", task.id, lambda: environment.hint(task.model_dump()))
        if not isinstance(hint, str):
            raise EnvironmentFault(
                f"environment {target.name} ({target.source}) gave {hint!r:.40} as the hint of {task.id}",
                "return text from hint(task)",
            )
        return hint

    def _played(self, adapter: str, wanted: Sequence[Wanted]) -> tuple[list[Played], int]:
        done: dict[int, Played] = {}
        left, errors = list(range(len(wanted))), 0
        for attempt in range(AGAIN + 1):
            # A key of its own, because a rollout that was read anew as other tokens would be so again.
            again = f"/again/{attempt}" if attempt else ""
            episodes = {at: self.targets[wanted[at].place].open(wanted[at].task, wanted[at].key) for at in left}
            plays = {at: Play(f"{wanted[at].key}{again}", episodes[at], adapter, wanted[at].hint) for at in left}
            places = {id(play): at for at, play in plays.items()}
            # Others may be open while one is scored: whatever is raised then, all are closed.
            with closing_episodes(episodes.values()):
                for play in self.policy.play([*plays.values()]):
                    at = places[id(play)]
                    if play.mask and not (play.error or play.retokenised):
                        one, target = wanted[at], self.targets[wanted[at].place]
                        score = target.score(one.task, play.messages)
                        done[at] = Played(one.place, target, one.task, one.trial, play, score)
                    episodes[at].close()
            left = [at for at in left if at not in done]
            if not left:
                break
            errors += len(left)
            if attempt == AGAIN:
                raise self._fruitless(plays[left[0]])
        return [done[at] for at in range(len(wanted))], errors

    def _fruitless(self, play: Play) -> UserError:
        if play.error:
            return UserError(
                f"training {self.job.name}: rollout {play.key} ended in an infrastructure error ({play.error})",
                "mend its cause and run again: training goes on from its last checkpoint",
            )
        if not play.retokenised:
            return UserError(
                f"training {self.job.name}: the model has no room for the prompt of rollout {play.key} "
                f"({play.truncated})",
                "choose a model of longer context, or serve it with one (--max-model-len in machine.vllm.arguments)",
            )
        return UserError(
            f"training {self.job.name}: rollout {play.key} is not token-exact and cannot be trained on "
            f"({play.retokenised})",
            "choose a model whose chat template renders earlier turns as the model wrote them, or policy=local",
        )
