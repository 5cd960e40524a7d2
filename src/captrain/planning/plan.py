"""What a configuration will cost, and whether it can run at all, before anything is spent.

Counts follow from the settings, but for what nobody knows beforehand: how many attempts each environment needs to earn
its passport, which capabilities only a control takes, and which tasks are routed to several adapters at once. So
everything is worked out for the least and for the most of that, and shown as a range; `capabilities.count` capabilities
are taken to be selected. All else is an estimate, and every number that it rests on is shown with where it comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.config import Spec, compose_spec, load_choice
from captrain.errors import UserError
from captrain.planning.assumptions import USABLE, splits
from captrain.planning.estimate import Estimate, Node, Work
from captrain.planning.sources import assumptions, warnings


@dataclass(frozen=True)
class Plan:
    """Stages with the least (`low`) and with the most (`high`) of what is not known beforehand; what that rests on, as
    (what, value, where from); what to know; and what makes the settings impossible."""

    title: str
    low: list[Work]
    high: list[Work]
    assumptions: list[tuple[str, str, str]]
    warnings: list[str]
    problems: list[UserError]

    def refuse(self) -> None:
        """End here if the settings are impossible.

        Raises:
            UserError: all that makes them so.
        """
        if self.problems:
            problem = "\n       ".join(one.problem for one in self.problems)
            raise UserError(problem, "\n          ".join(one.remedy for one in self.problems))


def composed(settings: Sequence[str], root: Path) -> tuple[Spec, str]:
    """The configuration that params.yaml selects, with settings on top, and what it is called.

    Args:
        settings: key=value, as in `overrides` of params.yaml; experiment=NAME and seed=NUMBER choose others.
        root: of the project.

    Raises:
        UserError: it does not compose.
    """
    chosen = load_choice(root / "params.yaml")
    given = {key: value for key, _, value in (one.partition("=") for one in settings) if key in ("experiment", "seed")}
    if not (seed := given.get("seed", str(chosen.seed))).isdecimal():
        raise UserError(f"seed = {seed!r} is not a number", "write, for example, seed=42")
    overrides = [*chosen.overrides, *(one for one in settings if one.partition("=")[0] not in given)]
    experiment = given.get("experiment", chosen.experiment)
    title = ", ".join([f"experiment {experiment}", f"seed {seed}", *overrides])
    return compose_spec(experiment, int(seed), overrides, root / "conf"), title


def plan(spec: Spec, node: Node, title: str = "") -> Plan:
    """Work out a configuration; nothing is started, asked or written."""
    low, high = Estimate(spec, node, 1), Estimate(spec, node, spec.environments.rounds, 1.0)
    problems = [*_temperature(spec), *_tasks(spec), *_gpus(low), *_memory(low)]
    works = low.works(), high.works()
    return Plan(title, *works, assumptions(low), warnings(low, works[0][-1].money), problems)


def _temperature(spec: Spec) -> list[UserError]:
    if spec.exploring().settings().get("temperature") != 0:
        return []
    problem = "policy.temperature = 0 in training, too: every group of rollouts is constant there and teaches nothing"
    return [UserError(problem, "set environments.temperature=1.0")]


def _gpus(estimate: Estimate) -> list[UserError]:
    """A job that asks for other GPUs than its servers and its trainer need, or for more than there are."""
    if not estimate.vllm or not estimate.spec.machine.vllm.gpus:
        return []
    needed, slurm, node = estimate.servers(True) + 1, estimate.spec.machine.slurm, estimate.node
    stated = f"machine.vllm asks for {needed - 1} GPUs, and training for one more"
    if needed > node.gpus:
        return [UserError(f"{stated}: {node.gpus} are planned with", "lower machine.vllm.replicas, or state --gpus")]
    if estimate.spec.machine.launcher == "slurm" and slurm is not None and slurm.gpus < needed:
        problem = f"machine.slurm.gpus = {slurm.gpus}, and {stated}"
        return [UserError(problem, f"set machine.slurm.gpus={needed}")]
    return []


def _tasks(spec: Spec) -> list[UserError]:
    """More tasks than there are, of the benchmark's splits or of an environment."""
    there, size, found = splits(spec.benchmark), spec.trainer.group_size, []
    wanted = {"rollouts.tasks": ("discovery", spec.rollouts.tasks), "evaluation.tasks": ("test", spec.evaluation.tasks)}
    for key, (split, count) in wanted.items():
        if count > (most := there.get(split, count)):
            found.append(UserError(f"{key} = {count}, and split {split} has {most} tasks at most", f"set {key}={most}"))
    needed, seeds = spec.environments.groups + spec.adapters.rollouts // size, spec.environments.seeds
    if needed > seeds:
        found.append(
            UserError(
                f"adapters.rollouts = {spec.adapters.rollouts} in groups of {size} and environments.groups = "
                f"{spec.environments.groups} need {needed} tasks of an environment, and its passport is for "
                f"environments.seeds = {seeds}",
                f"set environments.seeds={needed}, or lower adapters.rollouts",
            )
        )
    return found


def _memory(estimate: Estimate) -> list[UserError]:
    parts, node = estimate.parts(training=True), estimate.node
    needed, usable = sum(parts.values()), USABLE * node.memory
    if needed <= usable:
        return []
    shares = ", ".join(f"{name} {_rounded(value)}" for name, value in parts.items())
    problem = (
        f"{estimate.model} does not fit while it is trained: about {needed:.0f} GiB of each of {node.gpus} GPUs "
        f"({shares}), and {usable:.0f} of {node.memory:g} can be used"
    )
    more = "set machine.vllm.gpus to more, plan with more" if estimate.vllm else "plan with more --gpus or"
    return [UserError(problem, f"{more} --gpu-memory, a smaller model, or a smaller machine.batch")]


def shown(made: Plan) -> list[RenderableType]:
    """The plan as something rich can print: counts, cost, what they rest on, what to know."""
    counts = _table(f"plan: {made.title}", "stage", "jobs", "rollouts", "model calls", "tokens read", "tokens written")
    cost = _table("cost", "stage", "GPUs", "GiB of each", "GPU-hours", "wall", "money")
    least = {one.stage: one for one in made.low}
    for high in made.high:
        # What may have nothing to do, as controls, is no stage of the least.
        low = least.get(high.stage, Work(high.stage, high.jobs, gpus=high.gpus))
        style = "bold" if low.stage == "total" else ""
        pairs = ((getattr(low.took, name), getattr(high.took, name)) for name in ("calls", "read", "written"))
        rollouts = _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}")
        counts.add_row(low.stage, str(low.jobs), rollouts, *(_range(*pair, _rounded) for pair in pairs), style=style)
        memory = _range(low.memory, high.memory, lambda size: f"{size:.0f}")
        gpus = (str(low.gpus), memory, _range(low.gpu_hours, high.gpu_hours, _rounded)) if low.gpus else ("", "", "")
        money = _range(low.money, high.money, _rounded)
        cost.add_row(low.stage, *gpus, _range(low.seconds, high.seconds, _time), money, style=style)
    counts.caption = "ranges: the least to the most of what nobody knows beforehand"
    rests = _table("what this rests on", "what", "value", "from", left=3)
    for row in made.assumptions:
        rests.add_row(*row)
    return [counts, cost, rests, *(Text(f"to know: {warning}", "yellow") for warning in made.warnings)]


def _table(title: str, *names: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at < left else "right")
    return table


def _range(low: float | None, high: float | None, said: Callable[[float], str]) -> str:
    if low is None or high is None:
        return "not known"
    ends = [said(value) if value else "0" for value in (low, high)]
    return " to ".join(ends) if ends[0] != ends[1] else ends[0] if low else ""


def _rounded(value: float) -> str:
    """Two digits: an estimate has no more."""
    value = float(f"{value:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g} {name}"
    return f"{value:,g}"


def _time(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{_rounded(seconds / unit)} {name}"
    return f"{_rounded(seconds)} s"
