"""Refusals (reasons why a configuration cannot run) for `captrain plan` and `captrain doctor`, and a plan's warnings.

A refusal names the setting to change. Refusals follow from the settings alone, with one exception: an installed
benchmark is asked for its tasks. Checks of the machine are in `captrain.planning.doctor`.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from captrain.agents import RANKS
from captrain.benchmarks import TOOLS, Verifiers, absences, in_workers, load_benchmark
from captrain.capabilities import CAUSES
from captrain.comparison import baselines, trained_baselines
from captrain.environments import EMBEDDED, demands_words, derivable
from captrain.errors import InfrastructureError, UserError
from captrain.planning.assumptions import LOCAL, USABLE_MEMORY, VLLM, EpisodeCost, split_sizes
from captrain.planning.estimate import RunEstimate
from captrain.records import counted
from captrain.run import GrpoSettings, Spec, build, component_class
from captrain.training import Demonstrations

PROGRAMMATIC = "captrain.capabilities.programmatic.ProgrammaticAnalyst"
UNREFERENCED = [name for name, cause in CAUSES.items() if cause.is_unreferenced]
"""Causes that the programmatic analyst can find without a reference solution."""
TEMPLATES = "captrain.environments.templates.TemplateSynthesizer"
EXAMPLES = 20
"""Number of training tasks whose references are played to check a benchmark."""


class Refusal(NamedTuple):
    """Reason why the settings cannot run: the setting to change, the problem, and the remedy."""

    key: str
    problem: str
    remedy: str


def refusals(estimate: RunEstimate) -> list[Refusal]:
    """Return all reasons why the settings cannot run."""
    spec = estimate.spec
    cases = [*_rollouts(spec), *_model(estimate), *_gpus(estimate)]
    return [
        *_benchmark(spec),
        *(refusal for applies, refusal in cases if applies),
        *_memory(estimate),
        *_host_memory(estimate),
    ]


def _rollouts(spec: Spec) -> list[tuple[bool, Refusal]]:
    """Refuse settings in which all rollouts of a group are equal, or that need more tasks than an environment has."""
    group_size, groups, seeds = spec.trainer.group_size, spec.environments.groups, spec.environments.seeds
    tasks = groups + -(-spec.adapters.rollouts // group_size)
    return [
        (
            spec.exploring().settings().get("temperature") == 0,
            Refusal(
                "environments.temperature",
                "policy.temperature = 0 also holds in training: all rollouts of a group are equal and teach nothing",
                "set environments.temperature=1.0",
            ),
        ),
        (
            tasks > seeds,
            Refusal(
                "environments.seeds",
                f"adapters.rollouts = {spec.adapters.rollouts} in groups of {group_size} and environments.groups = "
                f"{groups} need {counted(tasks, 'task')} of an environment; its passport covers only "
                f"environments.seeds = {seeds}",
                f"set environments.seeds={tasks}, or lower adapters.rollouts",
            ),
        ),
    ]


def _benchmark(spec: Spec) -> list[Refusal]:
    """Refuse a benchmark that does not load, has too few tasks, or does not fit synthesizer or demonstrations."""
    found = list[Refusal]()
    for check in (_too_many_tasks, _synthesis, _demonstrations):
        try:
            found.extend(check(spec))
        except UserError as error:
            found.append(Refusal("benchmark", error.problem, error.remedy))
        except InfrastructureError as error:
            problem = f"{spec.benchmark.target} does not answer: {error}"
            found.append(Refusal("benchmark", problem, "fix the benchmark"))
    return [*dict.fromkeys(found)]


def _too_many_tasks(spec: Spec) -> Iterator[Refusal]:
    sizes: dict[str, int | None] = {**split_sizes(spec.benchmark)}
    kind = component_class(spec.benchmark)
    if isinstance(kind, type) and issubclass(kind, Verifiers):
        # Only the taskset knows its sizes. This starts its worker, but plays nothing.
        target = load_benchmark(spec.benchmark, spec.machine)
        sizes = {split: target.size(split) for split in ("discovery", "test")}
    for key, split in (("rollouts.tasks", "discovery"), ("evaluation.tasks", "test")):
        count, most = (spec.rollouts if split == "discovery" else spec.evaluation).tasks, sizes.get(split)
        if most is not None and count > most:
            yield Refusal(
                key, f"{key} = {count}, and split {split} has at most {counted(most, 'task')}", f"set {key}={most}"
            )


def _synthesis(spec: Spec) -> Iterator[Refusal]:
    """Refuse a benchmark from which no environment can be derived, before rollouts and labels are paid for."""
    if spec.synthesizer.target != TEMPLATES or spec.benchmark.target == EMBEDDED:
        return
    derivable(spec.benchmark)
    if not in_workers(spec.benchmark) and demands_words(load_benchmark(spec.benchmark), EXAMPLES):
        yield Refusal(
            "benchmark",
            f"the score of {spec.benchmark.target} requires words that the agent is never told: no environment derived "
            "from it would earn a passport",
            "state them in the policy, or do not score words; `captrain check-benchmark` counts the tasks",
        )


def _can_synthesize(spec: Spec) -> bool:
    """Return whether `_synthesis` refuses nothing."""
    try:
        return not [*_synthesis(spec)]
    except UserError:
        return False


def _demonstrations(spec: Spec) -> Iterator[Refusal]:
    """Refuse demonstrations that share no tool with the benchmark, because the trained base would fail every task."""
    base = spec.base
    if base.model or base.pretrained or spec.policy.target not in (LOCAL, VLLM) or in_workers(spec.benchmark):
        return
    lessons = build(base.demonstrations, Demonstrations).tools if base.demonstrations else TOOLS
    offers = load_benchmark(spec.benchmark).tools
    learnt, offered = (sorted({str(tool["function"]["name"]) for tool in tools}) for tools in (lessons, offers))
    if not {*learnt} & {*offered}:
        source = base.demonstrations.target if base.demonstrations else "the service desk's demonstrations"
        yield Refusal(
            "base.demonstrations",
            f"the base learns to call {', '.join(learnt[:3])} from {source}, and {spec.benchmark.target} offers "
            f"{', '.join(offered[:3])}: it would pass nothing",
            "set base.demonstrations._target_=MODULE:CLASS (docs/own-benchmark.md), or policy=openai base.model=NAME",
        )


def _model(estimate: RunEstimate) -> list[tuple[bool, Refusal]]:
    """Refuse adapters that the base or its servers do not support. `captrain doctor` also checks the model's files."""
    spec, servers, rank, own = estimate.spec, estimate.spec.machine.vllm, estimate.rank, estimate.vllm
    is_embedded = spec.base.model is None and not spec.base.pretrained
    is_mixture = estimate.experts or bool(estimate.size and estimate.size.experts)
    return [
        (
            estimate.experts and is_embedded,
            Refusal(
                "trainer.experts",
                "trainer.experts = true, and the embedded base is not a mixture of experts",
                "set trainer.experts=false",
            ),
        ),
        (
            own and (spec.baselines.mixture.run or spec.baselines.solutions_mixture.run),
            Refusal(
                "baselines.mixture.run",
                "vLLM serves one adapter per request: it can neither mix adapters per layer nor train their gates",
                "set policy=local, or baselines.mixture.run=false, baselines.solutions_mixture.run=false and "
                "router=gate, which serves one composed adapter per task",
            ),
        ),
        (own and is_mixture and not is_embedded and not servers.gpus, mixture_without_gpus(estimate.model)),
        (
            own and rank > servers.max_lora_rank,
            Refusal(
                "trainer.rank",
                f"trainer.rank = {rank}, and machine.vllm.max_lora_rank = {servers.max_lora_rank}",
                f"set machine.vllm.max_lora_rank={rank}",
            ),
        ),
        (
            own and rank * servers.max_loras > RANKS[-1],
            Refusal(
                "trainer.rank",
                f"{servers.max_loras} adapters of rank {rank} together are beyond vLLM's {RANKS[-1]}",
                "lower trainer.rank, or machine.vllm.max_loras with router.most",
            ),
        ),
    ]


def mixture_without_gpus(model: str) -> Refusal:
    """Refuse a mixture of experts that vLLM would serve on a CPU."""
    return Refusal(
        "machine.vllm.gpus",
        f"{model} is a mixture of experts, and vLLM's kernels for adapters of these need a GPU: machine.vllm.gpus = 0",
        "set machine.vllm.gpus to 1 or more, or choose policy=local",
    )


def _gpus(estimate: RunEstimate) -> list[tuple[bool, Refusal]]:
    """Refuse if servers, training and endpoint together need more GPUs than the node has or a job requests."""
    spec, planned, machine = estimate.spec, estimate.node.gpus, estimate.spec.machine
    serving, training = estimate.servers(True), estimate.trainers()
    on_gpus = estimate.vllm and machine.vllm.gpus > 0
    fits = serving + training + machine.asking.gpus <= planned
    job, needed = machine.slurm.gpus if machine.slurm else 0, serving + training // machine.nodes
    demand = f"machine.vllm asks for {counted(serving, 'GPU')}, and training for {training} more"
    endpoint = f", and machine.asking for {machine.asking.gpus}" if machine.asking.gpus else ""
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    return [
        (
            on_gpus and bool(spec.base.model) and machine.accelerate.precision == "float64",
            Refusal(
                "machine.accelerate.precision",
                f"machine.accelerate.precision = float64 trains {estimate.model} on the CPU, beside servers on GPUs",
                "set machine.accelerate.precision=bfloat16",
            ),
        ),
        (
            on_gpus and not fits,
            Refusal(
                "machine.vllm.gpus",
                f"{demand}{endpoint}: {planned} are planned with",
                "lower machine.vllm.replicas or machine.accelerate.processes, or state --gpus",
            ),
        ),
        (
            on_gpus and fits and estimate.on_slurm and job < needed,
            Refusal(
                "machine.slurm.gpus",
                f"machine.slurm.gpus = {job}, and {demand}{nodes}",
                f"set machine.slurm.gpus={needed}",
            ),
        ),
    ]


def _memory(estimate: RunEstimate) -> Iterator[Refusal]:
    """Refuse a training that does not fit into the memory of a GPU. Checks the group of GPUs that needs the most."""
    node, groups = estimate.node, estimate.memory_groups(training=True)
    parts = max(groups.values(), key=lambda group: sum(group.values()), default={})
    required, usable = sum(parts.values()), USABLE_MEMORY.value * node.memory
    if required > usable:
        shares = ", ".join(f"{name} {rounded(value)}" for name, value in parts.items())
        more = "set machine.vllm.gpus to more, machine.accelerate as machine=node8 has it, plan with more"
        yield Refusal(
            "base.model",
            f"{estimate.model} does not fit while it is trained: about {required:.0f} GiB of each of "
            f"{counted(node.gpus, 'GPU')} ({shares}), and {usable:.0f} of {node.memory:g} can be used",
            f"{more if estimate.vllm else 'plan with more --gpus or'} --gpu-memory, a smaller model, or a smaller "
            "machine.batch",
        )


def _host_memory(estimate: RunEstimate) -> Iterator[Refusal]:
    """Refuse a Slurm job with less main memory than the weights, which are loaded there before they go to the GPUs."""
    slurm, size = estimate.spec.machine.slurm, estimate.size
    if estimate.on_slurm and slurm is not None and size is not None and estimate.served:
        weights, memory = (
            2 * size.parameters / 2**30,
            int(slurm.memory[:-2]) / (1 if slurm.memory[-2:] == "GB" else 1024),
        )
        if memory < weights:
            yield Refusal(
                "machine.slurm.memory",
                f"machine.slurm.memory = {slurm.memory}, and the weights of {estimate.model} have {weights:.0f} GiB",
                f"set machine.slurm.memory={math.ceil(2 * weights)}GB",
            )


def rounded(value: float) -> str:
    """Format a number with two significant digits, because estimates are not more precise."""
    value = float(f"{value:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g} {name}"
    return f"{value:,g}"


def task_uses(estimate: RunEstimate) -> dict[str, float]:
    """Return stage -> how often it uses each training task, for stages that train on the target. {} if unlimited."""
    spec, tasks, uses = estimate.spec, split_sizes(estimate.spec.benchmark).get("training"), dict[str, float]()
    if not tasks or not estimate.trainable:
        return uses
    for name in trained_baselines():
        row = baselines()[name]
        section = row.section(spec)
        group_size = section.group_size if isinstance(section, GrpoSettings) else None
        groups = estimate.baseline_rollouts(row) * row.target_share(spec) / (group_size or spec.trainer.group_size)
        if groups:
            uses[name] = groups / tasks
    return uses


def warnings(estimate: RunEstimate, money: float | None) -> list[str]:
    """Return warnings about settings that can run. `money` is the cost of the whole run, None if unknown."""
    spec, lacking = estimate.spec, absences(estimate.spec.benchmark)
    training = split_sizes(spec.benchmark).get("training")
    derives = spec.synthesizer.target == TEMPLATES and spec.benchmark.target != EMBEDDED
    scripted = spec.benchmark.settings().get("user", "") is None
    texts = {
        f"rollouts by {spec.policy.target} in {spec.benchmark.target} were never timed, so the plan has counts only": (
            estimate.episode == EpisodeCost()
        ),
        f"the size of {estimate.model} is not known: state it with --parameters, in billions": (
            estimate.served and estimate.size is None
        ),
        "evaluation.trials = 1: the oracle bound and the causal test need two trials and are left out": (
            spec.evaluation.trials == 1
        ),
        "set machine.asking.input_price and output_price, for a million tokens, to see the money": money is None,
        "an endpoint that somebody else runs cannot be trained through: the run stops after `environments`": (
            not estimate.trainable
        ),
        "the agent's own endpoint is taken to cost nothing: state the price of a million tokens with --price": (
            estimate.served and not estimate.vllm and estimate.node.price is None
        ),
        **{
            f"{name} uses each of {training} training tasks {math.ceil(times):,} times, in other trials": times > 1
            for name, times in task_uses(estimate).items()
        },
        "environments are derived for single capabilities: there will be none for pairs (pairs.count)": (
            spec.pairs.count > 0 and derives and _can_synthesize(spec)
        ),
        **dict.fromkeys(lacking.values(), True),
        f"without references the programmatic analyst finds {' and '.join(UNREFERENCED)}, and what nearly all passed "
        "rollouts do and failed ones lack: analyst=openai analyst.name=MODEL has no such bounds": (
            "reference" in lacking and spec.analyst.target == PROGRAMMATIC
        ),
        "benchmark.user is null: a script plays the user, for checks and not for results": estimate.served and scripted,
    }
    return [text for text, applies in texts.items() if applies]
