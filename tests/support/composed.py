"""Equal files and equal overrides are composed once in a process: Hydra takes a tenth of a second, and hundreds of
tests ask for the same few configurations."""

import copy
from pathlib import Path

from captrain.config import compose
from captrain.config.shipped import conf_layers
from captrain.records import JsonObject

FileState = tuple[str, int, int]
_composed: dict[tuple[tuple[FileState, ...], tuple[str, ...]], JsonObject] = {}


def compose_once() -> None:
    """From here on, what was composed is remembered until one of its files has changed; refusals are not."""
    merge = compose._merged

    def merge_once(conf_dir: Path, overrides: list[str]) -> JsonObject:
        key = tuple(state for layer in conf_layers(conf_dir) for state in states(layer)), tuple(overrides)
        if key not in _composed:
            _composed[key] = merge(conf_dir, overrides)
        return copy.deepcopy(_composed[key])

    compose._merged = merge_once


def states(folder: Path) -> list[FileState]:
    """Name, time and size of each file of a configuration."""
    files = sorted(folder.rglob("*.yaml"))
    return [(str(path), status.st_mtime_ns, status.st_size) for path in files for status in [path.stat()]]
