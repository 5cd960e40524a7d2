"""Projects, jobs and trainings on a tiny model, for the tests of training."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.letters import LETTERS
from support.stages import command_of
from support.waiting import until
from support.warm import ADDRESS, start

from captrain.contract import CheckedEnvironment
from captrain.records import Passport, digest, file_digest, publish_json
from captrain.run import compose_spec, publish_spec
from captrain.run.components import Component
from captrain.run.machine import Machine
from captrain.training.jobs import EnvironmentFile, Job, TrainingEnvironment

if TYPE_CHECKING:
    from captrain.training.sft import FineTuned

ROOT = Path(__file__).parents[2]


POLICY = {"temperature": 1.0, "max_turns": 3, "max_tokens": 8}


GRPO = {
    "group_size": 4, "groups_per_step": 2, "epochs": 2, "rank": 4, "alpha": 8, "learning_rate": 1e-2, "clip": 0.2,
    "checkpoint_every": 1,
}  # fmt: skip


def job(base: Path, environment: Path, **changes: Any) -> Job:
    sampling = {**POLICY, **changes.pop("policy", {})}
    policy = Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **sampling})
    trainer = Component.model_validate(
        {"_target_": "captrain.training.recipe.GRPO", **GRPO, **changes.pop("trainer", {})}
    )
    place = TrainingEnvironment(
        "letters", EnvironmentFile(environment.parent, passport(environment)), changes.pop("skip", 2)
    )
    settings: dict[str, Any] = {"name": "letters", "rollouts": 24, "seed": 0, "environments": (place,), **changes}
    return Job(base=base, policy=policy, trainer=trainer, machine=Machine(workers=1, batch=1), **settings)


def passport(path: Path, trusted: bool = True) -> Passport:
    """Return a passport for an environment file as it is now. A missing file gets an outdated one."""
    written = file_digest(path) if path.exists() else ""
    return Passport(
        capability=path.stem, environment=digest(path.stem, written), attempt=0, passed=True, trusted=trusted,
        calibration_tasks=3, checks=[],
    )  # fmt: skip


def synthesized(folder: Path, name: str) -> None:
    """Write an environment with its passport, as the environments stage does."""
    path = folder / f"results/environments/{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LETTERS.format(name=name, flat=0))
    publish_json(path.with_suffix(".passport.json"), passport(path))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Work in a folder, so that workspaces and outputs are written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        yield folder


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file as load_tensors

    return load_tensors(folder / "adapter_model.safetensors")


def moved(folder: Path) -> float:
    """Measure how far the adapter is from the identity."""
    return max(tensor.abs().max().item() for name, tensor in weights(folder).items() if "lora_B" in name)


def project(folder: Path, base: Path, *names: str, rollouts: int = 48, more: Sequence[str] = ()) -> Path:
    """Make a project up to environments with passports, with a tiny random base; `more` are overrides."""
    shutil.copytree(ROOT / "stages", folder / "stages")
    overrides = [f"trainer.{key}={value}" for key, value in GRPO.items()]
    overrides += [f"policy.{key}={value}" for key, value in POLICY.items()]
    overrides += [f"adapters.rollouts={rollouts}", "machine.workers=1", *more]
    publish_spec(compose_spec("smoke", 0, overrides, ROOT / "conf"), folder / "results/spec.yaml")
    shutil.copytree(base, folder / "artifacts/base")
    for name in names:
        synthesized(folder, name)
    return folder


def published(folder: Path, name: str = "adapters") -> dict[str, bytes]:
    """Read the files that a stage has published."""
    paths = [path for top in ("artifacts", "results") for path in (folder / top / name).rglob("*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def kill(folder: Path, name: str, warm: Path, *paths: Path) -> None:
    """Run a stage in a process, and kill it between its first checkpoint and its end.

    Args:
        warm: the fixture of that name.
        paths: further import paths of the stage.
    """
    imported = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    running = start(warm / ADDRESS, command_of(name), folder, {**os.environ, "PYTHONPATH": imported})
    mark = ".cache/adapters/*/checkpoints/checkpoint-*/history.json"
    until(lambda: [*folder.glob(mark)] or not running.alive())
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not published(folder, name) and not list(folder.glob(".cache/adapters/*/result.json"))
    assert list(folder.glob(".cache/adapters/*/checkpoints/checkpoint-*/history.json"))


def fine_tuned(base: Path, folder: Path, machine: Machine) -> "FineTuned":
    """Fine-tune an adapter on twelve demonstrations, four per update."""
    from captrain.agents import load_policy
    from captrain.training.jobs import Learner
    from captrain.training.sft import Demonstration, FineTuning, Settings, fine_tune

    sampling = Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **POLICY})
    rows = [Demonstration([5 + (7 * row + place) % 40 for place in range(9 + row)], [0] * 4 + [1] * (5 + row))
            for row in range(12)]  # fmt: skip
    settings: Settings = {
        "rank": 4, "alpha": 8, "epochs": 2, "learning_rate": 1e-2, "batch": 4, "seed": 0,
        "targets": ["q_proj", "v_proj", "down_proj"], "experts": False,
    }  # fmt: skip
    with inside(folder):
        lesson = FineTuning("lesson", base, settings, rows, {}, "", machine)
        adapter = fine_tune(lesson, load_policy(sampling, base, machine, Learner))
    return replace(adapter, folder=folder / adapter.folder)


def trainer_of(one: Job) -> Any:
    """Return TRL's trainer of a job before its first step."""
    from captrain.agents import LocalPolicy
    from captrain.run import build
    from captrain.training import recipe
    from captrain.training.grpo import PolicyTrainer

    policy, trainer = build(one.policy, LocalPolicy, model=one.base), build(one.trainer, recipe.GRPO)
    environment = one.environments[0].source
    assert isinstance(environment, EnvironmentFile)
    return PolicyTrainer(trainer, one, policy, targets_of(one), environment.folder)


def targets_of(one: Job) -> list[CheckedEnvironment]:
    """List the environments that a job trains in."""
    return [place.target(one.machine) for place in one.environments]


def groups(count: int, size: int = 4) -> list[dict[str, str]]:
    """Return the rows of a batch, as TRL gives them to the trainer."""
    return [{"prompt": f"group {index // size}"} for index in range(count * size)]


def mixture_of(tiny: Path, folder: Path) -> Path:
    """Save a tiny mixture of experts with random weights, and the tokenizer of the tiny model."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def interrupted(job: Job, after: int) -> Path:
    """Interrupt a training after some steps and return the folder of its checkpoints."""
    import pytest

    from captrain.training.grpo import PolicyTrainer
    from captrain.training.runs import train

    play = PolicyTrainer.play

    def pull_the_plug(self: Any, prompts: list[str]) -> Any:
        if len(self.history) == after:
            raise KeyboardInterrupt
        return play(self, prompts)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PolicyTrainer, "play", pull_the_plug)
        train(job)
    [checkpoints] = Path(".cache/adapters").glob("*/checkpoints")
    return checkpoints
