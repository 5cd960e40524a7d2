"""Components: replaceable parts, named by import path and described by their constructors.

An import path is module.Class or module:Class, also in the project's own modules (`captrain.run.entry_point`). A
constructor takes runtime arguments first, then keyword-only settings after `*`. It declares the settings' names, types
and ranges, for example `def __init__(self, base: Path, *, clip: Annotated[float, Field(gt=0)] = 0.2)`. `check`
validates a section of the configuration against the constructor without calling it, so a wrong setting fails before the
first stage runs. Therefore modules of components import heavy packages inside functions.

A setting may itself be a component, a mapping with `_target_`; for example the simulated user of a benchmark is a
policy. It is checked and built from its own settings.
"""

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Protocol, TypeGuard, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails, PydanticCustomError

from captrain.errors import UserError
from captrain.records import JsonObject, plain

LONGEST = 300
"""Most characters of the user's text that a message quotes."""
REMEDY = "correct it where it is named: in params.yaml (overrides), in conf/, or on the command line"

Built = TypeVar("Built")


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("the lower bound is above the upper one")
    return interval


def variable(name: str) -> str:
    """Check the name of an environment variable. A configuration holds such a name instead of a secret.

    Raises:
        PydanticCustomError: hides the value, because it may be the secret itself.
    """
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise PydanticCustomError("hidden", "not the name of an environment variable, such as OPENAI_API_KEY")
    return name


Variable = Annotated[str, AfterValidator(variable)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]
Level = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
Interval = Annotated[tuple[Share, Share], AfterValidator(_ordered)]


class Section(BaseModel):
    """Base of all sections: immutable, without unknown keys or silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Component(Section):
    """A replaceable part: the import path of its class or function, and its settings."""

    model_config = ConfigDict(extra="allow")
    target: str = Field(alias="_target_")

    def settings(self) -> JsonObject:
        """Return everything except the target, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"target"})


def build(component: Component, kind: type[Built], /, **runtime: object) -> Built:
    """Build a component; components among its settings are built first.

    Args:
        component: to build.
        kind: the class or protocol that the result must have.
        **runtime: further arguments of the constructor, which win over settings.

    Raises:
        UserError: an import path does not exist, or the result has another kind.
    """
    settings = component.settings()
    inner = {name: build(part, object) for name, value in settings.items() if (part := nested(name, value)) is not None}
    built = component_class(component)(**{**settings, **inner, **runtime})
    if not fulfils(built, kind):
        if missing := _lacking(built, kind):
            problem = f"{component.target} cannot be used as {kind.__name__}: it lacks {', '.join(missing)}"
            raise UserError(problem, "add what is missing to the class (docs/own-benchmark.md), or name another class")
        raise UserError(f"_target_ = {component.target} is not a subclass of {kind.__name__}", REMEDY)
    return built


def fulfils(value: object, kind: type[Built]) -> TypeGuard[Built]:
    """Return whether a value is an instance of a class or has all members of a protocol. Types are not checked."""
    return not _lacking(value, kind) if Protocol in kind.__bases__ else isinstance(value, kind)


def _lacking(value: object, kind: type) -> list[str]:
    """List the public members of a protocol and its bases that a value lacks; none for other classes.

    Properties are not evaluated, because one may start a server. (`isinstance` evaluates them in Python 3.11.)
    """
    bases = [base for base in kind.__mro__ if Protocol in base.__bases__] if Protocol in kind.__bases__ else []
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {})) if name[0] != "_"}
    absent = object()
    return sorted(name for name in names if inspect.getattr_static(value, name, absent) is absent)


def nested(key: str, value: object) -> Component | None:
    """Return the component in a setting, or None for a plain value.

    Raises:
        UserError: its `_target_` is not an import path.
    """
    if not isinstance(value, dict) or "_target_" not in value:
        return None
    try:
        return Component.model_validate(value)
    except ValidationError as error:
        raise UserError(_first_problem(key, error), REMEDY) from None


def takes(component: Component, name: str) -> bool:
    """Return whether the constructor of a component has a parameter of this name.

    Raises:
        UserError: the import path does not exist or is not callable.
    """
    return name in _parameters(component, "_target_")


def component_class(component: Component, key: str = "_target_") -> Callable[..., Any]:
    """Import the class or function of a component.

    Args:
        component: names it.
        key: of its `_target_`, for messages.

    Raises:
        UserError: the import path does not exist.
    """
    target = component.target
    label = f"{key} = {excerpt(target)}"
    module_name, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    if not all(part.isidentifier() for part in target.replace(":", ".").split(".")):
        raise UserError(f"{label}: this is not an import path", "write package.module.Class or package.module:Class")
    try:
        module = importlib.import_module(module_name or target)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if f"{module_name or target}.".startswith(f"{missing}."):
            raise UserError(f"{label}: there is no module {excerpt(missing)}", REMEDY) from None
        raise UserError(f"{label}: it needs the package {missing}", f"install {missing}, or choose another") from error
    if not hasattr(module, name):
        candidates = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise UserError(f"{label}: there is no {excerpt(name)!r} in {module_name}", alternatives(name, candidates))
    return getattr(module, name)


def _parameters(component: Component, key: str) -> Mapping[str, inspect.Parameter]:
    constructor = component_class(component, key)
    try:
        return inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        raise UserError(f"{key} = {component.target} cannot be called", REMEDY) from None


def check(section: str, component: Component, *, is_inner: bool = False) -> None:
    """Check the settings of a component, also of inner ones, against its constructor, without calling it.

    Raises:
        UserError: the import path does not exist or is not callable; a setting is unknown, missing, of the wrong type
            or out of range; an inner component needs more than its settings.
    """
    parameters, settings = _parameters(component, f"{section}._target_"), component.settings()
    settable = {name: entry.annotation for name, entry in parameters.items() if entry.kind is entry.KEYWORD_ONLY}
    free = any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
    for name, value in settings.items():
        if name in settable:
            _check_value(f"{section}.{name}", value, settable[name])
        elif not free:
            raise UserError(f"{component.target} has no setting {section}.{name}", alternatives(name, settable))
    for name, entry in parameters.items():
        if entry.default is not entry.empty:
            continue
        if name in settable and name not in settings:
            raise UserError(f"{section}.{name} is not set, and {component.target} needs it", REMEDY)
        if is_inner and entry.kind is entry.POSITIONAL_OR_KEYWORD:
            raise UserError(
                f"{section}._target_ = {component.target} needs {name}, which only a stage can give it", REMEDY
            )


def _check_value(key: str, value: object, annotation: Any) -> None:
    """Check type and range of one setting. A missing annotation or one in a string is not checked."""
    inner = nested(key, value)
    if annotation is not inspect.Parameter.empty and not isinstance(annotation, str):
        try:
            TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
        except PydanticSchemaGenerationError:
            # JSON cannot hold this class, so the value must be a component or null.
            optional = type(None) in get_args(annotation)
            if inner is None and not (optional and value is None):
                kinds = "null or a component" if optional else "a component"
                raise UserError(f"{key} = {value!r}: must be {kinds}, a mapping with _target_", REMEDY) from None
        except ValidationError as error:
            raise UserError(_first_problem(key, error), f"set {key}=VALUE" if value is None else REMEDY) from None
    if inner is not None:
        check(key, inner, is_inner=True)


def alternatives(name: str, names: Iterable[str]) -> str:
    """Suggest the name nearest to a misspelt one, and list the others."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    further = ", ".join(candidate for candidate in names if candidate not in near)
    if not near:
        return f"choose one of {further}" if further else "there is none to choose from"
    return f"did you mean {near[0]}?" + (f" Others: {further}" if further else "")


def _first_problem(key: str, error: ValidationError) -> str:
    """Return the first problem of the setting with this key, in words."""
    problem = error.errors(include_url=False)[0]
    return problem_text({**problem, "loc": (key, *problem["loc"])})


def problem_text(problem: ErrorDetails) -> str:
    """Return a validation problem in words, beginning with the key."""
    key = ".".join(str(part) for part in problem["loc"])
    texts = {
        "extra_forbidden": f"there is no setting {key}",
        "missing": f"{key} is not set",
        "hidden": f"{key}: {problem['msg']}",
    }
    if problem["type"] in texts:
        return texts[problem["type"]]
    message = str(problem.get("ctx", {}).get("error", "")) or problem["msg"][0].lower() + problem["msg"][1:]
    message = re.sub("^input should (not )?be", r"must \1be", message)
    return f"{key} = {excerpt(repr(problem['input']))}: {message}" if key else message


def excerpt(text: str) -> str:
    """Shorten the user's text for a message."""
    return plain(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
