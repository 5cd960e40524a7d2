"""An agent without the needed look-ups that learns from a few hundred plays which moves earn reward.

It stands in for reinforcement learning. Each move is drawn with weights that depend on the previous move. The weights
of moves grow with the reward of the plays that made them. `Adversary.best` then plays the best sequences of moves on
other tasks. Training the embedded base would find less: it earns next to nothing in a foreign environment, so GRPO has
nothing to reinforce.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from captrain.contract import calls_of, tool_call
from captrain.environments.adversary import Adversary, Script
from captrain.environments.evidence import Agent
from captrain.environments.probes import CLOSING, random_call
from captrain.environments.views import View
from captrain.records import JsonObject, Message

PLAYS, BATCH = 480, 48
"""Total number of plays, and number of plays between changes of the weights."""
RATE, LEAST = 0.3, 0.02
"""Share of a weight that a batch replaces, and sum of the minimum weights of all moves."""
LONGEST = 12
"""Maximum number of moves in a play."""
KEPT = 24
"""Number of scripts that are played on other tasks."""
GO_ON, STEP, SPEAK, STOP = "the solution's next message", "the step", "words", "the end"
ELSEWHERE = " on another value"


class Learner:
    """Learner of moves, on the tasks on which the adversary's rules are fitted.

    Args:
        player: the adversary of the environment.
    """

    def __init__(self, player: Adversary) -> None:
        self.player, self.evidence = player, player.evidence
        hidden = {tool for view in player.views for tool in view.needed}
        tools: list[JsonObject] = [tool["function"] for tool in self.evidence.tools]
        self.tools = {tool["name"]: tool for tool in tools if tool["name"] not in hidden}
        keys = {view.key for view in player.views}
        keyed = [name for name, tool in self.tools.items() if keys & {*_parameters(tool)}]
        self.moves = [GO_ON, STEP, SPEAK, STOP, *self.tools, *(name + ELSEWHERE for name in keyed)]
        self.weights = {last: dict.fromkeys(self.moves, 1.0) for last in ("", *self.moves)}
        for last in ("", GO_ON, STEP):
            self.weights[last][GO_ON] = float(len(self.moves))

    def scripts(self) -> dict[str, Script]:
        """Learn, and return the scripts that earned most, by their moves in words; {} if no task needs a look-up."""
        rng, views = self.evidence.random("learner"), self.player.views
        best: dict[tuple[str, ...], float] = {}
        for start in range(0, PLAYS if views else 0, BATCH):
            batch: list[tuple[float, tuple[str, ...]]] = []
            for number in range(start, start + BATCH):
                view, trail = views[number % len(views)], list[str]()
                play = self.evidence.act(view.task, self._explore(view, rng, trail), LONGEST + 1)
                batch.append((self.evidence.score(view.task, play).reward, tuple(trail)))
            self._reweight(batch)
            for reward, trail in batch:
                best[trail] = max(best.get(trail, 0.0), reward)
        chosen = sorted(best, key=lambda trail: (-best[trail], len(trail), trail))[:KEPT]
        return {in_words(trail): partial(self._follow, trail) for trail in chosen}

    def _reweight(self, batch: Sequence[tuple[float, Sequence[str]]]) -> None:
        """Shift weights towards the moves of plays that earned more than the mean."""
        mean = sum(reward for reward, _ in batch) / len(batch)
        gains: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for reward, trail in batch:
            for last, move in zip(("", *trail), trail, strict=False):
                gains[last][move] += max(0.0, reward - mean)
        for last, gained in gains.items():
            old, most = self.weights[last], sum(gained.values())
            share = sum(old.values())
            if most > 0:
                floor = LEAST / len(self.moves)
                mixed = {move: (1 - RATE) * old[move] / share + RATE * gained[move] / most for move in self.moves}
                self.weights[last] = {move: max(weight, floor) for move, weight in mixed.items()}

    def _explore(self, view: View, rng: random.Random, trail: list[str]) -> Agent:
        """Return an agent that draws its moves and appends them to `trail`."""
        turn = self._turn(view, rng)

        def agent(messages: Sequence[Message]) -> Message | None:
            if len(trail) >= LONGEST:
                return None
            weights = self.weights[trail[-1] if trail else ""]
            [move] = rng.choices([*weights], [*weights.values()])
            trail.append(move)
            return turn(move, messages)

        return agent

    def _follow(self, trail: Sequence[str], view: View, rng: random.Random) -> Agent | None:
        """Return an agent that repeats the moves of `trail`; None if a value of the step is not visible."""
        turn, moves = self._turn(view, rng), iter(trail)
        return (lambda messages: turn(next(moves, STOP), messages)) if view.has_choice else None

    def _turn(self, view: View, rng: random.Random) -> Callable[[str, Sequence[Message]], Message | None]:
        """Return a function that makes the message of a move. A play draws one value for all of its moves."""
        values = self.player.labels or [one.value for one in view.candidates] or [view.wrong]
        value = rng.choice(values)
        before, after = iter(view.before), iter([view.step(value), *view.ending(value)])

        def turn(move: str, messages: Sequence[Message]) -> Message | None:
            if move in (SPEAK, STOP):
                return CLOSING if move == SPEAK else None
            if move == GO_ON:
                return next(before, None) or next(after, None)
            if move == STEP:
                return view.step(value)
            [(name, arguments)] = calls_of(random_call(self.tools[move.removesuffix(ELSEWHERE)], messages, rng))
            if view.key in arguments:
                others = [one for one in values if one != value] if move.endswith(ELSEWHERE) else []
                arguments[view.key] = rng.choice(others or [value])
            return tool_call(name, arguments)

        return turn


def _parameters(tool: JsonObject) -> JsonObject:
    return (tool.get("parameters") or {}).get("properties") or {}


def in_words(trail: Sequence[str]) -> str:
    """Return the moves of a play in words."""
    counts = [(move, len([*same])) for move, same in groupby(trail)]
    return ", ".join(move if count == 1 else f"{move} {count} times" for move, count in counts)
