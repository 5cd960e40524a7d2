"""Checkpoint marks of a training, and the check of a published adapter."""

from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.models import Adapter, checkpoint_marks, require_trained


@pytest.mark.parametrize(
    ("rollouts", "points", "marks"),
    [
        (24, 3, [8, 16]),
        (3200, 4, [800, 1600, 2400]),
        (10, 4, [3, 5, 8]),
        # By a share of 9/11 the ninth would be rounded up to 505.
        (616, 11, [56, 112, 168, 224, 280, 336, 392, 448, 504, 560]),
        (24, 1, []),
        (24, 0, []),
    ],
)
def test_checkpoint_marks_are_even_and_exclude_the_end(rollouts: int, points: int, marks: list[int]) -> None:
    assert checkpoint_marks(rollouts, points) == marks


def test_an_altered_adapter_does_not_act(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_model.safetensors is missing(.|\n)*dvc repro row@single"):
        require_trained(Adapter(str(tmp_path), "0123"), "single")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"but 0123 was trained(.|\n)*`dvc repro -f single`"):
        require_trained(Adapter(str(tmp_path), "0123"), "single")
