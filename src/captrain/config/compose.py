"""The folder conf/: what an experiment, a seed and overrides select in it, as plain data.

A project's conf/ holds what the project changes; what it lacks is in the one that captrain brings along.

Hydra composes; what it would say of a misspelt option or key is said here first, with what there is to choose from.
Nothing is known of types and ranges: that is the schema's (`captrain.config.spec`).
"""

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from captrain.config.components import REMEDY, alternatives, excerpt, nested, takes
from captrain.config.shipped import conf_layers, searched_conf
from captrain.errors import UserError
from captrain.records import JsonObject

_HYDRA = threading.Lock()
"""Hydra has one folder of configuration in a process: threads that compose wait for each other."""


def compose_data(experiment: str, seed: int, overrides: Sequence[str], conf_dir: Path) -> JsonObject:
    """Compose the configuration as plain data, unchecked but for the names of options and keys.

    Args:
        experiment: one of conf/experiment/.
        overrides: see `captrain.config.compose_spec`.
        conf_dir: of the project; captrain's own comes after it.

    Raises:
        UserError: an unknown experiment, option or key, a line that is no key=value, or files that do not compose.
    """
    groups = _groups(conf_dir)
    if experiment not in groups["experiment"]:
        raise UserError(f"unknown experiment {experiment!r}", alternatives(experiment, groups["experiment"]))
    pairs = [_parsed(override, groups) for override in overrides]
    options = [key for _, key in pairs if key in groups]
    choices = [f"experiment={experiment}", f"seed={seed}", *(text for text, key in pairs if key in groups)]
    values = [(text, key) for text, key in pairs if key not in groups]
    try:
        data = _merged(conf_dir, [*choices, *(text for text, _ in values)])
    except UserError:
        without = _merged(conf_dir, choices)
        added = [f"++{text}" if _is_unlisted(text, key, without) else text for text, key in values]
        _check_keys([(text, key) for text, (_, key) in zip(added, values, strict=True)], without)
        data = _merged(conf_dir, [*choices, *added])
    _drop_settings_of_others(data, options, {key for _, key in values})
    # Hydra takes settings of its own, too. What there is without the values takes as long again to compose.
    if not {key for _, key in values} <= {*_dotted(data)}:
        _check_keys(values, _merged(conf_dir, choices))
    return data


def _is_unlisted(text: str, key: str, data: JsonObject) -> bool:
    """Tell if an override is of a setting that conf/ does not list and that the section's class takes."""
    group, _, name = key.partition(".")
    part = None if text.startswith("+") or name in data.get(group, {name: 0}) else nested(group, data[group])
    return part is not None and takes(part, name.partition(".")[0])


def _drop_settings_of_others(data: JsonObject, options: Sequence[str], keys: Collection[str]) -> None:
    """Drop the settings that conf/ gives to a class which an override replaces.

    Where benchmark._target_=desks.mine:Desk names another class, only settings that are overridden, too, stay. Where
    router=retrieval chooses another option than the experiment, what the experiment sets of its own goes with that:
    all that the class of the option does not take.
    """
    classes = {key.removesuffix("._target_") for key in keys if key.count(".") == 1 and key.endswith("._target_")}
    for group in {*options, *classes}:
        part = None if group in classes or group not in data else nested(group, data[group])
        if group in classes or part is not None:
            data[group] = {
                name: value
                for name, value in data[group].items()
                if name == "_target_" or f"{group}.{name}" in keys or (part is not None and takes(part, name))
            }


def _check_keys(values: Sequence[tuple[str, str]], data: Mapping[str, object]) -> None:
    """Refuse an override of a setting that is not there, unless it says that it adds it."""
    settings = _dotted(data)
    for text, key in values:
        if key not in settings and not text.startswith("+"):
            raise UserError(
                f"override {excerpt(text)!r}: there is no setting {excerpt(key)}", alternatives(key, settings)
            )


def _groups(conf_dir: Path) -> dict[str, list[str]]:
    """List the options of each config group, `experiment` among them."""
    options: dict[str, set[str]] = {}
    for layer in conf_layers(conf_dir):
        for file in layer.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def _parsed(override: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the override and its key, once its form and its place are known to be right."""
    form = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", override.strip(), re.DOTALL)
    if form is None:
        raise UserError(
            f"override {excerpt(override)!r} is not of the form key=value", "write, for example, selection.delta=0.1"
        )
    key, value = form[2], form[3]
    if key in ("experiment", "seed"):
        raise UserError(f"override {override!r}: {key} is not an override", f"set `{key}:` in params.yaml itself")
    if key in groups and value not in groups[key]:
        raise UserError(
            f"override {excerpt(override)!r}: there is no {key} {excerpt(value)!r}", alternatives(value, groups[key])
        )
    # What is said to be added may be there already, since conf/ lists more settings now than it did.
    return (f"++{key}={value}" if form[1] and key not in groups else override.strip()), key


def _merged(conf_dir: Path, overrides: list[str]) -> JsonObject:
    # Needed by the compose stage only; every other stage imports this module with the schema.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("max", max, replace=True)
    try:
        with _HYDRA, searched_conf(conf_dir) as folder, initialize_config_dir(str(folder), version_base="1.3"):
            config = hydra_compose("config", overrides)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise not_composed(conf_dir, error) from None
    assert isinstance(data, dict)
    _require_words({**data})
    return {str(key): value for key, value in data.items()}


def _require_words(data: Mapping[object, object], place: str = "") -> None:
    """Refuse names of settings that are no text.

    Raises:
        UserError: one is a number, a truth value, a date.
    """
    for name, value in data.items():
        if not isinstance(name, str):
            raise UserError(f"conf/ names a setting {place}{name}, which is no text", f"write {str(name)!r}, quoted")
        if isinstance(value, Mapping):
            _require_words(value, f"{place}{name}.")


def not_composed(conf_dir: Path, error: Exception) -> UserError:
    """Word the error of Hydra, or a library behind it, that does not compose a configuration."""
    return UserError(f"the configuration in {conf_dir}/ does not compose: {_reason(error)}", REMEDY)


def _reason(error: Exception) -> str:
    """Reduce a library's error to one line of some length, without the names of its exceptions."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    message = re.sub(r"\b\w+(?:Exception|Error)\b(?: raised while)?:? ?", "", " ".join(str(error).split()))
    return excerpt(message) or "a name in it is null, where settings have names"


def _dotted(data: Mapping[str, object], prefix: str = "") -> list[str]:
    """List all keys of a nested mapping, inner ones too, as a.b.c."""
    keys: list[str] = []
    for key, value in data.items():
        keys.append(prefix + key)
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys
