"""Gates before and after GRPO (`captrain.training.gates`): fits them to prompts, makes untrained gates for comparison,
and reads the decisions of trained gates.

The fit is the supervised start in the paper's revised abstract. Each prompt is labelled with the adapters that the
gates should open: a prompt of an environment with its adapter, a prompt of a pair with two adapters, and a prompt of a
target task that the base passed with none. This costs no rollouts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.models import (
    BASE_SLOT,
    MixtureParts,
    adapter_digest,
    mixture_parts,
    mixture_use,
    parse_composition,
    require_trained,
)
from captrain.records import Task, digest, publish_text
from captrain.run import Spec
from captrain.training.jobs import Learner, Trained, TrainingEnvironment, learner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from captrain.models import Mixture

Matrix = NDArray[np.float64]
PURPOSE = "the gates of a mixture"
ROUNDS = 2
"""Number of fits. The state that a gate reads depends on the gates of earlier blocks, which weigh all slots equally in
the first fit."""
DIGITS = 4
"""Decimals of fitted weights, so that rounding errors of the solver do not change them."""
UNSEEN = 10.0
"""Logit of a slot that all prompts should open. Its negative is the logit of a slot that no prompt should open."""


@dataclass(frozen=True)
class Prompts:
    """Tasks of an environment whose prompts are read. The tasks are not played."""

    environment: CheckedEnvironment
    tasks: list[Task]

    def tokens(self, policy: Learner) -> list[list[int]]:
        """Return the tokens of each task's prompt. Opening a task costs no rollout."""
        chat, found = policy.chat(self.environment.tools), list[list[int]]()
        for task in self.tasks:
            episode = self.environment.open(task)
            found.append(chat.prompt(episode.messages))
            episode.close()
        return found


@dataclass(frozen=True)
class GateLesson:
    """A fit of gates to prompts.

    Args:
        name: name of the gates.
        row: the row of the table that the gates belong to.
        spec: the whole specification.
        base: folder of the base model.
        parts: the frozen parts of the mixture.
        tasks: number of training tasks per environment, after those of calibration.
        environments: training environments. The name is that of an adapter, or "a+b" for several.
        passed: tasks of the target that the base passed.
    """

    name: str
    row: str
    spec: Spec
    base: Path
    parts: MixtureParts
    tasks: int
    environments: tuple[TrainingEnvironment, ...]
    passed: tuple[Task, ...]


def teach_gates(lesson: GateLesson) -> Trained:
    """Fit the gates to the lesson's prompts and save them. If prompts open fewer than two slots, gates stay zero.

    Raises:
        UserError: the base cannot be trained.
    """
    from captrain.models import Mixture, load_module  # torch

    # 1. Read prompts, each with the slots that the gates should open for it.
    names = lesson.parts.slots
    spec, machine = lesson.spec, lesson.spec.machine
    policy = learner(spec.exploring(), lesson.base, machine, PURPOSE, f"set baselines.{lesson.row}.run to false")
    places = {BASE_SLOT: Prompts(load_benchmark(spec.benchmark, machine), [*lesson.passed])}
    for environment in lesson.environments:
        target = environment.target(machine)
        tasks = target.tasks("training", environment.skip + lesson.tasks, fewer=True)[environment.skip :]
        places[environment.name] = Prompts(target, tasks)
    prompts, opened, counts = list[list[int]](), list[list[bool]](), dict[str, int]()
    for name, place in places.items():
        wanted = {name} if name == BASE_SLOT or name in names else {*parse_composition(name)}
        if wanted <= {*names, BASE_SLOT}:  # else an adapter is missing
            read = place.tokens(policy)
            prompts += read
            opened += [[slot in wanted for slot in names]] * len(read)
            counts[name] = len(read)

    # 2. Fit all gates, as often as a gate reads what others open.
    module = load_module(lesson.base, machine.accelerate.precision).eval()
    mixture = Mixture(module, replace(lesson.parts, decide="prompt"))
    for _ in range(ROUNDS if lesson.parts.scope == "layer" else 1):
        _fit(mixture, module, prompts, np.array(opened))
    mixture.parts = lesson.parts
    rows = "".join(f"| {name} | {count} |\n" for name, count in counts.items())
    card = f"The gates were fitted to prompts of these:\n\n| to open | prompts |\n|---|---|\n{rows}"
    return _saved(mixture, lesson.name, spec, card)


def _decide(mixture: "Mixture", base: "PreTrainedModel", prompt: Sequence[int]) -> "Mixture":
    """Run the base on a prompt, so that the gates decide, and return the mixture."""
    import torch

    with torch.no_grad():
        base.base_model(input_ids=torch.tensor([prompt], device=base.device), use_cache=False)
    return mixture


def _fit(
    mixture: "Mixture", base: "PreTrainedModel", prompts: Sequence[Sequence[int]], opened: NDArray[np.bool_]
) -> None:
    """Fit each gate by logistic regression to the states that it reads with the current gates.

    Args:
        mixture: mixture whose gates decide at the prompt's last token.
        base: the base of the mixture.
        prompts: token ids of each prompt.
        opened: (prompts, slots), whether the gates should open a slot for a prompt.
    """
    import torch

    from captrain.models import to_grid

    if np.count_nonzero(opened.any(0)) < 2:
        return
    states = np.stack([_decide(mixture, base, prompt).states[0].double().cpu().numpy() for prompt in prompts])
    fit = _multinomial if mixture.parts.activation == "softmax" else _binary
    for index, gate in enumerate(mixture.linears):
        with torch.no_grad():
            for parameter, values in zip((gate.weight, gate.bias), fit(states[:, index], opened), strict=True):
                parameter.copy_(torch.from_numpy(values.round(DIGITS)))
                to_grid(parameter)


def _multinomial(states: Matrix, opened: NDArray[np.bool_]) -> tuple[Matrix, Matrix]:
    """Return weights, (slots, hidden), and biases whose softmax is the share of each slot.

    A prompt with several slots counts as one of each, with its weight divided. All slots have the same total weight.
    """
    from sklearn.linear_model import LogisticRegression

    rows, targets = opened.nonzero()
    model = LogisticRegression(class_weight="balanced", max_iter=2000)
    model.fit(states[rows], targets, sample_weight=1 / opened.sum(1)[rows])
    weight, bias = np.zeros((opened.shape[1], states.shape[1])), np.full(opened.shape[1], -UNSEEN)
    slopes, offsets = np.asarray(model.coef_), np.asarray(model.intercept_)
    if len(slopes) == 1:  # the second of two slots against the first
        slopes, offsets = np.concatenate([-slopes, slopes]) / 2, np.concatenate([-offsets, offsets]) / 2
    weight[model.classes_], bias[model.classes_] = slopes, offsets
    return weight, bias


def _binary(states: Matrix, opened: NDArray[np.bool_]) -> tuple[Matrix, Matrix]:
    """Return weights, (slots, hidden), and biases whose sigmoid is the probability of each slot by itself."""
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((opened.shape[1], states.shape[1])), np.where(opened.any(0), UNSEEN, -UNSEEN)
    for slot, wanted in enumerate(opened.T):
        if wanted.any() and not wanted.all():
            model = LogisticRegression(class_weight="balanced", max_iter=2000).fit(states, wanted)
            weight[slot], bias[slot] = np.asarray(model.coef_)[0], np.asarray(model.intercept_)[0]
    return weight, bias


def untrained_gates(name: str, base: Path, spec: Spec, parts: MixtureParts, seed: int | None) -> Trained:
    """Save gates without training: equal gates without a seed, random gates with one.

    The logits of random gates have a standard deviation of about 1.
    """
    from captrain.models import Mixture, draw_normal, load_module  # torch

    mixture = Mixture(load_module(base, spec.machine.accelerate.precision), parts)
    if seed is not None:
        random = np.random.Generator(np.random.PCG64(seed))
        for gate in mixture.linears:
            draw_normal(gate.weight, 1 / math.sqrt(gate.weight.shape[1]), random)
    return _saved(mixture, name, spec, "The gates are not trained.")


def _saved(mixture: "Mixture", name: str, spec: Spec, card: str) -> Trained:
    """Save a mixture of a row with its model card."""
    from captrain.models import save_mixture

    folder = Path(".cache") / name.partition(":")[0] / digest(name, spec.seed, mixture.parts.config().model_dump())
    save_mixture(mixture, folder)
    publish_text(
        folder / "README.md", f"# {name}\n\nMixture of LoRA adapters.\n\n{card}\n\n{mixture_use(mixture.parts)}\n"
    )
    return Trained(name, adapter_digest(folder), folder)


@dataclass(frozen=True)
class Decisions:
    """The mean decision for some prompts. `weights` is (gates, slots): the weight that each gate gives to each slot."""

    prompts: int
    slots: Sequence[str]
    weights: list[list[float]]


def opened_gates(spec: Spec, base: Path, folder: Path, places: Mapping[str, Prompts]) -> dict[str, Decisions]:
    """Return the mean decision of a saved mixture for each place, over its prompts. Opening a task costs no rollout.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        folder: folder of the mixture.
        places: name of a place -> its tasks.
    """
    import torch

    from captrain.models import Mixture, load_gates, load_module

    policy = learner(spec.exploring(), base, spec.machine, PURPOSE)
    module, parts = load_module(base, spec.machine.accelerate.precision).eval(), mixture_parts(folder)
    for adapter in parts.adapters.values():
        require_trained(adapter, "mixture")
    mixture = Mixture(module, replace(parts, decide="prompt"))
    load_gates(mixture, folder)
    found = dict[str, Decisions]()
    for place, prompts in places.items():
        weights = list[torch.Tensor]()
        for tokens in prompts.tokens(policy):
            weights.append(_decide(mixture, module, tokens).decisions[0])
        mean = torch.stack(weights).mean(0)
        found[place] = Decisions(len(weights), parts.slots, mean.tolist())
    return found
