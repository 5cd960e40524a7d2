"""The student of a `Distillation`. Imported only where training happens: it needs torch and TRL."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import kl_div

from captrain.models import draw_adapter
from captrain.training import collectives
from captrain.training.grpo import PolicyTrainer
from captrain.training.jobs import Distillation, Job, StepResult
from captrain.training.trl_trainer import Columns, StepBatch


class Student(PolicyTrainer):
    """The trainer with the divergence from the teachers as its loss; rewards are only recorded."""

    passes = 0
    """Number of forward and backward passes over the step's rollouts so far."""
    divergence = 0.0
    """Sum of the divergences of all tokens in the first pass over the rollouts."""

    def prepare(self, job: Job, temperature: float) -> None:
        """Load the teachers as further adapters; the student is the adapter "default"."""
        model = self.model
        assert isinstance(job, Distillation) and isinstance(model, PeftModel)
        if job.machine.accelerate.precision == "float64":
            draw_adapter(model, job.seed)
        for index, teacher in enumerate(job.teachers):
            model.load_adapter(teacher.folder, f"teacher_{index}", torch_device="cpu")
        model.set_adapter("default")

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Return True, because every rollout has a training signal."""
        return True

    def model_card(self, result: StepResult) -> str:
        """Write the model card of a distilled adapter in Markdown, from results only."""
        job, trainer = self.job, self.recipe
        assert isinstance(job, Distillation)
        first, last = result.history[0], result.history[-1]
        pairs = zip(self.groups.targets, job.teachers, strict=True)
        teachers = "\n".join(f"| teacher in `{target.name}` | {teacher.digest} |" for target, teacher in pairs)
        return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, distillation, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}), distilled from specialists on rollouts of its own.

| | |
|---|---|
| content hash | {result.digest} |
{teachers}
| rollouts | {last.rollouts} |
| rollouts and passes of a step | {trainer.step_rollouts}, {trainer.epochs} |
| learning rate | {trainer.learning_rate} |
| divergence from the teachers (nats a token), first and last step | {first.divergence:.4f}, {last.divergence:.4f} |
| pass rate in the environments, first and last step | {first.success:.3f}, {last.success:.3f} |
| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""

    def prepare_batch(self, columns: Columns, batch: StepBatch) -> Columns:
        """Start to measure the divergence of a step."""
        self.passes, self.divergence = 0, 0.0
        return super().prepare_batch(columns, batch)

    def loss(self, model: nn.Module, columns: Columns) -> Tensor:
        """Return the divergence of the student from the teachers, per written token."""
        ids = torch.cat([columns["prompt_ids"], columns["completion_ids"]], 1)
        attention = torch.cat([columns["prompt_mask"], columns["completion_mask"]], 1)
        mask = (columns["completion_mask"] * columns["tool_mask"]).bool()
        teacher = self._teacher_scores(model, ids, attention, mask, columns["sources"])
        student = self._scores(model, ids, attention, mask)
        # kl_div(p, q) is KL(q || p), of log-probabilities.
        total = kl_div(teacher, student, reduction="sum", log_target=True)
        count = columns["num_items_in_batch"].clamp(min=1.0)
        if self.passes < self.args.gradient_accumulation_steps:
            self.divergence += sum(collectives.together(lambda: total.item()))
            self.history[-1] = replace(self.history[-1], divergence=round(self.divergence / float(count), 6))
        self.passes += 1
        return total / (count / self.accelerator.num_processes)

    @torch.no_grad()
    def _teacher_scores(
        self, model: nn.Module, ids: Tensor, attention: Tensor, mask: Tensor, sources: Tensor
    ) -> Tensor:
        """Score each row's tokens by the teacher of its environment, in the shape of `_scores`."""
        adapted = self.accelerator.unwrap_model(model)
        assert isinstance(adapted, PeftModel)
        sizes, by_row = mask.sum(1).tolist(), dict[int, Tensor]()
        for index in range(len(self.groups.targets)):
            part = (sources == index).nonzero().flatten()
            # All processes of a sharded model take part in a forward pass, also those without a row of this teacher.
            if not any(collectives.together(lambda part=part: len(part))):
                continue
            selection = part if len(part) else torch.tensor([0])
            adapted.set_adapter(f"teacher_{index}")
            scores = self._scores(model, ids[selection], attention[selection], mask[selection])
            if len(part):
                blocks = scores.split([sizes[row] for row in part.tolist()])
                by_row |= dict(zip(part.tolist(), blocks, strict=True))
        # PEFT trains the adapter that was set last: set the student's.
        adapted.set_adapter("default")
        return torch.cat([by_row[row] for row in range(len(ids))])

    def _scores(self, model: nn.Module, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
        """Return the active adapter's log-probabilities (written tokens, vocabulary) before each written token, at the
        sampling temperature."""
        width = mask.shape[1]
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=width + 1, use_cache=False).logits
        logits = logits[:, :-1][mask]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (logits / (self.temperature or 1.0)).log_softmax(-1)
