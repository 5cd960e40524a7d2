"""Workspaces in which one adapter each is trained, and the publishing of trained adapters.

A workspace is a folder named by the identity of all that decides its result. Training in it may be cut off at any time:
the result is published before anything that training could go on from is removed, so that the next run either goes on
or finds it whole. What was altered since then is never used: the adapter is named by the hash of its content.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from captrain.errors import UserError
from captrain.execution import exclusive
from captrain.ledger import LedgerEntry
from captrain.models import adapter_digest
from captrain.records import JsonObject, place_aside, publish, publish_folder, publish_json, publish_text, read_json
from captrain.training import mismatch

RESULT = "result.json"
LOCK = "lock"
GRPO_COLUMNS = ("adapter", "step", "rollouts", "reward", "success", "informative")


@dataclass(frozen=True)
class Workspace:
    """A folder in which one adapter is trained, by one process at a time.

    Args:
        folder: named by the identity of what is trained.
        name: of the adapter, for messages.
        scratch: patterns of what training may go on from, and nobody needs once its result is there.
    """

    folder: Path
    name: str
    scratch: tuple[str, ...] = ()

    @property
    def adapter(self) -> Path:
        """The folder of the adapter, in plain PEFT format with its model card."""
        return self.folder / "adapter"

    def result(self, train: Callable[[], JsonObject]) -> JsonObject:
        """Return the result of the training, which is done now unless it has been done already.

        Args:
            train: leaves the adapter in `adapter` and returns the result, `digest` (of the adapter) among it.

        Raises:
            UserError: the adapter was altered, or a file of it is missing. The workspace is then removed, so that the
                next run trains again.
            Whatever `train` raises.
        """
        with exclusive(self.folder / LOCK):
            path = self.folder / RESULT
            if not path.exists():
                publish_json(path, train())
            for pattern in self.scratch:
                _remove(self.folder.glob(pattern))
            try:
                result = read_json(path, JsonObject)
            except UserError:
                result = {}
            self._check(result.get("digest"))
            return result

    def _check(self, expected: object) -> None:
        try:
            content = adapter_digest(self.adapter)
        except UserError:
            content = "not whole"
        if content != expected or not (self.adapter / "README.md").exists():
            # The lock stays: another process may be waiting for it.
            _remove(path for path in self.folder.iterdir() if path.name != LOCK)
            raise UserError(
                f"adapter {self.name} in {self.folder} was altered after training ({content}, not {expected})",
                "its workspace has been removed: run `dvc repro` to train it again",
            )


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_folder(aside: Path, folder: Path) -> Path:
    """Put a folder that was written aside in the place of another; returns the latter."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    publish_folder(aside, folder)
    return folder


class Publishable(Protocol):
    """A trained adapter, as it is published."""

    @property
    def name(self) -> str:
        """Key in the index."""
        ...

    @property
    def digest(self) -> str:
        """The hash of its content."""
        ...

    @property
    def folder(self) -> Path:
        """Folder of the published adapter."""
        ...

    @property
    def history(self) -> Sequence[Mapping[str, object]]:
        """One row a step or an update."""
        ...

    def summary(self) -> JsonObject:
        """Summarize the training for its row of the index."""
        ...

    def ledger(self, stage: str, method: str) -> LedgerEntry | None:
        """Enter the rollouts that the training spent; None for none."""
        ...


def publish_adapters(
    adapters: Sequence[Publishable],
    stage: str,
    method: str | None = None,
    *,
    columns: Sequence[str] = GRPO_COLUMNS,
    calibration: Sequence[LedgerEntry] = (),
    guidance: Sequence[str] | None = None,
) -> None:
    """Copy adapters to artifacts/<stage>/<digest>, and write results/<stage>: history.csv, ledger.jsonl, index.json.

    Args:
        adapters: what was trained, in the order of the index.
        stage: names the folders and the ledger's entries.
        method: whose account training is on; None: each on an account of its own name.
        columns: of history.csv; what was measured of a server that sampled follows them.
        calibration: entries of the ledger that come before those of the training.
        guidance: lines of the system prompt that the index says each acts with; None: it says nothing of them.
    """
    artifacts, results = Path("artifacts", stage), Path("results", stage)
    artifacts.mkdir(parents=True, exist_ok=True)
    index: dict[str, JsonObject] = {}
    steps = [step for adapter in adapters for step in adapter.history]
    measured = [name for name in mismatch.COLUMNS if any(name in step for step in steps)]
    rows, entries = [(*columns, *measured)], [*calibration]
    for adapter in adapters:
        folder = artifacts / adapter.digest
        with place_aside(folder) as aside:
            shutil.copytree(adapter.folder, aside)
            replace_folder(aside, folder)
        row: JsonObject = {"digest": adapter.digest, "path": str(folder)}
        if guidance is not None:
            row["guidance"] = list(guidance)
        index[adapter.name] = {**row, **adapter.summary()}
        rows += [
            (
                *(str({"adapter": adapter.name, **step}[column]) for column in columns),
                *(str(step.get(name, "")) for name in measured),
            )
            for step in adapter.history
        ]
        if (entry := adapter.ledger(stage, method or adapter.name)) is not None and entry.rollouts:
            entries.append(entry)
    publish_text(results / "history.csv", "".join(",".join(row) + "\n" for row in rows))
    publish(results / "ledger.jsonl", entries)
    publish_json(results / "index.json", index)
