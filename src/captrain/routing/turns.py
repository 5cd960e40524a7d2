"""Routing turn by turn: the adapters that act next, asked before every turn of the assistant.

The model is that of `captrain.routing.sets`; to the words of the opening come the tools that were called so far and
the last action. All tools count, because no environment says which of them write. It is fitted on turns of the base's
calibration rollouts, which are counted already, on the environments' own solutions, and on discovery rollouts that
the base passed, whose turns need nothing. Pair environments are not played on the base, so that theirs are solutions
alone; solutions in single environments as well keep the two from being told apart by how well they are played.

The label of a turn is its environment's set, to the end of the episode: which of two capabilities is still open cannot
be told from outside, since one call may need both, and a call left out is seen only where the episode ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from captrain.contract import Target, calls_of
from captrain.records import Message, Record, Rollout, digest, publish_json, read_json
from captrain.routing.compositions import BASE, members, route_of
from captrain.routing.router import OPENINGS, opening
from captrain.routing.sets import SetModel, words


class _StoredRouter(Record):
    most: int
    bias: dict[str, float]
    weights: dict[str, list[float]]


class TurnRouter:
    """Chooser of an arm for the next turn.

    Args:
        model: see `features` for what it goes by.
        most: at most so many adapters act together.
    """

    def __init__(self, model: SetModel, most: int) -> None:
        self.model, self.most = model, most

    @classmethod
    def fit(
        cls,
        targets: Mapping[str, Target],
        calibration: Mapping[str, Sequence[Rollout]],
        discovery: Sequence[Rollout],
        most: int = 2,
        count: int = OPENINGS,
    ) -> "TurnRouter":
        """Fit to what is known before any test task; costs no rollout.

        Args:
            targets: capability, or pair "a+b", -> its environment.
            calibration: rollouts of the base in each capability's environment.
            discovery: rollouts of the base on the discovery split, of which the passed ones are used.
            most: see the class.
            count: solutions of each environment.
        """
        dialogues = [(route, rollout.messages) for route, rollouts in calibration.items() for rollout in rollouts]
        dialogues += [
            (route, target.play(task, target.reference(task)))
            for route, target in targets.items()
            for task in target.tasks("training", count)
        ]
        dialogues += [(BASE, rollout.messages) for rollout in discovery if rollout.outcome == "passed"]
        turns = [
            (features(messages), members(route)) for route, dialogue in dialogues for messages in before_turns(dialogue)
        ]
        return cls(SetModel.fit(turns), most)

    @classmethod
    def read(cls, path: Path) -> "TurnRouter":
        """Read what `write` has written.

        Raises:
            UserError: the file is missing or damaged.
        """
        stored = read_json(path, _StoredRouter, "run `dvc repro routes` to make it again")
        return cls(SetModel(stored.bias, stored.weights), stored.most)

    def write(self, path: Path) -> None:
        """Publish the fitted model as JSON."""
        publish_json(path, {"most": self.most, "bias": self.model.bias, "weights": self.model.weights})

    @property
    def digest(self) -> str:
        """Identity of its choices."""
        return digest(self.most, self.model.bias, self.model.weights)

    @property
    def arms(self) -> list[str]:
        """All that it can choose, the base first."""
        capabilities, sizes = [name for name in self.model.bias if name != BASE], range(1, self.most + 1)
        return [BASE, *(route_of(frozenset(names)) for size in sizes for names in combinations(capabilities, size))]

    def choose(self, messages: Sequence[Message]) -> str:
        """Choose the arm that takes the next turn of this dialogue."""
        return self.model.route(features(messages), self.most)


def features(messages: Sequence[Message]) -> list[str]:
    """Describe the state before a turn: the words of the opening, the tools called so far, the last action."""
    turns = [message for message in messages if message["role"] == "assistant"]
    calls = [[name for name, _ in calls_of(message)] for message in turns]
    last = "+".join(calls[-1]) or "words" if calls else "nothing"
    # With a sign that no word holds, so that a tool's name is never taken for a word of the opening.
    return [*words(opening(messages)), *(f"called:{name}" for names in calls for name in names), f"last:{last}"]


def before_turns(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages that precede each turn of the assistant."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[:index]
