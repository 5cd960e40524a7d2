"""Hashes of the bytes on this disk against those that were written: DVC's cache, and the outputs that lie here.

DVC believes a file that has kept its time and size, so that a flipped bit in the cache is restored unseen, and one in
an output is read by the next stage. Here every file is hashed anew: one of the cache is named by its own hash, and one
of an output by dvc.lock or by the listing of its folder.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from captrain.records import BLOCK, read_json, read_yaml
from captrain.reporting.verification import dvc_pipeline

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}(\.dir)?$")]
ENTRIES = "files/md5"


class ListedFile(BaseModel):
    """A file of a folder in DVC's cache."""

    md5: Hash
    relpath: str


class _Output(BaseModel):
    path: str
    md5: Hash


class _Stage(BaseModel):
    outs: list[_Output] = []


class _Lock(BaseModel):
    stages: dict[str, _Stage] = {}


@dataclass(frozen=True)
class Integrity:
    """Number of files hashed, and what to do about each one whose bytes have changed."""

    files: int
    damages: tuple[str, ...]


def check_integrity(root: Path) -> Integrity:
    """Hash every file of DVC's cache, and of the outputs that lie here.

    Raises:
        UserError: there is no dvc.lock, or it is damaged.
    """
    with dvc_pipeline(root) as repo:
        cache = Path(str(repo.cache.local.path))
    cache = cache if cache.name == "md5" else cache / ENTRIES
    checks = [*_cache(cache), *_outputs(root, cache)]
    return Integrity(len(checks), tuple(filter(None, checks)))


def _cache(cache: Path) -> Iterator[str]:
    """Yield for each file of the cache what is wrong with it, "" for nothing."""
    for path in sorted(cache.glob("[0-9a-f][0-9a-f]/*")):
        name = f"{path.parent.name}{path.name}"
        sound = not path.is_file() or len(name.removesuffix(".dir")) != 32 or _md5(path) == name.removesuffix(".dir")
        yield "" if sound else f"{path} of DVC's cache is damaged: remove it, and `dvc repro` makes it again"


def _outputs(root: Path, cache: Path) -> Iterator[str]:
    """Yield the same for each file of an output; one that is not here is not looked at."""
    for name, stage in _lock(root).stages.items():
        for out in stage.outs:
            path = root / out.path
            if not path.exists():
                continue
            for file, expected in _files(path, out.md5, cache):
                sound = file.is_file() and _md5(file) == expected
                place = file.relative_to(root)
                yield (
                    "" if sound else f"{place}, of {name}, is not what dvc.lock has: `dvc repro {name}`, or restore it"
                )


def _files(path: Path, md5: str, cache: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of an output with their hashes; of a folder as its listing in the cache has them, if that is
    whole."""
    if not md5.endswith(".dir"):
        yield path, md5
        return
    listing = cache / md5[:2] / md5[2:]
    if listing.exists() and _md5(listing) == md5.removesuffix(".dir"):
        for entry in read_json(listing, list[ListedFile]):
            yield path / entry.relpath, entry.md5


def _lock(root: Path) -> _Lock:
    return read_yaml(root / "dvc.lock", _Lock, "restore it with `git checkout dvc.lock`")


def _md5(path: Path) -> str:
    total = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()
