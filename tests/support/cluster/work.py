"""Work of the tests' jobs: each call is noted in the file `runs`, and may wait for a file before it goes on."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from captrain.errors import EnvironmentFault, UserError
from captrain.run import launch


@dataclass(frozen=True)
class Chore:
    """A small thing to do. gate: the file that it waits for. once: it waits at its first call only."""

    name: str
    gate: str = ""
    once: bool = False


def chore(item: Chore) -> tuple[str, str | None]:
    """The name in capitals, and how many threads there are."""
    again = (Path("runs").read_text() if Path("runs").exists() else "").split().count(item.name)
    with open("runs", "a") as file:
        file.write(f"{item.name}\n")
    Path(f"pid-{item.name}").write_text(str(os.getpid()))
    launch.report_progress(again + 1, 5, f"at {item.name}")
    while item.gate and not (item.once and again) and not Path(item.gate).exists():
        time.sleep(0.02)
    return item.name.upper(), os.environ.get("OMP_NUM_THREADS")


def refuse(item: Chore) -> str:
    """Refuses what is out of stock, breaks on what is broken, finds fault with what is faulty."""
    if item.name == "scarce":
        raise UserError("one is out of stock", "take two")
    if item.name == "faulty":
        raise EnvironmentFault("two raised", "mend it")
    if item.name == "broken":
        raise ZeroDivisionError("three by nothing")
    return chore(item)[0]
