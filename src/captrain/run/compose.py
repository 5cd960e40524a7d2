"""Composition of conf/ with an experiment, a seed and overrides, as plain data.

A project's conf/ holds its changes; everything else comes from captrain's own conf/. Hydra composes. This module
reports misspelt options and sections first, with the choices. The schema (`captrain.run.spec`) checks settings, types
and ranges.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import yaml

from captrain.errors import UserError
from captrain.records import JsonObject
from captrain.run.components import REMEDY, alternatives, excerpt, nested, takes
from captrain.run.shipped import conf_layers, searched_conf

_HYDRA = threading.Lock()
"""Lock for composing: Hydra has one configuration folder per process, so only one thread may compose at a time."""


def compose_data(experiment: str, seed: int, overrides: Sequence[str], conf_dir: Path) -> JsonObject:
    """Compose the configuration as plain data. Only the names of options are checked.

    Args:
        experiment: one of conf/experiment/.
        seed: seed of the run.
        overrides: see `captrain.run.compose_spec`.
        conf_dir: of the project; captrain's own conf/ is searched after it.

    Raises:
        UserError: the experiment, an option or a section is unknown, an override is not key=value, or the files do not
            compose.
    """
    groups: dict[str, set[str]] = {}
    for layer in conf_layers(conf_dir):
        for file in layer.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    if experiment not in groups["experiment"]:
        raise UserError(f"unknown experiment {experiment!r}", alternatives(experiment, sorted(groups["experiment"])))
    texts, settings, options, keys = [f"experiment={experiment}", f"seed={seed}"], list[str](), set[str](), set[str]()
    for override in overrides:
        plus, key, value = _parsed(override, groups)
        if key in groups:
            texts.append(override.strip())
            options.add(key)
        else:
            settings.append(f"{'++' * bool(plus)}{key}={value}")
            keys.add(key)
    try:
        data = _merged(conf_dir, [*texts, *settings])
    except UserError:
        # conf/ may not list the setting. The schema decides whether an existing section has it.
        _require_sections(settings, _merged(conf_dir, texts))
        data = _merged(conf_dir, [*texts, *(f"++{text.lstrip('+')}" for text in settings)])
    # Drop settings of a replaced class. If benchmark._target_=mine:Desk names another class, only overridden settings
    # stay. If router=retrieval replaces the experiment's option, settings that the new class does not take are dropped.
    classes = {key.removesuffix("._target_") for key in keys if re.fullmatch(r"\w+\._target_", key)}
    for group in {*options, *classes} & data.keys():
        part = None if group in classes else nested(group, data[group])
        if group in classes or part is not None:
            data[group] = {
                name: value
                for name, value in data[group].items()
                if name == "_target_" or f"{group}.{name}" in keys or (part is not None and takes(part, name))
            }
    return data


def _parsed(override: str, groups: Mapping[str, set[str]]) -> tuple[str, str, str]:
    """Split an override into its leading `+`, key and value. If the key is a group, check that the option exists."""
    form = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", override.strip(), re.DOTALL)
    if form is None:
        raise UserError(
            f"override {excerpt(override)!r} is not of the form key=value", "write, for example, selection.delta=0.1"
        )
    plus, key, value = form.groups()
    if key in ("experiment", "seed"):
        raise UserError(f"override {override!r}: {key} is not an override", f"set `{key}:` in params.yaml itself")
    if key.startswith("hydra."):
        raise UserError(f"there is no setting {excerpt(key)}", f"take it out: {REMEDY}")
    if key in groups and value not in groups[key]:
        raise UserError(
            f"override {excerpt(override)!r}: there is no {key} {excerpt(value)!r}",
            alternatives(value, sorted(groups[key])),
        )
    return plus, key, value


def _require_sections(settings: Sequence[str], defaults: JsonObject) -> None:
    """Check that each setting is in an existing section, starts a new section with `+`, or belongs to a component."""
    names = [*_dotted(defaults)]
    for text in settings:
        key = text.partition("=")[0]
        group, section = key.partition(".")[0], key.rpartition(".")[0] or key
        near = [name for name in names if name.endswith(f".{key.rpartition('.')[2]}")]
        if near and not (key[0] == "+" or section in names or nested(group, defaults.get(group))):
            best = max(near, key=lambda name: SequenceMatcher(None, name, key).ratio())
            hint = f" (to begin a section, write +{excerpt(key)}=...)" if group in defaults else ""
            raise UserError(
                f"override {excerpt(text)!r}: there is no setting {excerpt(key)}", alternatives(best, near) + hint
            ) from None


def _dotted(data: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield all keys of a nested mapping as a.b.c."""
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _merged(conf_dir: Path, overrides: list[str]) -> JsonObject:
    # Imported here, because only the compose stage needs Hydra.
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
    return {str(key): value for key, value in data.items()}


def not_composed(conf_dir: Path, error: Exception) -> UserError:
    """Return a failure of Hydra or OmegaConf as one line without names of exceptions."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return UserError(f"there is no {group} {excerpt(name)!r}", alternatives(name, sorted(error.options)))
    message = re.sub(r"\b\w+(?:Exception|Error)\b(?: raised while)?:? ?", "", " ".join(str(error).split()))
    reason = excerpt(message) or "a name of a setting is null"
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    return UserError(f"the configuration in {conf_dir}/ is invalid: {reason}", REMEDY)
