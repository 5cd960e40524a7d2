"""LoRA adapters by GRPO: TRL's GRPOTrainer and PEFT, rollouts by our own engine or by vLLM.

A job trains one adapter in one place, or in several: an environment that was synthesized, or the benchmark itself. The
trainer decides from which place each group is drawn; the tasks of a place are used in order, and none twice before all
have been used that there are.

A group is K rollouts of one task (one seed). Advantage (r - mean) / (std + 1e-4) within the group; a group of constant
reward carries no signal and is discarded: its tokens are masked out of the loss (and counted). Clipped per-token
ratio, mean over all tokens of the batch, no KL term, tokens the model wrote only (paper section 3.3). The sampler's
own log-probabilities are the old policy's. The rollout budget is exact: where it is no multiple of a step, the last
step is smaller, and its last group may be (one of a single rollout is counted and teaches nothing).

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from captrain import distributed
from captrain.benchmarks import load_benchmark
from captrain.components import Count, Level, Rate, Share, takes
from captrain.contract import Target
from captrain.environments import load, passports
from captrain.errors import UserError
from captrain.machine import Machine
from captrain.policies import Play, Policy, load_policy, model_of
from captrain.records import (
    LedgerEntry,
    Passport,
    Score,
    Task,
    code_digest,
    digest,
    file_digest,
    publish,
    publish_json,
    publish_text,
)
from captrain.rollouts import CODE
from captrain.spec import Component, Spec, build

WORKSPACES = Path(".cache/adapters")
Size = Annotated[int, Field(ge=2)]
Layers = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Step = Mapping[str, Any]
"""What is known of a step that has been played: a row of `Trained.history`."""


@dataclass(frozen=True)
class Synthesized:
    """An environment file by its passport, and the folder that holds it."""

    folder: Path
    passport: Passport

    def identity(self) -> str:
        """What decides what is trained in it."""
        return self.passport.environment


@dataclass(frozen=True)
class Place:
    """Where groups are drawn from.

    Args:
        name: of the environment; no two places of a job have the same.
        environment: a synthesized environment, or a benchmark component.
        skip: training tasks passed over because calibration has spent them.
    """

    name: str
    environment: Synthesized | Component
    skip: int = 0

    def target(self, machine: Machine) -> Target:
        """The environment to train in.

        Raises:
            UserError: its file is missing, or is another one than its passport was made out for.
        """
        if isinstance(self.environment, Synthesized):
            return load(self.environment.folder, self.environment.passport, machine)
        return load_benchmark(self.environment, machine)


@dataclass(frozen=True)
class Job:
    """One adapter to train.

    Args:
        name: the capability, or the baseline.
        base: folder of the base model.
        policy: the policy component (how to sample).
        trainer: the trainer component.
        places: where to train, one or more.
        rollouts: exact budget.
        seed: run seed.
        machine: where installations of benchmarks lie, and how strict the sandbox is; no part of the result.
    """

    name: str
    base: Path
    policy: Component
    trainer: Component
    places: tuple[Place, ...]
    rollouts: int
    seed: int
    machine: Machine

    def decisive(self) -> list[Any]:
        """What decides the result besides policy, trainer and environments, as JSON."""
        return [self.name, self.rollouts, self.seed, [[place.name, place.skip] for place in self.places]]


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

    `history` has one row a step: step, rollouts so far, mean reward, pass rate, share of informative groups, and
    `places`, how many groups were of each place; where hints are given also `unhinted`, the step's rollouts without
    one, and how many of these passed. `errors` are attempts at a rollout that came to nothing and were made again,
    beyond `rollouts`.
    """

    name: str
    digest: str
    folder: Path
    rollouts: int
    discarded: int
    prompt_tokens: int
    completion_tokens: int
    errors: int
    history: list[dict[str, Any]]

    def ledger(self, stage: str, method: str) -> LedgerEntry:
        """What the training spent."""
        return LedgerEntry(
            stage=stage, purpose="training", method=method, item=self.name, rollouts=self.rollouts + self.errors,
            discarded=self.discarded, errors=self.errors, prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class Played:
    """One rollout of a step: the number of its place and what that is, and what came of it."""

    place: int
    target: Target
    task: Task
    trial: int
    play: Play
    score: Score


def places_of(environments: Path) -> tuple[Place, ...]:
    """The environments in a folder that have a passport, in the order of their names; none if there is no folder."""
    return tuple(
        Place(name, Synthesized(environments, passport), passport.calibration_tasks)
        for name, passport in passports(environments).items()
    )


def capability_jobs(spec: Spec, base: Path, environments: Path) -> list[Job]:
    """One job for each environment that has a passport, in the order of their names."""
    return [
        Job(
            name=place.name, base=base, policy=spec.exploring(), trainer=spec.trainer, places=(place,),
            rollouts=spec.adapters.rollouts, seed=spec.seed, machine=spec.machine,
        )
        for place in places_of(environments)
    ]  # fmt: skip


def recipe(trainer: Component, target: str = "captrain.adapters.GRPO", **changes: Any) -> Component:
    """Another trainer (or GRPO as it is), with the settings that it shares with a given one, but for the changes."""
    other = Component.model_validate({"_target_": target})
    shared = {name: value for name, value in trainer.settings().items() if takes(other, name)}
    return other.model_copy(update={**shared, **changes})


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
        UserError: the processes of `machine.accelerate` cannot share the work, or died.
    """
    policy: Any = load_policy(job.policy, job.base, job.machine)
    if not isinstance(policy, Learner):
        raise UserError(
            f"{job.name}: GRPO samples through policies that act with adapters, and policy is {job.policy.target}",
            "choose policy=local or policy=vllm; an endpoint that somebody else runs cannot be trained through",
        )
    targets = [place.target(job.machine) for place in job.places]
    trainer: GRPO = build(job.trainer)
    fingerprint = digest(
        code_digest("adapters", "distributed", "groups", "grpo", *CODE),
        policy.digest,
        [target.fingerprint for target in targets],
        [job.trainer.target, trainer.identity()],
        job.decisive(),
    )
    workspace = WORKSPACES / fingerprint
    workspace.mkdir(parents=True, exist_ok=True)
    with open(workspace / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workspace / "result.json").exists():
            if job.machine.accelerate.processes > 1:
                distributed.launch(job, trainer, workspace)
            else:
                publish_json(workspace / "result.json", trainer.fit(job, policy, targets, workspace))
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
    """The trainer. Of several places it takes each in turn; what a subclass may decide otherwise are the methods from
    `jobs` to `noted`, whose only memory is the history, which checkpoints hold.

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
        targets: linear layers that get low-rank weights, by the ends of their names; a mixture of experts takes those
            of its attention only.
    """

    scale: float | None = None
    """What advantages are divided by; None: the standard deviation of their group."""

    def __init__(
        self, *, group_size: Size, groups_per_step: Count, epochs: Count, rank: Count, alpha: Count,
        learning_rate: Rate, clip: Level, checkpoint_every: Count, hints: Share = 0.0, targets: Layers = LINEAR,
    ) -> None:  # fmt: skip
        self.group_size, self.groups_per_step, self.epochs = group_size, groups_per_step, epochs
        self.rank, self.alpha, self.learning_rate, self.clip = rank, alpha, learning_rate, clip
        self.checkpoint_every, self.hints, self.targets = checkpoint_every, hints, list(targets)

    @property
    def step_rollouts(self) -> int:
        """Rollouts sampled for one update."""
        return self.group_size * self.groups_per_step

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result."""
        return {key: value for key, value in vars(self).items() if key != "checkpoint_every" and key[0] != "_"}

    def jobs(self, spec: Spec, project: Path = Path()) -> list[Job]:
        """What the adapters stage trains; `project` is the folder of artifacts/ and results/."""
        return capability_jobs(spec, project / "artifacts/base", project / "results/environments")

    def place(self, job: Job, group: int, history: Sequence[Step]) -> int:
        """From which of the job's places a group is drawn, when its step is about to be played.

        Args:
            job: what is trained.
            group: its number in the whole training, from 0 on.
            history: the steps before.
        """
        return group % len(job.places)

    def reward(self, job: Job, place: int, score: Score) -> float:
        """What a rollout in a place earns, in [0, 1]."""
        return score.reward

    def noted(self, job: Job, played: "Sequence[Played]") -> dict[str, Any]:
        """What a step's row of the history holds besides, as JSON: all that later groups are decided by."""
        return {}

    def fit(self, job: Job, policy: Any, targets: list[Target], workspace: Path) -> dict[str, Any]:
        """Train from the last whole checkpoint in the workspace (or from nothing); leave the adapter in
        `workspace/adapter`, and return the fields of `Trained` but name and folder. Where several processes train, all
        of them call this."""
        from captrain.grpo import make_trainer, model_card, save

        if job.rollouts < 1:
            raise UserError(
                f"{job.name}: there are {job.rollouts} rollouts to train with",
                "raise adapters.rollouts: diagnosis and calibration have spent what there was",
            )
        checkpoints = workspace / distributed.checkpoints(job.machine.accelerate)
        trainer: Any = make_trainer(self, job, policy, targets, checkpoints)
        last = distributed.once(lambda: last_checkpoint(checkpoints))
        if last is not None:
            trainer.history = json.loads((last / "history.json").read_text())
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
        folder = workspace / "adapter"
        save(trainer.model, folder, job.base, policy.digest)
        steps = trainer.history
        counts = ("discarded", "prompt_tokens", "completion_tokens", "errors")
        total = {key: sum(step[key] for step in steps) for key in counts}
        rows = [{key: value for key, value in step.items() if key not in total} for step in steps]
        result = {"digest": adapter_digest(folder), "rollouts": steps[-1]["rollouts"], **total, "history": rows}
        if distributed.rank() == 0:
            publish_text(folder / "README.md", model_card(job, self, targets, result))
            for path in workspace.glob("checkpoints*"):
                shutil.rmtree(path)
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
