"""The barrier around optimizer steps, and models that compute in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import load_script
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from captrain.errors import UserError
from captrain.models.barrier import GRADIENT_GRID, WEIGHT_GRID, AdamW, Muon, to_grid
from captrain.models.dense import to_float64

SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def steps(optimizer: torch.optim.Optimizer, parameter: Tensor, noise: float = 0.0, count: int = 20) -> Tensor:
    """Return the parameter after some steps along gradients that differ only by noise."""
    draw, disturb = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    for _ in range(count):
        gradient = 0.01 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        gradient += noise * torch.randn(parameter.shape, generator=disturb, dtype=torch.float64)
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def test_rounding_leaves_multiples_of_the_grid_and_no_negative_zero() -> None:
    values = torch.tensor([0.3, -0.3, 1e-9, -1e-9, -WEIGHT_GRID], dtype=torch.float64)
    to_grid(values, WEIGHT_GRID)
    assert values.tolist() == [
        round(0.3 / WEIGHT_GRID) * WEIGHT_GRID,
        -round(0.3 / WEIGHT_GRID) * WEIGHT_GRID,
        0,
        0,
        -WEIGHT_GRID,
    ]
    assert not values[2:4].signbit().any()
    assert torch.equal(values.float().double(), values)  # what is saved is what was trained


def test_adamw_equals_torchs_up_to_the_grid() -> None:
    ours, torchs = weights(8, 8), weights(8, 8)
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    moved = steps(AdamW([ours], **options), ours)
    expected = steps(torch.optim.AdamW([torchs], **options), torchs)
    assert (moved - expected).abs().max() < 20 * WEIGHT_GRID < (moved - weights(8, 8)).abs().max()
    assert torch.equal(moved, torch.round(moved / WEIGHT_GRID) * WEIGHT_GRID)


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 32)])
def test_muon_steps_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    parameter = weights(*shape)
    moved = steps(Muon([parameter], lr=1e-2, weight_decay=0.0), parameter, count=1)
    step = (moved - weights(*shape)) / (1e-2 * 0.2 * max(shape) ** 0.5)
    assert torch.linalg.svdvals(step).min() > 0.5 and torch.linalg.svdvals(step).max() < 1.3


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_kernel_noise_changes_no_bit_of_weights_or_averages(kind: type[AdamW] | type[Muon]) -> None:
    results = []
    for noise in (0.0, 1e-17):
        parameter = weights(64, 64)
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.01)
        moved = steps(optimizer, parameter, noise)
        results.append([moved, *(value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))])
    assert all(torch.equal(plain, disturbed) for plain, disturbed in zip(*results, strict=True))
    parameter = weights(64, 64)  # where the noise is as coarse as the grid it shows
    assert not torch.equal(
        steps(kind([parameter], lr=1e-2, weight_decay=0.01), parameter, GRADIENT_GRID), results[0][0]
    )


@pytest.mark.parametrize(("noise", "flips"), [(1e-17, 0), (1e-7, 200)])
def test_the_benchmark_counts_as_many_flips_as_it_expects(tmp_path: Path, noise: float, flips: int) -> None:
    bench = load_script("bench_barrier")
    folders = [tmp_path / "still", tmp_path / "noisy"]
    for folder, loudness in zip(folders, (0.0, noise), strict=True):
        folder.mkdir()
        with bench.recording(folder, 1):
            parameter = weights(64, 64)
            steps(Muon([parameter], lr=1e-2, weight_decay=0.1), parameter, loudness, count=2)
    gradient = bench.noises(folders)["gradient"]
    assert (gradient.steps, gradient.elements) == (2, 2 * 64 * 64)
    assert 0.5 * noise < gradient.mean < noise < gradient.largest < 6 * noise
    assert gradient.flips == pytest.approx(gradient.expected, rel=0.3, abs=1e-3)
    assert flips / 2 <= gradient.flips <= 2 * flips
    assert (bench.noises(folders)["weight"].flips > 0) == (flips > 0)


def test_a_learning_rate_below_the_grid_is_refused() -> None:
    with pytest.raises(UserError, match=r"1e-05 is lost in float64") as refusal:
        AdamW([weights(2)], lr=1e-5)
    assert "machine.accelerate.precision=float32" in refusal.value.remedy
    single = nn.Parameter(torch.ones(2))
    single.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        AdamW([single], lr=1e-2).step()


def test_only_dense_qwen3_trains_in_float64() -> None:
    with pytest.raises(UserError, match="dense Qwen3 models alone, and this one is llama"):
        to_float64(LlamaForCausalLM(LlamaConfig(**SIZE)))
