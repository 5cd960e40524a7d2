"""Tries to make a file without a name, a shared memory object, a link, and a named pipe at the path it is given."""

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
