# pyright: reportMissingImports=false
"""An OpenEnv environment of MCP tools that is none of captrain's: numbers are read and a sum is answered."""

import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class SumsEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")
        self.numbers: list[int] = []
        self.worth, self.over, self.count = 0.0, False, 0

        @server.tool
        def numbers() -> str:
            """The numbers to be added."""
            return " ".join(map(str, self.numbers))

        @server.tool
        def answer(total: int) -> str:
            """Say what they come to."""
            self.worth, self.over = float(total == sum(self.numbers)), True
            return "Thank you."

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        rng = random.Random(seed)
        self.numbers = [rng.randint(10, 99) for _ in range(3)]
        self.worth, self.over, self.count = 0.0, False, 0
        return Observation()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._paid(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._paid(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _paid(self, observation: Observation) -> Observation:
        self.count += 1
        return observation.model_copy(update={"reward": self.worth, "done": self.over})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("call a tool")

    @property
    def state(self) -> State:
        return State(step_count=self.count)


app = create_app(SumsEnvironment, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=8)
