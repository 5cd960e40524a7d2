"""Tries to create an unnamed file, shared memory, a link, and a named pipe."""

import os


def attack(argument):
    made = []
    for attempt in (
        lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
        lambda: os.memfd_create("escaped"),
        lambda: os.symlink("/etc/passwd", argument),
        lambda: os.link("/etc/passwd", argument),
        lambda: os.mkfifo(argument),
        lambda: os.mkdir(argument),
    ):
        try:
            made.append(attempt())
        except OSError:
            continue
    return f"made {len(made)}"
