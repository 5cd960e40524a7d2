"""One adapter by GRPO: from a job to the published adapter, in the order in which it happens.

`fit` makes TRL's trainer, goes on from the last whole checkpoint, trains, and leaves the adapter with its model card.
`PolicyTrainer` is TRL's GRPOTrainer with a policy as its sampler: before each step the adapter is saved in plain PEFT
format, in a folder named by its content hash, and the policy acts with it, in this process or through servers that load
it under that name (`play`). What the policy says of its tokens is what is trained on: its log-probabilities are the old
policy's. `captrain.training.groups` decides which rollouts a step is made of, and their advantages;
`captrain.training.recipe` has the hyperparameters, and says what is learnt from a group.

Where a server samples, it computes with other kernels, and often in another precision, than the process that trains.
What it sampled is then not quite what the trained policy would have sampled, and ratios are not quite 1 where they
should be. The measures are those of a step's tokens that the model wrote, hinted rollouts apart: the mean and the
largest absolute difference of log-probabilities, and the effective sample size of the importance weights, as a share of
the tokens: (sum w)^2 / (n sum w^2), 1 where all weights are equal.

Imported only where training happens: it needs torch and TRL.
"""

import math
import os
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, set_seed
from transformers.utils import logging as hf_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain.contract import Play, Target
from captrain.errors import UserError
from captrain.models import (
    CHECKPOINTS,
    adapter_digest,
    computes_on_cpu,
    copy_adapter,
    exact_optimizer,
    load_module,
    lora_config,
    prepare_trainer,
)
from captrain.records import JsonObject, publish_text, read_json
from captrain.run import launch, takes
from captrain.training import collectives, processes, trackers
from captrain.training.checkpoints import Checkpoints, last_checkpoint
from captrain.training.groups import Groups, PlannedRollout, ScoredPlay, advantages
from captrain.training.jobs import Job, Learner
from captrain.training.recipe import GRPO

POINTS = "points"
"""Folder of a workspace with the adapter as it was at the points of its job."""

DIGITS = 9
"""Decimals of the differences between a server's log-probabilities and the trainer's."""
StepInPlay = tuple[list[PlannedRollout], Callable[[], tuple[list[ScoredPlay], int]]]
"""A step whose rollouts are being played: what they are, and what waits for them (see `Groups.begin`)."""


@dataclass(frozen=True)
class Row:
    """One rollout as it is trained on, with the number of its environment. Its reward is None beyond the budget, and
    nothing is learnt from it where its group is not informative."""

    environment: int
    play: Play
    informative: bool
    reward: float | None
    advantage: float
    hinted: bool


@dataclass(frozen=True)
class StepBatch:
    """One step's rollouts as this process trains on them: what TRL's own batch does not hold.

    Attributes:
        sampled: (rows, completion) float64, the sampler's log-probabilities; `completion` is the length in tokens of
            the longest dialogue after its opening, and what is beyond the end of a row is 0.
        advantages: (rows,) float64.
        hinted: (rows,) bool, where a rollout read a hint that the prompt trained on does not have.
        environments: (rows,) int, the number of each row's environment.
        compared: (rows, completion) bool, the tokens that the model wrote without a hint, by which the sampler's
            log-probabilities are compared with the trainer's.
        any_hinted: true where any row of any process is hinted.
        informative: share of all processes' rows that teach something.
    """

    sampled: Tensor
    advantages: Tensor
    hinted: Tensor
    environments: Tensor
    compared: Tensor
    any_hinted: bool
    informative: float


def fit(
    kind: "type[PolicyTrainer]",
    recipe: GRPO,
    job: Job,
    policy: Learner,
    targets: Sequence[Target],
    workspace: Path,
) -> JsonObject:
    """Train from the last whole checkpoint in the workspace, or from nothing, and leave the adapter in
    `workspace/adapter`. Checkpoints stay: they are needed until the result is published. Where several processes train,
    all of them call this.

    Args:
        kind: of the trainer.
        recipe: hyperparameters.
        job: what to train.
        policy: samples; its model is the job's, which is the frozen base.
        targets: the job's environments.
        workspace: folder of checkpoints and of the adapter.

    Returns:
        The fields of `Trained` but name and folder.

    Raises:
        UserError: there is nothing to train with; the base has no layer of one of the names in `targets`, or no
            experts; or the adapter to start from is another one or of another shape.
        EnvironmentFault: an environment has too few tasks.
    """
    if job.rollouts < 1:
        raise UserError(
            f"{job.name}: there are {job.rollouts} rollouts to train with",
            "raise adapters.rollouts: diagnosis and calibration have spent what there was",
        )
    # 1. The trainer, as it was when it was cut off.
    folder = workspace / collectives.checkpoints(job.machine.accelerate)
    trainer = kind(recipe, job, policy, targets, folder)
    last = collectives.once(lambda: last_checkpoint(folder))
    if last is not None:
        remedy = f"remove {last}: training goes on from the one before"
        trainer.history = read_json(last / "history.json", list[JsonObject], remedy)

    # 2. All steps: rollouts, then updates.
    page = {"seed": job.seed, "rollouts": job.rollouts, "policy": policy.digest, **recipe.identity()}
    try:
        with trackers.reported(trainer, job.machine.report_to, job.name, workspace, page, trainer.reports):
            trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    finally:
        if trainer.pool is not None:
            trainer.pool.shutdown(wait=False, cancel_futures=True)

    # 3. The adapter as it is now and as it was on the way, and what it has cost.
    adapter, steps = workspace / "adapter", trainer.history
    collectives.save(trainer.model, adapter, job.base, policy.digest)
    totals = {
        key: sum(step[key] for step in steps) for key in ("discarded", "prompt_tokens", "completion_tokens", "errors")
    }
    rows = [{key: value for key, value in step.items() if key not in totals} for step in steps]
    points = sorted((workspace / POINTS).glob("*"), key=lambda path: int(path.name))
    result = {"digest": adapter_digest(adapter), "rollouts": steps[-1]["rollouts"], **totals, "history": rows}
    result[CHECKPOINTS] = {path.name: adapter_digest(path) for path in points}
    if collectives.rank() == 0:
        publish_text(adapter / "README.md", trainer.model_card(result))
        for path in points:
            shutil.copytree(path, adapter / CHECKPOINTS / path.name)
    return result


class PolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a policy, token-exact and with the sampler's log-probabilities.

    A row of its dataset is a group, by number: what is played for it is decided when its step is played. `history`
    holds one row a step: step, rollouts, reward, success, informative, discarded, prompt_tokens, completion_tokens,
    errors (rollouts that came to nothing and were played again, beyond the others), places (groups of each
    environment); where hints are given also unhinted, the rollouts without one, and unhinted_passed; where a server
    samples the columns that `captrain.training.workspace` has for that. It is all that later steps depend on besides
    weights and optimizer. The arguments are those of `fit`, `folder` that of the checkpoints.
    """

    def __init__(self, recipe: GRPO, job: Job, policy: Learner, targets: Sequence[Target], folder: Path) -> None:
        self.recipe, self.job, self.policy = recipe, job, policy
        self.sampling, self.points = folder / "sampling", folder.parent / POINTS
        self.groups = Groups(recipe, policy, targets, job)
        self.steps = math.ceil(job.rollouts / recipe.step_rollouts)
        self.history: list[JsonObject] = []
        self.is_served = takes(job.policy, "machine")
        """True where the sampler is a server, whose log-probabilities are not those of this process."""
        if recipe.staleness and not self.is_served:
            raise UserError(
                f"trainer.staleness = {recipe.staleness}, and the model of {job.policy.target} is in the process that "
                "trains, which cannot sample meanwhile",
                "set trainer.staleness=0, or choose policy=vllm",
            )
        self.steps_ahead: deque[StepInPlay] = deque()
        """Steps whose rollouts are being played, from the next one on."""
        self.pool = ThreadPoolExecutor(1 + recipe.staleness) if recipe.staleness else None
        self.batch: StepBatch | None = None
        """The last step's."""
        self.is_sampling = False
        self.has_signal = True

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        config = _configuration(recipe, job, policy, folder, self.steps)
        set_seed(job.seed)
        base = load_module(job.base, job.machine.accelerate.precision)
        numbers = range(self.steps * recipe.groups_per_step)
        super().__init__(
            model=base,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"group {number}"} for number in numbers]),
            processing_class=policy.tokenizer,
            peft_config=lora_config(base, recipe.shape),
            reward_funcs=[_environment_reward],
            rollout_func=lambda prompts, trainer: self.play(prompts),
        )
        if job.machine.accelerate.precision == "float64":
            self.optimizer_cls_and_kwargs = exact_optimizer(config)
        self.prepare(job, policy.temperature)
        if job.start is not None:
            model: Any = self.model
            copy_adapter(model, job.start)
        self.remove_callback(PrinterCallback)
        self.add_callback(Checkpoints(folder, lambda: self.history))
        if recipe.importance_cap is not None:
            # After TRL's constructor, which would start a vLLM of its own, whose weights it would keep up to date: the
            # policy serves each step's adapter, which `play` has saved.
            trainer: Any = self
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
            self.use_vllm, self._last_loaded_step = True, -1

    def prepare(self, job: Job, temperature: float) -> None:
        """Set how a step is computed."""
        prepare_trainer(self, temperature, job.machine, job.seed)

    def teaches(self, rewards: Sequence[float]) -> bool:
        """Tell if a group of these rewards carries a signal: one of equal rewards has no advantage."""
        return max(rewards) - min(rewards) > 1e-6

    def reports(self) -> list[JsonObject]:
        """List what trackers are told of each step that is over: its row of the history, and TRL's measures, where
        these were taken."""
        by_step = {row["step"] // self.recipe.epochs: row for row in trackers.updates(self)}
        over = self.history[: self.state.global_step // self.recipe.epochs]
        return [by_step.get(step["step"], {}) | step for step in over]

    def model_card(self, result: JsonObject) -> str:
        """Write the model card of an adapter in Markdown, from results only."""
        job, trainer, targets = self.job, self.recipe, self.groups.targets
        first, last = result["history"][0], result["history"][-1]
        # A hinted rollout says little of what the adapter can do by itself.
        hinted = (
            f"| share of rollouts with a hint | {trainer.hints} |\n| passed of those without, first and last step "
            f"| {first['unhinted_passed']} of {first['unhinted']}, {last['unhinted_passed']} of {last['unhinted']} |\n"
            if "unhinted" in last
            else ""
        )
        plural = "s" if len(targets) > 1 else ""
        groups = Counter[str]()
        for step in result["history"]:
            groups.update(step["places"])
        shares = ", ".join(f"{environment.name} {groups[environment.name]}" for environment in job.environments)
        clip = f"{trainer.clip}" if trainer.clip_high is None else f"{trainer.clip} below, {trainer.clip_high} above"
        start = f"| trained on from the adapter | {job.start.digest} |\n" if job.start else ""
        fingerprints = ", ".join(target.fingerprint for target in targets)
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
| content hash | {result["digest"]} |
| environment fingerprint{plural} | {fingerprints} |
{f"| groups of each environment | {shares} |{chr(10)}" if plural else ""}\
| rollouts (of which in discarded constant groups) | {result["rollouts"]} ({result["discarded"]}) |
{start}| group size, groups per step, epochs | {trainer.group_size}, {trainer.groups_per_step}, {trainer.epochs} |
| learning rate, clip | {trainer.learning_rate} {trainer.schedule}, {clip} |
| mean reward, first and last step | {first["reward"]:.3f}, {last["reward"]:.3f} |
| pass rate in its environment, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
{hinted}| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""

    # 1. A step's rollouts, played and scored.

    def play(self, prompts: list[str]) -> JsonObject:
        """Play one step's groups with the adapter as it is now, score them, and add the step to the history.

        Hints are stripped: the prompts returned are the unhinted ones. Where the budget ends within the step, the rows
        beyond it are not played: they repeat the first one without its reward and with nothing to learn from. Where
        several processes train, each has its own prompts. What all of them play is known to each, so that the history
        is that of the whole step; what is returned is for a process's own prompts.

        Args:
            prompts: groups by number ("group 17"), each `group_size` times in a row.

        Returns:
            Columns as TRL's `rollout_func` gives them, a row for each prompt.
        """
        size, history = self.recipe.group_size, self.history
        before, number = history[-1]["rollouts"] if history else 0, len(history)
        adapter = self._save_adapter(number)
        start, end = [0, 0, *(step["rollouts"] for step in history)][-2:]
        if any(start < mark <= end for mark in self.job.marks):
            point = self.points / str(end)
            collectives.once(lambda: shutil.copytree(adapter, point, dirs_exist_ok=True))

        # The next steps' rollouts, too, where they may be of an adapter that is some updates old by then.
        while len(self.steps_ahead) <= self.recipe.staleness and number + len(self.steps_ahead) < self.steps:
            self.steps_ahead.append(self._begin(number + len(self.steps_ahead), len(prompts)))
        plan, finish = self.steps_ahead.popleft()
        plays, errors = finish()
        scores = [scored.score for scored in plays]
        rewards = [score.reward for score in scores]
        by_group = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        informative = [self.teaches(group) for group in by_group]
        hinted = any(self.groups.hints(target) for target in self.groups.targets)
        unhinted = [scored.score.success for scored in plays if not scored.play.hint]
        step = {
            "step": number + 1,
            "rollouts": before + len(plays),
            "reward": round(sum(rewards) / len(rewards), 6),
            "success": round(sum(score.success for score in scores) / len(scores), 6),
            "informative": round(sum(informative) / len(informative), 6),
            "discarded": sum(len(group) for group, signal in zip(by_group, informative, strict=True) if not signal),
            "prompt_tokens": sum(scored.play.prompt_tokens for scored in plays),
            "completion_tokens": sum(sum(scored.play.mask) for scored in plays),
            "errors": errors,
            "places": Counter(self.job.environments[rollout.environment].name for rollout in plan[::size]),
            **({"unhinted": len(unhinted), "unhinted_passed": sum(unhinted)} if hinted else {}),
            **({"rerendered": sum(scored.play.rerendered for scored in plays)} if self.is_served else {}),
            **({"staleness": min(number, self.recipe.staleness)} if self.recipe.staleness else {}),
        }
        history.append(step)
        if collectives.rank() == 0:
            message = f"mean reward {step['reward']:.3f}, pass rate {step['success']:.3f}"
            launch.report_progress(step["step"], self.steps, message)

        gains = [advantage for group in by_group for advantage in advantages(group)]
        rows = [
            Row(
                scored.rollout.environment,
                scored.play,
                informative[index // size],
                reward,
                gain,
                scored.play.hint != "",
            )
            for index, (scored, reward, gain) in enumerate(zip(plays, rewards, gains, strict=True))
        ]
        rows += (len(prompts) * collectives.size() - len(rows)) * [Row(0, plays[0].play, False, None, 0.0, False)]
        any_hinted, share = any(row.hinted for row in rows), sum(row.informative for row in rows) / len(rows)
        start = collectives.rank() * len(prompts)
        return self._columns(rows[start : start + len(prompts)], any_hinted, share)

    def _begin(self, step: int, rows: int) -> StepInPlay:
        """Begin the rollouts of a step by its number from 0 on, within the budget; `rows` are those of a process."""
        first = step * self.recipe.groups_per_step
        plan = self.groups.plan(range(first, first + self.recipe.groups_per_step))
        plan = plan[: self.job.rollouts - step * self.recipe.step_rollouts]
        [adapter] = (self.sampling / str(max(0, step - self.recipe.staleness))).iterdir()
        failed = sum(past["errors"] for past in self.history)
        return plan, self.groups.begin(adapter.resolve(), plan, rows, failed, self.pool)

    def _save_adapter(self, step: int) -> Path:
        """Save the adapter as it is now in a folder named by the step and its content, and remove those that neither
        this training nor one that goes on from a checkpoint plays with."""
        folder, recent = self.sampling / str(step), self.recipe.staleness + 2 * self.recipe.checkpoint_every
        recent_names = {str(before) for before in range(step - recent, step) if self.recipe.staleness}
        old = [path for path in self.sampling.glob("*") if path.name not in recent_names]
        collectives.once(lambda: [shutil.rmtree(path) for path in old])
        aside = self.sampling / "new"
        collectives.save(self.model, aside, self.job.base, self.policy.digest)

        def place() -> Path:
            folder.mkdir()
            return aside.rename(folder / adapter_digest(aside)).resolve()

        return collectives.once(place)

    def _columns(self, rows: Sequence[Row], any_hinted: bool, informative: float) -> JsonObject:
        """Turn rows into what TRL takes, and keep the rest in `batch`."""
        plays = [row.play for row in rows]
        opening = [play.mask.index(1) for play in plays]
        logprobs = [play.logprobs[start:] for play, start in zip(plays, opening, strict=True)]
        masks = [row.play.mask if row.informative else [0] * len(row.play.mask) for row in rows]
        width = max(len(row) for row in logprobs)
        compared = [
            row.play.mask[start:] if row.reward is not None and not row.hinted else []
            for row, start in zip(rows, opening, strict=True)
        ]
        self.batch = StepBatch(
            sampled=torch.tensor([row + [0.0] * (width - len(row)) for row in logprobs], dtype=torch.float64),
            advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float64),
            hinted=torch.tensor([row.hinted for row in rows]),
            environments=torch.tensor([row.environment for row in rows]),
            compared=torch.tensor([mask + [0] * (width - len(mask)) for mask in compared]).bool(),
            any_hinted=any_hinted,
            informative=informative,
        )
        return {
            "prompt_ids": [play.token_ids[:start] for play, start in zip(plays, opening, strict=True)],
            "completion_ids": [play.token_ids[start:] for play, start in zip(plays, opening, strict=True)],
            # TRL takes what is not known for what needs no correction: it must not correct for a hint.
            "logprobs": [
                [math.nan] * len(scores) if row.hinted and self.use_vllm else scores
                for row, scores in zip(rows, logprobs, strict=True)
            ],
            "env_mask": [mask[start:] for mask, start in zip(masks, opening, strict=True)],
            "environment_reward": [row.reward for row in rows],
        }

    # 2. The batch that an update is made of.

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> JsonObject:
        self.is_sampling = True
        columns = super()._generate_and_score_completions(inputs)  # calls `play`
        self.is_sampling = False
        assert self.batch is not None
        # TRL's own are made in float32, by kernels that round differently on different CPUs.
        device = columns["advantages"].device
        columns["advantages"] = self.batch.advantages.to(device)
        columns["sources"] = self.batch.environments.to(device)
        if self.is_served:
            self.history[-1] |= self._mismatch(columns, self.batch)
        self.has_signal = bool(columns["num_items_in_batch"] > 0)
        # The parts of a batch, in time or over processes, must have equally many rows.
        if self.args.gradient_accumulation_steps == collectives.size() == 1:
            return without_discarded(columns)
        if self.loss_type == "grpo" and self.has_signal:
            # TRL's mean is over all rows: the loss is linear in the advantages, and this makes it one over those that
            # teach something, as it is where the others are left out.
            columns["advantages"] = columns["advantages"] / self.batch.informative
        return columns

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # TRL corrects the sampler's against these itself (`use_vllm`).
        if not self.is_sampling or self.batch is None or self.use_vllm:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        # While a batch is made, TRL asks for the old policy's log-probabilities: the sampler has them exactly, but
        # for the rows that it sampled under another prompt than the one trained on. The weights are still its own.
        old, hinted = self.batch.sampled.to(input_ids.device), self.batch.hinted.to(input_ids.device)
        if self.batch.any_hinted:
            rows = hinted.clone()
            rows[0] |= not rows.any()  # a forward pass of a model that is shared is everybody's
            stripped, _, _ = super()._get_per_token_logps_and_entropies(
                model, input_ids[rows], attention_mask[rows], *args, **kwargs
            )
            old[hinted] = stripped[hinted[rows]].to(old)
        return old, None, None

    def _mismatch(self, columns: JsonObject, batch: StepBatch) -> JsonObject:
        """Measure how far a server's log-probabilities are from those of the weights that it sampled with, here."""
        scores = columns.get("old_per_token_logps") if self.use_vllm else None
        if scores is None:
            ids = torch.cat([columns["prompt_ids"], columns["completion_ids"]], 1)
            attention = torch.cat([columns["prompt_mask"], columns["completion_mask"]], 1)
            width, rows = columns["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad():
                scores, _, _ = super()._get_per_token_logps_and_entropies(self.model, ids, attention, width, rows)
        differences: list[float] = (scores.cpu().double() - batch.sampled)[batch.compared].tolist()
        weights = [math.exp(difference) for difference in differences]
        # Of each process its sums alone: tokens are millions.
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

    # 3. The update, which is TRL's.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Make one update; none when every group of the batch was constant (momentum alone must not move weights)."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.has_signal:
            for parameter in model.parameters():
                parameter.grad = None
        return loss


def without_discarded(columns: JsonObject) -> JsonObject:
    """Leave out the rows of discarded groups, which cost time and change nothing; at least one row stays."""
    informative = columns["tool_mask"].mul(columns["completion_mask"]).any(1)
    informative[0] |= not informative.any()
    size = len(informative)
    return {
        name: value[informative] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for name, value in columns.items()
    }


def _environment_reward(completions: object, environment_reward: list[float | None], **_: object) -> list[float | None]:
    return environment_reward


def _configuration(recipe: GRPO, job: Job, policy: Learner, folder: Path, steps: int) -> GRPOConfig:
    accelerate = job.machine.accelerate
    share = recipe.step_rollouts // accelerate.processes
    rows = processes.rows_of_pass(accelerate, share)
    config = GRPOConfig(
        output_dir=str(folder),
        seed=job.seed,
        data_seed=job.seed,
        use_cpu=computes_on_cpu(accelerate.precision),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        steps_per_generation=share // rows,
        num_generations=recipe.group_size,
        num_iterations=recipe.epochs,
        max_steps=steps * recipe.epochs,
        shuffle_dataset=False,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        epsilon=recipe.clip,
        epsilon_high=recipe.clip_high,
        beta=0.0,
        loss_type=recipe.loss,
        vllm_importance_sampling_correction=recipe.importance_cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=recipe.importance_cap,
        temperature=policy.temperature,
        max_completion_length=policy.max_length,
        bf16=False,
        mask_truncated_completions=False,
        gradient_checkpointing=accelerate.gradient_checkpointing,
        ddp_find_unused_parameters=False,
        ddp_timeout=collectives.PATIENCE,
        report_to=[],  # see `captrain.training.trackers`
        disable_tqdm=True,
        logging_strategy="steps" if job.machine.report_to else "no",
        logging_steps=recipe.epochs,
        save_strategy="steps",
        save_steps=recipe.checkpoint_every * recipe.epochs,
        save_total_limit=2,
    )
    # Of several GPUs one trains; the others are the servers'.
    config._n_gpu = min(config.n_gpu, 1)
    return config
