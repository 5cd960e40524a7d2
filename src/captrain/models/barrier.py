"""Makes training give the same bytes on every CPU, by a barrier around each optimizer step.

Kernels of different instruction sets differ in the last bits of a sum, and training doubles such a difference every
few steps. More digits only delay that; a barrier stops it. The model computes in float64, so that gradients differ by
about 1e-17. Gradients are rounded to multiples of a fixed number before a step, and weights after it. Both grids are
far coarser than the noise, so the next step starts from the same bytes. They are far finer than a step.

Why this holds: a value falls on the other side of a rounding boundary with probability (its noise / the grid). Between
AVX-512 kernels and no vector code, an element of the embedded base's gradient differs by 7e-19 on average, and a weight
after its step not at all. So 540,000 elements x 600 steps x 7e-19 / 2^-18 = 6e-5 elements are expected to differ in a
whole run, and fewer in the training of an adapter.

AdamW adds no noise between the two roundings. It uses operations that IEEE 754 rounds exactly (sum, product, quotient,
root), one per kernel, because torch's own optimizer fuses product and sum on some CPUs only. So its averages in
checkpoints also have the same bytes. Multiples of 2^-18 below 64 are exact in float32, the type of saved weights.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from captrain.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments

GRADIENT_GRID = 2.0**-18
"""Spacing to which gradients are rounded.

Gradients are clipped to norm 1, and the mean of 540,000 elements is near 2^-10. A coarser grid would round more of them
to zero. A finer grid would be closer to the noise.
"""
WEIGHT_GRID = 2.0**-18
"""Spacing to which weights are rounded. At our learning rates, a step of AdamW moves a weight by about 500 of these."""
LEAST_STEPS = 16
"""Smallest learning rate in multiples of the grid. Smaller steps would be lost in the rounding."""
ParameterGroup = dict[str, Any]
"""Settings that parameters share, as torch keeps them."""


def to_grid(tensor: Tensor, spacing: float = WEIGHT_GRID) -> None:
    """Round to multiples of a power of two, in place; negative zero becomes zero."""
    tensor.div_(spacing).round_().mul_(spacing).add_(0.0)


class _Exact(torch.optim.Optimizer, ABC):
    """The barrier: it rounds gradients and weights; a subclass moves a parameter by its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            ValueError: a parameter is not in float64.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.dtype != torch.float64:
                    raise ValueError(f"a parameter is in {parameter.dtype}: the barrier needs float64")
                to_grid(parameter.grad, GRADIENT_GRID)
                self._move(parameter, parameter.grad, group)
                to_grid(parameter)

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None: ...


class AdamW(_Exact):
    """AdamW (arXiv 1711.05101, algorithm 2, with torch's meaning of the rate), behind the barrier.

    Args:
        params: parameters, in float64.
        lr: learning rate.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the root.
        weight_decay: decoupled, as a share of the learning rate.

    Raises:
        UserError: the learning rate is too small for the grid of weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < LEAST_STEPS * WEIGHT_GRID:
            raise UserError(
                f"a learning rate of {lr:g} is lost in float64, where weights are multiples of {WEIGHT_GRID:.1g}",
                f"set machine.accelerate.precision=float32, or a rate of {LEAST_STEPS * WEIGHT_GRID:.1g} or more",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
        state["step"] += 1
        (first, second), rate, steps = group["betas"], group["lr"], state["step"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(gradient * (1 - first))
        square.mul_(second).add_((gradient * gradient).mul_(1 - second))
        root = square.sqrt().div_(math.sqrt(1 - _power(second, steps))).add_(group["eps"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_((mean * (rate / (1 - _power(first, steps)))).div_(root))


class Muon(_Exact):
    """Muon (torch.optim.Muon with `match_rms_adamw`) behind the barrier. It orthogonalises in float64; torch's own does
    so in bfloat16, whatever the type of the parameters.

    Args:
        params: matrices, in float64.
        lr: learning rate, of AdamW's scale.
        weight_decay: decoupled, as a share of the learning rate.
        momentum: Nesterov's, of the average of gradients.
        iterations: of Newton-Schulz.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float, momentum: float = 0.95, iterations: int = 5
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "iterations": iterations}
        )

    def _move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        momentum, rate = group["momentum"], group["lr"]
        mean = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
        mean.mul_(momentum).add_(gradient * (1 - momentum))
        ahead = (gradient * (1 - momentum)).add_(mean * momentum)
        parameter.mul_(1 - rate * group["weight_decay"])
        scale = rate * 0.2 * math.sqrt(max(parameter.shape))
        # Newton-Schulz: approach the nearest matrix with orthonormal rows or columns.
        a, b, c = self.COEFFICIENTS
        tall = ahead.shape[0] > ahead.shape[1]
        x = ahead.T if tall else ahead
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(group["iterations"]):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        parameter.sub_((x.T if tall else x).mul_(scale))


def _power(base: float, exponent: int) -> float:
    """Raise to a power by products, because the C library's `pow` rounds differently across machines."""
    return math.prod(repeat(base, exponent))


@torch.no_grad()
def draw_normal(parameter: Tensor, deviation: float, random: np.random.Generator) -> None:
    """Fill a parameter with normal numbers on the grid. numpy draws them: torch's draws depend on its kernels."""
    parameter.copy_(torch.from_numpy(random.standard_normal(tuple(parameter.shape)) * deviation))
    to_grid(parameter)


@torch.no_grad()
def draw_adapter(model: nn.Module, seed: int) -> None:
    """Draw the A of each LoRA pair uniformly within 1 / sqrt(inputs), as PEFT does, but with numpy and on the grid."""
    random = np.random.Generator(np.random.PCG64(seed))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy((2 * random.random(tuple(parameter.shape)) - 1) * bound))
            to_grid(parameter)


def exact_optimizer(options: "TrainingArguments") -> tuple[type[AdamW], dict[str, Any]]:
    """Return AdamW behind the barrier as a trainer's `optimizer_cls_and_kwargs`."""
    betas = (options.adam_beta1, options.adam_beta2)
    return AdamW, {"lr": options.learning_rate, "betas": betas, "eps": options.adam_epsilon}
