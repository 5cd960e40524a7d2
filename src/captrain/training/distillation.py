"""On-policy distillation: one student learns from every specialist in the specialist's own environment.

The student, a fresh LoRA adapter, plays the adapters' environments in turn, on training tasks beyond calibration. What
it wrote is read again by the environment's specialist, and the student is moved towards it: the loss is the reverse
divergence KL(student || teacher) of the distributions of the next token, over the full vocabulary, at each token that
the student wrote, mean over the tokens of a batch. That is GKD with data of the student alone and the reverse KL
(arXiv 2306.13649, section 3.1); as there, no gradient goes through sampling. Rewards are recorded and not learnt from.

A job's workspace is named by the fingerprint of all that decides its result. After each step it holds the full state,
and half-sampled steps lie in journals: a job that was cut off goes on and ends in the identical adapter.
"""

import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captrain.config import Component, Machine, Spec, build
from captrain.contract import Target
from captrain.errors import UserError
from captrain.execution import code_digest, launch, prepare_torch
from captrain.ledger import ledger_entry
from captrain.models import Adapter, adapter_digest, load_module, save_adapter
from captrain.records import JsonObject, Rollout, Task, digest, publish_text
from captrain.rollouts import collect, pass_rate
from captrain.training.jobs import Learner, Trained, TrainingEnvironment, learner, training_environments
from captrain.training.recipe import GRPO
from captrain.training.workspace import Workspace, replace_folder

if TYPE_CHECKING:
    from torch import Tensor, device

WORKSPACES = Path(".cache/distillation")
SCRATCH = ("sampling", "final", "rollouts", "state.*")


@dataclass(frozen=True)
class Specialist:
    """A teacher, and the environment that it was trained in."""

    environment: TrainingEnvironment
    teacher: Adapter


@dataclass(frozen=True)
class Distillation:
    """One student to train.

    Args:
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component: rank and alpha, size of groups and batches, passes over a batch.
        specialists: in the order in which they take turns.
        rollouts: exact budget; where it is no multiple of a step, the last step is smaller, and its last group may be.
        learning_rate: AdamW's, constant.
        seed: run seed.
        machine: where servers and the sandbox run; no part of the result.
    """

    base: Path
    policy: Component
    trainer: Component
    specialists: tuple[Specialist, ...]
    rollouts: int
    learning_rate: float
    seed: int
    machine: Machine

    @property
    def name(self) -> str:
        """What the adapter and its job are called."""
        return "distillation"


def distillation(spec: Spec, base: Path, environments: Path, teachers: Mapping[str, Adapter]) -> Distillation:
    """The student of all adapters, by the names of their environments.

    Raises:
        UserError: an adapter's environment has no passport.
    """
    by_name = {environment.name: environment for environment in training_environments(environments)}
    if missing := [name for name in teachers if name not in by_name]:
        raise UserError(
            f"adapter {missing[0]} has no environment of its own in {environments} to be imitated in",
            "run `dvc repro environments adapters`, or leave distillation out of merging.methods",
        )
    return Distillation(
        base=base,
        policy=spec.exploring(),
        trainer=spec.trainer,
        specialists=tuple(Specialist(by_name[name], teacher) for name, teacher in teachers.items()),
        rollouts=spec.merging.rollouts,
        learning_rate=spec.merging.learning_rate,
        seed=spec.seed,
        machine=spec.machine,
    )


def distil(job: Distillation) -> Trained:
    """Train the student, or return it from its workspace when it is there already.

    Raises:
        UserError: the policy cannot be trained through, an environment's file is missing, a rollout ended in an
            infrastructure error, or the adapter was altered.
        EnvironmentFault: an environment broke its contract.
    """
    policy = learner(
        job.policy, job.base, job.machine, purpose=job.name, way_out="leave distillation out of merging.methods"
    )
    trainer = build(job.trainer, GRPO)
    targets = [specialist.environment.target(job.machine) for specialist in job.specialists]
    identity = digest(
        code_digest(distil),
        policy.digest,
        [target.fingerprint for target in targets],
        [(specialist.environment.skip, specialist.teacher.digest) for specialist in job.specialists],
        trainer.identity(),
        (job.rollouts, job.learning_rate, job.seed),
    )
    workspace = Workspace(WORKSPACES / identity, job.name, SCRATCH)
    result = workspace.result(lambda: _Student(job, trainer, policy, targets, workspace).fit())
    return Trained(job.name, folder=workspace.adapter, **result)


class _Student:
    """A distillation in progress: model, optimiser and history, which make up its checkpoint."""

    def __init__(
        self, job: Distillation, trainer: GRPO, policy: Learner, targets: list[Target], workspace: Workspace
    ) -> None:
        import torch
        from transformers import set_seed
        from transformers.utils import logging as hf_logging

        from captrain.models import AdamW, draw_adapter

        prepare_torch()
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        self.job, self.trainer, self.policy, self.targets = job, trainer, policy, targets
        self.workspace, self.checkpoint = workspace.folder, workspace.folder / "state.pt"
        self.adapter = workspace.adapter
        groups = math.ceil(job.rollouts / trainer.group_size)
        self.tasks: list[list[Task]] = []
        for specialist, target in zip(job.specialists, targets, strict=True):
            skip = specialist.environment.skip
            self.tasks.append(target.tasks("training", skip + -(-groups // len(targets)))[skip:])
        set_seed(job.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = self._model()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind: Any = torch.optim.AdamW
        if job.machine.accelerate.precision == "float64":
            draw_adapter(self.model, job.seed)
            kind = AdamW
        self.optimizer = kind(self.parameters, lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.history: list[JsonObject] = []

    def _model(self) -> object:
        """The base with the student, adapter "default", and the teachers, "teacher_<number>"."""
        from peft import LoraConfig, get_peft_model

        base = load_module(self.job.base, self.job.machine.accelerate.precision)
        lora = LoraConfig(
            r=self.trainer.rank,
            lora_alpha=self.trainer.alpha,
            lora_dropout=0.0,
            target_modules=self.trainer.targets,
            bias="none",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(base, lora).to(self.device).eval()
        for index, specialist in enumerate(self.job.specialists):
            model.load_adapter(specialist.teacher.folder, f"teacher_{index}", torch_device=str(self.device))
        model.set_adapter("default")
        return model

    def fit(self) -> JsonObject:
        """Train from the last checkpoint (or from nothing); leave the adapter in the workspace, and return the fields
        of `Trained` but name and folder."""
        self._restore()
        steps = math.ceil(self.job.rollouts / self.trainer.step_rollouts)
        while len(self.history) < steps:
            self.history.append(self._step())
            self._save_checkpoint()
            launch.report_progress(len(self.history), steps, f"divergence {self.history[-1]['divergence']:.4f}")
        folder = replace_folder(self._save_adapter(self.workspace / "final"), self.adapter)
        counts = ("discarded", "prompt_tokens", "completion_tokens", "errors")
        total = {key: sum(int(step[key]) for step in self.history) for key in counts}
        rows = [{key: value for key, value in step.items() if key not in total} for step in self.history]
        result = {"digest": adapter_digest(folder), "rollouts": rows[-1]["rollouts"], **total, "history": rows}
        publish_text(folder / "README.md", _card(self.job, self.trainer, self.targets, result))
        return result

    def _step(self) -> JsonObject:
        """Sample a batch and learn from it; returns its row of the history."""
        batches = self._sample(self._save_adapter(self.workspace / "sampling"), len(self.history))
        rollouts = [rollout for batch in batches for rollout in batch]
        divergences = [self._update(batches) for _ in range(self.trainer.epochs)]
        cost = ledger_entry(rollouts, stage="merging", method=self.job.name)
        rewards = [rollout.score.reward for rollout in rollouts if rollout.score is not None]
        return {
            "step": len(self.history) + 1,
            "rollouts": len(self.history) * self.trainer.step_rollouts + len(rollouts),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(pass_rate(rollouts) or 0.0, 6),
            "divergence": round(divergences[0], 6),
            "discarded": sum(not rollout.token_ids for rollout in rollouts),
            "prompt_tokens": cost.prompt_tokens,
            "completion_tokens": cost.completion_tokens,
            "errors": cost.errors,
        }

    def _sample(self, folder: Path, step: int) -> list[list[Rollout]]:
        """The rollouts of one step by specialist; groups of equal tasks, environments in turn over all steps."""
        student, count = Adapter(str(folder), folder.name), len(self.targets)
        first, size = step * self.trainer.groups_per_step, self.trainer.group_size
        budget = min(self.job.rollouts - step * self.trainer.step_rollouts, self.trainer.step_rollouts)
        # Of how many rollouts each group is: the last one of the last step may be smaller.
        sizes = {first + index: min(size, budget - index * size) for index in range(math.ceil(budget / size))}
        batches: list[list[Rollout]] = []
        for index, (target, tasks) in enumerate(zip(self.targets, self.tasks, strict=True)):
            batch: list[Rollout] = []
            for trials in sorted({*sizes.values()}, reverse=True):
                batch += collect(
                    self.policy,
                    target,
                    [tasks[group // count] for group in sizes if group % count == index and sizes[group] == trials],
                    purpose="training",
                    seed=self.job.seed,
                    trials=trials,
                    adapter=student,
                    journals=self.workspace / "rollouts",
                    quiet=True,
                )
            batches.append(batch)
        rollouts = [rollout for batch in batches for rollout in batch]
        if failure := next((rollout for rollout in rollouts if rollout.outcome == "error"), None):
            raise UserError(
                f"distillation: rollout of {failure.task.id} ended in an infrastructure error ({failure.error})",
                "mend its cause and run again: training goes on from its last step",
            )
        if not any(rollout.token_ids for rollout in rollouts):
            raise UserError(
                "distillation: no rollout of a step is token-exact, and none can be learnt from",
                "choose a model whose chat template renders earlier turns as the model wrote them, or policy=local",
            )
        return batches

    def _update(self, batches: Sequence[Sequence[Rollout]]) -> float:
        """One optimiser step on the rollouts of each specialist; returns the mean divergence before it, in nats a
        token."""
        import torch

        tokens = sum(sum(rollout.mask) for batch in batches for rollout in batch)
        total = 0.0
        for index, batch in enumerate(batches):
            exact = [rollout for rollout in batch if rollout.token_ids]
            for start in range(0, len(exact), self.trainer.group_size):
                ids, mask = _padded(exact[start : start + self.trainer.group_size], self.device)
                # PEFT marks the adapter that is switched to as the one to train; the student's turn comes last.
                self.model.set_adapter(f"teacher_{index}")
                with torch.no_grad():
                    teacher = self._logprobs(ids, mask)
                self.model.set_adapter("default")
                loss = divergence(self._logprobs(ids, mask), teacher) / tokens
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _logprobs(self, ids: "Tensor", mask: "Tensor") -> "Tensor":
        """Log-probabilities (written tokens, vocabulary) that the active adapter gave before each written token, at
        the temperature of the sampling."""
        # Rows are padded at their ends, where causal attention keeps padding from all that counts: no mask is needed.
        logits = self.model(input_ids=ids).logits[:, :-1][mask[:, 1:]]
        return (logits / (self.policy.temperature or 1.0)).log_softmax(-1)

    def _save_adapter(self, parent: Path) -> Path:
        """The student as it is now, in a folder named by its content."""
        shutil.rmtree(parent, ignore_errors=True)
        save_adapter(self.model, parent / "new", self.job.base, self.policy.digest)
        return (parent / "new").rename(parent / adapter_digest(parent / "new"))

    def _save_checkpoint(self) -> None:
        import torch
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(self.model, adapter_name="default")
        state = {"weights": weights, "optimizer": self.optimizer.state_dict(), "history": self.history}
        aside = self.workspace / f"state.{os.getpid()}.tmp"
        try:
            torch.save(state, aside)
            aside.replace(self.checkpoint)
        finally:
            aside.unlink(missing_ok=True)

    def _restore(self) -> None:
        import torch
        from peft import set_peft_model_state_dict

        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=self.device)
            set_peft_model_state_dict(self.model, state["weights"], adapter_name="default")
            self.optimizer.load_state_dict(state["optimizer"])
            self.history = state["history"]


def divergence(student: "Tensor", teacher: "Tensor") -> "Tensor":
    """The sum over tokens of KL(student || teacher), from log-probabilities (tokens, vocabulary), in nats."""
    from torch.nn.functional import kl_div

    # torch's first argument is the distribution that the divergence is taken from, in logarithms.
    return kl_div(teacher, student, reduction="sum", log_target=True)


def _padded(rollouts: Sequence[Rollout], place: "device") -> tuple["Tensor", "Tensor"]:
    """Token ids (rows, longest), zeros behind, and which of them the model wrote."""
    import torch

    width = max(len(rollout.token_ids) for rollout in rollouts)
    ids = [[*rollout.token_ids, *[0] * (width - len(rollout.token_ids))] for rollout in rollouts]
    mask = [[*rollout.mask, *[0] * (width - len(rollout.mask))] for rollout in rollouts]
    return torch.tensor(ids, device=place), torch.tensor(mask, device=place).bool()


def _card(job: Distillation, trainer: GRPO, targets: Sequence[Target], result: JsonObject) -> str:
    """A model card in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
    far, near = first["divergence"], last["divergence"]
    pairs = zip(targets, job.specialists, strict=True)
    teachers = "\n".join(
        f"| teacher in `{target.name}` | {specialist.teacher.digest} |" for target, specialist in pairs
    )
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
| rollouts (of which not token-exact) | {result["rollouts"]} ({result["discarded"]}) |
| rollouts and passes of a step | {trainer.step_rollouts}, {trainer.epochs} |
| learning rate | {job.learning_rate} |
| divergence from the teachers (nats a token), first and last step | {far:.4f}, {near:.4f} |
| pass rate in the environments, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
