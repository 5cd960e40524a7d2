"""A cache of composed configurations.

Hydra takes a tenth of a second, and hundreds of tests compose the same few choices with other values.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from captrain.records import JsonObject
from captrain.run import compose
from captrain.run.shipped import conf_layers

FileState = tuple[str, int, int]
Key = tuple[tuple[FileState, ...], tuple[str, ...]]
_composed: dict[Key, JsonObject] = {}
_chosen: dict[Key, DictConfig] = {}


def compose_once() -> None:
    """Cache compositions in this process until one of the files changes. Errors are not cached."""
    merge, hydra_compose = compose._merged, hydra.compose
    states: tuple[FileState, ...] = ()

    def merge_once(conf_dir: Path, overrides: list[str]) -> JsonObject:
        nonlocal states
        states = tuple(state for layer in conf_layers(conf_dir) for state in states_of(layer))
        key = states, tuple(overrides)
        if key not in _composed:
            hydra.compose = choose_once
            try:
                _composed[key] = merge(conf_dir, overrides)
            finally:
                hydra.compose = hydra_compose
        return copy.deepcopy(_composed[key])

    def choose_once(config_name: str, overrides: Sequence[str]) -> DictConfig:
        """Compose the config groups once, then apply the values as Hydra does after composing."""
        try:
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            parsed = OverridesParser.create().parse_overrides([*overrides])
            loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
            values = [one for one in parsed if not loader.repository.group_exists(one.key_or_group)]
            options = [str(one.input_line) for one in parsed if one not in values]
            key = states, tuple(options)
            if key not in _chosen:
                _chosen[key] = hydra_compose(config_name, options)
            config = copy.deepcopy(_chosen[key])
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        except HydraException:
            return hydra_compose(config_name, [*overrides])  # raises Hydra's own message
        return config

    compose._merged = merge_once


def states_of(folder: Path) -> list[FileState]:
    """List name, time and size of each file of a configuration."""
    files = sorted(folder.rglob("*.yaml"))
    return [(str(path), status.st_mtime_ns, status.st_size) for path in files for status in [path.stat()]]
