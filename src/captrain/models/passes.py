"""Divides forward and backward passes over rows between two processes of this machine.

Threads of one process spin while they wait for each other. If the machine has other work, they are many times slower
than one thread. So the rows of a pass are divided among single-threaded processes, which sleep while they wait. The
number of parts is fixed, and gradients are added in a fixed order, so one process and two give the same bytes.

The helper process is forked at the first pass with the current model. It receives the trained weights with each pass,
and ends with its parent.
"""

import mmap
import multiprocessing
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import reduce
from itertools import accumulate, compress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captrain.errors import UserError
from captrain.models.barrier import draw_adapter
from captrain.models.dense import Context, Scores, score_states, token_scores
from captrain.models.forest import Row, make_forest, split_forest
from captrain.models.weights import DENSE, computes_on_cpu
from captrain.run import Machine, launch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

PARTS = 2
"""Number of parts that the rows of a pass are divided into."""
IGNORED = -100
"""Label of a token that is not scored."""


class SharedPasses(AbstractContextManager["SharedPasses"]):
    """Passes of one model.

    Args:
        model: a dense Qwen3 or Llama (see `token_scores`). Parameters that require gradients at construction get them.
        processes: number of processes that share a pass, including this one; at most `PARTS` have work.
        products: type in which weights are multiplied; None: their own type.
        room: bytes for the activations of a pass in each process. It does not change the result (see `token_scores`).
    """

    def __init__(
        self, model: nn.Module, processes: int, products: torch.dtype | None = None, room: int | None = None
    ) -> None:
        self.model, self.products, self.room = model, products, room
        self.processes = min(processes, PARTS)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._helper: _Helper | None = None

    def scores(self, rows: Sequence[Row], temperature: float = 1.0) -> Scores:
        """Score tokens under the model, as `token_scores` does.

        Args:
            rows: token ids, and 1 where a token is scored.
            temperature: logits are divided by it.

        Returns:
            Scores of the scored tokens, row by row.

        Raises:
            UserError: a process that shares the pass died.
        """
        return Scores(*_Pass.apply(self, rows, temperature, *self.parameters))

    def score(self, rows: Sequence[Row], temperature: float, differentiated: bool) -> Scores | None:
        """Score the rows of one part in this process. Return None if there are no rows."""
        room = None if self.room is None else self.room * self.processes // PARTS
        with torch.set_grad_enabled(differentiated):
            return token_scores(self.model, make_forest(rows), temperature, self.products, room) if rows else None

    def close(self) -> None:
        """End the helper process. A later pass starts a new one."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def __exit__(self, *_: object) -> None:
        """Close the passes."""
        self.close()

    def helper(self) -> "_Helper | None":
        """Return the helper process, and start it if needed. None if this process computes all parts."""
        if self._helper is None and self.processes > 1:
            self._helper = _Helper(self)
        return self._helper


def _gradients(scores: Scores | None, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Backpropagate `gradient` (scored,) of a part's log-probabilities. Return each parameter's gradient or None."""
    if scores is None or not len(gradient):
        return [None] * len(parameters)
    return [*torch.autograd.grad(scores.log_probs, parameters, gradient, allow_unused=True)]


class _Helper:
    """A process that computes parts of passes. Weights and gradients are in shared memory."""

    def __init__(self, passes: SharedPasses) -> None:
        self.weights, self.gradients = ([_shared(parameter) for parameter in passes.parameters] for _ in range(2))
        context = multiprocessing.get_context("fork")
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=self._serve, args=(far_end, passes), daemon=True)
        self.process.start()
        far_end.close()

    def _serve(self, connection: Connection, passes: SharedPasses) -> None:
        self.connection.close()
        # The parent has ended.
        with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            scores: Scores | None = None
            while True:
                question = connection.recv()
                if isinstance(question, tuple):
                    with torch.no_grad():
                        for parameter, weights in zip(passes.parameters, self.weights, strict=True):
                            parameter.copy_(weights)
                    scores = passes.score(*question)
                    connection.send([values.detach().numpy() for values in scores or ()])
                    continue
                gradients = _gradients(scores, torch.from_numpy(question), passes.parameters)
                for place, gradient in zip(self.gradients, gradients, strict=True):
                    if gradient is not None:
                        place.copy_(gradient)
                scores = None
                connection.send([gradient is not None for gradient in gradients])

    def begin(self, parameters: Sequence[Tensor], rows: Sequence[Row], temperature: float, keep: bool) -> None:
        """Start a part of a pass in the helper. With `keep`, the activations are kept for the backward pass."""
        for place, parameter in zip(self.weights, parameters, strict=True):
            place.copy_(parameter.detach())
        self.connection.send((rows, temperature, keep))

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()

    def answer(self) -> Any:
        """Receive the result of the helper process.

        Raises:
            UserError: the helper process died.
        """
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.close()
            raise UserError(
                "a process that shares the training of this one died: it was killed, or memory ran out",
                "run again, with machine.workers=1 if it was memory; training goes on from its last checkpoint",
            ) from None


def _shared(like: Tensor) -> Tensor:
    """Allocate a tensor of the same shape and type in memory that a forked process shares."""
    memory = mmap.mmap(-1, like.numel() * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class _Pass(torch.autograd.Function):
    """Scores of all parts, row by row."""

    @staticmethod
    def forward(
        ctx: Context, passes: SharedPasses, rows: Sequence[Row], temperature: float, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        keep = any(ctx.needs_input_grad)
        shares = split_forest(rows, PARTS)
        parts = [[rows[number] for number in share] for share in shares]
        helper = passes.helper()
        if helper is not None:
            helper.begin(parameters, parts.pop(), temperature, keep)
        ctx.parts = [passes.score(part, temperature, keep) for part in parts]
        scores = [[values.detach() for values in part or ()] for part in ctx.parts]
        if helper is not None:
            scores.append([torch.from_numpy(values) for values in helper.answer()])
        bounds = [0, *accumulate(sum(scored[1:]) for _, scored in rows)]
        positions = [
            torch.tensor([place for number in share for place in range(bounds[number], bounds[number + 1])])
            for share in shares
        ]
        ctx.passes, ctx.positions = passes, positions
        whole = [
            torch.cat([values[kind] for values in scores if values])[torch.cat(positions).long().argsort()]
            for kind in range(len(Scores._fields))
        ]
        ctx.mark_non_differentiable(*whole[1:])
        return tuple(whole)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        passes, helper = ctx.passes, ctx.passes.helper()
        pieces = [gradients[0][place.long()] for place in ctx.positions]
        if helper is not None:
            helper.connection.send(pieces.pop().contiguous().numpy())
        ordered = [_gradients(part, piece, passes.parameters) for part, piece in zip(ctx.parts, pieces, strict=True)]
        if helper is not None:
            pairs = zip(helper.gradients, helper.answer(), strict=True)
            ordered.append([place.clone() if present else None for place, present in pairs])
        # Add in the order of the parts, so that the bytes do not depend on which process finishes first.
        columns = [[gradient for gradient in column if gradient is not None] for column in zip(*ordered, strict=True)]
        return (None, None, None, *(reduce(torch.add, column) if column else None for column in columns))


def share_beginnings(model: "PreTrainedModel", temperature: float, machine: Machine) -> SharedPasses | None:
    """Replace TRL's head (`trl.trainer.utils.add_fused_lm_head`) by `SharedPasses`, in place.

    This happens only if the model is dense and trains on a CPU, where computing the prompt of every row would take most
    of the time. With FSDP, and with a mixture of adapters, the model's own modules compute.

    Args:
        model: the base of a PEFT model, or the base with a mixture, before training.
        temperature: logits are divided by it.
        machine: number of processes, and precision.

    Returns:
        The passes, to be closed after training. None if the model's own modules compute.
    """
    accelerate = machine.accelerate
    dense = model.config.model_type in DENSE and computes_on_cpu(accelerate.precision)
    sharded, mixture = accelerate.strategy == "fsdp", getattr(model, "mixture", None)
    if mixture is None and accelerate.precision != "float64" and (sharded or not dense):
        return None
    from trl.trainer.utils import FusedCausalLMOutput

    passes = (
        None
        if sharded or mixture is not None
        else SharedPasses(model, launch.cores(machine), room=launch.room(machine))
    )

    def forward(
        self: "PreTrainedModel",
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> FusedCausalLMOutput:
        mask = labels[:, 1:] != IGNORED
        if passes is None:
            # The modules compute, row by row.
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
            states = self.base_model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            head = self.get_output_embeddings()
            assert head is not None
            scores = score_states(head(states[:, :-1][mask]), input_ids[:, 1:][mask], temperature)
        else:
            columns = (input_ids.tolist(), (labels != IGNORED).tolist(), attention_mask.bool().tolist())
            rows = [
                ([*compress(ids, real)], [*compress(scored, real)]) for ids, scored, real in zip(*columns, strict=True)
            ]
            scores = passes.scores(rows, temperature)

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-scores.log_probs.sum() / count,
            log_probs=padded(scores.log_probs),
            entropy=padded(scores.entropies),
            is_top1=padded(scores.is_top1),
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)
    return passes


def prepare_trainer(trainer: "Trainer", temperature: float, machine: Machine, seed: int) -> None:
    """Prepare a TRL trainer of an adapter or of a mixture's gates.

    Common beginnings of rows are computed once (`share_beginnings`). In float64, the initial weights are drawn so that
    they are the same on every CPU.

    Args:
        trainer: the trainer, before training.
        temperature: temperature of the policy that sampled.
        machine: number of processes, and precision.
        seed: seed of the adapter's initial weights.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainerCallback

    base = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    assert isinstance(base, PreTrainedModel) and trainer.model is not None
    passes = share_beginnings(base, temperature, machine)
    if machine.accelerate.precision == "float64":
        draw_adapter(trainer.model, seed)
    if passes is not None:

        class Closing(TrainerCallback):
            """Callback that ends the helper process."""

            def on_train_end(self, *_: object, **__: object) -> None:
                """Close the passes."""
                passes.close()

        trainer.add_callback(Closing())
