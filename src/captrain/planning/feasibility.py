"""Refusals of impossible configurations, each with its remedy, and warnings on possible ones."""

import math
from collections.abc import Iterator

from captrain.benchmarks import TOOLS, Verifiers, absences, in_workers, load_benchmark
from captrain.comparison import baselines, trained_baselines
from captrain.environments import EMBEDDED, demands_words, derivable
from captrain.errors import InfrastructureError, UserError
from captrain.planning.assumptions import LOCAL, USABLE_MEMORY, VLLM, EpisodeCost, split_sizes
from captrain.planning.estimate import Estimate
from captrain.run import GrpoSettings, Spec, build, component_class
from captrain.training import Demonstrations

PROGRAMMATIC = "captrain.capabilities.programmatic.ProgrammaticAnalyst"
UNAIDED = ("invalid_call", "premature_stop")
"""Causes that the programmatic analyst finds without a reference solution."""
TEMPLATES = "captrain.environments.templates.TemplateSynthesizer"
EXAMPLES = 20
"""Training tasks whose references are played."""


def problems(estimate: Estimate) -> list[UserError]:
    """List all that makes the settings impossible."""
    spec = estimate.spec
    return [*_rollouts(spec), *_synthesis(spec), *_demonstrations(spec), *_model(estimate)]


def _rollouts(spec: Spec) -> Iterator[UserError]:
    """Refuse groups that teach nothing, and more tasks than there are, of the benchmark's splits or an environment."""
    if spec.exploring().settings().get("temperature") == 0:
        yield UserError(
            "policy.temperature = 0 in training, too: every group of rollouts is constant there and teaches nothing",
            "set environments.temperature=1.0",
        )
    sizes: dict[str, int | None] = {**split_sizes(spec.benchmark)}
    kind = component_class(spec.benchmark)
    if isinstance(kind, type) and issubclass(kind, Verifiers):
        # Only the taskset itself knows its sizes: its worker is started, and nothing is played.
        try:
            target = load_benchmark(spec.benchmark, spec.machine)
            sizes = {"discovery": target.size("discovery"), "test": target.size("test")}
        except UserError as error:
            yield error
        except InfrastructureError as error:
            yield UserError(f"{spec.benchmark.target} cannot be looked at: {error}", "mend the environment")
    for key, split, count in (
        ("rollouts.tasks", "discovery", spec.rollouts.tasks),
        ("evaluation.tasks", "test", spec.evaluation.tasks),
    ):
        most = sizes.get(split)
        if most is not None and count > most:
            yield UserError(f"{key} = {count}, and split {split} has {most} tasks at most", f"set {key}={most}")
    group_size, seeds = spec.trainer.group_size, spec.environments.seeds
    tasks = spec.environments.groups + -(-spec.adapters.rollouts // group_size)
    if tasks > seeds:
        yield UserError(
            f"adapters.rollouts = {spec.adapters.rollouts} in groups of {group_size} and environments.groups = "
            f"{spec.environments.groups} need {tasks} tasks of an environment, and its passport is for "
            f"environments.seeds = {seeds}",
            f"set environments.seeds={tasks}, or lower adapters.rollouts",
        )


def _synthesis(spec: Spec) -> Iterator[UserError]:
    """Refuse environments that nobody could write, which would show after every rollout and label has been paid."""
    if spec.synthesizer.target != TEMPLATES or spec.benchmark.target == EMBEDDED:
        return
    try:
        derivable(spec.benchmark)
    except UserError as error:
        yield error
        return
    if not in_workers(spec.benchmark) and demands_words(load_benchmark(spec.benchmark), EXAMPLES):
        yield UserError(
            f"the score of {spec.benchmark.target} asks for words that nobody has told the agent: no environment "
            "derived from it would earn a passport",
            "let the policy say them, or score no words; `captrain check-benchmark` counts the tasks",
        )


def _demonstrations(spec: Spec) -> Iterator[UserError]:
    """Refuse a base that learns to act elsewhere: it would pass nothing, which shows after its training alone."""
    base = spec.base
    if base.model or base.pretrained or spec.policy.target not in (LOCAL, VLLM) or in_workers(spec.benchmark):
        return
    source = build(base.demonstrations, Demonstrations).tools if base.demonstrations else TOOLS
    offers = load_benchmark(spec.benchmark).tools
    lesson_tools, benchmark_tools = ({str(tool["function"]["name"]) for tool in tools} for tools in (source, offers))
    if not lesson_tools & benchmark_tools:
        source_name = base.demonstrations.target if base.demonstrations else "the service desk's demonstrations"
        yield UserError(
            f"the base learns to call {', '.join(sorted(lesson_tools)[:3])} from {source_name}, and "
            f"{spec.benchmark.target} offers {', '.join(sorted(benchmark_tools)[:3])}: it would pass nothing",
            "set base.demonstrations._target_=MODULE:CLASS (docs/own-benchmark.md), or policy=openai base.model=NAME",
        )


def _model(estimate: Estimate) -> Iterator[UserError]:
    """Refuse adapters that the base or its servers do not take, and what does not fit the GPUs; of a model that is not
    known here `captrain doctor` looks at its files."""
    spec, node, machine = estimate.spec, estimate.node, estimate.spec.machine
    # Experts that the base has not, or that its servers cannot act with.
    is_mixture = estimate.experts or bool(estimate.size and estimate.size.experts)
    if estimate.experts and spec.base.model is None and not spec.base.pretrained:
        yield UserError(
            "trainer.experts = true, and the embedded base is not a mixture of experts", "set trainer.experts=false"
        )
    elif estimate.vllm and is_mixture and not machine.vllm.gpus:
        yield mixture_without_gpus(estimate.model)
    if estimate.vllm and machine.vllm.gpus and spec.base.model and machine.accelerate.precision == "float64":
        yield UserError(
            f"machine.accelerate.precision = float64 trains {estimate.model} on the CPU, beside servers on GPUs",
            "set machine.accelerate.precision=bfloat16",
        )
    # A job that asks for other GPUs than servers, trainer and endpoint need, or for more than there are.
    if estimate.vllm and machine.vllm.gpus:
        serving, endpoint, slurm = estimate.servers(True), machine.asking.gpus, machine.slurm
        training = estimate.trainers()
        demand = f"machine.vllm asks for {serving} GPUs, and training for {training} more"
        first_node = training // machine.nodes + serving
        if training + serving + endpoint > node.gpus:
            more = f", and machine.asking for {endpoint}" if endpoint else ""
            yield UserError(
                f"{demand}{more}: {node.gpus} are planned with",
                "lower machine.vllm.replicas or machine.accelerate.processes, or state --gpus",
            )
        elif estimate.on_slurm and slurm is not None and slurm.gpus < first_node:
            shared = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
            yield UserError(
                f"machine.slurm.gpus = {slurm.gpus}, and {demand}{shared}", f"set machine.slurm.gpus={first_node}"
            )
    # Memory of one GPU, of the group that holds more.
    groups = estimate.memory_groups(training=True)
    parts = max(groups.values(), key=lambda group: sum(group.values()), default={})
    required, usable = sum(parts.values()), USABLE_MEMORY.value * node.memory
    if required > usable:
        shares = ", ".join(f"{name} {rounded(value)}" for name, value in parts.items())
        more = "plan with more --gpus or"
        if estimate.vllm:
            more = "set machine.vllm.gpus to more, machine.accelerate as machine=node8 has it, plan with more"
        yield UserError(
            f"{estimate.model} does not fit while it is trained: about {required:.0f} GiB of each of {node.gpus} GPUs "
            f"({shares}), and {usable:.0f} of {node.memory:g} can be used",
            f"{more} --gpu-memory, a smaller model, or a smaller machine.batch",
        )


def mixture_without_gpus(model: str) -> UserError:
    """Word the refusal of a mixture of experts that vLLM serves on a CPU."""
    return UserError(
        f"{model} is a mixture of experts, and vLLM's kernels for adapters of these need a GPU: machine.vllm.gpus = 0",
        "set machine.vllm.gpus to 1 or more, or choose policy=local",
    )


def rounded(value: float) -> str:
    """Round to two digits: an estimate has no more."""
    value = float(f"{value:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g} {name}"
    return f"{value:,g}"


def task_uses(estimate: Estimate) -> dict[str, float]:
    """Estimate how often stages that train on the target use each of its training tasks; {} where there is no end."""
    spec, tasks, uses = estimate.spec, split_sizes(estimate.spec.benchmark).get("training"), dict[str, float]()
    for name in trained_baselines() if tasks and estimate.trainable else ():
        row = baselines()[name]
        section = row.section(spec)
        group_size = section.group_size if isinstance(section, GrpoSettings) else None
        groups = estimate.baseline_rollouts(row) * row.target_share(spec) / (group_size or spec.trainer.group_size)
        if tasks and groups:
            uses[name] = groups / tasks
    return uses


def warnings(estimate: Estimate, money: float | None) -> list[str]:
    """List what to know that does not make the settings impossible; `money` is that of the whole run, None if not
    known."""
    spec, node, lacking = estimate.spec, estimate.node, absences(estimate.spec.benchmark)
    training = split_sizes(spec.benchmark).get("training")
    derives = spec.synthesizer.target == TEMPLATES and spec.benchmark.target != EMBEDDED
    scripted = spec.benchmark.settings().get("user", "") is None
    texts = {
        f"nothing is known of rollouts by {spec.policy.target} in {spec.benchmark.target}: counts only": (
            estimate.episode == EpisodeCost()
        ),
        f"the size of {estimate.model} is not known: state it with --parameters, in billions": (
            estimate.served and estimate.size is None
        ),
        "evaluation.trials = 1: the oracle bound and the causal test need two trials and are left out": (
            spec.evaluation.trials == 1
        ),
        "machine.asking.input_price and output_price, for a million tokens, show the money": money is None,
        "an endpoint that somebody else runs cannot be trained through: it stops after `environments`": (
            not estimate.trainable
        ),
        "the agent's own endpoint is taken to cost nothing: state what a million tokens cost by --price": (
            estimate.served and not estimate.vllm and node.price is None
        ),
        **{
            f"{name} uses each of {training} training tasks {math.ceil(times):,} times, in other trials": times > 1
            for name, times in task_uses(estimate).items()
        },
        "environments are derived for single capabilities: there will be none for pairs (pairs.count)": (
            spec.pairs.count > 0 and derives and not [*_synthesis(spec)]
        ),
        **dict.fromkeys(lacking.values(), True),
        f"without references the programmatic analyst finds {' and '.join(UNAIDED)}, and what nearly all passed "
        "rollouts do and failed ones lack: analyst=openai analyst.name=MODEL has no such bounds": (
            "reference" in lacking and spec.analyst.target == PROGRAMMATIC
        ),
        "benchmark.user is null: a script plays the user, for checks and not for results": estimate.served and scripted,
    }
    return [text for text, applies in texts.items() if applies]
