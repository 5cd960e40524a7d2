"""One LoRA adapter per environment: GRPO with TRL's GRPOTrainer and PEFT, rollouts by our own engine.

A group is K rollouts of one task (one seed). Advantage (r - mean) / (std + 1e-4) within the group; a group of constant
reward carries no signal and is discarded: its tokens are masked out of the loss (and counted). Clipped per-token
ratio, mean over all tokens of the batch, no KL term, tokens the model wrote only (paper section 3.3). The sampler's
own log-probabilities are the old policy's. The rollout budget is exact.

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
from typing import Annotated, Any

from pydantic import Field

from captrain.benchmarks import load_benchmark
from captrain.contract import Target, load_file
from captrain.errors import UserError
from captrain.policies.local import LocalPolicy
from captrain.records import LedgerEntry, Task, code_digest, digest, file_digest, publish, publish_json, publish_text
from captrain.rollouts import CODE
from captrain.spec import Component, Machine, Spec, build

WORKSPACES = Path(".cache/adapters")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Job:
    """One adapter to train.

    Args:
        name: the capability, or the baseline.
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component.
        environment: path of an environment file, or a benchmark component.
        rollouts: exact budget, a multiple of a step's rollouts.
        skip: training tasks passed over because calibration has spent them.
        seed: run seed.
        machine: where installations of benchmarks lie; no part of the result.
    """

    name: str
    base: Path
    policy: Component
    trainer: Component
    environment: Path | Component
    rollouts: int
    skip: int
    seed: int
    machine: Machine | None = None

    def target(self) -> Target:
        """The environment to train in."""
        if isinstance(self.environment, Path):
            return load_file(self.environment)
        return load_benchmark(self.environment, self.machine)


@dataclass(frozen=True)
class Trained:
    """A trained adapter: its content hash, its folder, and what it cost.

    `history` has one row a step: step, rollouts so far, mean reward, pass rate, share of informative groups.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int
    discarded: int
    prompt_tokens: int
    completion_tokens: int
    history: list[dict[str, float]]

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """What the training spent."""
        return LedgerEntry(
            stage=stage, purpose="training", method=method, item=self.name, rollouts=self.rollouts,
            discarded=self.discarded, prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens,
        )  # fmt: skip


def capability_jobs(spec: Spec, base: Path, environments: Path) -> list[Job]:
    """One job for each environment that has a passport, in the order of their names."""
    passports = [json.loads(path.read_text()) for path in sorted(environments.glob("*.passport.json"))]
    return [
        Job(
            name=passport["capability"], base=base, policy=spec.exploring(), trainer=spec.trainer,
            environment=environments / f"{passport['capability']}.py", rollouts=spec.adapters.rollouts,
            skip=passport["calibration_tasks"], seed=spec.seed,
        )
        for passport in passports
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
    policy: Any = build(job.policy, model=job.base)
    if not isinstance(policy, LocalPolicy):
        raise UserError(
            f"{job.name}: GRPO samples through captrain.policies.local.LocalPolicy, and policy is {job.policy.target}",
            "choose policy=local; this version does not train a model that is served elsewhere",
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
    """

    def __init__(
        self, *, group_size: Annotated[int, Field(ge=2)], groups_per_step: Annotated[int, Field(ge=1)],
        epochs: Annotated[int, Field(ge=1)], rank: Annotated[int, Field(ge=1)],
        alpha: Annotated[int, Field(ge=1)], learning_rate: Annotated[float, Field(gt=0)],
        clip: Annotated[float, Field(gt=0, lt=1)], checkpoint_every: Annotated[int, Field(ge=1)],
    ) -> None:  # fmt: skip
        self.group_size, self.groups_per_step, self.epochs = group_size, groups_per_step, epochs
        self.rank, self.alpha, self.learning_rate, self.clip = rank, alpha, learning_rate, clip
        self.checkpoint_every = checkpoint_every

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
        _settle(folder, policy.digest)
        steps = trainer.history
        total = {key: sum(step[key] for step in steps) for key in ("discarded", "prompt_tokens", "completion_tokens")}
        rows = [{key: step[key] for key in ("step", "rollouts", "reward", "success", "informative")} for step in steps]
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


def _settle(folder: Path, base: str) -> None:
    # The path of the base on this machine is no part of the adapter; key order and unset fields must not vary.
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = f"captrain-base-{base}"
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def model_card(job: Job, trainer: GRPO, target: Target, result: dict[str, Any]) -> str:
    """A model card in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
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
| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
