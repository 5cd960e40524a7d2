"""Plan of a configuration: its cost, and whether it can run at all, before anything is spent.

Counts follow from the settings, but for what nobody knows beforehand: how many attempts each environment needs to earn
its passport, which capabilities only a control takes, and which tasks are routed to several adapters at once. So
everything is worked out for the least and for the most of that, and shown as a range; `capabilities.count` capabilities
are taken to be selected. All else is an estimate, and every number that it rests on is shown with where it comes from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.config import Spec
from captrain.errors import UserError
from captrain.planning.basis import BasisRow, basis
from captrain.planning.cost import StageCost, rounded
from captrain.planning.estimate import Estimate, Node
from captrain.planning.feasibility import problems, warnings


@dataclass(frozen=True)
class Plan:
    """Stages with the least (`low`) and with the most (`high`) of what is not known beforehand; what that rests on;
    GiB of one GPU while an adapter is trained, by group of GPUs and what holds them; what to know; and what makes the
    settings impossible."""

    title: str
    low: list[StageCost]
    high: list[StageCost]
    basis: list[BasisRow]
    memory: dict[str, dict[str, float]]
    warnings: list[str]
    problems: list[UserError]

    def refuse_impossible(self) -> None:
        """End here if the settings are impossible.

        Raises:
            UserError: all that makes them so.
        """
        if self.problems:
            problem = "\n       ".join(error.problem for error in self.problems)
            raise UserError(problem, "\n          ".join(error.remedy for error in self.problems))


def make_plan(spec: Spec, node: Node, title: str = "") -> Plan:
    """Work out a configuration; nothing is started, asked or written."""
    least, most = Estimate(spec, node, 1), Estimate(spec, node, spec.environments.rounds, 1.0)
    low, high = least.costs(), most.costs()
    groups = least.memory_groups(training=True)
    return Plan(title, low, high, basis(least), groups, warnings(least, low[-1].money), problems(least))


def plan_tables(plan: Plan) -> list[RenderableType]:
    """Render the plan for rich: counts, cost, what they rest on, what to know."""
    counts = _table(f"plan: {plan.title}", "stage", "jobs", "rollouts", "model calls", "tokens read", "tokens written")
    money_and_time = _table("cost", "stage", "GPUs", "GiB of each", "GPU-hours", "wall", "money")
    least = {cost.stage: cost for cost in plan.low}
    for high in plan.high:
        # What may have nothing to do, as controls, is no stage of the least.
        low = least.get(high.stage, StageCost(high.stage, high.jobs, gpus=high.gpus))
        style = "bold" if low.stage == "total" else ""
        pairs = ((getattr(low.use, name), getattr(high.use, name)) for name in ("calls", "input", "output"))
        rollouts = _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}")
        counts.add_row(low.stage, str(low.jobs), rollouts, *(_range(*pair, rounded) for pair in pairs), style=style)
        memory = _range(low.memory, high.memory, lambda size: f"{size:.0f}")
        gpus = (str(low.gpus), memory, _range(low.gpu_hours, high.gpu_hours, rounded)) if low.gpus else ("", "", "")
        money = _range(low.money, high.money, rounded)
        money_and_time.add_row(low.stage, *gpus, _range(low.seconds, high.seconds, _time), money, style=style)
    counts.caption = "ranges: the least to the most of what nobody knows beforehand"
    basis_table = _table("what this rests on", "what", "value", "from", text_columns=3)
    for row in plan.basis:
        basis_table.add_row(*row)
    memory_table = _table("GiB of one GPU in training", "GPUs", "what", "GiB", text_columns=2)
    for group, parts in plan.memory.items():
        for name, value in parts.items():
            memory_table.add_row(group, name, f"{value:.1f}")
        memory_table.add_row(group, "total", f"{sum(parts.values()):.1f}", style="bold")
    itemised = [memory_table] if plan.memory else []
    return [
        counts,
        money_and_time,
        *itemised,
        basis_table,
        *(Text(f"to know: {text}", "yellow") for text in plan.warnings),
    ]


def _table(title: str, *names: str, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < text_columns else "right")
    return table


def _range(low: float | None, high: float | None, text_of: Callable[[float], str]) -> str:
    if low is None or high is None:
        return "not known"
    ends = [text_of(value) if value else "0" for value in (low, high)]
    return " to ".join(ends) if ends[0] != ends[1] else ends[0] if low else ""


def _time(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{rounded(seconds / unit)} {name}"
    return f"{rounded(seconds)} s"
