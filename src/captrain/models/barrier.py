"""Training that gives the same bytes on every CPU: a barrier around each step of an optimizer.

Kernels of different instruction sets differ in the last bits of a sum, and training doubles such a difference every
few steps. More digits delay that, and only a barrier ends it: the model computes in float64, so that its gradients
differ by some 1e-17; before a step they are rounded to multiples of a fixed number, and after it the weights are. Both
are far coarser than the noise, so that the next step begins from the same bytes, and far finer than what a step does.

Why this holds. A value lands on the other side of a boundary with probability (its noise / the grid). Between AVX-512
kernels and none at all, an element of the gradient of the embedded base differs by 7e-19 on average and a weight after
its step not at all, so that 540,000 elements x 600 steps x 7e-19 / 2^-18 = 6e-5 elements are expected to differ in a
whole run; of an adapter, with fewer elements and steps, still fewer.

Between the two roundings AdamW makes no noise at all: it is written in operations that IEEE 754 rounds exactly (sum,
product, quotient, root), one a kernel, because torch's own fuse product and sum on one CPU and not on another. So its
averages, which a checkpoint holds, have the same bytes too. Multiples of 2^-18 below 64 are exact in float32: what is
saved is what was trained.
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
"""Gradients are clipped to norm 1; of 540,000 elements the mean is near 2^-10. A coarser grid takes more of them for
nothing, a finer one is nearer to the noise."""
WEIGHT_GRID = 2.0**-18
"""A step of AdamW at the rates used here moves a weight by some 500 of these."""
LEAST_STEPS = 16
"""A learning rate below so many multiples of the grid would be rounded away."""
Group = dict[str, Any]
"""Settings that parameters share, as torch keeps them."""


def to_grid(tensor: Tensor, spacing: float = WEIGHT_GRID) -> None:
    """Round to multiples of a power of two, in place; zero has no sign afterwards."""
    tensor.div_(spacing).round_().mul_(spacing).add_(0.0)


class _Exact(torch.optim.Optimizer, ABC):
    """The barrier: a subclass says how a parameter is moved by its gradient, and both are rounded here."""

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
                    raise ValueError(f"a parameter is in {parameter.dtype}: the barrier holds in float64 alone")
                to_grid(parameter.grad, GRADIENT_GRID)
                self._move(parameter, parameter.grad, group)
                to_grid(parameter)

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, group: Group) -> None: ...


class AdamW(_Exact):
    """AdamW (arXiv 1711.05101, algorithm 2, rate as of torch), behind the barrier.

    Args:
        params: parameters, in float64.
        lr: learning rate.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the root.
        weight_decay: decoupled; a share of the learning rate.

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
                f"a learning rate of {lr:g} is lost in float64, whose weights are multiples of {WEIGHT_GRID:.1g} here",
                f"set machine.accelerate.precision=float32, or a rate of {LEAST_STEPS * WEIGHT_GRID:.1g} or more",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
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
    """Muon (torch.optim.Muon with `match_rms_adamw`), orthogonalised in float64, behind the barrier.

    torch's own orthogonalises in bfloat16 whatever the type of the parameters.

    Args:
        params: matrices, in float64.
        lr: learning rate, of AdamW's scale.
        weight_decay: decoupled; a share of the learning rate.
        momentum: of the average of gradients; Nesterov's.
        iterations: of Newton and Schulz.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float, momentum: float = 0.95, iterations: int = 5
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "iterations": iterations}
        )

    def _move(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        momentum, rate = group["momentum"], group["lr"]
        mean = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
        mean.mul_(momentum).add_(gradient * (1 - momentum))
        ahead = (gradient * (1 - momentum)).add_(mean * momentum)
        parameter.mul_(1 - rate * group["weight_decay"])
        scale = rate * 0.2 * math.sqrt(max(parameter.shape))
        # Near the next matrix whose rows or columns are orthonormal.
        a, b, c = self.COEFFICIENTS
        tall = ahead.shape[0] > ahead.shape[1]
        x = ahead.T if tall else ahead
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(group["iterations"]):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        parameter.sub_((x.T if tall else x).mul_(scale))


def _power(base: float, exponent: int) -> float:
    """Raise to a power by products, because the C library's `pow` is not rounded alike everywhere."""
    return math.prod(repeat(base, exponent))


@torch.no_grad()
def draw_normal(parameter: Tensor, deviation: float, random: np.random.Generator) -> None:
    """Fill a parameter with normal numbers on the grid; torch draws others where its kernels are others."""
    parameter.copy_(torch.from_numpy(random.standard_normal(tuple(parameter.shape)) * deviation))
    to_grid(parameter)


@torch.no_grad()
def draw_adapter(model: nn.Module, seed: int) -> None:
    """Draw the A of each low-rank pair as PEFT does, uniform within 1 / sqrt(inputs), by numpy and on the grid."""
    random = np.random.Generator(np.random.PCG64(seed))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy((2 * random.random(tuple(parameter.shape)) - 1) * bound))
            to_grid(parameter)


def exact_optimizer(options: "TrainingArguments") -> tuple[type[AdamW], dict[str, Any]]:
    """Return AdamW behind the barrier with a trainer's settings, as transformers' trainers take it
    (`optimizer_cls_and_kwargs`)."""
    betas = (options.adam_beta1, options.adam_beta2)
    return AdamW, {"lr": options.learning_rate, "betas": betas, "eps": options.adam_epsilon}
