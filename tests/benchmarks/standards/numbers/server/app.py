# pyright: reportMissingImports=false
"""An OpenEnv environment that is none of captrain's: a number between 1 and 20 is guessed, in one session at a time."""

import random
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class GuessAction(Action):
    """A guess."""

    guess: int = Field(..., ge=1, le=20, description="The number.")


class HintObservation(Observation):
    hint: str = ""


class NumbersEnvironment(Environment):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.count = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> HintObservation:
        self.number, self.count = random.Random(seed).randint(1, 20), 0
        return HintObservation(hint=f"Guess a number from 1 to 20. It is {'odd' if self.number % 2 else 'even'}.")

    def step(self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any) -> HintObservation:
        self.count += 1
        if action.guess == self.number:
            return HintObservation(hint="Right.", done=True, reward=1.0)
        hint = "higher" if action.guess < self.number else "lower"
        return HintObservation(hint=f"It is {hint}.", done=self.count == 6, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


app = create_app(NumbersEnvironment, GuessAction, HintObservation, env_name="numbers", max_concurrent_envs=1)
