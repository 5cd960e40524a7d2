"""Sampler of GRPO, which plays each batch with the adapter as it then is.

Imported only where training happens: it needs torch and TRL. Before each batch of rollouts the adapter is saved in
plain PEFT format, in a folder named by its content hash, and the policy acts with it: in this process, or through
servers that load it under that name.
"""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain.contract import Target
from captrain.execution import launch
from captrain.models import adapter_digest
from captrain.policies import Play
from captrain.training import collectives
from captrain.training.groups import Groups, advantages
from captrain.training.jobs import Job, Learner
from captrain.training.recipe import GRPO
from captrain.training.trainer import PolicyTrainer


@dataclass(frozen=True)
class TrainingRow:
    """A rollout as it is trained on, by the number of its environment. Its own reward is None beyond the budget, and
    nothing is learnt where its group is not informative."""

    environment: int
    play: Play
    informative: bool
    reward: float | None
    advantage: float
    hinted: bool


class Sampler:
    """TRL's `rollout_func`: plays the batch's groups with the current adapter and scores them."""

    def __init__(
        self, recipe: GRPO, policy: Learner, targets: Sequence[Target], job: Job, folder: Path, points: Path
    ) -> None:
        self.recipe, self.policy, self.job, self.folder, self.points = recipe, policy, job, folder, points
        self.steps = math.ceil(job.rollouts / recipe.step_rollouts)
        self.groups = Groups(recipe, policy, targets, job)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Play one batch: `prompts` name groups by number ("group 17"), each `group_size` times in a row.

        Hints are stripped: the prompts returned are the unhinted ones. Where the budget ends within the batch, the rows
        beyond it are not played: they repeat the first one without its reward and with nothing to learn from.

        Where several processes train, each has its own prompts. What all of them play is known to each, so that the
        history is that of the whole step; what is returned is for a process's own prompts.
        """
        assert isinstance(trainer, PolicyTrainer)
        size, history = self.recipe.group_size, trainer.history
        before = history[-1]["rollouts"] if history else 0
        names = [name for part in collectives.together(lambda: prompts) for name in part]
        groups = [int(name.split()[1]) for name in names[::size]]
        plan = self.groups.plan(groups, history)[: self.job.rollouts - before]
        adapter = self._save_adapter(trainer)
        self._keep(adapter, [step["rollouts"] for step in history])
        plays, errors = self.groups.play(str(adapter), plan, len(prompts))
        rewards = [scored.score.reward for scored in plays]
        by_group = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        informative = [trainer.teaches(group) for group in by_group]
        scores = [scored.score for scored in plays]
        step = {
            "step": len(history) + 1,
            "rollouts": before + len(plays),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(sum(score.success for score in scores) / len(scores), 6),
            "informative": round(sum(informative) / len(informative), 6),
            "discarded": sum(len(group) for group, signal in zip(by_group, informative, strict=True) if not signal),
            "prompt_tokens": sum(scored.play.prompt_tokens for scored in plays),
            "completion_tokens": sum(sum(scored.play.mask) for scored in plays),
            "errors": errors,
            "places": Counter(self.job.environments[rollout.environment].name for rollout in plan[::size]),
            **self.groups.unhinted(plan, scores),
            **({"rerendered": sum(scored.play.rerendered for scored in plays)} if trainer.served else {}),
        }
        history.append(step)
        if collectives.rank() == 0:
            message = f"mean reward {step['reward']:.3f}, pass rate {step['success']:.3f}"
            launch.report_progress(step["step"], self.steps, message)
        gains = [advantage for group in by_group for advantage in advantages(group)]
        rows = [
            TrainingRow(rollout.environment, scored.play, informative[index // size], reward, gain, rollout.hint != "")
            for index, (scored, reward, gain, rollout) in enumerate(zip(plays, rewards, gains, plan, strict=True))
        ]
        rows += (len(names) - len(rows)) * [TrainingRow(0, plays[0].play, False, None, 0.0, False)]
        trainer.stripped = any(row.hinted for row in rows)
        trainer.informative = sum(row.informative for row in rows) / len(rows)
        start = collectives.rank() * len(prompts)
        return self._batch(trainer, rows[start : start + len(prompts)])

    def _batch(self, trainer: PolicyTrainer, rows: Sequence[TrainingRow]) -> dict[str, list[Any]]:
        """Convert rows to the columns that TRL takes; the trainer gets what it would compute itself."""
        plays = [row.play for row in rows]
        opening = [play.mask.index(1) for play in plays]
        completions = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        masks = [row.play.mask if row.informative else [0] * len(row.play.mask) for row in rows]
        width = max(len(row) for row in completions)
        sampled = [row + [0.0] * (width - len(row)) for row in completions]
        trainer.sampled = torch.tensor(sampled, dtype=torch.float64)
        trainer.advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
        trainer.hinted = torch.tensor([row.hinted for row in rows])
        trainer.sources = torch.tensor([row.environment for row in rows])
        compared = [
            row.play.mask[start:] if row.reward is not None and not row.hinted else []
            for row, start in zip(rows, opening, strict=True)
        ]
        trainer.model_tokens = torch.tensor([mask + [0] * (width - len(mask)) for mask in compared]).bool()
        return {
            "prompt_ids": [play.token_ids[:start] for play, start in zip(plays, opening, strict=True)],
            "completion_ids": [play.token_ids[start:] for play, start in zip(plays, opening, strict=True)],
            # TRL takes what is not known for what needs no correction: it must not correct for a hint.
            "logprobs": [
                [math.nan] * len(scores) if row.hinted and trainer.use_vllm else scores
                for row, scores in zip(rows, completions, strict=True)
            ],
            "env_mask": [mask[start:] for mask, start in zip(masks, opening, strict=True)],
            "environment_reward": [row.reward for row in rows],
        }

    def _save_adapter(self, trainer: PolicyTrainer) -> Path:
        """Save the adapter as it is now in a folder named by its content, and remove the one before."""
        aside = self.folder / "new"
        collectives.once(lambda: shutil.rmtree(self.folder, ignore_errors=True))
        collectives.save(trainer.model, aside, self.job.base, self.policy.digest)
        return collectives.once(lambda: aside.rename(self.folder / adapter_digest(aside)).resolve())

    def _keep(self, adapter: Path, counts: Sequence[int]) -> None:
        """Keep the adapter where a point of the job lies in the step that is over.

        Args:
            adapter: its folder.
            counts: rollouts that were played by the end of each step.
        """
        before, now = [0, 0, *counts][-2:]
        if any(before < mark <= now for mark in self.job.marks):
            collectives.once(lambda: shutil.copytree(adapter, self.points / str(now), dirs_exist_ok=True))
