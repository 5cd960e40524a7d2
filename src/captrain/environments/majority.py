"""The same answer in every task: it must not pay nearly as much as finding out the right one.

Only many tasks tell an answer that is right in nine of ten from one that is right in six. So it is played on more tasks
than other guesses, beside a guess drawn evenly among all answers.
"""

from collections import Counter
from dataclasses import dataclass

from captrain.environments.adversary import Adversary, Exploit

BATCH, PLAYED = 20, 100
"""Number of tasks after which the result is looked at, and maximum number of tasks."""


@dataclass(frozen=True)
class SameAnswer:
    """The plays of the most frequent answer, and what they are compared with.

    Attributes:
        plays: with the same answer in every task.
        evenly: mean reward of an answer drawn evenly among `answers`.
        answers: number of right answers that were seen, or of right and wrong ones if one is always right.
        bound: maximum reward.
    """

    plays: Exploit
    evenly: float
    answers: int
    bound: float

    @property
    def reason(self) -> str:
        """The bound in words."""
        drawn = f"one of {self.answers} answers, drawn evenly, earns {self.evenly:.2f}"
        return f"{drawn}, and the same in every task may earn {self.bound:.2f}"


def play_same_answer(player: Adversary, low: float, high: float) -> SameAnswer | None:
    """Play the answer that is right in most tasks, whatever the task.

    The bound is halfway between the reward of guessing evenly and full reward, within `low` and `high`: .75 for two
    answers, .67 for three. So an honest environment may have few answers, and one of them twice as often as the others.

    Returns:
        The plays; None if each answer is right in at most half of the tasks.
    """
    counts = Counter(view.right for view in player.views)
    [(value, count)] = counts.most_common(1) or [("", 0)]
    if 2 * count <= len(player.views):
        return None
    answers = sorted({*counts} if len(counts) > 1 else {value, *(view.wrong for view in player.views)})
    same, evenly, bound = Exploit(f"{value[:40]!r} always"), Exploit("evenly"), high
    for number, task in enumerate(player.other_tasks(PLAYED), start=1):
        player.reward(lambda view, _: view.guess(value) if view.has_choice else None, task, same, "same")
        player.reward(
            lambda view, rng: view.guess(rng.choice(answers)) if view.has_choice else None, task, evenly, "evenly"
        )
        if same.rewards:
            bound = max(low, min(high, (1 + evenly.mean) / 2))
        if same.rewards and number % BATCH == 0 and not same.least <= bound <= same.most:
            break
    return SameAnswer(same, evenly.mean, len(answers), round(bound, 3)) if same.rewards else None
