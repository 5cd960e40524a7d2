"""The student of a `Distillation`. Imported only where training happens: it needs torch and TRL."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import kl_div

from captrain.models import draw_adapter
from captrain.records import JsonObject
from captrain.training import collectives
from captrain.training.grpo import PolicyTrainer
from captrain.training.jobs import Distillation, Job


class Student(PolicyTrainer):
    """TRL's trainer with the divergence from the teachers for its loss; rewards are recorded and not learnt from.

    A row of `history` has the mean divergence before the step's first update too, in nats a token.
    """

    passes = 0
    """Forward and backward passes on the rollouts of the step so far."""
    divergence = 0.0
    """The sum over the tokens of these, in the first round over them."""

    def prepare(self, job: Job, temperature: float) -> None:
        """Load the teachers beside the student, which is the adapter "default"."""
        model = self.model
        assert isinstance(job, Distillation) and isinstance(model, PeftModel)
        if job.machine.accelerate.precision == "float64":
            draw_adapter(model, job.seed)
        for index, teacher in enumerate(job.teachers):
            model.load_adapter(teacher.folder, f"teacher_{index}", torch_device="cpu")
        model.set_adapter("default")

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Return True: every rollout of the student teaches."""
        return True

    def model_card(self, result: JsonObject) -> str:
        """Write the model card of a distilled adapter in Markdown, from results only."""
        job, trainer = self.job, self.recipe
        assert isinstance(job, Distillation)
        first, last = result["history"][0], result["history"][-1]
        far, near = first["divergence"], last["divergence"]
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
| content hash | {result["digest"]} |
{teachers}
| rollouts | {result["rollouts"]} |
| rollouts and passes of a step | {trainer.step_rollouts}, {trainer.epochs} |
| learning rate | {trainer.learning_rate} |
| divergence from the teachers (nats a token), first and last step | {far:.4f}, {near:.4f} |
| pass rate in the environments, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> JsonObject:
        self.passes, self.divergence = 0, 0.0
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: nn.Module, inputs: JsonObject) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        teacher = self._teacher_scores(model, ids, attention, mask, inputs["sources"])
        student = self._scores(model, ids, attention, mask)
        # torch's first argument is the distribution that the divergence is taken from, in logarithms.
        total = kl_div(teacher, student, reduction="sum", log_target=True)
        count = inputs["num_items_in_batch"].clamp(min=1.0)
        if self.passes < self.args.gradient_accumulation_steps:
            self.divergence += sum(collectives.together(lambda: total.item()))
            self.history[-1]["divergence"] = round(self.divergence / float(count), 6)
        self.passes += 1
        return total / (count / self.accelerator.num_processes)

    @torch.no_grad()
    def _teacher_scores(
        self, model: nn.Module, ids: Tensor, attention: Tensor, mask: Tensor, sources: Tensor
    ) -> Tensor:
        """Score each row's tokens by the teacher of its environment, in the shapes of `_scores`."""
        adapted = self.accelerator.unwrap_model(model)
        assert isinstance(adapted, PeftModel)
        sizes, by_row = mask.sum(1).tolist(), dict[int, Tensor]()
        for index in range(len(self.groups.targets)):
            part = (sources == index).nonzero().flatten()
            # A forward pass of a model that is shared is everybody's, also of those who have no row of the teacher.
            if not any(collectives.together(lambda part=part: len(part))):
                continue
            selection = part if len(part) else torch.tensor([0])
            adapted.set_adapter(f"teacher_{index}")
            scores = self._scores(model, ids[selection], attention[selection], mask[selection])
            if len(part):
                blocks = scores.split([sizes[row] for row in part.tolist()])
                by_row |= dict(zip(part.tolist(), blocks, strict=True))
        # PEFT marks the adapter that is switched to as the one to train; the student's turn comes last.
        adapted.set_adapter("default")
        return torch.cat([by_row[row] for row in range(len(ids))])

    def _scores(self, model: nn.Module, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities (written tokens, vocabulary) that the active adapter gives before each written token, at
        the temperature of the sampling."""
        width = mask.shape[1]
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=width + 1, use_cache=False).logits
        logits = logits[:, :-1][mask]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (logits / (self.temperature or 1.0)).log_softmax(-1)
