"""`captrain plan`: the cost of a configuration, and whether it can run at all, before anything is spent.

Three numbers are unknown in advance: how many attempts each environment needs to earn its passport, how many
capabilities only a control uses, and how many tasks are routed to several adapters at once. So all costs are computed
for the smallest and the largest values, and shown as a range. The plan assumes that `capabilities.count` capabilities
are selected. It shows every assumption with its source.

The forecast that `captrain run` prints before its first stage uses the same numbers.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.comparison import baselines, read_published
from captrain.errors import UserError
from captrain.planning.assumptions import (
    ANALYST,
    CANDIDATES,
    COMPOSED_COLUMNS,
    CONTROL_CHOICES,
    FILE_TOKENS,
    FRAME_TOKENS,
    LABEL_TOKENS,
    PASSPORT,
    REFERENCE_SPEED,
    REFLECTION_TOKENS,
    REQUEST_RATE,
    ROUTING,
    SERVER_START,
    SHARED_TRAINING,
    STAGE_START,
    SYNTHESIZER,
    TRAINING_FACTOR,
    USABLE_MEMORY,
    EpisodeCost,
    ModelUse,
    machine_speed,
)
from captrain.planning.estimate import Node, RunEstimate, StageCost
from captrain.planning.feasibility import Refusal, refusals, rounded, warnings
from captrain.records import counted
from captrain.run import Spec, compose_configuration, launch, load_choice, row_of

BasisRow = tuple[str, str, str]
"""One assumption: the quantity in words, its value, and its source."""


class Plan(NamedTuple):
    """Cost and feasibility of a configuration.

    held: GPUs of the node that the run occupies for its whole wall time; 0 if Slurm assigns GPUs to each job. low,
    high: costs of the stages for the smallest and the largest values of the unknown numbers. basis: the assumptions.
    memory: group of GPUs -> use -> GiB of one GPU in training.
    """

    title: str
    held: int
    low: list[StageCost]
    high: list[StageCost]
    basis: list[BasisRow]
    memory: dict[str, dict[str, float]]
    warnings: list[str]
    refusals: list[Refusal]

    def refuse_impossible(self) -> None:
        """Raise an error if the settings cannot run.

        Raises:
            UserError: the settings cannot run. The message lists all refusals.
        """
        if self.refusals:
            problems = "\n       ".join(refusal.problem for refusal in self.refusals)
            raise UserError(problems, "\n          ".join(refusal.remedy for refusal in self.refusals))


def make_plan(spec: Spec, node: Node, title: str = "") -> Plan:
    """Estimate a configuration. This starts no process, sends no request and writes no file."""
    least, most = RunEstimate(spec, node, 1), RunEstimate(spec, node, spec.environments.rounds, 1.0)
    low, memory = least.costs(), least.memory_groups(training=True)
    held = node.gpus if least.vllm and not least.on_slurm else 0
    return Plan(title, held, low, most.costs(), _basis(least), memory, warnings(least, low[-1].money), refusals(least))


def _basis(estimate: RunEstimate) -> list[BasisRow]:
    """Return all assumptions of the estimate."""
    spec, episode = estimate.spec, estimate.episode
    rollout, source = _tokens(episode.agent), episode.source
    if episode == EpisodeCost():
        rollout, source = "not known", "not measured yet"
    composed = f"none to {COMPOSED_COLUMNS.value} times the test tasks"
    rows = [
        ("capabilities selected", str(estimate.count), "spec: capabilities.count, at most"),
        ("attempts at an environment", f"1 to {spec.environments.rounds}", "spec: environments.rounds"),
        ("rollouts of several adapters at once", composed, COMPOSED_COLUMNS.source),
        ("a rollout: calls, read (new), written", rollout, source),
        ("errors and refused answers", "none", "assumed"),
        *(_local(estimate) if estimate.local else []),
    ]
    if episode.user.calls:
        rows.append(("its simulated user, the same", _tokens(episode.user), episode.source))
    if spec.controls.run:
        most = f"0 to {CONTROL_CHOICES.value * estimate.count}"
        rows.append(("capabilities that only controls take", most, CONTROL_CHOICES.source))
    for name, row in baselines().items():
        if row.learns_from == "demonstrations" and row.section(spec).run:
            rows.append((f"a demonstration of {name}", "as long as a rollout", "assumed"))
    if spec.baselines.gepa.run and spec.baselines.gepa.model:
        question = f"{REFLECTION_TOKENS.value:,} tokens and the minibatch's dialogues"
        rows.append(("questions of gepa", question, REFLECTION_TOKENS.source))
    if estimate.served:
        rows += _serving(estimate)
    if spec.analyst.target == ANALYST or spec.synthesizer.target == SYNTHESIZER:
        label = f"{LABEL_TOKENS} a label of {CANDIDATES}; {FILE_TOKENS:,} a file"
        text = f"{FRAME_TOKENS:,} and 1 for 4 characters; {label}"
        rows.append(("tokens of questions and answers", text, "assumed"))
    return rows


def _tokens(use: ModelUse) -> str:
    return f"{use.calls:g}, {use.input:,g} ({use.new_input:,g}), {use.output:,g} tokens"


def _local(estimate: RunEstimate) -> list[BasisRow]:
    """List the assumptions on a base that is played and trained in this process."""
    rates, machine = estimate.rates, estimate.spec.machine
    activations = f"{launch.room(machine) / 2**30:.1f} GiB a process"
    source = "half of this machine's memory; what does not fit is computed again"
    pretrained = [("activations of a pass, at most", activations, source)] if estimate.spec.base.pretrained else []
    return [
        ("rollouts a CPU second", f"{rates.rollouts.value:.3g}", rates.rollouts.source),
        ("rollouts a CPU second, in training", f"{rates.training.value:.3g}", rates.training.source),
        ("demonstrations a CPU second", f"{rates.demonstrations.value:.3g}", rates.demonstrations.source),
        ("processes", str(machine.workers), "spec: machine.workers"),
        ("two processes on one training", f"{SHARED_TRAINING.value:g} times as fast as one", SHARED_TRAINING.source),
        ("examining an environment", f"{PASSPORT.value / estimate.node.speed:.2g} s", PASSPORT.source),
        ("fitting the routers", f"{ROUTING.value / estimate.node.speed:.2g} s", ROUTING.source),
        ("speed of this machine", f"{estimate.node.speed:.2f} times the reference", REFERENCE_SPEED.source),
        ("imports and statistics", "not counted: a few seconds a stage", "assumed"),
        *pretrained,
    ]


def _serving(estimate: RunEstimate) -> list[BasisRow]:
    """List the assumptions on a served model: its size, its GPUs and their speed."""
    node, size, machine, throughput = estimate.node, estimate.size, estimate.spec.machine, estimate.throughput
    billions = f"{size.parameters / 1e9:.3g}, {size.active / 1e9:.2g} of them active" if size else "not known"
    modules = "q, k, v, o" + (" and feed-forward" if size and size.inner else " and experts" * estimate.experts)
    memory = f"{node.gpus} of {node.memory:g} GiB, {USABLE_MEMORY.value:.0%} usable"
    speed = f"{throughput.prefill:,.0f} read, {throughput.decode:,.0f} written"
    copies, fleet, host = "2, sharded: to sample and to train", list[BasisRow](), estimate.episode.host
    jobs, setting = f"{machine.workers} of adapters and evaluation", "machine.workers"
    if estimate.vllm:
        copies, fleet = _fleet(estimate)
        jobs, setting = _jobs(estimate)
    return [
        ("in a synthesized environment", "the same, its user a script", "assumed"),
        ("longest dialogue", f"{estimate.episode.longest:,} tokens", estimate.episode.source),
        (f"{estimate.model}: billions", billions, size.source if size else "--parameters states it"),
        ("LoRA", f"rank {estimate.rank} on {modules}", "spec: trainer.rank; assumed"),
        ("copies of its weights in training", copies, "assumed"),
        ("GPUs", memory, f"{USABLE_MEMORY.source}; --gpus, --gpu-memory"),
        *fleet,
        ("tokens a second of a GPU", speed, throughput.source),
        ("tokens a second of a request", f"{REQUEST_RATE.value:g}", REQUEST_RATE.source),
        ("reading a dialogue", "each token once: prefixes are cached", "assumed"),
        ("training on a token", f"{TRAINING_FACTOR.value} times reading it", TRAINING_FACTOR.source),
        ("episodes at once", f"{machine.batch} a job", "spec: machine.batch"),
        ("jobs at once", jobs, f"spec: {setting}"),
        ("worker of the benchmark", f"{host.value:g} s a rollout", host.source),
        ("its processes", str(estimate.processes), "spec: machine.benchmarks"),
    ]


def _fleet(estimate: RunEstimate) -> tuple[str, list[BasisRow]]:
    """Describe the copies of the weights, and the GPUs of servers that a job starts itself."""
    machine, accelerate = estimate.spec.machine, estimate.spec.machine.accelerate
    shared = f", by {accelerate.strategy} over {accelerate.processes}" if accelerate.processes > 1 else ""
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    gpus = f"{estimate.servers(True)} of its servers, and {estimate.trainers()} to train{nodes}"
    endpoint = machine.asking.gpus
    place = f"on {counted(endpoint, 'further GPU')} of the node" if endpoint else "at an endpoint of their own"
    start = f"{SERVER_START.value:g} s in each {'job' if estimate.on_slurm else 'stage'}"
    return f"one in {accelerate.precision} on the trainer's GPUs{shared}, beside the servers'", [
        ("GPUs of a job", gpus, "spec: machine.vllm.replicas x gpus, machine.accelerate.processes"),
        ("servers are healthy after", start, SERVER_START.source),
        ("simulated user, analyst, synthesizer", place, "spec: machine.asking.gpus"),
    ]


def _jobs(estimate: RunEstimate) -> tuple[str, str]:
    """Describe how many jobs run at once over our own servers, and the settings that decide it."""
    gpus, processes = estimate.node.gpus, estimate.spec.machine.accelerate.processes
    if not estimate.on_slurm:
        return f"1 on {counted(gpus, 'GPU')}, one after another", "machine.workers, machine.gpus; --gpus"
    parallel = max(1, gpus // (processes + estimate.servers(True)))
    return f"{parallel} of training on {counted(gpus, 'GPU')}", "machine.launcher = slurm; --gpus"


def plan_tables(plan: Plan) -> list[RenderableType]:
    """Render the plan for rich: its total, costs, counts, memory, assumptions, warnings."""
    counts = _table("work of each stage", "stage", "jobs", "rollouts", "model calls", "tokens read", "tokens written")
    counts.caption = "Ranges cover what is known only afterwards, such as the attempts at an environment."
    costs = _table("cost of each stage", "stage", "GPUs", "GiB of each", "GPU-hours", "time", "money")
    least = {cost.stage: cost for cost in plan.low}
    for high in plan.high:
        # A stage that may have nothing to do, such as controls, is missing from the low estimate.
        low = least.get(high.stage, StageCost(high.stage, high.jobs, gpus=high.gpus))
        style = "bold" if low.stage == "total" else ""
        rollouts = _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}")
        calls, tokens_read, _, tokens_written = (_range(*ends, rounded) for ends in zip(low.use, high.use, strict=True))
        counts.add_row(low.stage, str(low.jobs), rollouts, calls, tokens_read, tokens_written, style=style)
        memory = _range(low.memory, high.memory, lambda size: f"{size:.0f}")
        gpus = (str(low.gpus), memory, _range(low.gpu_hours, high.gpu_hours, rounded)) if low.gpus else ("", "", "")
        time, money = _range(low.seconds, high.seconds, _time), _range(low.money, high.money, rounded)
        costs.add_row(low.stage, *gpus, time, money, style=style)
    if plan.held:
        costs.add_row("node, held throughout", str(plan.held), "", _held_hours(plan), "", "", style="bold")
    memory_table = _table("GiB of one GPU in training", "GPUs", "what", "GiB", text_columns=2)
    for group, parts in plan.memory.items():
        for name, value in {**parts, "total": sum(parts.values())}.items():
            memory_table.add_row(group, name, f"{value:.1f}", style="bold" if name == "total" else "")
    basis = _table("assumptions", "what", "value", "from", text_columns=3)
    for row in plan.basis:
        basis.add_row(*row)
    notes = (Text(f"note: {text}", "yellow") for text in plan.warnings)
    tables = [_without_empty_columns(table) for table in (costs, counts, memory_table, basis) if table.row_count]
    return [_total(plan), *tables, *([Text(own)] if (own := _own_share(plan)) else []), *notes]


def _held_hours(plan: Plan) -> str:
    """Return the GPU-hours of the node that the run occupies for its whole time."""
    totals = (plan.low[-1].seconds, plan.high[-1].seconds)
    low, high = (None if seconds is None else plan.held * seconds / 3600 for seconds in totals)
    return _range(low, high, rounded)


def _total(plan: Plan) -> str:
    """Say what the whole run costs: time, GPU-hours, rollouts, model calls, and money where a price is known."""
    low, high = plan.low[-1], plan.high[-1]
    hours = _held_hours(plan) if plan.held else _range(low.gpu_hours, high.gpu_hours, rounded)
    parts = {
        "time": _range(low.seconds, high.seconds, _time),
        "GPU-hours": hours if low.gpus or plan.held else "",
        "rollouts": _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}"),
        "jobs": str(low.jobs),
        "money": _range(low.money, high.money, rounded),
    }
    return f"Total of {plan.title}: {', '.join(f'{name} {value}' for name, value in parts.items() if value)}"


def _own_share(plan: Plan) -> str:
    """Name the stages that the paper does not have, with their share of the GPU-hours."""
    published = {method for table in read_published().tables.values() for method in table.values}
    ours = {*(name for name in baselines() if name not in published), "controls", "causality"}
    stages = {cost.stage: cost.gpu_hours for cost in plan.high if cost.stage in ours}
    hours = sum(cost or 0.0 for cost in stages.values())
    share = f", {rounded(hours)} GPU-hours at most" if hours else ""
    return f"Not in the paper, but captrain's own: {', '.join(stages)}{share}" if stages else ""


def _without_empty_columns(table: Table) -> Table:
    """Return a table without the columns that are empty in every row."""
    table.columns = [column for column in table.columns if any(column.cells)]
    return table


def _table(title: str, *names: str, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < text_columns else "right")
    return table


def _range(low: float | None, high: float | None, text_of: Callable[[float], str]) -> str:
    """Format a range; "" if both ends are 0."""
    if low is None or high is None:
        return "not known"
    # What one stage spends less the more another takes, such as training after repeated calibration, comes reversed.
    ends = [text_of(value) if value else "0" for value in sorted((low, high))]
    return " to ".join(dict.fromkeys(ends)) if low or high else ""


def _time(seconds: float) -> str:
    """Format seconds in hours, minutes or seconds."""
    unit, name = (3600, "h") if seconds >= 3600 else (60, "min") if seconds >= 60 else (1, "s")
    return f"{rounded(seconds / unit)} {name}"


def stale_stages(root: Path) -> list[str]:
    """List the stages that `dvc repro` may run, in pipeline order: those that changed, and those after them.

    Raises:
        UserError: params.yaml is invalid, or DVC cannot read the pipeline.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from networkx import ancestors, topological_sort

    load_choice(root / "params.yaml")
    try:
        with Repo(str(root)) as repo:
            changed, graph = {name.rpartition(":")[2] for name in repo.status()}, repo.index.graph
    except DvcException as error:
        raise UserError(
            f"DVC cannot read the pipeline: {error}",
            "correct dvc.yaml, dvc.lock or params.yaml, or restore them from git",
        ) from None
    first = [stage for stage in graph if getattr(stage, "name", None) in changed]
    stale = {stage for change in first for stage in (change, *ancestors(graph, change))}
    return [row_of(stage.name) for stage in reversed([*topological_sort(graph)]) if stage in stale]


def skipped_stages(root: Path, stages: Collection[str]) -> list[str]:
    """Return the stages that the configuration turns off. They only write empty files.

    Raises:
        UserError: the configuration that params.yaml selects does not compose.
    """
    spec, _ = compose_configuration([], root)
    off = [name for name, row in baselines().items() if not row.section(spec).run]
    off += [name for name, works in (("merging", spec.merging.methods), ("controls", spec.controls.run)) if not works]
    return [stage for stage in stages if stage.removeprefix("evaluation@") in off]


def forecast_run(root: Path, stages: Collection[str]) -> str:
    """Estimate in one line how long stages take on this machine.

    Raises:
        UserError: the configuration that params.yaml selects does not compose.
    """
    spec, _ = compose_configuration([], root)
    speed, skipped = machine_speed(), skipped_stages(root, stages)
    *planned, _ = RunEstimate(spec, Node(speed=speed), 1).costs()
    parts = [part for cost in planned for part in cost.parts or [cost]]
    costs = {part.stage: part.seconds for part in parts if part.stage in stages}
    count = counted(len(stages) - len(skipped), "stage") + " to run"
    rows = {stage.removeprefix("evaluation@") for stage in skipped}
    end = f"; skipped: {counted(len(rows), 'optional row')}" if rows else ""
    if unknown := [stage for stage, seconds in costs.items() if seconds is None]:
        return f"{count}; the time is not known ({', '.join(unknown)}: see `captrain plan`){end}"
    seconds = sum(cost or 0.0 for cost in costs.values()) + STAGE_START.value / speed * len(stages)
    return f"{count}, about {_time(seconds)} by the measured speed of this machine{end}"
