"""A benchmark under `captrain check-benchmark`: each call is announced and limited in time.

Nothing of the benchmark is trusted: it may raise, end the process or never return. Each becomes a `Problem` with
its file and line.
"""

import contextlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from captrain.contract import CheckedEnvironment, Environment, Overdue, time_limit
from captrain.errors import EnvironmentFault, UserError
from captrain.run import Component, build

T = TypeVar("T")
LIMIT = 10.0
"""Seconds for one call of one method, and to build the benchmark."""
LIBRARIES = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")).resolve())
ENDING = "raise an error instead of ending the process, and end every loop"
INSTALLED = {"site-packages", "dist-packages"}


@dataclass
class Problem:
    """A breach of the contract: its place (`file:line`, or "-"), the remedy, and how often it occurred."""

    place: str
    text: str
    remedy: str
    times: int = 1

    def __str__(self) -> str:
        again = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.place or '-'}: {self.text}{again}\n  remedy: {self.remedy}"


@dataclass
class BenchmarkReport:
    """What was measured of a benchmark, and its problems."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        """Add a problem, or count it if its line already has one with the same remedy."""
        for former in self.problems:
            if (former.place, former.remedy) == (problem.place, problem.remedy):
                former.times += 1
                return
        self.problems.append(problem)


def raising_place(error: BaseException, source: Path | None) -> str:
    """Find the innermost line of the user's code that an error came through, or "".

    Args:
        error: with its traceback.
        source: the benchmark's file. Files beside it are the user's, too, unless packages are installed there.
    """
    own = source.parent if source and source.parent.name not in INSTALLED else source
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, ""))
    for frame in reversed(frames):
        path = Path(frame.filename).resolve()
        is_library = INSTALLED & {*path.parts} or any(map(path.is_relative_to, LIBRARIES))
        if path.is_file() and ((own and path.is_relative_to(own)) or not is_library):
            return f"{os.path.relpath(frame.filename)}:{frame.lineno or 1}"
    return ""


@cache
def definition(owner: type, name: str) -> str:
    """Find the line that defines a method of a class, or else the class; "" if there is no source."""
    member = inspect.getattr_static(owner, name, owner)
    member = member.fget if isinstance(member, property) else member if inspect.isfunction(member) else owner
    try:
        return f"{os.path.relpath(inspect.getfile(member))}:{inspect.getsourcelines(member)[1]}"
    except (TypeError, OSError):
        return ""


class ExaminedBenchmark(CheckedEnvironment):
    """A benchmark that sends each call before it is made, and each problem.

    Args:
        environment: the benchmark.
        source: its class, for messages.
        limit: seconds for one call.
        send: takes ("call", what would be its problem) and ("problem", a problem).
    """

    def __init__(self, environment: Environment, source: str, limit: float, send: Callable[[object], None]) -> None:
        super().__init__(environment, source, "")
        self.limit, self._send, self._operation = limit, send, "name"
        self._overdue: dict[str, EnvironmentFault] = {}
        self._owners: list[type] = [type(environment)]
        self.file: Path | None = None
        with contextlib.suppress(TypeError, OSError):
            self.file = Path(inspect.getfile(type(environment))).resolve()

    def call(self, operation: str, task: str, function: Callable[[], T]) -> T:
        """See `CheckedEnvironment.call`; a method that took too long is not called again."""
        self._operation = operation
        if operation in self._overdue:
            raise self._overdue[operation]
        self._send(("call", Problem(self.place(operation), f"{operation} on {task}", ENDING)))
        try:
            result = super().call(operation, task, function)
        except EnvironmentFault as fault:
            if isinstance(fault.__cause__, Overdue):
                self._overdue[operation] = fault
            raise
        if operation == "open":
            self._owners[1:] = [type(result)]
        return result

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Send a fault as a problem: at the user's line that raised, or else where the method is defined."""
        try:
            yield
        except EnvironmentFault as fault:
            place, remedy = self.place(self._operation), fault.remedy
            if fault.__cause__ is not None:
                place = raising_place(fault.__cause__, self.file) or place
                remedy = "answer an agent's mistakes with an error message; do not raise, and end every loop"
            self._send(("problem", Problem(place, fault.problem, remedy)))

    def place(self, operation: str) -> str:
        """Return the line that defines a method, or else the first line of the benchmark's file."""
        first = f"{os.path.relpath(self.file)}:1" if self.file else ""
        owners = [owner for owner in self._owners if hasattr(owner, operation)]
        return next(filter(None, (definition(owner, operation) for owner in owners)), first)


def load_environment_class(target: str, settings: Mapping[str, object]) -> Environment:
    """Build a benchmark from its import path and settings.

    Raises:
        UserError: there is no such class, it cannot be built, or it lacks a member of the contract.
    """
    try:
        with time_limit(LIMIT):
            return build(Component.model_validate({"_target_": target, **settings}), Environment)
    except UserError:
        raise
    except BaseException as error:
        place = raising_place(error, None)
        reason = f"{place}: " if place else ""
        reason += f"no end within {LIMIT:g} s" if isinstance(error, Overdue) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{target} cannot be built: {reason}",
            "fix its module; a benchmark is built from keyword-only settings with defaults or values in conf/",
        ) from error
