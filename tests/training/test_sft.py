"""Fine-tuning: resume after a kill, and gradients that are not finite."""

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.training import fine_tuned
from transformers import Trainer

from captrain.errors import UserError
from captrain.models import computes_on_cpu
from captrain.run.machine import Machine
from captrain.training import sft

MACHINE = Machine(workers=1, batch=1)
UPDATES, EVERY, DEATH = 6, 2, 5
"""Updates in all, updates between checkpoints, and the update in which the process dies."""


def contents(folder: Path) -> dict[str, bytes]:
    [adapter] = (folder / ".cache/lesson").glob("*/adapter")
    return {path.name: path.read_bytes() for path in adapter.iterdir()}


def test_a_killed_fine_tuning_resumes_to_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_gradient_that_is_not_finite_ends_the_training_and_keeps_its_checkpoints(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.training_step
    monkeypatch.setattr(sft, "CHECKPOINT", EVERY)

    def diverging(self: Any, *arguments: Any, **settings: Any) -> Any:
        loss = step(self, *arguments, **settings)
        if self.state.global_step + 1 == DEATH:
            next(parameter for parameter in self.model.parameters() if parameter.grad is not None).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(Trainer, "training_step", diverging)
    with pytest.raises(UserError, match=rf"the gradient of update {DEATH} .* is not finite"):
        fine_tuned(tiny, tmp_path, MACHINE)
    assert not [*tmp_path.glob(".cache/lesson/*/adapter")]
    assert len([*tmp_path.glob(".cache/lesson/**/history.json")]) == DEATH // EVERY


def test_float64_computes_on_the_cpu_even_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = ("float64", "float32", "bfloat16")
    for is_there, expected in ((True, [True, False, False]), (False, [True, True, True])):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_there=is_there: is_there)
        assert [computes_on_cpu(precision) for precision in precisions] == expected


def test_updates_are_counted_on_standard_output_which_a_job_of_several_processes_keeps_in_its_log(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("captrain.records.progress.PAUSE", 0.0)
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(seconds)))  # the bar skips updates within .1 s
    fine_tuned(tiny, tmp_path, MACHINE)
    out, err = capsys.readouterr()
    assert f"lesson: {UPDATES - 1} of {UPDATES} updates, " in out and "lesson" not in err
