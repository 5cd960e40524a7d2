"""What precedes and follows the GRPO of gates (`captrain.training.gates`): their fine-tuning, gates without training,
and a look at the decisions of trained ones."""

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from captrain.contract import CheckedEnvironment
from captrain.errors import UserError
from captrain.models import MixtureParts, adapter_digest, mixture_parts, require_trained
from captrain.records import Rollout, Task, digest, publish_text
from captrain.run import GateStartSettings, Spec, code_digest
from captrain.training.jobs import FineTuned, Trained, TrainingEnvironment, learner
from captrain.training.sft import Demonstration, FineTuning, fine_tune, fine_tuning_settings
from captrain.training.solutions import NO_FAULTS, solution_rows

PURPOSE = "the gates of a mixture"


@dataclass(frozen=True)
class GateLesson:
    """Gates to fine-tune on solutions of environments, or on rollouts.

    Args:
        name: of the gates.
        row: whose gates they are.
        spec: the whole specification.
        settings: of the fine-tuning.
        base: folder of the base model.
        parts: the frozen parts of the mixture.
        environments: of which solutions are taken, on training tasks after those of calibration.
        rollouts: whose tokens are taken.
    """

    name: str
    row: str
    spec: Spec
    settings: GateStartSettings
    base: Path
    parts: MixtureParts
    environments: tuple[TrainingEnvironment, ...]
    rollouts: tuple[Rollout, ...]


def teach_gates(lesson: GateLesson) -> FineTuned:
    """Fine-tune gates from zero and cache them in their workspace.

    Raises:
        UserError: the base cannot be trained, or there is nothing to learn from.
    """
    spec, most, left_out = lesson.spec, lesson.settings.demonstrations, Counter[str]()
    policy = learner(spec.exploring(), lesson.base, spec.machine, PURPOSE, f"set baselines.{lesson.row}.run to false")
    parts = dict[str, list[Demonstration]]()
    for rollout in lesson.rollouts:
        parts.setdefault(rollout.environment, []).append(Demonstration(rollout.token_ids, rollout.mask))
    for environment in lesson.environments:
        target = environment.target(spec.machine)
        tasks = target.tasks("training", environment.skip + most, fewer=True)[environment.skip :]
        parts[environment.name] = solution_rows(target, tasks, policy, left_out, NO_FAULTS)
    rows = [row for part in parts.values() for row in part[:most]]
    if not rows:
        raise UserError(
            f"baselines.{lesson.row}: no rollout in calibration or diagnosis passed, so gates have no start",
            f"set baselines.{lesson.row}.start.epochs=0",
        )
    card = "".join(f"| of these from {name} | {len(part[:most])} |\n" for name, part in parts.items())
    settings = fine_tuning_settings(spec, lesson.settings.epochs, lesson.settings.learning_rate)
    job = FineTuning(
        lesson.name,
        lesson.base,
        settings,
        rows,
        dict(sorted(left_out.items())),
        card,
        spec.machine,
        [code_digest(teach_gates)],
        lesson.row,
        lesson.parts,
    )
    return fine_tune(job, policy)


def untrained_gates(name: str, base: Path, spec: Spec, parts: MixtureParts, seed: int | None) -> Trained:
    """Save gates without training. Without a seed they are equal.

    With a seed they are random: their logits have a standard deviation of about 1.
    """
    from captrain.models import Mixture, draw_normal, load_module, save_mixture  # torch

    mixture = Mixture(load_module(base, "float64"), parts)
    if seed is not None:
        random = np.random.Generator(np.random.PCG64(seed))
        for gate in mixture.linears:
            draw_normal(gate.weight, 1 / math.sqrt(gate.weight.shape[1]), random)
    folder = Path(".cache") / name.partition(":")[0] / digest(name, spec.seed, *parts.identity())
    shutil.rmtree(folder, ignore_errors=True)
    save_mixture(mixture, folder)
    publish_text(folder / "README.md", f"# {name}\n\nA mixture of LoRA adapters with untrained gates.\n")
    return Trained(name, adapter_digest(folder), folder)


@dataclass(frozen=True)
class Prompts:
    """Tasks of an environment; `opened_gates` reads their prompts."""

    environment: CheckedEnvironment
    tasks: list[Task]


@dataclass(frozen=True)
class Decisions:
    """The mean decision for some prompts: the shares of each gate, by adapter; the base is the last."""

    prompts: int
    adapters: Sequence[str]
    shares: list[list[float]]


def opened_gates(spec: Spec, base: Path, folder: Path, places: Mapping[str, Prompts]) -> dict[str, Decisions]:
    """Return the mean decision of a saved mixture for the prompts of each place. Opening a task costs no rollout.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        folder: of the mixture.
        places: tasks by the name of their place.
    """
    import torch

    from captrain.models import Mixture, load_gates, load_module

    policy = learner(spec.exploring(), base, spec.machine, PURPOSE)
    module, parts = load_module(base, "float64").eval(), mixture_parts(folder)
    for adapter in parts.adapters.values():
        require_trained(adapter, "mixture")
    mixture = Mixture(module, replace(parts, decide="prompt"))
    load_gates(mixture, folder)
    found = dict[str, Decisions]()
    for place, prompts in places.items():
        chat, shares = policy.chat(prompts.environment.tools), list[torch.Tensor]()
        for task in prompts.tasks:
            episode = prompts.environment.open(task)
            with torch.no_grad():
                module.base_model(input_ids=torch.tensor([chat.prompt(episode.messages)]), use_cache=False)
            shares.append(mixture.decisions[0])
            episode.close()
        mean = torch.stack(shares).mean(0)
        found[place] = Decisions(len(shares), [*parts.adapters, "base"], mean.tolist())
    return found
