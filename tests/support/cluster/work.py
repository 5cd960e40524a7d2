"""Work for jobs in tests: each call is logged in the file `runs`, and may wait for a file."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from captrain.errors import EnvironmentFault, UserError


@dataclass(frozen=True)
class Chore:
    """A small piece of work. gate: the file it waits for. once: wait at the first call only."""

    name: str
    gate: str = ""
    once: bool = False


def chore(item: Chore) -> tuple[str, str | None]:
    """Return the name in capitals, and the number of threads."""
    again = (Path("runs").read_text(encoding="utf-8") if Path("runs").exists() else "").split().count(item.name)
    with open("runs", "a", encoding="utf-8") as file:
        file.write(f"{item.name}\n")
    Path(f"pid-{item.name}").write_text(str(os.getpid()), encoding="utf-8")
    print(f"{again + 1} of 5: at {item.name}", flush=True)
    while item.gate and not (item.once and again) and not Path(item.gate).exists():
        time.sleep(0.02)
    return item.name.upper(), os.environ.get("OMP_NUM_THREADS")


def refuse(item: Chore) -> str:
    """Raise the error that the item's name asks for."""
    if item.name == "scarce":
        raise UserError("one is out of stock", "take two")
    if item.name == "faulty":
        raise EnvironmentFault("two raised", "mend it")
    if item.name == "broken":
        raise ZeroDivisionError("three by nothing")
    return chore(item)[0]
