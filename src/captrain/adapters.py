"""One LoRA adapter per environment: GRPO with TRL's GRPOTrainer and PEFT, rollouts by our own engine or by vLLM.

A group is K rollouts of one task (one seed). Advantage (r - mean) / (std + 1e-4) within the group; a group of constant
reward carries no signal and is discarded: its tokens are masked out of the loss (and counted). Clipped per-token
ratio, mean over all tokens of the batch, no KL term, tokens the model wrote only (paper section 3.3). The sampler's
own log-probabilities are the old policy's. The rollout budget is exact.

An environment may define `hint(task) -> str`: what a share of the rollouts read at the end of the system prompt, so
that groups which would all fail have something to learn from. Before the update the hint is stripped: the prompt
trained on is the unhinted one, and so is that of the old policy's log-probabilities, which are computed again for
hinted rollouts; the ratio does not correct for the hint. Advantages are over the group as it is, hinted and unhinted
rollouts together (as the paper does): an unhinted one is held against hinted ones, and what these did better is
learnt without the hint. Neither score nor record sees a hint.

A job's workspace is named by the fingerprint of all that decides its result; in it lie full-state checkpoints, and at
the end the adapter, whose name is the hash of its content. A job that was cut off goes on from its last whole
checkpoint and ends in the identical adapter.
"""

import fcntl
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from captrain.benchmarks import load_benchmark
from captrain.components import Share
from captrain.contract import Target
from captrain.environments import load, passports
from captrain.errors import UserError
from captrain.policies import Policy, load_policy, model_of
from captrain.records import (
    LedgerEntry,
    Passport,
    Task,
    code_digest,
    digest,
    file_digest,
    publish,
    publish_json,
    publish_text,
)
from captrain.rollouts import CODE
from captrain.spec import Component, Machine, Spec, build

WORKSPACES = Path(".cache/adapters")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Synthesized:
    """An environment file by its passport, and the folder that holds it."""

    folder: Path
    passport: Passport

    def identity(self) -> str:
        """What decides what is trained in it."""
        return self.passport.environment


@dataclass(frozen=True)
class Job:
    """One adapter to train.

    Args:
        name: the capability, or the baseline.
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component.
        environment: a synthesized environment, or a benchmark component.
        rollouts: exact budget, a multiple of a step's rollouts.
        skip: training tasks passed over because calibration has spent them.
        seed: run seed.
        machine: where installations of benchmarks lie, and how strict the sandbox is; no part of the result.
    """

    name: str
    base: Path
    policy: Component
    trainer: Component
    environment: Synthesized | Component
    rollouts: int
    skip: int
    seed: int
    machine: Machine

    def target(self) -> Target:
        """The environment to train in.

        Raises:
            UserError: its file is missing, or is another one than its passport was made out for.
        """
        if isinstance(self.environment, Synthesized):
            return load(self.environment.folder, self.environment.passport, self.machine)
        return load_benchmark(self.environment, self.machine)


@runtime_checkable
class Learner(Policy, Protocol):
    """A policy that GRPO samples through: it acts with any adapter of its model, gives hints, and shows the tokens that
    it read and wrote, with log-probabilities under the distribution that it drew from."""

    temperature: float
    room: int
    """Tokens of the longest dialogue."""
    tokenizer: Any


@dataclass(frozen=True)
class Trained:
    """A trained adapter: its content hash, its folder, and what it cost.

    `history` has one row a step: step, rollouts so far, mean reward, pass rate, share of informative groups; where
    hints are given also `unhinted`, the step's rollouts without one, and how many of these passed. `errors` are
    attempts at a rollout that came to nothing and were made again, beyond `rollouts`.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int
    discarded: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    history: list[dict[str, float]]

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """What the training spent."""
        return LedgerEntry(
            stage=stage, purpose="training", method=method, item=self.name, rollouts=self.rollouts + self.errors,
            discarded=self.discarded, errors=self.errors, prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )  # fmt: skip


def capability_jobs(spec: Spec, base: Path, environments: Path) -> list[Job]:
    """One job for each environment that has a passport, in the order of their names."""
    return [
        Job(
            name=name, base=base, policy=spec.exploring(), trainer=spec.trainer,
            environment=Synthesized(environments, passport), rollouts=spec.adapters.rollouts,
            skip=passport.calibration_tasks, seed=spec.seed, machine=spec.machine,
        )
        for name, passport in passports(environments).items()
    ]  # fmt: skip


def publish_adapters(trained: Sequence[Trained], stage: str, method: str) -> None:
    """Copy adapters to artifacts/<stage>/<digest>, and write results/<stage>: index, ledger, history."""
    index, rows = {}, []
    for one in trained:
        folder = Path("artifacts") / stage / one.digest
        shutil.copytree(one.folder, folder, dirs_exist_ok=True)
        index[one.name] = {
            "digest": one.digest,
            "path": str(folder),
            "rollouts": one.rollouts,
            "discarded": one.discarded,
        }
        rows += [{"adapter": one.name, **step} for step in one.history]
    Path("artifacts", stage).mkdir(parents=True, exist_ok=True)
    columns = ["adapter", "step", "rollouts", "reward", "success", "informative"]
    history = "".join(",".join(str(row[column]) for column in columns) + "\n" for row in rows)
    publish_text(Path("results") / stage / "history.csv", ",".join(columns) + "\n" + history)
    publish(Path("results") / stage / "ledger.jsonl", [one.ledger(stage, method) for one in trained])
    publish_json(Path("results") / stage / "index.json", index)


def train(job: Job) -> Trained:
    """Train one adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the environment's file or the base is missing or damaged.
        EnvironmentFault: the environment broke its contract.
    """
    policy: Any = load_policy(job.policy, job.base, job.machine)
    if not isinstance(policy, Learner):
        raise UserError(
            f"{job.name}: GRPO samples through policies that act with adapters, and policy is {job.policy.target}",
            "choose policy=local or policy=vllm; an endpoint that somebody else runs cannot be trained through",
        )
    target = job.target()
    trainer: GRPO = build(job.trainer)
    fingerprint = digest(
        code_digest("adapters", "grpo", *CODE),
        policy.digest,
        target.fingerprint,
        trainer.identity(),
        job.rollouts,
        job.skip,
        job.seed,
    )
    workspace = WORKSPACES / fingerprint
    workspace.mkdir(parents=True, exist_ok=True)
    with open(workspace / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workspace / "result.json").exists():
            tasks = target.tasks("training", job.skip + job.rollouts // trainer.group_size)[job.skip :]
            publish_json(workspace / "result.json", trainer.fit(job, policy, target, tasks, workspace))
    result = json.loads((workspace / "result.json").read_text())
    folder = workspace / "adapter"
    try:
        found = adapter_digest(folder)
    except UserError:
        found = "not whole"
    if found != result["digest"]:
        shutil.rmtree(workspace)
        raise UserError(
            f"adapter {job.name} in {workspace} was altered after training ({found}, not {result['digest']})",
            "its workspace has been removed: run `dvc repro` to train it again",
        )
    return Trained(job.name, folder=folder, **result)


def adapter_digest(folder: Path) -> str:
    """Content hash of an adapter in plain PEFT format."""
    paths = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    if missing := [path for path in paths if not path.exists()]:
        raise UserError(f"{missing[0]} is missing", "run `dvc repro adapters baselines`")
    return file_digest(*paths)


class GRPO:
    """The trainer.

    Args:
        group_size: rollouts of one task, K.
        groups_per_step: groups sampled before an update.
        epochs: passes over each batch of rollouts.
        rank: LoRA rank.
        alpha: LoRA alpha; updates are scaled by alpha / rank.
        learning_rate: AdamW's, constant.
        clip: PPO clipping range.
        checkpoint_every: steps between full-state checkpoints; no influence on the result.
        hints: share of rollouts that read the environment's hint, where it offers one; each is drawn by its own key,
            so that a group may hold both kinds.
    """

    def __init__(
        self, *, group_size: Annotated[int, Field(ge=2)], groups_per_step: Annotated[int, Field(ge=1)],
        epochs: Annotated[int, Field(ge=1)], rank: Annotated[int, Field(ge=1)],
        alpha: Annotated[int, Field(ge=1)], learning_rate: Annotated[float, Field(gt=0)],
        clip: Annotated[float, Field(gt=0, lt=1)], checkpoint_every: Annotated[int, Field(ge=1)], hints: Share = 0.0,
    ) -> None:  # fmt: skip
        self.group_size, self.groups_per_step, self.epochs = group_size, groups_per_step, epochs
        self.rank, self.alpha, self.learning_rate, self.clip = rank, alpha, learning_rate, clip
        self.checkpoint_every, self.hints = checkpoint_every, hints

    @property
    def step_rollouts(self) -> int:
        """Rollouts sampled for one update."""
        return self.group_size * self.groups_per_step

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result."""
        return {key: value for key, value in vars(self).items() if key != "checkpoint_every"}

    def fit(self, job: Job, policy: Any, target: Target, tasks: list[Task], workspace: Path) -> dict[str, Any]:
        """Train from the last whole checkpoint in the workspace (or from nothing); leave the adapter in
        `workspace/adapter`, and return the fields of `Trained` but name and folder."""
        from captrain.grpo import make_trainer

        if job.rollouts % self.step_rollouts:
            raise UserError(
                f"{job.name}: {job.rollouts} rollouts are not a multiple of the {self.step_rollouts} of a step",
                "change adapters.rollouts, or trainer.group_size and trainer.groups_per_step",
            )
        checkpoints = workspace / "checkpoints"
        last = last_checkpoint(checkpoints)
        trainer: Any = make_trainer(self, job, policy, target, tasks, checkpoints)
        if last is not None:
            trainer.history = json.loads((last / "history.json").read_text())
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
        folder = workspace / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        trainer.model.save_pretrained(folder)
        settle(folder, job.base, policy.digest)
        steps = trainer.history
        counts = ("discarded", "prompt_tokens", "completion_tokens", "errors")
        total = {key: sum(step[key] for step in steps) for key in counts}
        rows = [{key: value for key, value in step.items() if key not in total} for step in steps]
        result = {"digest": adapter_digest(folder), "rollouts": steps[-1]["rollouts"], **total, "history": rows}
        publish_text(folder / "README.md", model_card(job, self, target, result))
        shutil.rmtree(checkpoints)
        return result


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written whole; later ones, cut off while they were written, are removed."""
    if not folder.exists():
        return None
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if (path / "history.json").exists():
            return path
        shutil.rmtree(path)
    return None


def settle(folder: Path, base: Path, policy: str) -> None:
    """Make a saved adapter one that equal weights always give: the path of the base on this machine is no part of it,
    and key order and unset fields must not vary. A base that has a name is called by it, another by the `policy`'s
    digest."""
    model = model_of(base)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = model.source if model.named else f"captrain-base-{policy}"
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def model_card(job: Job, trainer: GRPO, target: Target, result: dict[str, Any]) -> str:
    """A model card in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
    # A hinted rollout says little of what the adapter can do by itself.
    hinted = (
        f"| share of rollouts with a hint | {trainer.hints} |\n| passed of those without, first and last step "
        f"| {first['unhinted_passed']} of {first['unhinted']}, {last['unhinted_passed']} of {last['unhinted']} |\n"
        if "unhinted" in last
        else ""
    )
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, grpo, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}) trained with GRPO in the environment `{target.name}`.

| | |
|---|---|
| content hash | {result["digest"]} |
| environment fingerprint | {target.fingerprint} |
| rollouts (of which in discarded constant groups) | {result["rollouts"]} ({result["discarded"]}) |
| group size, groups per step, epochs | {trainer.group_size}, {trainer.groups_per_step}, {trainer.epochs} |
| learning rate, clip | {trainer.learning_rate}, {trainer.clip} |
| mean reward, first and last step | {first["reward"]:.3f}, {last["reward"]:.3f} |
| pass rate in its environment, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
{hinted}| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
