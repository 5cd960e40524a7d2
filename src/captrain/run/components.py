"""Components: replaceable parts, named by import path and described by their constructors alone.

An import path is module.Class or module:Class; modules of the project count (`captrain.run.entry_point`).
Runtime arguments of a constructor come first; settings are keyword-only, after `*`. The names, types and ranges of
the settings are those that the constructor declares, for example
`def __init__(self, base: Path, *, clip: Annotated[float, Field(gt=0)] = 0.2)`. `check` holds a section of the
configuration against that without constructing anything, so that a misspelt or impossible setting ends before the
first stage runs; modules of components therefore import heavy packages inside functions.

A setting may itself be a component, a mapping with `_target_` (the simulated user of a benchmark is a policy): it is
checked and built with it, from its own settings alone.
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
"""Characters of what a user wrote, in a message."""
REMEDY = "correct it in params.yaml (overrides) or in conf/"

Kind = TypeVar("Kind")


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("the lower bound is above the upper one")
    return interval


def variable(name: str) -> str:
    """Check the name of an environment variable, which is all that a configuration may hold of a secret.

    Raises:
        PydanticCustomError: a ValueError that does not show what stands there: it may be the secret itself.
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
    """Base of all sections: immutable, unknown keys and silent conversions refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Component(Section):
    """A replaceable part: the import path of its class or function, and the settings that it is built with."""

    model_config = ConfigDict(extra="allow")
    target: str = Field(alias="_target_")

    def settings(self) -> JsonObject:
        """Return everything but the target, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"target"})


def build(component: Component, kind: type[Kind], /, **runtime: object) -> Kind:
    """Build a component, the components among its settings first.

    Args:
        component: what to build, from its settings.
        kind: the class or the protocol that it must be of.
        **runtime: further arguments of its constructor, which win over settings.

    Raises:
        UserError: an import path does not exist, or what it names makes something of another kind.
    """
    settings = component.settings()
    inner = {name: build(part, object) for name, value in settings.items() if (part := nested(name, value)) is not None}
    built = component_class(component)(**{**settings, **inner, **runtime})
    if not fulfils(built, kind):
        missing = _lacking(built, kind)
        reason = f": it has no {', '.join(missing)}" if missing else ""
        raise UserError(f"_target_ = {component.target} is no {kind.__name__}{reason}", REMEDY)
    return built


def fulfils(value: object, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether a value is of a class, or has all members of a protocol. Their types are not checked."""
    return not _lacking(value, kind) if Protocol in kind.__bases__ else isinstance(value, kind)


def _lacking(value: object, kind: type) -> list[str]:
    """List the public members of a protocol, and of those that it extends, that a value lacks; of other classes none.

    Members are looked up and not evaluated, as `isinstance` would in Python 3.11: a property may start a server.
    """
    bases = [base for base in kind.__mro__ if Protocol in base.__bases__] if Protocol in kind.__bases__ else []
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {})) if name[0] != "_"}
    absent = object()
    return sorted(name for name in names if inspect.getattr_static(value, name, absent) is absent)


def nested(key: str, value: object) -> Component | None:
    """Return the component that a setting is, or None where it is a plain value.

    Raises:
        UserError: its `_target_` is no import path.
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
        UserError: the import path does not exist or is nothing to call.
    """
    return name in _parameters(component, "_target_")


def component_class(component: Component, key: str = "_target_") -> Callable[..., Any]:
    """Import the class or function of a component, without building it.

    Args:
        component: that names it.
        key: of its `_target_`, for messages.

    Raises:
        UserError: the import path does not exist.
    """
    target = component.target
    label = f"{key} = {excerpt(target)}"
    module_name, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    if not all(part.isidentifier() for part in target.replace(":", ".").split(".")):
        raise UserError(f"{label}: it is not an import path", "write package.module.Class, or package.module:Class")
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
    """Hold the settings of a component, and of the components among them, against its constructor, without calling
    it. An inner one must be built from its settings alone.

    Raises:
        UserError: the import path does not exist or is nothing to call, a setting is unknown, missing, of the wrong
            type or out of range, or is a component that cannot be built from settings alone.
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
    """Check type and range of one setting; an annotation that is absent or only a string promises nothing to check."""
    inner = nested(key, value)
    if annotation is not inspect.Parameter.empty and not isinstance(annotation, str):
        try:
            TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
        except PydanticSchemaGenerationError:
            # Of a class that JSON cannot hold: only a component can be that, or nothing at all.
            optional = type(None) in get_args(annotation)
            if inner is None and not (optional and value is None):
                kinds = "null or a component" if optional else "a component"
                raise UserError(
                    f"{key} = {value!r}: input should be {kinds}, a mapping with _target_", REMEDY
                ) from None
        except ValidationError as error:
            raise UserError(_first_problem(key, error), f"set {key}=VALUE" if value is None else REMEDY) from None
    if inner is not None:
        check(key, inner, is_inner=True)


def alternatives(name: str, names: Iterable[str]) -> str:
    """List the nearest to a misspelt name, and the others of its kind."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    further = ", ".join(candidate for candidate in names if candidate not in near)
    if not near:
        return f"known are {further}" if further else "there is none to choose from"
    return f"did you mean {near[0]}?" + (f" Others: {further}" if further else "")


def _first_problem(key: str, error: ValidationError) -> str:
    """Word the first problem of the setting with this key."""
    problem = error.errors(include_url=False)[0]
    return problem_text({**problem, "loc": (key, *problem["loc"])})


def problem_text(problem: ErrorDetails) -> str:
    """Word a validation problem in one sentence that begins with the key."""
    key = ".".join(str(part) for part in problem["loc"])
    texts = {
        "extra_forbidden": f"there is no setting {key}",
        "missing": f"{key} is not set",
        "hidden": f"{key}: {problem['msg']}",
    }
    if problem["type"] in texts:
        return texts[problem["type"]]
    message = str(problem.get("ctx", {}).get("error", "")) or problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key} = {excerpt(repr(problem['input']))}: {message}" if key else message


def excerpt(text: str) -> str:
    """Shorten text that a user wrote to fit into a message."""
    return plain(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
