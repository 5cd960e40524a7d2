"""The folder conf/: what an experiment, a seed and overrides select in it, as plain data.

Hydra composes; what it would say of a misspelt option or key is said here first, with what there is to choose from.
Nothing is known of types and ranges: that is the schema's (`captrain.config.spec`).
"""

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from captrain.config.components import REMEDY, alternatives
from captrain.errors import UserError
from captrain.records import JsonObject

_HYDRA = threading.Lock()
"""Hydra has one folder of configuration in a process: threads that compose wait for each other."""


def compose_data(experiment: str, seed: int, overrides: Sequence[str], conf_dir: Path) -> JsonObject:
    """The composed configuration as plain data, unchecked but for the names of options and keys.

    Args:
        experiment: one of conf/experiment/.
        overrides: see `captrain.config.compose_spec`.

    Raises:
        UserError: an unknown experiment, option or key, a line that is no key=value, or files that do not compose.
    """
    groups = _groups(conf_dir)
    if experiment not in groups["experiment"]:
        raise UserError(f"unknown experiment {experiment!r}", alternatives(experiment, groups["experiment"]))
    pairs = [_parsed(override, groups) for override in overrides]
    choices = [f"experiment={experiment}", f"seed={seed}", *(text for text, key in pairs if key in groups)]
    values = [(text, key) for text, key in pairs if key not in groups]
    try:
        data = _merged(conf_dir, [*choices, *(text for text, _ in values)])
    except UserError:
        _check_keys(values, _merged(conf_dir, choices))
        raise
    # Hydra takes settings of its own, too. What there is without the values takes as long again to compose.
    if not {key for _, key in values} <= {*_dotted(data)}:
        _check_keys(values, _merged(conf_dir, choices))
    return data


def _check_keys(values: Sequence[tuple[str, str]], data: Mapping[str, object]) -> None:
    """Refuse an override of a setting that is not there, unless it says that it adds it."""
    settings = _dotted(data)
    for text, key in values:
        if key not in settings and not text.startswith("+"):
            raise UserError(f"override {text!r}: there is no setting {key}", alternatives(key, settings))


def _groups(conf_dir: Path) -> dict[str, list[str]]:
    """The options of each config group, `experiment` among them."""
    groups = {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(conf_dir.glob("*"))
        if folder.is_dir()
    }
    if "experiment" not in groups:
        raise UserError(f"there is no folder {conf_dir}/experiment", "run from the root of the repository")
    return groups


def _parsed(override: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The override and its key, once its form and its place are known to be right."""
    form = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", override.strip(), re.DOTALL)
    if form is None:
        raise UserError(
            f"override {override!r} is not of the form key=value", "write, for example, selection.delta=0.1"
        )
    key, value = form[2], form[3]
    if key in ("experiment", "seed"):
        raise UserError(f"override {override!r}: {key} is not an override", f"set `{key}:` in params.yaml itself")
    if key in groups and value not in groups[key]:
        raise UserError(f"override {override!r}: there is no {key} {value!r}", alternatives(value, groups[key]))
    return override.strip(), key


def _merged(conf_dir: Path, overrides: list[str]) -> JsonObject:
    # Needed by the compose stage only; every other stage imports this module with the schema.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _HYDRA, initialize_config_dir(config_dir=str(conf_dir.resolve()), version_base="1.3"):
            config = hydra_compose("config", overrides)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"the configuration in {conf_dir}/ does not compose: {message}", REMEDY) from None
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _dotted(data: Mapping[str, object], prefix: str = "") -> list[str]:
    """All keys of a nested mapping, inner ones too, as a.b.c."""
    keys: list[str] = []
    for key, value in data.items():
        keys.append(prefix + key)
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys
