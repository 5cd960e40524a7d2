"""Removes keys of the environment from the output of this process and from the logs of its child processes."""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO, cast

from captrain.records import plain, without_secrets


@contextmanager
def clean_output() -> Iterator[None]:
    """Clean standard output and error inside the block; see `_CleanStream`."""
    with redirect_stdout(cleaned(sys.stdout)), redirect_stderr(cleaned(sys.stderr)):
        yield


def cleaned(stream: TextIO | None) -> TextIO:
    """Return a stream that writes cleaned text to another one."""
    return cast(TextIO, _CleanStream(stream))


def clean(text: str) -> str:
    """Remove keys of the environment from a text, and show its control characters; carriage returns stay."""
    return "\r".join(map(plain, without_secrets(text).split("\r")))


def copy_clean(lines: Iterable[bytes], log: Path) -> None:
    """Append the output of a child process to a log, cleaned line by line. A full disk does not stop the child."""
    for line in lines:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(clean(line.decode(errors="replace")))


class _CleanStream:
    """Standard output or error. Keys of the environment are removed; in a file or pipe, control characters are shown.

    A terminal gets those of progress bars and colours. Text of others is escaped before it is laid out (`print_all`).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (None if it is closed)
        self._is_styled = self._stream.isatty() or "FORCE_COLOR" in os.environ
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write a text; see the class."""
        self._stream.write(without_secrets(text) if self._is_styled else clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after another."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
