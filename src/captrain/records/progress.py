"""A bar on the terminal for what takes long."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Pass items on. If standard error is a terminal, a bar there shows how many are done."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
