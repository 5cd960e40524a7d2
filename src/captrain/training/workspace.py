"""Workspaces in which one adapter each is trained, and the publishing of trained adapters.

A workspace is a folder named by the identity of all that decides its result. Training in it may be cut off at any time:
the result is published before anything that training could go on from is removed, so that the next run either goes on
or finds it whole. What was altered since then is never used: the adapter is named by the hash of its content.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models import adapter_digest
from captrain.records import JsonObject, place_aside, publish, publish_folder, publish_json, publish_text, read_json
from captrain.run import exclusive
from captrain.training.jobs import FineTuned, Trained

RESULT = "result.json"
LOCK = "lock"
SCRATCH = ("checkpoints*", "points", "trained.json", "reported.json", "unfinished")
"""Patterns of what training may go on from, and nobody needs once its result is there."""
GRPO_COLUMNS = ("adapter", "step", "rollouts", "reward", "success", "informative")
SERVED_COLUMNS = ("mismatch", "mismatch_largest", "effective_tokens", "rerendered", "staleness")
"""Columns of history.csv where a server samples: how far its log-probabilities are from the trainer's, the turns that
were rendered again, and the steps by which the adapter that plays is behind, whose updates the differences then hold,
too."""


def train_once(folder: Path, name: str, train: Callable[[], JsonObject]) -> JsonObject:
    """Return the result of a training, which is done now unless it has been done already, by one process at a time.

    Args:
        folder: the workspace, named by the identity of what is trained.
        name: of the adapter, for messages.
        train: leaves the adapter with its model card in `folder/adapter` and returns the result, `digest` (of the
            adapter) among it.

    Raises:
        UserError: the adapter was altered, or a file of it is missing. The workspace is then removed, so that the next
            run trains again.
        Whatever `train` raises.
    """
    with exclusive(folder / LOCK):
        if not (folder / RESULT).exists():
            publish_json(folder / RESULT, train())
        _remove(path for pattern in SCRATCH for path in folder.glob(pattern))
        result, content = JsonObject(), "not whole"
        try:
            result = read_json(folder / RESULT, JsonObject)
            content = adapter_digest(folder / "adapter")
        except UserError:
            pass
        expected = result.get("digest")
        if content != expected or not (folder / "adapter/README.md").exists():
            # The lock stays: another process may be waiting for it.
            _remove(path for path in folder.iterdir() if path.name != LOCK)
            raise UserError(
                f"adapter {name} in {folder} was altered after training ({content}, not {expected})",
                "its workspace has been removed: run `dvc repro` to train it again",
            )
        return result


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_folder(aside: Path, folder: Path) -> None:
    """Put a folder that was written aside in the place of another."""
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
    steps = [(adapter.name, step) for adapter in adapters for step in adapter.history]
    measured = [name for name in SERVED_COLUMNS if any(name in step for _, step in steps)]
    rows = [(*columns, *measured)]
    for name, step in steps:
        cells = {"adapter": name, **step}
        rows.append((*(str(cells[column]) for column in columns), *(str(step.get(name, "")) for name in measured)))
    entries = [*calibration]
    for adapter in adapters:
        folder = artifacts / adapter.digest
        with place_aside(folder) as aside:
            shutil.copytree(adapter.folder, aside)
            replace_folder(aside, folder)
        acting = {} if guidance is None else {"guidance": list(guidance)}
        index[adapter.name] = {"digest": adapter.digest, "path": str(folder), **acting, **adapter.summary()}
        if isinstance(adapter, Trained) and (entry := adapter.ledger(stage, method or adapter.name)).rollouts:
            entries.append(entry)
    publish_text(results / "history.csv", "".join(",".join(row) + "\n" for row in rows))
    publish(results / "ledger.jsonl", entries)
    publish_json(results / "index.json", index)
