"""Fine-tuning by itself: a process that is killed in the middle of it leaves nothing to do twice."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.training import fine_tuned

from captrain.run.machine import Machine
from captrain.training import sft

MACHINE = Machine(workers=1, batch=1)
UPDATES, EVERY, DEATH = 6, 2, 5
"""Updates of the whole, updates between checkpoints, and the one in which the process dies."""


def contents(folder: Path) -> dict[str, bytes]:
    [adapter] = (folder / ".cache/lesson").glob("*/adapter")
    return {path.name: path.read_bytes() for path in adapter.iterdir()}


def test_a_fine_tuning_that_was_killed_goes_on_from_its_last_checkpoint_to_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    step, steps = Trainer.training_step, list[int]()
    monkeypatch.setattr(sft, "CHECKPOINT", EVERY)

    def counted(self: Any, *arguments: Any, **settings: Any) -> Any:
        steps.append(self.state.global_step + 1)
        return step(self, *arguments, **settings)

    def deadly(self: Any, *arguments: Any, **settings: Any) -> Any:
        if self.state.global_step + 1 == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments, **settings)

    monkeypatch.setattr(Trainer, "training_step", counted)
    whole = fine_tuned(tiny, tmp_path / "whole", MACHINE)
    assert len(whole.losses) == UPDATES and {*steps} == {*range(1, UPDATES + 1)}
    if not (child := os.fork()):
        try:
            monkeypatch.setattr(Trainer, "training_step", deadly)
            fine_tuned(tiny, tmp_path / "killed", MACHINE)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    steps.clear()
    resumed = fine_tuned(tiny, tmp_path / "killed", MACHINE)
    assert {*steps} == {DEATH, UPDATES}
    assert (resumed.digest, resumed.losses) == (whole.digest, whole.losses)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
