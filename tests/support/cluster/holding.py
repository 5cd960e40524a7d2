"""A benchmark that pays for letters, logs each scoring with its process, and waits while a file `hold` exists."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.letters import LETTERS

SCORED: list[int] = []
BASE: dict[str, Any] = {}
exec(LETTERS.format(name="letters", flat=0), BASE)


class Letters(BASE["Environment"]):
    """A process stops after as many scores as `hold` says, instead of 20."""

    def score(self, task: dict[str, Any], messages: list[Any]) -> Any:
        with Path("scored").open("a", encoding="utf-8") as file:
            SCORED.append(file.write(f"{os.getpid()}\n"))
        with Path("nodes").open("a", encoding="utf-8") as file:
            file.write(f"{os.environ.get('SLURMD_NODENAME', 'here')}\n")
        with suppress(FileNotFoundError):
            while len(SCORED) > int(Path("hold").read_text(encoding="utf-8") or 20):
                time.sleep(0.02)
        return super().score(task, messages)
