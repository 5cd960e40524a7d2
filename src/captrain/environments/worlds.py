"""Files whose text is our own, opened in this process: by themselves, or with the benchmark that they narrow.

Only `captrain.environments.own_text` says what may be opened here. Files of one benchmark share its workers, because
each of these has the benchmark's packages in memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.config import Component, Machine
from captrain.contract import Environment, Target, load_file
from captrain.environments.own_text import world_of
from captrain.errors import EnvironmentFault
from captrain.records import digest, read_bytes

REMEDY = "run `dvc repro environments` to write it again"
Reopening = Callable[[], AbstractContextManager[Target]]
"""An environment, loaded anew for as long as it is looked at."""
WORLDS: dict[str, Environment] = {}
"""Benchmarks that are open in this process."""


def load_own(path: Path, machine: Machine, source: bytes | None = None) -> Target:
    """A file whose text is our own.

    Args:
        path: of the file.
        machine: where installations of benchmarks lie.
        source: its bytes, where somebody has read and checked them.

    Raises:
        UserError: the file is missing, or its benchmark is not installed.
        EnvironmentFault: the file does not load.
    """
    source = read_bytes(path, REMEDY) if source is None else source
    component = world_of(source.decode(errors="replace"))
    if component is None:
        return load_file(path, source)
    # A process that was forked has none of its parent's workers.
    key = digest(os.getpid(), component.model_dump_json(), machine.model_dump_json())
    if key not in WORLDS:
        WORLDS[key] = _world(path, component, machine)
    return load_file(path, source, WORLDS[key])


def reopening(path: Path, machine: Machine) -> Reopening | None:
    """Return a way to load a file with its benchmark in workers of its own; None where it is not given one."""
    source = read_bytes(path, REMEDY)
    component = world_of(source.decode(errors="replace"))
    if component is None:
        return None

    @contextmanager
    def reopened() -> Iterator[Target]:
        world = _world(path, component, machine)
        try:
            yield load_file(path, source, world)
        finally:
            world.pool.close()  # pyright: ignore[reportAttributeAccessIssue]

    return reopened


def _world(path: Path, component: Component, machine: Machine) -> Environment:
    try:
        return load_benchmark(component, machine).environment
    except TypeError as error:
        raise EnvironmentFault(
            f"environment file {path} does not load: {component.target} takes other settings ({error})",
            REMEDY,
        ) from None
