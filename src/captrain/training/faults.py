"""Solutions with faults of a known rate: what an author who errs, such as a language model, would have taught.

The embedded templates' solutions are without a fault, so that what they teach says nothing of a model's. Here a known
share of solutions is altered before it is played, at random or always at the same step, and the environment's own
score may or may not be asked to leave out what does not earn everything. A curve over the rate says how good solutions
must be. Which solution is altered, and how, follows from its task alone.
"""

import copy
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from captrain.contract import Target, calls_of
from captrain.records import Message, Task

FaultKind = Literal["random", "systematic"]
DIGIT = re.compile(r"\d")


@dataclass(frozen=True)
class Faults:
    """Faults in solutions.

    Args:
        rate: share of solutions that are altered, in [0, 1].
        kind: "random": a call is dropped, or a digit of an argument changed. "systematic": the step of the
            environment's own capability is broken, as its `broken(task)` has it; without one the last call is dropped.
        filtered: whether a solution that does not earn everything in its environment is left out.
    """

    rate: float = 0.0
    kind: FaultKind = "random"
    filtered: bool = True

    def solution(self, target: Target, task: Task) -> list[Message]:
        """Return the assistant messages of a task's solution, altered or not."""
        actions, rng = target.reference(task), random.Random(f"fault-{task.id}")
        if rng.random() >= self.rate:
            return actions
        return _broken(target, task, actions) if self.kind == "systematic" else _altered(actions, rng)


def _broken(target: Target, task: Task, actions: Sequence[Message]) -> list[Message]:
    broken: Callable[[Any], list[Message]] | None = getattr(target.environment, "broken", None)
    if broken is not None:
        return target.call("broken", task.id, lambda: broken(task.model_dump()))
    calling = [index for index, action in enumerate(actions) if calls_of(action)]
    return [action for index, action in enumerate(actions) if index not in calling[-1:]]


def _altered(actions: Sequence[Message], rng: random.Random) -> list[Message]:
    """Drop one call of a solution or, as often, change one digit of one argument; a solution without a call stays as it
    is."""
    calling = [index for index, action in enumerate(actions) if calls_of(action)]
    if not calling:
        return [*actions]
    index = rng.choice(calling)
    digits = [
        (call, name, match.start())
        for call, (_, arguments) in enumerate(calls_of(actions[index]))
        for name, value in arguments.items()
        if isinstance(value, str)
        for match in DIGIT.finditer(value)
    ]
    if not digits or rng.random() < 0.5:
        return [action for number, action in enumerate(actions) if number != index]
    call, name, place = rng.choice(digits)
    action = copy.deepcopy(actions[index])
    function, (_, arguments) = action["tool_calls"][call]["function"], calls_of(action)[call]
    digit = str((int(arguments[name][place]) + rng.randrange(1, 10)) % 10)
    value = arguments[name][:place] + digit + arguments[name][place + 1 :]
    function["arguments"] = {**arguments, name: value}
    return [*actions[:index], action, *actions[index + 1 :]]
