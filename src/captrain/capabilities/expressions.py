"""Expressions and templates of clause files: data from other people, evaluated without running any of it as Python.

An expression has Python's syntax, but only the parts in `GRAMMAR`: no attributes, lambdas, keyword arguments, powers or
formatted strings. A walk over its syntax tree computes it with the functions it is given. Steps, sizes and time are
limited. Templates and patterns are limited in the same way.
"""

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import lru_cache
from re import Match
from time import thread_time
from typing import Any, Self

import regex
from pydantic_core import core_schema

LONGEST, DEEPEST = 2000, 40
"""Maximum number of characters of an expression or pattern, and of levels of its syntax tree."""
SHOWN = 100
"""Maximum number of characters of an expression that a message shows."""
STEPS, SIZE, SECONDS = 10_000, 100_000, 0.25
"""Limits of one evaluation: nodes visited, characters and items of a value, and time."""
PARTS = 100_000
"""Maximum number of parts of the patterns of a file. A part costs up to 4 us and 400 bytes to compile."""
COUNT = regex.compile(r"\{\s*(\d*)\s*(?:,\s*\d*\s*)?\}")
RECURSION = regex.compile(r"\(\?(?:R|&|P>|[+-]?\d)")
FIELD = regex.compile(r"\{(\w+)((?:\[\w+\])*)\}")
"""A field of a template: a name, and indices after it."""
ARITHMETIC: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
SIGNS: dict[type[ast.unaryop], Callable[..., object]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
GRAMMAR = (
    *(ast.Expression, ast.Constant, ast.Name, ast.expr_context, ast.Call, ast.Starred, ast.IfExp),
    *(ast.BoolOp, ast.boolop, ast.UnaryOp, *SIGNS, ast.BinOp, *ARITHMETIC, ast.Compare, ast.cmpop),
    *(ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.ListComp, ast.GeneratorExp, ast.comprehension),
)
"""The syntax that an expression may have."""


class ExpressionError(Exception):
    """An expression, template or pattern is wrong or costs too much. The message says which, and why."""


class MissingValue(Exception):
    """An expression looks up a value that the log does not show."""


class Parsed(ABC):
    """Base of types that pydantic reads from text with `parse`."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Check the text.

        Raises:
            ValueError: it is wrong; the message says why.
        """

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        schema = core_schema.is_instance_schema(cls)
        return core_schema.no_info_before_validator_function(cls._read, schema)

    @classmethod
    def _read(cls, value: object) -> object:
        parsed = cls._parsed(value) if isinstance(value, str) else value
        if isinstance(parsed, ValueError):
            raise ValueError(str(parsed))
        return parsed

    @classmethod
    @lru_cache(4096)
    def _parsed(cls, text: str) -> Self | ValueError:
        """Parse a text once: aliases of YAML can repeat it many times."""
        try:
            return cls.parse(text)
        except ValueError as error:
            return error


@dataclass(frozen=True)
class Expression(Parsed):
    """A checked expression."""

    text: str
    tree: ast.expr = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Check an expression against the grammar."""
        if len(text) > LONGEST:
            raise ValueError(f"the expression has {len(text)} characters, more than {LONGEST}")
        try:
            tree = ast.parse(text, mode="eval").body
            level: Sequence[ast.AST] = [tree]
            for _ in range(DEEPEST):
                level = [child for node in level for child in ast.iter_child_nodes(node)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text[:SHOWN]!r} is not an expression") from None
        if level:
            raise ValueError(f"{text[:SHOWN]!r} is nested more than {DEEPEST} levels deep")
        for node in ast.walk(tree):
            _check(node, text)
        return cls(text, tree)

    @property
    def names(self) -> set[str]:
        """The names of the values that the expression takes from outside."""
        functions = [node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node not in functions]
        return {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}

    @property
    def functions(self) -> set[str]:
        """The names of the functions that the expression calls."""
        calls = [node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return {function.id for function in calls if isinstance(function, ast.Name)}

    def keys_of(self, name: str) -> set[str]:
        """The constant keys that the expression looks up in the value of a name."""
        return {
            node.slice.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        }


def _check(node: ast.AST, text: str) -> None:
    """Refuse a node outside the grammar."""
    if not isinstance(node, GRAMMAR):
        raise ValueError(f"{text!r} uses {type(node).__name__}, which expressions do not have")
    if isinstance(node, ast.Constant) and not isinstance(node.value, str | int | float | None):
        raise ValueError(f"{text!r} holds {node.value!r}, which is not text, a number, True, False or None")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        require_text(node.value)
    if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
        raise ValueError(f"{text!r} calls something other than a function by its name with plain arguments")
    if isinstance(node, ast.comprehension) and node.is_async:
        raise ValueError(f"{text!r} uses async")


def require_text(text: str) -> str:
    """Refuse text that no file can hold.

    Raises:
        ValueError: it holds half of a surrogate pair.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{text!r} holds half of a surrogate pair")
    return text


@dataclass(frozen=True)
class Template(Parsed):
    """Text with fields in braces: `{name}`, `{name[key]}` or `{name[0]}`."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Check that every brace belongs to a field."""
        if brace := regex.search(r"[{}]", FIELD.sub("", text)):
            raise ValueError(f"{text!r} has a {brace.group()} outside a field such as {{name}} or {{name[key]}}")
        return cls(require_text(text))

    @property
    def fields(self) -> list[tuple[str, list[str]]]:
        """The name and the indices of each field."""
        return [(match.group(1), regex.findall(r"\w+", match.group(2))) for match in FIELD.finditer(self.text)]

    def fill(self, scope: Mapping[str, object]) -> str:
        """Return the text with values in place of the fields.

        Raises:
            MissingValue: a field looks up what the log does not show.
            ExpressionError: a value is not JSON-like data, has no such items, or is too long.
        """
        try:
            texts = [written(_indexed(scope[name], indices)) for name, indices in self.fields]
        except (TypeError, ValueError, RecursionError, ExpressionError) as error:
            raise ExpressionError(f"{self.text}: {error}") from None
        values = iter(texts)
        if sum(map(len, texts)) > SIZE:
            raise ExpressionError(f"{self.text}: the text is longer than {SIZE} characters")
        return FIELD.sub(lambda _: next(values), self.text)


def _indexed(value: object, indices: Sequence[str]) -> object:
    for index in indices:
        value = look_up(value, int(index) if index.isdigit() and not isinstance(value, dict) else index)
    return value


def look_up(container: object, key: object) -> object:
    """Look up a key of an object, or an index or slice of a list or text.

    Raises:
        MissingValue: the key is missing.
        ExpressionError: the container has no such keys.
    """
    if container is None:
        raise MissingValue
    if not isinstance(container, dict | list | tuple | str):
        raise ExpressionError(f"{type(container).__name__} has no items")
    items: Any = container
    try:
        return items[key]
    except LookupError:
        raise MissingValue from None


def written(value: object) -> str:
    """Return a value as text.

    Raises:
        ExpressionError: it is not JSON-like data, or is too long.
    """
    size_of(value)
    return str(value)


def size_of(value: object) -> int:
    """Count the characters and items of a value.

    Raises:
        ExpressionError: there are more than `SIZE`, or a part of it is not JSON-like data.
    """
    size, pending = 0, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, int) and not isinstance(part, bool):
            size += part.bit_length() // 3
        elif not isinstance(part, str | float | bool | date | timedelta | None):
            raise ExpressionError(f"{type(part).__name__} is not data")
        size += 1 + (len(part) if isinstance(part, str) else 0)
        if size + len(pending) > SIZE:
            raise ExpressionError(f"a value has more than {SIZE} characters or items")
    return size


def parts_of(pattern: str) -> int:
    """Return an upper bound on the parts of a pattern after `regex` has written out its required repetitions.

    A repetition may repeat all before it if a group can end there, else one part.
    """
    parts, end = 0, 0
    for match in COUNT.finditer(pattern):
        between, count = pattern[end : match.start()], max(1, int(match[1][:9] or 0))
        parts += len(between)
        parts = parts * count if ")" in between else parts + count
        end = match.end()
    return parts + len(pattern) - end


@dataclass(frozen=True)
class Pattern(Parsed):
    """A regular expression whose matching is limited in time."""

    text: str
    compiled: Any = field(repr=False, compare=False)  # the regex module has no types

    @classmethod
    def parse(cls, text: str) -> Self:
        """Compile a pattern."""
        if len(text) > LONGEST:
            raise ValueError(f"the pattern has {len(text)} characters, more than {LONGEST}")
        if parts_of(text) > PARTS:
            raise ValueError(f"{text[:SHOWN]!r} repeats too much: written out, it has more than {PARTS} parts")
        if RECURSION.search(text):
            raise ValueError(f"{text[:SHOWN]!r} is recursive")
        try:
            return cls(text, regex.compile(require_text(text)))
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(f"{text[:SHOWN]!r} is not a regular expression: {error}") from None

    def matches(self, text: str, seconds: float = SECONDS) -> Iterator[Match[str]]:
        """Find the matches in a text, one by one.

        Raises:
            ExpressionError: no time is left for it.
        """
        try:
            if seconds <= 0:
                raise TimeoutError
            yield from self.compiled.finditer(text, timeout=seconds)
        except TimeoutError:
            raise ExpressionError(f"the pattern {self.text!r} takes longer than {SECONDS} s") from None

    def search(self, text: str, seconds: float = SECONDS) -> bool:
        """Return whether a text contains a match.

        Raises:
            ExpressionError: no time is left for it.
        """
        return next(self.matches(text, seconds), None) is not None

    def find_all(self, text: str, seconds: float = SECONDS) -> list[object]:
        """Return the matches in a text as `re.findall` does: whole, or their groups.

        Raises:
            ExpressionError: no time is left for it.
        """
        found = list[object]()
        for match in self.matches(text, seconds):
            groups = match.groups("")
            found.append((groups[0] if len(groups) == 1 else groups) if groups else match.group())
        return found


def _begins(text: str, prefix: str) -> bool:
    return str.startswith(text, prefix)


def _day(moment: datetime) -> str:
    return moment.date().isoformat()


def _hours(count: float) -> timedelta:
    return timedelta(hours=count)


def _sum(numbers: Sequence[float]) -> float:
    return sum(numbers)


def _join(separator: str, texts: Sequence[str]) -> str:
    if len(separator) * len(texts) > SIZE:
        raise ExpressionError(f"the text is longer than {SIZE} characters")
    return separator.join(texts)


def _replace(text: str, old: str, new: str) -> str:
    return _join(new, text.split(old))


def _text(template: str, *values: object) -> str:
    parts = template.split("{}")
    if len(parts) != len(values) + 1:
        raise ExpressionError(f"{len(values)} values for {len(parts) - 1} places {{}} in {template!r}")
    return "".join(part + written(value) for part, value in zip(parts, [*values, ""], strict=True))


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{function.__name__: function for function in (len, any, all, min, max, sorted, int)},
    "begins": _begins,
    "day": _day,
    "hours": _hours,
    "join": _join,
    "replace": _replace,
    "str": written,
    "sum": _sum,
    "text": _text,
    "time": datetime.fromisoformat,
}
"""The functions of every expression."""


class Evaluation:
    """Evaluates expressions within the limits of one evaluation.

    Args:
        functions: functions that expressions may call in addition to `FUNCTIONS`, by name.
    """

    def __init__(self, functions: Mapping[str, Callable[..., object]]) -> None:
        self._functions, self._steps, self._deadline = {**FUNCTIONS, **functions}, 0, thread_time() + SECONDS

    @property
    def seconds(self) -> float:
        """The time that is left."""
        return self._deadline - thread_time()

    def evaluate(self, expression: Expression, scope: Mapping[str, object]) -> object:
        """Compute an expression.

        Args:
            expression: checked.
            scope: values by name.

        Raises:
            MissingValue: it looks up what the log does not show.
            ExpressionError: it fails, or exceeds a limit.
        """
        try:
            return self._value(expression.tree, scope)
        except KeyError as error:
            raise ExpressionError(f"{expression.text}: {error.args[0]} has no value here") from None
        except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError, ExpressionError) as error:
            raise ExpressionError(f"{expression.text}: {error}") from None

    def _value(self, node: ast.expr | None, scope: Mapping[str, object]) -> object:
        self._steps += 1
        if self._steps > STEPS or self.seconds < 0:
            raise ExpressionError(f"more than {STEPS} steps or {SECONDS} s")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return scope[name]
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test, scope) else other, scope)
            case ast.BoolOp():
                return self._decision(node, scope)
            case ast.Compare():
                return self._comparison(node, scope)
            case ast.Subscript(value=container, slice=ast.Slice(lower=lower, upper=upper, step=step)):
                ends = [self._value(end, scope) if end else None for end in (lower, upper, step)]
                return look_up(self._value(container, scope), slice(*ends))
            case ast.Subscript(value=container, slice=key):
                return look_up(self._value(container, scope), self._value(key, scope))
            case _:
                return self._made(node, scope)

    def _made(self, node: ast.expr | None, scope: Mapping[str, object]) -> object:
        """Compute a node that makes a value, and limit the size of it."""
        match node:
            case ast.UnaryOp(op=sign, operand=operand):
                value = SIGNS[type(sign)](self._value(operand, scope))
            case ast.BinOp(left=left, op=sign, right=right):
                value = self._arithmetic(sign, self._value(left, scope), self._value(right, scope))
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                value = self._items(nodes, scope)
            case ast.Set(elts=nodes):
                value = dict.fromkeys(self._items(nodes, scope))  # a set with a fixed order
            case ast.Dict(keys=keys, values=values):
                value = {self._value(k, scope): self._value(v, scope) for k, v in zip(keys, values, strict=True)}
            case ast.ListComp(elt=item, generators=loops) | ast.GeneratorExp(elt=item, generators=loops):
                value = [self._value(item, inner) for inner in self._scopes(loops, scope)]
            case ast.Call(func=ast.Name(id=name), args=arguments):
                value = self._functions[name](*self._items(arguments, scope))
            case _:
                raise ExpressionError(f"{type(node).__name__} is not in the grammar")
        if not isinstance(value, bool):
            size_of(value)
        return value

    def _decision(self, node: ast.BoolOp, scope: Mapping[str, object]) -> object:
        value: object = None
        for operand in node.values:
            value = self._value(operand, scope)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def _comparison(self, node: ast.Compare, scope: Mapping[str, object]) -> bool:
        left = self._value(node.left, scope)
        for sign, operand in zip(node.ops, node.comparators, strict=True):
            right = self._value(operand, scope)
            if not COMPARISONS[type(sign)](left, right):
                return False
            left = right
        return True

    def _arithmetic(self, sign: ast.operator, left: object, right: object) -> object:
        """Add, or calculate with numbers and times. Repeating or formatting text is refused: its size has no bound."""
        if not isinstance(sign, ast.Add) and isinstance(left, str | list) | isinstance(right, str | list):
            raise ExpressionError("texts and lists can only be added")
        return ARITHMETIC[type(sign)](left, right)

    def _items(self, nodes: Sequence[ast.expr], scope: Mapping[str, object]) -> list[object]:
        items = list[object]()
        for node in nodes:
            if isinstance(node, ast.Starred):
                items += self._iterable(node.value, scope)
            else:
                items.append(self._value(node, scope))
        return items

    def _iterable(self, node: ast.expr, scope: Mapping[str, object]) -> list[object]:
        value = self._value(node, scope)
        if not isinstance(value, str | list | tuple | dict):
            raise ExpressionError(f"{type(value).__name__} is no list")
        return [*value]

    def _scopes(
        self, loops: Sequence[ast.comprehension], scope: Mapping[str, object]
    ) -> Iterator[Mapping[str, object]]:
        """Yield the scopes in which the item of a comprehension is computed."""
        if not loops:
            yield scope
            return
        for item in self._iterable(loops[0].iter, scope):
            inner = {**scope, **_bound(loops[0].target, item)}
            if all(self._value(test, inner) for test in loops[0].ifs):
                yield from self._scopes(loops[1:], inner)


def _bound(target: ast.expr, value: object) -> dict[str, object]:
    """Return the names that a loop over a value sets, with their values."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, list | tuple | str):
        raise ExpressionError(f"{type(value).__name__} does not fit the names of the loop")
    names = dict[str, object]()
    for part, item in zip(target.elts, value, strict=True):
        names |= _bound(part, item)
    return names
