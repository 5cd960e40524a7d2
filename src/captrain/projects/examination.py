"""Calls of a benchmark's methods as `captrain check-benchmark` makes them.

Nothing of the benchmark is trusted: it may raise anything, print, never return, or give back what is no JSON. Whatever
it does is a `Problem` that names the method, the task, the line and the remedy; a method that fails on twenty tasks is
one problem.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from captrain.contract import Environment, Overdue, time_limit
from captrain.errors import UserError
from captrain.run import Component, build

T = TypeVar("T")
LIMIT = 10.0
"""Seconds for one call of one method."""
PACKAGE = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}


def innermost(frames: traceback.StackSummary, source: Path | None) -> str:
    """Find the innermost line of the user's own code, "" where there is none.

    Args:
        frames: of a traceback, or of what is being run.
        source: the file that has the benchmark; None where nothing was built. Its neighbours are of the same hand,
            unless packages of all kinds lie there.
    """
    for frame in reversed(frames):
        path = Path(frame.filename).resolve()
        siblings = source.parent if source and source.parent.name not in INSTALLED else source
        is_own = siblings is not None and path.is_relative_to(siblings)
        is_library = INSTALLED & {*path.parts} or any(map(path.is_relative_to, (PACKAGE, STANDARD_LIBRARY)))
        if path.is_file() and (is_own or not is_library):
            return f"{os.path.relpath(frame.filename)}:{frame.lineno or 1}"
    return ""


def raising_place(error: BaseException, source: Path | None) -> str:
    """Find the innermost line of the user's own code that an error came through, "" where it came through none."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, ""))
    return innermost(frames, source)


@cache
def definition(owner: type, name: str) -> str:
    """Find the line that gives a class a member, or else that of the class; "" where it has none, or no source."""
    for base in owner.__mro__:
        if name not in vars(base):
            continue
        try:
            lines, start = inspect.getsourcelines(base)
            [tree] = ast.parse(textwrap.dedent("".join(lines))).body
            path = os.path.relpath(inspect.getfile(base))
        except (TypeError, OSError, SyntaxError, ValueError):
            return ""
        for node in getattr(tree, "body", []):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            if name in (getattr(target, "id", getattr(target, "name", "")) for target in targets):
                first = min(part.lineno for part in (node, *getattr(node, "decorator_list", [])))
                return f"{path}:{start + first - 1}"
        return f"{path}:{start}"
    return ""


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
                self.problems[index] = replace(former, times=former.times + 1)
                return
        self.problems.append(problem)


class MethodFailed(Exception):
    """A method of the benchmark gave no value; the problem is noted."""


class Output(io.StringIO):
    """Capture of a method's prints, with the line that printed first."""

    def __init__(self, source: Path | None) -> None:
        super().__init__()
        self.source, self.place = source, ""

    def write(self, text: str) -> int:
        """See `io.StringIO.write`."""
        self.place = self.place or innermost(traceback.extract_stack(), self.source)
        return super().write(text)


class Examined:
    """A benchmark whose methods are called with a limit of time, their output caught and their faults noted.

    Args:
        environment: the benchmark.
        report: where problems go.
        limit: seconds for one call.
        announce: is told of each call before it is made: what would be its problem, and the report till then.
    """

    def __init__(
        self, environment: Environment, report: BenchmarkReport, limit: float, announce: Callable[[object], None]
    ) -> None:
        self.environment, self.report, self.limit, self.announce = environment, report, limit, announce
        self.source: Path | None = None
        with contextlib.suppress(TypeError, OSError):
            self.source = Path(inspect.getfile(type(environment))).resolve()
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
        remedy = "raise an error in place of leaving, and end what does not end"
        self.announce((Problem(method, task, self.place(method), "", remedy), self.report))
        try:
            with time_limit(self.limit), contextlib.redirect_stdout(output):
                return function()
        except Overdue as error:
            self.overdue.add(method)
            self.note(method, task, f"did not return within {self.limit:g} s", "end what does not end", error)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # of code of others: even SystemExit
            self.note(
                method,
                task,
                f"raised {type(error).__name__}: {error}",
                "answer what an agent does wrong with an error; raise nothing",
                error,
            )
        finally:
            if printed_lines := output.getvalue().strip().splitlines():
                text, place = f"prints to stdout: {printed_lines[0][:80]!r}", output.place or self.place(method)
                self.report.add(Problem(method, task, place, text, "print nothing, or to sys.stderr"))
        raise MethodFailed

    def note(self, method: str, task: str, text: str, remedy: str, error: BaseException | None = None) -> None:
        """Note a problem at the line of the user's own code that raised, or else at that of the method."""
        place = raising_place(error, self.source) if error else ""
        self.report.add(Problem(method, task, place or self.place(method), text, remedy))

    def place(self, method: str) -> str:
        """Return the line that defines a method, or else the first of the benchmark's file."""
        owners = [type(owner) for owner in (self.environment, self.episode) if owner is not None]
        first = f"{os.path.relpath(self.source)}:1" if self.source else ""
        return next(filter(None, (definition(owner, method) for owner in owners)), first)


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
    except BaseException as error:
        place = raising_place(error, None)
        if isinstance(error, Overdue):
            raise UserError(
                f"{target} is not built within {LIMIT:g} s{f': {place}' if place else ''}",
                "end what does not end when it is imported or constructed",
            ) from None
        module = target.partition(":")[0] if ":" in target else target.rpartition(".")[0]
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
