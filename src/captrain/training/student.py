"""The student of `captrain.training.distillation`. Imported only where training happens: it needs torch and TRL."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import kl_div

from captrain.models import make_exact
from captrain.records import JsonObject
from captrain.training import collectives
from captrain.training.grpo import PolicyTrainer
from captrain.training.jobs import Distillation, Job
from captrain.training.model_card import student_model_card


class Student(PolicyTrainer):
    """TRL's trainer with the divergence from the teachers for its loss; rewards are recorded and not learnt from.

    A row of `history` has the mean divergence before the step's first update too, in nats a token.
    """

    model_card = staticmethod(student_model_card)
    teachers = 0
    passes = 0
    """Forward and backward passes on the rollouts of the step so far."""
    divergence = 0.0
    """The sum over the tokens of these, in the first round over them."""

    def prepare(self, job: Job, temperature: float) -> None:
        """Load the teachers beside the student, which is the adapter "default"."""
        model = self.model
        assert isinstance(job, Distillation) and isinstance(model, PeftModel)
        if job.machine.accelerate.precision == "float64":
            make_exact(self, job.seed)
        for index, teacher in enumerate(job.teachers):
            model.load_adapter(teacher.folder, f"teacher_{index}", torch_device="cpu")
        model.set_adapter("default")
        self.teachers = len(job.teachers)

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Return True: every rollout of the student teaches."""
        return True

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> JsonObject:
        self.passes, self.divergence = 0, 0.0
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: nn.Module, inputs: JsonObject) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        teacher = self._teacher_scores(model, ids, attention, mask, inputs["sources"])
        total = divergence(self._scores(model, ids, attention, mask), teacher)
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
        rows = [(sources == index).nonzero().flatten() for index in range(self.teachers)]
        parts: list[tuple[Tensor, Tensor]] = []
        for index, part in enumerate(rows):
            # A forward pass of a model that is shared is everybody's, also of those who have no row of the teacher.
            if not any(collectives.together(lambda part=part: len(part))):
                continue
            selection = part if len(part) else torch.tensor([0])
            adapted.set_adapter(f"teacher_{index}")
            scores = self._scores(model, ids[selection], attention[selection], mask[selection])
            if len(part):
                parts.append((part, scores))
        # PEFT marks the adapter that is switched to as the one to train; the student's turn comes last.
        adapted.set_adapter("default")
        sizes = mask.sum(1).tolist()
        by_row = {
            int(row): block
            for part, scores in parts
            for row, block in zip(part.tolist(), scores.split([sizes[row] for row in part.tolist()]), strict=True)
        }
        return torch.cat([by_row[row] for row in range(len(ids))])

    def _scores(self, model: nn.Module, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities (written tokens, vocabulary) that the active adapter gives before each written token, at
        the temperature of the sampling."""
        width = mask.shape[1]
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=width + 1, use_cache=False).logits
        logits = logits[:, :-1][mask]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (logits / (self.temperature or 1.0)).log_softmax(-1)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum KL(student || teacher) over tokens, in nats, from log-probabilities (tokens, vocabulary)."""
    # torch's first argument is the distribution that the divergence is taken from, in logarithms.
    return kl_div(teacher, student, reduction="sum", log_target=True)
