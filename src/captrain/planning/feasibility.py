"""Refusals of impossible configurations, each with its remedy, and warnings on possible ones."""

import math
import random
from collections.abc import Iterator, Sequence

from captrain.benchmarks import TOOLS, Demonstrations, StandardEnvironment, absences, in_workers, load_benchmark
from captrain.config import SLEEP, Spec, build, component_class
from captrain.contract import calls_of
from captrain.environments import EMBEDDED, demands_words, derivable
from captrain.errors import InfrastructureError, UserError
from captrain.planning.assumptions import LOCAL, USABLE_MEMORY, VLLM, EpisodeCost, split_sizes
from captrain.planning.basis import task_uses
from captrain.planning.cost import rounded
from captrain.planning.estimate import Estimate
from captrain.records import Message, Split

PROGRAMMATIC = "captrain.capabilities.programmatic.ProgrammaticAnalyst"
UNAIDED = ("invalid_call", "premature_stop")
"""Causes that the programmatic analyst finds without a reference solution."""
TEMPLATES = "captrain.environments.templates.TemplateSynthesizer"
EXAMPLES = 20
"""Training tasks whose references are played."""


def problems(estimate: Estimate) -> list[UserError]:
    """List all that makes the settings impossible."""
    spec = estimate.spec
    return [
        *_temperature(spec),
        *_tasks(spec),
        *_standard(spec),
        *_synthesis(spec),
        *_demonstrations(spec),
        *_experts(estimate),
        *_gpus(estimate),
        *_memory(estimate),
    ]


def _temperature(spec: Spec) -> list[UserError]:
    if spec.exploring().settings().get("temperature") != 0:
        return []
    problem = "policy.temperature = 0 in training, too: every group of rollouts is constant there and teaches nothing"
    return [UserError(problem, "set environments.temperature=1.0")]


def _synthesis(spec: Spec) -> list[UserError]:
    """Refuse environments that nobody could write, which would show after every rollout and label has been paid."""
    if spec.synthesizer.target != TEMPLATES or spec.benchmark.target == EMBEDDED:
        return []
    try:
        derivable(spec.benchmark)
    except UserError as error:
        return [error]
    if in_workers(spec.benchmark) or not demands_words(load_benchmark(spec.benchmark), EXAMPLES):
        return []
    return [
        UserError(
            f"the score of {spec.benchmark.target} asks for words that nobody has told the agent: no environment "
            "derived from it would earn a passport",
            "let the policy say them, or score no words; `captrain check-benchmark` counts the tasks",
        )
    ]


def _demonstrations(spec: Spec) -> list[UserError]:
    """Refuse a base that learns to act elsewhere: it would pass nothing, which shows after its training alone."""
    base = spec.base
    if base.model or base.pretrained or spec.policy.target not in (LOCAL, VLLM) or in_workers(spec.benchmark):
        return []
    source = build(base.demonstrations, Demonstrations).tools if base.demonstrations else TOOLS
    offers = load_benchmark(spec.benchmark).tools
    lesson_tools, benchmark_tools = ({str(tool["function"]["name"]) for tool in tools} for tools in (source, offers))
    if lesson_tools & benchmark_tools:
        return []
    source_name = base.demonstrations.target if base.demonstrations else "the service desk's demonstrations"
    return [
        UserError(
            f"the base learns to call {', '.join(sorted(lesson_tools)[:3])} from {source_name}, and "
            f"{spec.benchmark.target} offers {', '.join(sorted(benchmark_tools)[:3])}: it would pass nothing",
            "set base.demonstrations._target_=MODULE:CLASS (docs/own-benchmark.md), or policy=openai base.model=NAME",
        )
    ]


def _unlike_references(spec: Spec) -> list[str]:
    """Say that a base is taught dialogues which solve nothing, as far as the order of their calls shows it."""
    base = spec.base
    if base.demonstrations is None or spec.policy.target not in (LOCAL, VLLM) or in_workers(spec.benchmark):
        return []
    target, source = load_benchmark(spec.benchmark), build(base.demonstrations, Demonstrations)
    most = target.size("discovery")
    tasks = target.tasks("discovery", EXAMPLES if most is None else min(EXAMPLES, most))
    solved = [reference for task in tasks if (reference := target.reference(task))]
    rng = random.Random(spec.seed)
    dialogues = [source.demonstration(rng)[1] for _ in range(EXAMPLES * 5)]
    orders = {tuple(_called(messages)) for messages in dialogues}
    if not solved or any(tuple(_called(reference)) in orders for reference in solved):
        return []
    return [
        f"none of {len(dialogues)} demonstrations makes the calls of any of {len(solved)} references: the base may "
        "pass nothing; see base.demonstrations, and after `dvc repro base` run `captrain doctor --play 20`"
    ]


def _called(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the names of the tools that a dialogue calls, in order."""
    for message in messages:
        if message["role"] == "assistant":
            yield from (name for name, _ in calls_of(message))


def _standard(spec: Spec) -> list[UserError]:
    """Look for faults of an environment of another standard, which only looking at it tells.

    Its worker is started, and nothing is played.
    """
    if not _is_standard(spec):
        return []
    demands: dict[Split, tuple[str, int]] = {
        "discovery": ("rollouts.tasks", spec.rollouts.tasks),
        "test": ("evaluation.tasks", spec.evaluation.tasks),
    }
    errors = list[UserError]()
    try:
        target = load_benchmark(spec.benchmark, spec.machine)
        for split, (key, count) in demands.items():
            if (most := target.size(split)) is not None and count > most:
                errors.append(UserError(f"{key} = {count}, and split {split} has {most} tasks", f"set {key}={most}"))
    except UserError as error:
        errors.append(error)
    except InfrastructureError as error:
        errors.append(UserError(f"{spec.benchmark.target} cannot be looked at: {error}", "mend the environment"))
    return errors


def _is_standard(spec: Spec) -> bool:
    kind = component_class(spec.benchmark)
    return isinstance(kind, type) and issubclass(kind, StandardEnvironment)


def _experts(estimate: Estimate) -> list[UserError]:
    """Refuse adapters of experts that the base has not, or that its servers cannot act with; of a model that is not
    known here `captrain doctor` asks the servers themselves."""
    spec = estimate.spec
    if estimate.experts and spec.base.model is None and not spec.base.pretrained:
        problem = "trainer.experts = true, and the embedded base is not a mixture of experts"
        return [UserError(problem, "set trainer.experts=false")]
    is_mixture = estimate.experts or bool(estimate.size and estimate.size.experts)
    if not (estimate.vllm and is_mixture) or spec.machine.vllm.gpus:
        return []
    problem = f"{estimate.model} is a mixture of experts, and vLLM's kernels for adapters of these need a GPU: "
    return [UserError(f"{problem}machine.vllm.gpus = 0", "set machine.vllm.gpus to 1 or more, or choose policy=local")]


def _gpus(estimate: Estimate) -> list[UserError]:
    """Refuse a job that asks for other GPUs than servers, trainer and endpoint need, or for more than there are."""
    machine, node = estimate.spec.machine, estimate.node
    if not estimate.vllm or not machine.vllm.gpus:
        return []
    serving, endpoint = estimate.servers(True), machine.asking.gpus
    training = estimate.at_once * machine.accelerate.processes
    demand = f"machine.vllm asks for {serving} GPUs, and training for {training} more"
    if machine.vllm.sleeps and (staleness := estimate.spec.trainer.settings().get("staleness")):
        return [
            UserError(
                f"trainer.staleness = {staleness} plays while it trains, and servers that sleep do so then",
                f"set trainer.staleness=0, or leave {SLEEP} out of machine.vllm.arguments",
            )
        ]
    if machine.together(training, serving) + endpoint > node.gpus:
        more = f", and machine.asking for {endpoint}" if endpoint else ""
        remedy = "lower machine.vllm.replicas or machine.accelerate.processes, or state --gpus"
        return [UserError(f"{demand}{more}: {node.gpus} are planned with", remedy)]
    slurm, gpus = machine.slurm, machine.together(training // machine.nodes, serving)  # of the first node
    if machine.launcher == "slurm" and slurm is not None and slurm.gpus < gpus:
        shared = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
        problem = f"machine.slurm.gpus = {slurm.gpus}, and {demand}{shared}"
        return [UserError(problem, f"set machine.slurm.gpus={gpus}")]
    return []


def _tasks(spec: Spec) -> list[UserError]:
    """Refuse more tasks than there are, of the benchmark's splits or of an environment."""
    sizes, group_size, errors = split_sizes(spec.benchmark), spec.trainer.group_size, []
    demands = {
        "rollouts.tasks": ("discovery", spec.rollouts.tasks),
        "evaluation.tasks": ("test", spec.evaluation.tasks),
    }
    for key, (split, count) in demands.items():
        if count > (most := sizes.get(split, count)):
            errors.append(
                UserError(f"{key} = {count}, and split {split} has {most} tasks at most", f"set {key}={most}")
            )
    tasks, seeds = spec.environments.groups + -(-spec.adapters.rollouts // group_size), spec.environments.seeds
    if tasks > seeds:
        errors.append(
            UserError(
                f"adapters.rollouts = {spec.adapters.rollouts} in groups of {group_size} and environments.groups = "
                f"{spec.environments.groups} need {tasks} tasks of an environment, and its passport is for "
                f"environments.seeds = {seeds}",
                f"set environments.seeds={tasks}, or lower adapters.rollouts",
            )
        )
    return errors


def _memory(estimate: Estimate) -> list[UserError]:
    parts, node = estimate.memory_parts(training=True), estimate.node
    demand, usable = sum(parts.values()), USABLE_MEMORY.value * node.memory
    if demand <= usable:
        return []
    shares = ", ".join(f"{name} {rounded(value)}" for name, value in parts.items())
    problem = (
        f"{estimate.model} does not fit while it is trained: about {demand:.0f} GiB of each of {node.gpus} GPUs "
        f"({shares}), and {usable:.0f} of {node.memory:g} can be used"
    )
    more = "plan with more --gpus or"
    if estimate.vllm:
        more = "set machine.vllm.gpus to more, machine.accelerate as machine=node8 has it, plan with more"
    return [UserError(problem, f"{more} --gpu-memory, a smaller model, or a smaller machine.batch")]


def warnings(estimate: Estimate, money: float | None) -> list[str]:
    """List what to know that does not make the settings impossible; `money` is that of the whole run, None if not
    known."""
    spec, texts = estimate.spec, list[str]()
    if estimate.episode == EpisodeCost():
        texts.append(f"nothing is known of rollouts by {spec.policy.target} in {spec.benchmark.target}: counts only")
    if estimate.served and estimate.size is None:
        texts.append(f"the size of {estimate.model} is not known: state it with --parameters, in billions")
    if spec.evaluation.trials == 1:
        texts.append("evaluation.trials = 1: the oracle bound and the causal test need two trials and are left out")
    if estimate.vllm and spec.machine.vllm.sleeps and (parts := estimate.memory_groups(True).get("servers, awake")):
        resident = sum(amount for name, amount in parts.items() if name.startswith("trainer's"))
        share = math.floor(100 * (USABLE_MEMORY.value - resident / estimate.node.memory)) / 100
        texts.append(
            f"the trainer's weights stay: machine.vllm.arguments needs --gpu-memory-utilization={share} or less"
        )
    if money is None:
        texts.append("machine.asking.input_price and output_price, for a million tokens, show the money")
    if not estimate.trainable:
        texts.append("an endpoint that somebody else runs cannot be trained through: it stops after `environments`")
    if estimate.served and not estimate.vllm and estimate.node.price is None:
        texts.append("the agent's own endpoint is taken to cost nothing: state what a million tokens cost by --price")
    for name, times in task_uses(estimate).items():
        if times > 1:
            texts.append(
                f"{name} uses each of {split_sizes(spec.benchmark)['training']} training tasks "
                f"{math.ceil(times):,} times, in other trials"
            )
    derives = spec.synthesizer.target == TEMPLATES and spec.benchmark.target != EMBEDDED
    texts += _unlike_references(spec)
    if spec.pairs.count and derives and not _synthesis(spec):
        texts.append("environments are derived for single capabilities: there will be none for pairs (pairs.count)")
    lacking = absences(spec.benchmark)
    texts += lacking.values()
    if "reference" in lacking and spec.analyst.target == PROGRAMMATIC:
        texts.append(
            f"without references the programmatic analyst finds {' and '.join(UNAIDED)}, and what nearly all passed "
            "rollouts do and failed ones lack: analyst=openai analyst.name=MODEL has no such bounds"
        )
    if estimate.served and spec.benchmark.settings().get("user", "") is None:
        texts.append("benchmark.user is null: a script plays the user, for checks and not for results")
    return texts
