"""A benchmark held to the contract before anything is spent on it: what `captrain check-benchmark` does.

Every method is called as the pipeline would call it, and as it would not: with reference solutions, with nothing, with
random and malformed calls, with every call twice, again in this process and in another one. What does not hold is a
`Problem` that names the method, the task, the line and the remedy; a method that fails on twenty tasks is one problem.
Nothing of the benchmark is trusted: it may raise anything, print, never return, or give back what is no JSON.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from captrain.config import Component, build
from captrain.contract import Environment, Overdue, time_limit
from captrain.errors import UserError
from captrain.projects.isolation import Announce

PACKAGE = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}


def source_file(owner: type) -> Path | None:
    """Find the file that has a class; None where it is of none."""
    try:
        return Path(inspect.getfile(owner)).resolve()
    except (TypeError, OSError):
        return None


def place_at(path: str | Path, line: int) -> str:
    """Format a line as messages name it."""
    return f"{os.path.relpath(path)}:{line}"


def is_own(path: str, source: Path | None) -> bool:
    """Return whether a file is the user's.

    Args:
        path: as a frame has it.
        source: the file that has the benchmark; None where nothing was built.
    """
    place = Path(path).resolve()
    if not place.is_file():
        return False
    if source is not None and (place == source or (_has_siblings(source) and place.is_relative_to(source.parent))):
        return True
    return not (_is_installed(place) or place.is_relative_to(PACKAGE) or place.is_relative_to(STANDARD_LIBRARY))


def _is_installed(place: Path) -> bool:
    return bool(INSTALLED & {*place.parts})


def _has_siblings(source: Path) -> bool:
    """Return whether the neighbours of a file are of the same hand: not where packages of all kinds lie."""
    return source.parent.name not in INSTALLED


def raising_place(error: BaseException, source: Path | None) -> str:
    """Find the innermost line of the user's own code that an error came through, "" where it came through none."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename, source):
        return place_at(error.filename, error.lineno or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own(frame.filename, source):
            return place_at(frame.filename, frame.lineno or 1)
    return ""


def calling_place(source: Path | None) -> str:
    """Find the innermost line of the user's own code that is being run, "" where none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename, source):
            return place_at(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def definition(owner: type, name: str) -> str:
    """Find the line that defines a member of a class: a method, a property, or a value; "" where the class has none."""
    for base in owner.__mro__:
        if name in vars(base):
            return _function_place(vars(base)[name]) or _value_place(base, name)
    return ""


def _function_place(member: object) -> str:
    inner = next((getattr(member, key) for key in ("fget", "func", "__func__") if hasattr(member, key)), member)
    code = getattr(inspect.unwrap(inner), "__code__", None) if callable(inner) else None
    return place_at(code.co_filename, code.co_firstlineno) if code else ""


def _value_place(owner: type, name: str) -> str:
    """Find the line that gives a member of a class its value, or else that of the class."""
    try:
        lines, start = inspect.getsourcelines(owner)
        [body] = ast.parse(textwrap.dedent("".join(lines))).body
        path = inspect.getfile(owner)
    except (TypeError, OSError, SyntaxError, ValueError):
        return ""
    for node in getattr(body, "body", []):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return place_at(path, start + node.lineno - 1)
    return place_at(path, start)


T = TypeVar("T")
LIMIT = 10.0
"""Seconds for one call of one method."""


@dataclass(frozen=True)
class Problem:
    """One thing that does not hold: where (`file:line`, "" where no file has it), in which method, on which task,
    what, and the remedy; `times` that it came up."""

    method: str
    task: str
    place: str
    text: str
    remedy: str
    times: int = 1

    def __str__(self) -> str:
        again = f" ({self.times} times)" if self.times > 1 else ""
        on = f" on {self.task}" if self.task else ""
        return f"{self.place or '-'}: {self.method}{on}: {self.text}{again}\n  remedy: {self.remedy}"


@dataclass
class BenchmarkReport:
    """Measurements of a benchmark, and the demands of the contract that it does not meet."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        """Add a problem; what the same line is to mend in the same way only counts, whatever it says of other tasks."""
        for index, former in enumerate(self.problems):
            if (former.method, former.place, former.remedy) == (problem.method, problem.place, problem.remedy):
                again = Problem(former.method, former.task, former.place, former.text, former.remedy, former.times + 1)
                self.problems[index] = again
                return
        self.problems.append(problem)


@dataclass(frozen=True)
class Call:
    """One call of a method: on which task, where it is defined, and the report before it."""

    method: str
    task: str
    place: str
    report: BenchmarkReport


class MethodFailed(Exception):
    """A method of the benchmark gave no value; the problem is noted."""


class Output(io.StringIO):
    """Capture of a method's prints, with the line that printed first."""

    def __init__(self, source: Path | None) -> None:
        super().__init__()
        self.source, self.place = source, ""

    def write(self, text: str) -> int:
        """See `io.StringIO.write`."""
        self.place = self.place or calling_place(self.source)
        return super().write(text)


class Examined:
    """A benchmark whose methods are called with a limit of time, their output caught and their faults noted.

    Args:
        environment: the benchmark.
        report: where problems go.
        limit: seconds for one call.
        announce: is told of each call before it is made.
    """

    def __init__(
        self, environment: Environment, report: BenchmarkReport, limit: float, announce: Announce[Call]
    ) -> None:
        self.environment, self.report, self.limit, self.announce = environment, report, limit, announce
        self.source = source_file(type(environment))
        self.episode: object = None
        """Episode that was opened last: it has methods, too."""
        self.overdue: set[str] = set()

    def call(self, method: str, task: str, function: Callable[[], T]) -> T:
        """Call a method and return its result.

        Raises:
            MethodFailed: it raised, or took too long; after that it is not called again.
        """
        if method in self.overdue:
            raise MethodFailed
        output = Output(self.source)
        self.announce(Call(method, task, self.place(method), self.report))
        try:
            with time_limit(self.limit), contextlib.redirect_stdout(output):
                return function()
        except Overdue as error:
            self.overdue.add(method)
            self.note(method, task, f"did not return within {self.limit:g} s", "end what does not end", error)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # of code of others: even SystemExit
            text = f"raised {type(error).__name__}: {error}"
            self.note(method, task, text, "answer what an agent does wrong with an error; raise nothing", error)
        finally:
            if output.getvalue().strip():
                first = output.getvalue().strip().splitlines()[0][:80]
                text = f"prints to stdout: {first!r}"
                place = output.place or self.place(method)
                self.report.add(Problem(method, task, place, text, "print nothing, or to sys.stderr"))
        raise MethodFailed

    def note(self, method: str, task: str, text: str, remedy: str, error: BaseException | None = None) -> None:
        """Note a problem at the line that raised, or else at that of the method."""
        self.report.add(Problem(method, task, self.place(method, error), text, remedy))

    def place(self, method: str, error: BaseException | None = None) -> str:
        """Return the line of the user's own code that raised; where none did, the one that defines the method."""
        owners = [type(owner) for owner in (self.environment, self.episode) if owner is not None]
        places = [raising_place(error, self.source)] if error else []
        places += [definition(owner, method) for owner in owners]
        return next(filter(None, places), place_at(self.source, 1) if self.source else "")


def load_environment_class(target: str, settings: Mapping[str, object]) -> Environment:
    """Build a benchmark from its import path and settings.

    Raises:
        UserError: there is no such class, it cannot be built, or it lacks a member of the contract.
    """
    component = Component.model_validate({"_target_": target, **settings})
    try:
        with time_limit(LIMIT):
            return build(component, Environment)
    except UserError:
        raise
    except Overdue as error:
        place = raising_place(error, None)
        raise UserError(
            f"{target} is not built within {LIMIT:g} s{f': {place}' if place else ''}",
            "end what does not end when it is imported or constructed",
        ) from None
    except BaseException as error:
        module = target.partition(":")[0] if ":" in target else target.rpartition(".")[0]
        place = raising_place(error, None)
        raise UserError(
            f"{target} cannot be built: {f'{place}: ' if place else ''}{type(error).__name__}: {error}",
            f"mend {module}; a benchmark is built from keyword-only settings with defaults or values in conf/",
        ) from error


def is_json(value: object) -> bool:
    """Return whether a value is plain JSON: it comes back as it went, keys and tuples included."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def message_faults(messages: object, roles: Sequence[str]) -> str:
    """Say what is wrong with a list of messages, "" where nothing is."""
    if not isinstance(messages, list):
        return f"is {type(messages).__name__} and no list of messages"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in roles:
            return f"holds {str(message)[:60]!r}, which is not a message of {' or '.join(roles)}"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f"holds a message of {message['role']} whose content is not text"
        if not is_json(message):
            return f"holds a message of {message['role']} that is not plain JSON"
    return ""
