"""Train one adapter with GRPO. The code follows the order of execution.

`fit` makes the trainer, resumes it from the last complete checkpoint, trains, and saves the adapter and its model card.
`PolicyTrainer` makes each step:

1. `play`: save the adapter in a folder named by its content hash, and let the policy play the step's groups with it, in
   this process or through servers that load it under that name (`captrain.training.groups`).
2. `group_advantages`: compare each rollout with its group.
3. `loss`: TRL's clipped ratio. The old log-probabilities are those that the policy returned with its tokens.
4. One update for each of the recipe's epochs.

`captrain.training.trl_trainer` says where TRL calls these, and `captrain.training.recipe` has the hyperparameters.

A server computes with other kernels than the training process, and often in another precision. So its log-probabilities
differ from the trainer's. `_mismatch` measures by how much, over the tokens of a step that the model wrote without a
hint: the mean and the largest absolute difference, and the effective sample size of the importance weights as a share
of the tokens, (sum w)^2 / (n sum w^2).

Imported only where training happens: it needs torch and TRL.
"""

import math
import os
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig

from captrain.contract import CheckedEnvironment, RunningEpisode
from captrain.errors import UserError
from captrain.models import (
    CHECKPOINTS,
    adapter_digest,
    copy_adapter,
    exact_optimizer,
    load_module,
    lora_config,
    prepare_trainer,
)
from captrain.records import publish_text
from captrain.run import takes
from captrain.training import collectives, trainers
from captrain.training.checkpoints import POINTS, last_checkpoint, read_mark
from captrain.training.groups import Groups, PlannedRollout, ScoredPlay, group_advantages
from captrain.training.jobs import Job, Learner, StepRecord, StepResult
from captrain.training.recipe import GRPO
from captrain.training.trl_trainer import Columns, Sampled, StepBatch, TrlTrainer, without_discarded

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

DIGITS = 9
"""Decimals to which differences between the server's and the trainer's log-probabilities are rounded."""
StepInPlay = tuple[list[PlannedRollout], Callable[[], tuple[list[ScoredPlay], int]]]
"""A step whose rollouts are being played: the plan, and a function that waits for them (see `Groups.begin`)."""


@dataclass(frozen=True)
class Row:
    """A rollout as a training row. `environment` is the index of its environment.

    Rows that only fill up a batch beyond the budget have no reward.
    """

    environment: int
    play: RunningEpisode
    informative: bool
    reward: float | None
    advantage: float
    hinted: bool


def fit(
    kind: "type[PolicyTrainer]",
    recipe: GRPO,
    job: Job,
    policy: Learner,
    targets: Sequence[CheckedEnvironment],
    workspace: Path,
) -> StepResult:
    """Train from the last complete checkpoint, or from the start, and save the adapter in `workspace/adapter`.

    Checkpoints stay until the result is published. If several processes train, all of them must call this.

    Args:
        kind: of the trainer.
        recipe: hyperparameters.
        job: what to train.
        policy: samples; its model is the frozen base.
        targets: the job's environments.
        workspace: folder of checkpoints and of the adapter.

    Raises:
        UserError: the budget is empty; the base has no layer of one of the names in `targets`, or no experts; or the
            adapter to start from has another digest or shape.
        EnvironmentFault: an environment has too few tasks.
    """
    if job.rollouts < 1:
        raise UserError(
            f"{job.name}: no rollouts are left to train with ({job.rollouts})",
            "raise adapters.rollouts: diagnosis and calibration have spent what there was",
        )
    # 1. The trainer, as it was at its last checkpoint.
    trainer = kind(recipe, job, policy, targets, workspace)
    last = collectives.once(lambda: last_checkpoint(trainer.folder))
    if last is not None:
        mark = read_mark(last)
        trainer.history = [*(mark.history or [])] if mark else []

    # 2. All steps.
    try:
        trainers.train(job.name, trainer, job.machine, last, lambda: trainer.history)
    finally:
        if trainer.pool is not None:
            trainer.pool.shutdown(wait=False, cancel_futures=True)

    # 3. The adapter, with its model card and its checkpoints.
    adapter = workspace / "adapter"
    trainer.save_acting(adapter)
    points = sorted((workspace / POINTS).glob("*"), key=lambda path: int(path.name))
    digests = {path.name: adapter_digest(path) for path in points}
    result = StepResult(adapter_digest(adapter), trainer.history, digests)
    if collectives.rank() == 0:
        publish_text(adapter / "README.md", trainer.model_card(result))
        for path in points:
            shutil.copytree(path, adapter / CHECKPOINTS / path.name)
    return result


class PolicyTrainer(TrlTrainer):
    """GRPO with a policy as its sampler, token-exact and with the sampler's log-probabilities.

    A row of its dataset is the number of a group; the group's rollouts are planned when its step is played. Apart from
    weights and optimizer, later steps depend on `history` alone. The arguments are those of `fit`.
    """

    def __init__(
        self, recipe: GRPO, job: Job, policy: Learner, targets: Sequence[CheckedEnvironment], workspace: Path
    ) -> None:
        self.recipe, self.job, self.policy = recipe, job, policy
        self.folder = workspace / collectives.checkpoints(job.machine.accelerate)
        self.sampling, self.points = self.folder / "sampling", workspace / POINTS
        self.groups = Groups(recipe, policy, targets, job)
        self.steps = math.ceil(job.rollouts / recipe.step_rollouts)
        self.history: list[StepRecord] = []
        self.is_served = takes(job.policy, "machine")
        """Whether a server samples, whose log-probabilities differ from this process's."""
        if recipe.staleness and not self.is_served:
            raise UserError(
                f"trainer.staleness = {recipe.staleness}, and the model of {job.policy.target} is in the process that "
                "trains, which cannot sample meanwhile",
                "set trainer.staleness=0, or choose policy=vllm",
            )
        self.steps_ahead: deque[StepInPlay] = deque()
        """The next steps, whose rollouts are being played."""
        self.pool = ThreadPoolExecutor(1 + recipe.staleness) if recipe.staleness else None

        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        config = _arguments(recipe, job, policy, workspace, self.steps)
        base = load_module(job.base, job.machine.accelerate.precision)
        numbers = range(self.steps * recipe.groups_per_step)
        super().__init__(
            model=base,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"group {number}"} for number in numbers]),
            processing_class=policy.tokenizer,
            peft_config=self.adapt(base),
            reward_funcs=[_environment_reward],
            rollout_func=lambda prompts, trainer: {**self.play(prompts)},
        )
        if job.machine.accelerate.precision == "float64":
            self.optimizer_cls_and_kwargs = exact_optimizer(config)
        self.prepare(job, policy.temperature)
        # Set after TRL's constructor, which would start a vLLM of its own. TRL then corrects for the sampler.
        self.use_vllm = recipe.importance_cap is not None

    def adapt(self, base: "PreTrainedModel") -> "LoraConfig | None":
        """Return PEFT's configuration of the adapter to train; None if the base is ready to train."""
        return lora_config(base, self.recipe.shape)

    def prepare(self, job: Job, temperature: float) -> None:
        """Set how a step is computed, and load the adapter that training starts from."""
        prepare_trainer(self, temperature, job.machine, job.seed)
        if job.start is not None:
            model: Any = self.model
            copy_adapter(model, job.start)

    def save_acting(self, folder: Path) -> None:
        """Save the adapter that the policy acts with. Every process must call this."""
        collectives.save(self.model, folder, self.job.base, self.policy.digest)

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Return whether a group with these rewards carries a signal. Equal rewards give no advantage."""
        return max(rewards) - min(rewards) > 1e-6

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's record to what TRL has measured of an update."""
        step = self.history[-1]
        if "loss" in logs:
            logs |= {name: value for name, value in step.row().items() if isinstance(value, int | float)}
            logs |= {f"places/{name}": count for name, count in step.places.items()}
        super().log(logs, start_time)

    def model_card(self, result: StepResult) -> str:
        """Write the model card of an adapter in Markdown, from results only."""
        job, trainer, targets = self.job, self.recipe, self.groups.targets
        first, last = result.history[0], result.history[-1]
        # Hinted rollouts say little about the adapter without hints.
        hinted = (
            f"| share of rollouts with a hint | {trainer.hints} |\n| passed of those without, first and last step "
            f"| {first.unhinted_passed} of {first.unhinted}, {last.unhinted_passed} of {last.unhinted} |\n"
            if last.unhinted is not None
            else ""
        )
        plural = "s" if len(targets) > 1 else ""
        groups = Counter[str]()
        for step in result.history:
            groups.update(step.places)
        shares = ", ".join(f"{environment.name} {groups[environment.name]}" for environment in job.environments)
        clip = f"{trainer.clip}" if trainer.clip_high is None else f"{trainer.clip} below, {trainer.clip_high} above"
        start = f"| trained on from the adapter | {job.start.digest} |\n" if job.start else ""
        fingerprints = ", ".join(target.fingerprint for target in targets)
        discarded = sum(step.discarded for step in result.history)
        return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, grpo, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}) trained with GRPO in the \
environment{plural} {", ".join(f"`{target.name}`" for target in targets)}.

| | |
|---|---|
| content hash | {result.digest} |
| environment fingerprint{plural} | {fingerprints} |
{f"| groups of each environment | {shares} |{chr(10)}" if plural else ""}\
| rollouts (of which in discarded constant groups) | {last.rollouts} ({discarded}) |
{start}| group size, groups per step, epochs | {trainer.group_size}, {trainer.groups_per_step}, {trainer.epochs} |
| learning rate, clip | {trainer.learning_rate} {trainer.schedule}, {clip} |
| mean reward, first and last step | {first.reward:.3f}, {last.reward:.3f} |
| pass rate in its environment, first and last step | {first.success:.3f}, {last.success:.3f} |
{hinted}| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""

    # 1. Rollouts

    def play(self, prompts: list[str]) -> Sampled:
        """Play one step's groups with the current adapter, and add the step to the history.

        The returned prompts have no hints. If the budget ends within the step, the remaining rows repeat the first
        rollout without reward or training signal. If several processes train, each records all rollouts of the step
        in its history, and returns those of its own prompts.

        Args:
            prompts: groups by number ("group 17"), each `group_size` times in a row.
        """
        step = len(self.history)
        self._save_adapter(step)
        # With staleness, rollouts of the next steps begin, too: they may be of an adapter some updates old by then.
        while len(self.steps_ahead) <= self.recipe.staleness and step + len(self.steps_ahead) < self.steps:
            self.steps_ahead.append(self._begin(step + len(self.steps_ahead), len(prompts)))
        plan, finish = self.steps_ahead.popleft()
        plays, errors = finish()
        groups = [
            plays[start : start + self.recipe.group_size] for start in range(0, len(plays), self.recipe.group_size)
        ]
        rows = [row for group in groups for row in self._rows(group)]
        self.history.append(self._record(plan, plays, errors, rows))
        # The rows that this process trains on.
        rows += (len(prompts) * collectives.size() - len(rows)) * [Row(0, plays[0].play, False, None, 0.0, False)]
        start = collectives.rank() * len(prompts)
        own = rows[start : start + len(prompts)]
        any_hinted, informative = any(row.hinted for row in rows), sum(row.informative for row in rows) / len(rows)
        self.batch = _batch(own, any_hinted, informative)
        return self._sampled(own)

    def _save_adapter(self, step: int) -> None:
        """Save the current adapter in a folder named by the step and its content hash.

        Also keep a copy if training has just reached a mark of the job. Then remove
        folders that this training, or a resumed one, no longer needs.
        """
        folder, recent = self.sampling / str(step), self.recipe.staleness + 2 * self.recipe.checkpoint_every
        recent_names = {str(before) for before in range(step - recent, step) if self.recipe.staleness}
        old = [path for path in self.sampling.glob("*") if path.name not in recent_names]
        collectives.once(lambda: [shutil.rmtree(path) for path in old])
        aside = self.sampling / "new"
        self.save_acting(aside)
        start, end = [0, 0, *(past.rollouts for past in self.history)][-2:]

        def place() -> None:
            folder.mkdir()
            adapter = aside.rename(folder / adapter_digest(aside))
            if any(start < mark <= end for mark in self.job.marks):
                shutil.copytree(adapter, self.points / str(end), dirs_exist_ok=True)

        collectives.once(place)

    def _begin(self, step: int, rows: int) -> StepInPlay:
        """Start the rollouts of step `step` (from 0) within the budget. `rows` is the number of rows per process."""
        first = step * self.recipe.groups_per_step
        plan = self.groups.plan(range(first, first + self.recipe.groups_per_step))
        plan = plan[: self.job.rollouts - step * self.recipe.step_rollouts]
        [adapter] = (self.sampling / str(max(0, step - self.recipe.staleness))).iterdir()
        if (content := adapter_digest(adapter)) != adapter.name:
            raise UserError(
                f"{adapter} was altered: it is {content} now", f"remove {self.folder}: training begins again"
            )
        failed = sum(past.errors for past in self.history)
        return plan, self.groups.begin(adapter.resolve(), plan, rows, failed, self.pool)

    def _record(
        self, plan: Sequence[PlannedRollout], plays: Sequence[ScoredPlay], errors: int, rows: Sequence[Row]
    ) -> StepRecord:
        """Record a step, and report it as progress."""
        number, size = len(self.history), self.recipe.group_size
        informative = [row.informative for row in rows[::size]]
        rewards = [scored.score.reward for scored in plays]
        unhinted = [scored.score.success for scored in plays if not scored.play.hint]
        gives_hints = any(self.groups.hints(target) for target in self.groups.targets)
        record = StepRecord(
            step=number + 1,
            rollouts=(self.history[-1].rollouts if self.history else 0) + len(plays),
            reward=round(sum(rewards) / len(rewards), 6),
            success=round(sum(scored.score.success for scored in plays) / len(plays), 6),
            informative=round(sum(informative) / len(informative), 6),
            discarded=sum(not row.informative for row in rows),
            prompt_tokens=sum(scored.play.prompt_tokens for scored in plays),
            completion_tokens=sum(sum(scored.play.mask) for scored in plays),
            errors=errors,
            places=dict(Counter(self.job.environments[rollout.environment].name for rollout in plan[::size])),
            unhinted=len(unhinted) if gives_hints else None,
            unhinted_passed=sum(unhinted) if gives_hints else None,
            rerendered=sum(scored.play.rerendered for scored in plays) if self.is_served else None,
            staleness=min(number, self.recipe.staleness) if self.recipe.staleness else None,
        )
        return record

    # 2. Advantages

    def _rows(self, group: Sequence[ScoredPlay]) -> list[Row]:
        """Give each rollout of a group its advantage."""
        rewards = [scored.score.reward for scored in group]
        informative = self.teaches(rewards)
        return [
            Row(scored.rollout.environment, scored.play, informative, reward, advantage, scored.play.hint != "")
            for scored, reward, advantage in zip(group, rewards, group_advantages(rewards), strict=True)
        ]

    def _sampled(self, rows: Sequence[Row]) -> Sampled:
        """Convert rows to TRL's columns: the tokens before the first sampled token, and the tokens from it on."""
        starts = [row.play.mask.index(1) for row in rows]
        pairs = [*zip(rows, starts, strict=True)]
        return {
            "prompt_ids": [row.play.token_ids[:start] for row, start in pairs],
            "completion_ids": [row.play.token_ids[start:] for row, start in pairs],
            # TRL corrects for the sampler, except at NaN. It must not correct for a hint.
            "logprobs": [
                [math.nan] * len(row.play.logprobs[start:])
                if row.hinted and self.use_vllm
                else row.play.logprobs[start:]
                for row, start in pairs
            ],
            "env_mask": [[mark * row.informative for mark in row.play.mask[start:]] for row, start in pairs],
            "environment_reward": [row.reward for row in rows],
        }

    def prepare_batch(self, columns: Columns, batch: StepBatch) -> Columns:
        """Drop rows without signal if the batch is not divided.

        The parts of a divided batch, over time or processes, must have equal numbers of rows.
        """
        if self.is_served:
            self.history[-1] = replace(self.history[-1], **self._mismatch(columns, batch))
        if self.args.gradient_accumulation_steps == collectives.size() == 1:
            return without_discarded(columns)
        if self.loss_type == "grpo" and self.has_signal:
            # TRL averages over all rows. The loss is linear in the advantages: this makes it the mean over the
            # informative ones, as it is where the others are left out.
            columns["advantages"] = columns["advantages"] / batch.informative
        return columns

    def _mismatch(self, columns: Columns, batch: StepBatch) -> dict[str, float]:
        """Compare a server's log-probabilities with those of this process, by the weights that it sampled with."""
        scores = columns.get("old_per_token_logps") if self.use_vllm else None
        if scores is None:
            ids = torch.cat([columns["prompt_ids"], columns["completion_ids"]], 1)
            attention = torch.cat([columns["prompt_mask"], columns["completion_mask"]], 1)
            width, rows = columns["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad():
                scores, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, attention, width, rows)
        differences: list[float] = (scores.cpu().double() - batch.sampled)[batch.compared].tolist()
        weights = [math.exp(difference) for difference in differences]
        # Each process sends only its sums, because there may be millions of tokens.
        sums = map(math.fsum, (map(abs, differences), weights, [weight * weight for weight in weights]))
        portion = (len(differences), max(map(abs, differences), default=0.0), *sums)
        counts, largest, *parts = zip(*collectives.together(lambda: portion), strict=True)
        if not (count := sum(counts)):
            return {"mismatch": 0.0, "mismatch_largest": 0.0, "effective_tokens": 1.0}
        distance, total, squares = map(math.fsum, parts)
        return {
            "mismatch": round(distance / count, DIGITS),
            "mismatch_largest": round(max(largest), DIGITS),
            "effective_tokens": round(total * total / (count * squares), DIGITS),
        }


def _batch(rows: Sequence[Row], any_hinted: bool, informative: float) -> StepBatch:
    """Make the batch of this process's rows."""
    starts = [row.play.mask.index(1) for row in rows]
    pairs = [*zip(rows, starts, strict=True)]
    logprobs = [row.play.logprobs[start:] for row, start in pairs]
    compared = [row.play.mask[start:] if row.reward is not None and not row.hinted else [] for row, start in pairs]
    width = max(map(len, logprobs))
    return StepBatch(
        sampled=torch.tensor([scores + [0.0] * (width - len(scores)) for scores in logprobs], dtype=torch.float64),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        hinted=torch.tensor([row.hinted for row in rows]),
        environments=torch.tensor([row.environment for row in rows]),
        compared=torch.tensor([mask + [0] * (width - len(mask)) for mask in compared]).bool(),
        any_hinted=any_hinted,
        informative=informative,
    )


def _environment_reward(completions: object, environment_reward: list[float | None], **_: object) -> list[float | None]:
    return environment_reward


def _arguments(recipe: GRPO, job: Job, policy: Learner, workspace: Path, steps: int) -> GRPOConfig:
    """Map the recipe to TRL's arguments."""
    return trainers.arguments(
        GRPOConfig,
        job.name,
        job.machine,
        workspace,
        job.seed,
        recipe.step_rollouts,
        num_generations=recipe.group_size,
        num_iterations=recipe.epochs,
        max_steps=steps * recipe.epochs,
        shuffle_dataset=False,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        epsilon=recipe.clip,
        epsilon_high=recipe.clip_high,
        beta=0.0,
        loss_type=recipe.loss,
        vllm_importance_sampling_correction=recipe.importance_cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=recipe.importance_cap,
        temperature=policy.temperature,
        max_completion_length=policy.max_length,
        mask_truncated_completions=False,
        logging_strategy="steps" if job.machine.report_to else "no",
        logging_steps=recipe.epochs,
        save_steps=recipe.checkpoint_every * recipe.epochs,
    )
