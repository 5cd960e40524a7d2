"""Keeps trainings in workspaces, and publishes trained adapters.

A workspace is a folder named by the digest of everything that decides its result. Training in it may be cut off at any
time: the result is written before the checkpoints are removed, so that the next run either resumes or finds the result.
An adapter that was altered later is never used: it is named by the hash of its content.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models import adapter_digest
from captrain.records import (
    JsonObject,
    folder_digests,
    place_aside,
    publish,
    publish_bytes,
    publish_folder,
    publish_json,
    publish_text,
    remains,
    sealed,
)
from captrain.run import exclusive
from captrain.training.jobs import FineTuned, Result, Trained

RESULT = "result.json"
LOCK = "lock"
SCRATCH = ("checkpoints*", "points", "trained.json", "unfinished")
"""Patterns of files that only unfinished trainings need."""
GRPO_COLUMNS = ("adapter", "step", "rollouts", "reward", "success", "informative")
SERVED_COLUMNS = ("mismatch", "mismatch_largest", "effective_tokens", "rerendered", "staleness")
"""Further columns of history.csv if a server samples (see `captrain.training.jobs.StepRecord`)."""


ResultType = TypeVar("ResultType", bound=Result)


def train_once(folder: Path, name: str, kind: type[ResultType], train: Callable[[], ResultType]) -> ResultType:
    """Train once and cache the result in the workspace, by one process at a time.

    Args:
        folder: the workspace.
        name: of the adapter, for messages.
        kind: of the result.
        train: leaves the adapter with its model card in `folder/adapter` and returns the result.

    Raises:
        UserError: the adapter was altered, or lacks a file. The workspace is then removed, so that the next run trains
            again.
        Whatever `train` raises.
    """
    with exclusive(folder / LOCK):
        path = folder / RESULT
        if not path.exists():
            trained = train()
            trained = replace(trained, files=folder_digests(folder / "adapter"))
            publish_bytes(path, sealed(path, TypeAdapter(kind).dump_json(trained).decode()))
        _remove(path for pattern in SCRATCH for path in folder.glob(pattern))
        result = next(iter(remains(path, kind)), None)
        fault = _fault(folder / "adapter", result)
        if result is not None and not fault:
            return result
        # The lock file stays, because another process may be waiting for it.
        _remove(path for path in folder.iterdir() if path.name != LOCK)
        raise UserError(
            f"adapter {name} in {folder} was altered after training ({fault})",
            "its workspace has been removed: run `dvc repro` to train it again",
        )


def _fault(adapter: Path, result: Result | None) -> str:
    """Return how an adapter differs from the result of its training; "" if it is unchanged."""
    if result is None:
        return f"{RESULT} differs from its digest"
    try:
        content = adapter_digest(adapter)
    except UserError:
        return "it is not whole"
    if content != result.digest:
        return f"{content}, not {result.digest}"
    found = folder_digests(adapter)
    names = {*found, *result.files} if result.files else set[str]()  # earlier versions kept no digests of files
    return ", ".join(sorted(name for name in names if found.get(name) != result.files.get(name)))


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_folder(aside: Path, folder: Path) -> None:
    """Replace a folder by one that was written aside."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    publish_folder(aside, folder)


def publish_adapters(
    adapters: Sequence[Trained | FineTuned],
    stage: str,
    method: str | None = None,
    *,
    columns: Sequence[str] = GRPO_COLUMNS,
    calibration: Sequence[LedgerEntry] = (),
    guidance: Sequence[str] | None = None,
) -> None:
    """Copy adapters to artifacts/<stage>/<digest>, and write results/<stage>: history.csv, ledger.jsonl, index.json.

    Args:
        adapters: in the order of the index.
        stage: names the folders and the ledger's entries.
        method: the method that the training is charged to; None: each adapter is a method with its own name.
        columns: columns of history.csv. The measured `SERVED_COLUMNS` follow.
        calibration: ledger entries that come before those of the training.
        guidance: lines of the system prompt that each adapter acts with; None: the index has no such field.
    """
    artifacts, results = Path("artifacts", stage), Path("results", stage)
    artifacts.mkdir(parents=True, exist_ok=True)
    steps = [{"adapter": adapter.name, **row} for adapter in adapters for row in adapter.rows]
    measured = [name for name in SERVED_COLUMNS if any(name in step for step in steps)]
    table = [[*columns, *measured]]
    for step in steps:
        table.append([str(step[name]) for name in columns] + [str(step.get(name, "")) for name in measured])
    index, entries = dict[str, JsonObject](), [*calibration]
    for adapter in adapters:
        folder = artifacts / adapter.digest
        with place_aside(folder) as aside:
            shutil.copytree(adapter.folder, aside)
            replace_folder(aside, folder)
        acting = {} if guidance is None else {"guidance": list(guidance)}
        index[adapter.name] = {"digest": adapter.digest, "path": str(folder), **acting, **adapter.summary()}
        if isinstance(adapter, Trained) and (entry := adapter.ledger(stage, method or adapter.name)).rollouts:
            entries.append(entry)
    publish_text(results / "history.csv", "".join(",".join(row) + "\n" for row in table))
    publish(results / "ledger.jsonl", entries)
    publish_json(results / "index.json", index)
