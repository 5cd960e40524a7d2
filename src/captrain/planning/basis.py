"""The basis of an estimate: every number that it rests on, as rows with where each comes from.

Apart from the arithmetic (`captrain.planning.estimate`), because these are words: they follow what it has worked out,
and nothing is worked out from them. A number that no setting holds is in `captrain.planning.assumptions`, with its
source; what is written out here is what follows from settings, and what is taken as given without a number.
"""

from typing import NamedTuple

from captrain.comparison import Baseline, baselines, trained_baselines
from captrain.config import GrpoSettings, Spec
from captrain.execution import launch
from captrain.planning.assumptions import (
    ANALYST,
    COMPOSED_COLUMNS,
    CONTROL_CHOICES,
    QUESTIONS,
    REFLECTION_TOKENS,
    REQUEST_RATE,
    SERVER_START,
    SHARED_TRAINING,
    SYNTHESIZER,
    TRAINING_FACTOR,
    USABLE_MEMORY,
    EpisodeCost,
    split_sizes,
)
from captrain.planning.estimate import Estimate


class BasisRow(NamedTuple):
    """Row of an estimate's basis: the quantity in words, its value, and where that comes from."""

    quantity: str
    value: str
    source: str


def basis(estimate: Estimate) -> list[BasisRow]:
    """List all that the estimate rests on."""
    spec, episode = estimate.spec, estimate.episode
    agent = (
        ("not known", "nobody has measured it") if episode == EpisodeCost() else (str(episode.agent), episode.source)
    )
    composed = f"on none to {COMPOSED_COLUMNS.value} times all test tasks"
    rows = [
        BasisRow("capabilities selected", str(estimate.count), "spec: capabilities.count, at most"),
        BasisRow("attempts at an environment", f"1 to {spec.environments.rounds}", "spec: environments.rounds"),
        BasisRow("arms that act together", composed, COMPOSED_COLUMNS.source),
        BasisRow("a rollout: calls, read (new), written", *agent),
        BasisRow("errors, and answers refused", "none", "assumed"),
    ]
    if estimate.local:
        rows += _embedded(estimate)
    if episode.user.calls:
        rows.append(BasisRow("its simulated user, the same", str(episode.user), episode.source))
    if spec.controls.run:
        most = f"0 to {CONTROL_CHOICES.value * estimate.count}"
        rows.append(BasisRow("capabilities that only controls take", most, CONTROL_CHOICES.source))
    rows += [
        BasisRow(f"a demonstration of {name}", "as long as a rollout", "assumed")
        for name, row in baselines().items()
        if row.learns_from == "demonstrations" and row.section(spec).run
    ]
    if spec.baselines.gepa.run and spec.baselines.gepa.model:
        question = f"{REFLECTION_TOKENS.value:,} tokens and the minibatch's dialogues"
        rows.append(BasisRow("questions of gepa", question, REFLECTION_TOKENS.source))
    sizes, uses = split_sizes(spec.benchmark), task_uses(estimate)
    if "training" in sizes and uses:
        text = ", ".join(f"{name} {times:,.0f}" for name, times in uses.items())
        source = f"spec: {sizes['training']} tasks; assumed: in turn"
        rows.append(BasisRow("times that a training task is used", text, source))
    if estimate.served:
        rows += _serving(estimate)
    if spec.analyst.target == ANALYST or spec.synthesizer.target == SYNTHESIZER:
        text = (
            f"{QUESTIONS.frame:,} and 1 for 4 characters; {QUESTIONS.label} a label of {QUESTIONS.candidates}; "
            f"{QUESTIONS.file:,} a file"
        )
        rows.append(BasisRow("tokens of questions and answers", text, QUESTIONS.source))
    return rows


def _embedded(estimate: Estimate) -> list[BasisRow]:
    """List the basis of the embedded base, whose rollouts are played in this process."""
    rates = estimate.rates
    spec, room = estimate.spec, launch.room(estimate.spec.machine)
    pretrained = [
        BasisRow(
            "activations of a pass, at most",
            f"{room / 2**30:.1f} GiB a process",
            "half of this machine's memory; what does not fit is computed again",
        )
    ]
    return [
        BasisRow("rollouts a CPU second", f"{rates.rollouts.value:g}", rates.rollouts.source),
        BasisRow("in training", f"{rates.training.value:g}", rates.training.source),
        BasisRow("demonstrations a CPU second", f"{rates.demonstrations.value:g}", rates.demonstrations.source),
        BasisRow("processes", str(estimate.spec.machine.workers), "spec: machine.workers"),
        BasisRow("two that share a training", f"{SHARED_TRAINING.value:g} times as fast", SHARED_TRAINING.source),
        *(pretrained if spec.base.pretrained else []),
        BasisRow("imports, passports, statistics", "not counted: seconds a stage", "assumed"),
    ]


def _serving(estimate: Estimate) -> list[BasisRow]:
    """List the basis of a served model: its size, its GPUs, and how fast they are."""
    node, size, machine, throughput = estimate.node, estimate.size, estimate.spec.machine, estimate.throughput
    billions = f"{size.parameters / 1e9:.3g}, {size.active / 1e9:.2g} of them active" if size else "not known"
    modules = "q, k, v, o" + (" and feed-forward" if size and size.inner else " and experts" * estimate.experts)
    host = estimate.episode.host
    accelerate = machine.accelerate
    shared = f", by {accelerate.strategy} over {accelerate.processes}" if accelerate.processes > 1 else ""
    copies = f"one in {accelerate.precision} on the trainer's GPUs{shared}, beside the servers'"
    memory = f"{node.gpus} of {node.memory:g} GiB, {USABLE_MEMORY.value:.0%} usable"
    return [
        BasisRow("in a synthesized environment", "the same, its user a script", "assumed"),
        BasisRow("longest dialogue", f"{estimate.episode.longest:,} tokens", estimate.episode.source),
        BasisRow(f"{estimate.model}: billions", billions, size.source if size else "--parameters states it"),
        BasisRow("LoRA", f"rank {estimate.rank} on {modules}", "spec: trainer.rank; assumed"),
        BasisRow(
            "copies of its weights in training",
            copies if estimate.vllm else "2, sharded: to sample and to train",
            "assumed",
        ),
        BasisRow("GPUs", memory, f"{USABLE_MEMORY.source}; --gpus, --gpu-memory"),
        *(_servers(estimate) if estimate.vllm else []),
        BasisRow(
            "tokens a second of a GPU",
            f"{throughput.prefill:,.0f} read, {throughput.decode:,.0f} written",
            throughput.source,
        ),
        BasisRow("tokens a second of a request", f"{REQUEST_RATE.value:g}", REQUEST_RATE.source),
        BasisRow("reading a dialogue", "each token once: prefixes are cached", "assumed"),
        BasisRow("training on a token", f"{TRAINING_FACTOR.value} times reading it", TRAINING_FACTOR.source),
        BasisRow("episodes at once", f"{machine.batch} a job", "spec: machine.batch"),
        _jobs_at_once(estimate),
        BasisRow("worker of the benchmark", f"{host.value:g} s a rollout", host.source),
        BasisRow("its processes", str(estimate.processes), "spec: machine.benchmarks"),
    ]


def _servers(estimate: Estimate) -> list[BasisRow]:
    """List the basis of servers that a job starts itself."""
    machine = estimate.spec.machine
    shared = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    shared += ", the same ones: servers sleep while it trains" if machine.vllm.sleeps else ""
    gpus = f"{estimate.servers(True)} of its servers, and {machine.accelerate.processes} to train{shared}"
    endpoint = estimate.spec.machine.asking.gpus
    place = f"on {endpoint} further GPUs of the node" if endpoint else "at an endpoint of their own"
    return [
        BasisRow("GPUs of a job", gpus, "spec: machine.vllm.replicas x gpus, machine.accelerate.processes"),
        BasisRow(
            "servers are healthy after",
            f"{SERVER_START.value:g} s in each {'job' if estimate.on_slurm else 'stage'}",
            SERVER_START.source,
        ),
        BasisRow("simulated user, analyst, synthesizer", place, "spec: machine.asking.gpus"),
    ]


def _jobs_at_once(estimate: Estimate) -> BasisRow:
    node, machine = estimate.node, estimate.spec.machine
    if not estimate.vllm:
        return BasisRow("jobs at once", f"{machine.workers} of adapters and evaluation", "spec: machine.workers")
    if estimate.on_slurm:
        job = machine.together(machine.accelerate.processes, estimate.servers(True))
        jobs, setting = (
            f"{max(1, node.gpus // job)} of training on {node.gpus} GPUs",
            "machine.launcher = slurm; --gpus",
        )
    elif estimate.at_once > 1:
        jobs, setting = f"{estimate.at_once} of training, over one fleet of servers", "machine.workers"
    else:
        jobs, setting = f"1 on {node.gpus} GPUs, one after another", "machine.workers, machine.gpus; --gpus"
    return BasisRow("jobs at once", jobs, f"spec: {setting}")


def task_uses(estimate: Estimate) -> dict[str, float]:
    """Estimate how often stages that train on the target use each of its training tasks; {} where there is no end."""
    spec = estimate.spec
    tasks = split_sizes(spec.benchmark).get("training")
    if tasks is None or not estimate.trainable:
        return {}
    rows = [baselines()[name] for name in trained_baselines()]
    rollouts = {row.name: estimate.baseline_rollouts(row) * row.target_share(spec) for row in rows}
    sizes_of_groups = {row.name: group_size(spec, row) for row in rows}
    return {name: count / sizes_of_groups[name] / tasks for name, count in rollouts.items() if count}


def group_size(spec: Spec, row: Baseline) -> int:
    """Return the rollouts of one task in a row that trains by GRPO: the trainer's, unless the row has its own."""
    section = row.section(spec)
    return (section.group_size if isinstance(section, GrpoSettings) else None) or spec.trainer.group_size
