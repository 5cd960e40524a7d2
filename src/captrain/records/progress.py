"""Progress of long work: a bar on a terminal. In a pipe, a file or a job's log, about one line per minute."""

import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import parent_process
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
PAUSE = 60.0
"""Seconds before the first line, and between lines."""
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {remaining} left{postfix}"


class ProgressBar(tqdm):
    """Shows how many items are done, the time left and a remark (`set_postfix_str`).

    A worker process writes lines on a terminal, too: the bar there is that of the process that started it.

    Args:
        items: to pass on; None: the caller calls `update`.
        what: the work, in a word or two.
        total: number of items; None: that of `items`.
        initial: items that were finished before.
        unit: one item, in a word.
        quiet: show nothing.
        stream: where it is shown; None: on standard error.
    """

    def __init__(
        self,
        items: Iterable[T] | None = None,
        *,
        what: str,
        total: int | None = None,
        initial: int = 0,
        unit: str = "item",
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.draws = self.stream.isatty() and parent_process() is None
        self.shown = time.monotonic()
        super().__init__(
            items,
            desc=what,
            total=total,
            initial=initial,
            unit=unit,
            leave=False,
            disable=quiet,
            file=self.stream,
            bar_format=None if self.draws else LINE,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Redraw the bar; without a terminal, write a line if the last one is old. No line is written at the end."""
        if self.draws:
            super().display(msg, pos)
            return
        if msg is None and self.n != self.total and time.monotonic() - self.shown >= PAUSE:
            self.shown = time.monotonic()
            clear = "\r\033[K" if self.stream.isatty() else ""  # erase the bar that another process drew
            print(f"{clear}{self}", file=self.stream, flush=True)


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items unchanged, and show how many are done."""
    return iter(ProgressBar(items, what=what, total=total))
