"""Plan of a configuration: its cost, and whether it can run at all, before anything is spent.

Counts follow from the settings, but for what nobody knows beforehand: how many attempts each environment needs to earn
its passport, which capabilities only a control takes, and which tasks are routed to several adapters at once. So
everything is worked out for the least and for the most of that, and shown as a range; `capabilities.count` capabilities
are taken to be selected. All else is an estimate, and every number that it rests on is shown with where it comes from.

The forecast that `captrain run` prints before its first stage is of the same numbers.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.comparison import baselines
from captrain.errors import UserError
from captrain.planning.assumptions import (
    ANALYST,
    CANDIDATES,
    COMPOSED_COLUMNS,
    CONTROL_CHOICES,
    FILE_TOKENS,
    FRAME_TOKENS,
    LABEL_TOKENS,
    REFLECTION_TOKENS,
    REQUEST_RATE,
    SERVER_START,
    SHARED_TRAINING,
    STAGE_START,
    SYNTHESIZER,
    TRAINING_FACTOR,
    USABLE_MEMORY,
    EpisodeCost,
)
from captrain.planning.estimate import Estimate, Node, StageCost
from captrain.planning.feasibility import problems, rounded, warnings
from captrain.run import Spec, compose_configuration, launch, load_choice, row_of

Basis = list[tuple[str, str, str]]
"""Rows of an estimate's basis: a quantity in words, its value, and where that comes from."""


class Plan(NamedTuple):
    """Stages with the least (`low`) and with the most (`high`) of what is not known beforehand; what that rests on;
    GiB of one GPU while an adapter is trained, by group of GPUs and what holds them; what to know; and what makes the
    settings impossible."""

    title: str
    low: list[StageCost]
    high: list[StageCost]
    basis: Basis
    memory: dict[str, dict[str, float]]
    warnings: list[str]
    problems: list[UserError]

    def refuse_impossible(self) -> None:
        """End here if the settings are impossible.

        Raises:
            UserError: all that makes them so.
        """
        if self.problems:
            raise UserError(
                "\n       ".join(error.problem for error in self.problems),
                "\n          ".join(error.remedy for error in self.problems),
            )


def make_plan(spec: Spec, node: Node, title: str = "") -> Plan:
    """Work out a configuration; nothing is started, asked or written."""
    least, most = Estimate(spec, node, 1), Estimate(spec, node, spec.environments.rounds, 1.0)
    low, high = least.costs(), most.costs()
    groups = least.memory_groups(training=True)
    return Plan(title, low, high, _basis(least), groups, warnings(least, low[-1].money), problems(least))


def _basis(estimate: Estimate) -> Basis:
    """List all that the estimate rests on.

    A number that no setting holds is in `captrain.planning.assumptions`, with its source; what is written out here is
    what follows from settings, and what is taken as given without a number.
    """
    spec, episode, rates, machine = estimate.spec, estimate.episode, estimate.rates, estimate.spec.machine
    agent, user = (
        f"{use.calls:g}, {use.input:,g} ({use.new_input:,g}), {use.output:,g} tokens"
        for use in (episode.agent, episode.user)
    )
    if episode == EpisodeCost():
        agent, source = "not known", "nobody has measured it"
    else:
        source = episode.source
    rows = [
        ("capabilities selected", str(estimate.count), "spec: capabilities.count, at most"),
        ("attempts at an environment", f"1 to {spec.environments.rounds}", "spec: environments.rounds"),
        (
            "arms that act together",
            f"on none to {COMPOSED_COLUMNS.value} times all test tasks",
            COMPOSED_COLUMNS.source,
        ),
        ("a rollout: calls, read (new), written", agent, source),
        ("errors, and answers refused", "none", "assumed"),
    ]
    if estimate.local:
        rows += [
            ("rollouts a CPU second", f"{rates.rollouts.value:g}", rates.rollouts.source),
            ("in training", f"{rates.training.value:g}", rates.training.source),
            ("demonstrations a CPU second", f"{rates.demonstrations.value:g}", rates.demonstrations.source),
            ("processes", str(machine.workers), "spec: machine.workers"),
            ("two that share a training", f"{SHARED_TRAINING.value:g} times as fast", SHARED_TRAINING.source),
            ("imports, passports, statistics", "not counted: seconds a stage", "assumed"),
        ]
    if estimate.local and spec.base.pretrained:
        activations = f"{launch.room(machine) / 2**30:.1f} GiB a process"
        source = "half of this machine's memory; what does not fit is computed again"
        rows.append(("activations of a pass, at most", activations, source))
    if episode.user.calls:
        rows.append(("its simulated user, the same", user, episode.source))
    if spec.controls.run:
        most = f"0 to {CONTROL_CHOICES.value * estimate.count}"
        rows.append(("capabilities that only controls take", most, CONTROL_CHOICES.source))
    rows += [
        (f"a demonstration of {name}", "as long as a rollout", "assumed")
        for name, row in baselines().items()
        if row.learns_from == "demonstrations" and row.section(spec).run
    ]
    if spec.baselines.gepa.run and spec.baselines.gepa.model:
        question = f"{REFLECTION_TOKENS.value:,} tokens and the minibatch's dialogues"
        rows.append(("questions of gepa", question, REFLECTION_TOKENS.source))
    if estimate.served:
        rows += _serving(estimate)
    if spec.analyst.target == ANALYST or spec.synthesizer.target == SYNTHESIZER:
        text = (
            f"{FRAME_TOKENS:,} and 1 for 4 characters; {LABEL_TOKENS} a label of {CANDIDATES}; {FILE_TOKENS:,} a file"
        )
        rows.append(("tokens of questions and answers", text, "assumed"))
    return rows


def _serving(estimate: Estimate) -> Basis:
    """List the basis of a served model: its size, its GPUs, and how fast they are."""
    node, size, machine, throughput = estimate.node, estimate.size, estimate.spec.machine, estimate.throughput
    accelerate, host = machine.accelerate, estimate.episode.host
    billions = f"{size.parameters / 1e9:.3g}, {size.active / 1e9:.2g} of them active" if size else "not known"
    modules = "q, k, v, o" + (" and feed-forward" if size and size.inner else " and experts" * estimate.experts)
    memory = f"{node.gpus} of {node.memory:g} GiB, {USABLE_MEMORY.value:.0%} usable"
    speed = f"{throughput.prefill:,.0f} read, {throughput.decode:,.0f} written"
    copies = "2, sharded: to sample and to train"
    jobs, setting = f"{machine.workers} of adapters and evaluation", "machine.workers"
    fleet = Basis()
    if estimate.vllm:
        # Servers that a job starts itself.
        servers = estimate.servers(True)
        shared = f", by {accelerate.strategy} over {accelerate.processes}" if accelerate.processes > 1 else ""
        copies = f"one in {accelerate.precision} on the trainer's GPUs{shared}, beside the servers'"
        gpus = f"{servers} of its servers, and {estimate.trainers()} to train"
        gpus += f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
        endpoint = machine.asking.gpus
        place = f"on {endpoint} further GPUs of the node" if endpoint else "at an endpoint of their own"
        start = f"{SERVER_START.value:g} s in each {'job' if estimate.on_slurm else 'stage'}"
        fleet = [
            ("GPUs of a job", gpus, "spec: machine.vllm.replicas x gpus, machine.accelerate.processes"),
            ("servers are healthy after", start, SERVER_START.source),
            ("simulated user, analyst, synthesizer", place, "spec: machine.asking.gpus"),
        ]
        jobs, setting = f"1 on {node.gpus} GPUs, one after another", "machine.workers, machine.gpus; --gpus"
        if estimate.on_slurm:
            parallel = max(1, node.gpus // (accelerate.processes + servers))
            jobs, setting = f"{parallel} of training on {node.gpus} GPUs", "machine.launcher = slurm; --gpus"
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


def plan_tables(plan: Plan) -> list[RenderableType]:
    """Render the plan for rich: counts, cost, what they rest on, what to know."""
    counts = _table(f"plan: {plan.title}", "stage", "jobs", "rollouts", "model calls", "tokens read", "tokens written")
    counts.caption = "ranges: the least to the most of what nobody knows beforehand"
    money_and_time = _table("cost", "stage", "GPUs", "GiB of each", "GPU-hours", "wall", "money")
    least = {cost.stage: cost for cost in plan.low}
    for high in plan.high:
        # What may have nothing to do, as controls, is no stage of the least.
        low = least.get(high.stage, StageCost(high.stage, high.jobs, gpus=high.gpus))
        style = "bold" if low.stage == "total" else ""
        rollouts = _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}")
        calls, tokens_read, _, tokens_written = (_range(*ends, rounded) for ends in zip(low.use, high.use, strict=True))
        counts.add_row(low.stage, str(low.jobs), rollouts, calls, tokens_read, tokens_written, style=style)
        memory = _range(low.memory, high.memory, lambda size: f"{size:.0f}")
        gpus = (str(low.gpus), memory, _range(low.gpu_hours, high.gpu_hours, rounded)) if low.gpus else ("", "", "")
        wall, money = _range(low.seconds, high.seconds, _time), _range(low.money, high.money, rounded)
        money_and_time.add_row(low.stage, *gpus, wall, money, style=style)
    memory_table = _table("GiB of one GPU in training", "GPUs", "what", "GiB", text_columns=2)
    for group, parts in plan.memory.items():
        for name, value in {**parts, "total": sum(parts.values())}.items():
            memory_table.add_row(group, name, f"{value:.1f}", style="bold" if name == "total" else "")
    basis_table = _table("what this rests on", "what", "value", "from", text_columns=3)
    for row in plan.basis:
        basis_table.add_row(*row)
    tables = [counts, money_and_time, memory_table, basis_table]
    notes = (Text(f"to know: {text}", "yellow") for text in plan.warnings)
    return [*(table for table in tables if table.row_count), *notes]


def _table(title: str, *names: str, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < text_columns else "right")
    return table


def _range(low: float | None, high: float | None, text_of: Callable[[float], str]) -> str:
    """Word a range; "" for nothing at all."""
    if low is None or high is None:
        return "not known"
    if not low and not high:
        return ""
    ends = [text_of(value) if value else "0" for value in (low, high)]
    return " to ".join(dict.fromkeys(ends))


def _time(seconds: float) -> str:
    """Word seconds in the unit that suits them."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{rounded(seconds / unit)} {name}"
    return f"{rounded(seconds)} s"


def stale_stages(root: Path) -> list[str]:
    """List the stages that `dvc repro` may run, in the pipeline's order: those that changed, and what comes after.

    Raises:
        UserError: params.yaml is not what it should be, or DVC reads no pipeline.
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
            f"DVC does not read the pipeline: {error}",
            "mend dvc.yaml, dvc.lock or params.yaml, or restore them from git",
        ) from None
    first = [stage for stage in graph if getattr(stage, "name", None) in changed]
    stale = {stage for change in first for stage in (change, *ancestors(graph, change))}
    return [row_of(stage.name) for stage in reversed([*topological_sort(graph)]) if stage in stale]


def forecast_run(root: Path, stages: Collection[str]) -> str:
    """Say in a line what stages will take, at most, by the rates that the plan counts with.

    Args:
        root: of the project.
        stages: that run.

    Raises:
        UserError: the configuration that params.yaml selects does not compose.
    """
    spec, _ = compose_configuration([], root)
    costs = {cost.stage: cost.seconds for cost in Estimate(spec, Node(), 1).costs() if cost.stage in stages}
    count = f"{len(stages)} stage{'s' if len(stages) != 1 else ''} to run"
    if unknown := [stage for stage, seconds in costs.items() if seconds is None]:
        return f"{count}; for how long is not known ({', '.join(unknown)}: see `captrain plan`)"
    seconds = sum(cost or 0.0 for cost in costs.values()) + STAGE_START.value * len(stages)
    return f"{count}, about {_time(seconds)} at the rates of `captrain plan`"
