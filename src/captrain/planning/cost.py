"""Cost of one stage or of several together, with `None` for what is not known.

Apart from the arithmetic (`captrain.planning.estimate`), because the tables of a plan and what is feasible read costs
and work none out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from captrain.planning.assumptions import ModelUse


@dataclass(frozen=True)
class StageCost:
    """One stage. Seconds on the wall, GiB of one GPU and money are None where they are not known."""

    stage: str
    jobs: int = 0
    rollouts: float = 0
    use: ModelUse = ModelUse()
    gpus: int = 0
    memory: float | None = 0
    seconds: float | None = 0
    money: float | None = 0
    parts: tuple["StageCost", ...] = ()
    """Costs that a total is the sum of."""

    @property
    def gpu_hours(self) -> float | None:
        """Hours of the GPUs that are held; None if not known."""
        if self.parts:
            return _sum_if_all_known([part.gpu_hours for part in self.parts])
        return None if self.seconds is None else self.gpus * self.seconds / 3600


def total(stages: Sequence[StageCost]) -> StageCost:
    """Add up all stages."""
    use = ModelUse()
    for stage in stages:
        use = use.plus(stage.use)
    return StageCost(
        "total",
        jobs=sum(stage.jobs for stage in stages),
        rollouts=sum(stage.rollouts for stage in stages),
        use=use,
        gpus=max(stage.gpus for stage in stages),
        memory=max([stage.memory for stage in stages if stage.memory], default=None),
        seconds=_sum_if_all_known([stage.seconds for stage in stages]),
        money=_sum_if_all_known([stage.money for stage in stages]),
        parts=tuple(stages),
    )


def _sum_if_all_known(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def rounded(value: float) -> str:
    """Round to two digits: an estimate has no more."""
    value = float(f"{value:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g} {name}"
    return f"{value:,g}"
