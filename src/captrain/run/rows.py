"""The sections of the rows that TRACE is compared with: one for each below `baselines` in conf/config.yaml.

Apart from the rest of the schema (`captrain.run.spec`), because rows come and go. A row that trains by GRPO needs
nothing here.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from captrain.records import JsonObject
from captrain.run.components import Count, Rate, Section, Share
from captrain.run.shipped import read_stages, shipped


class Switch(Section):
    """Row without a setting but whether it runs."""

    run: bool


class GrpoSettings(Switch):
    """A row that trains by GRPO with settings of its own: what differs from the trainer of the adapters. Null: what the
    trainer has."""

    group_size: Annotated[int, Field(ge=2)] | None = None
    groups_per_step: Count | None = None
    epochs: Count | None = None
    learning_rate: Rate | None = None
    schedule: Literal["constant", "linear"] | None = None
    clip_high: Rate | None = None

    def differences(self) -> JsonObject:
        """Return the settings that are not null."""
        return self.model_dump(exclude={"run"}, exclude_none=True)


class RejectionSftSettings(Switch):
    """Rejection fine-tuning on the target: rounds of rollouts, of which the passed ones are fine-tuned on."""

    rounds: Count
    rows: Count
    """Rows that a fine-tuning sees, about: passes over what has been kept are as many as come nearest to it."""
    learning_rate: Rate


class GepaSettings(Switch):
    """Optimisation of the system prompt by GEPA, with rollouts on the training split. `model` names the one that
    reflects, asked as `machine.asking` says; null: a programmatic proposer over the lines that the base knows."""

    model: str | None = None
    minibatch: Count
    validation: Count
    """Training tasks set aside to choose among prompts."""
    prompts: Count | None = None
    """Accepted by the search at most, beside the prompt of the base; null: as many as the budget has room for."""


class AdpSettings(Switch):
    """Supervised fine-tuning on trajectories in the schema of the Agent Data Protocol. `source` is a JSONL file of
    them; "": generic demonstrations of our own, written in that schema."""

    source: str = ""
    demonstrations: Count
    epochs: Count
    learning_rate: Rate


class AwmSettings(Switch):
    """GRPO in synthetic environments that no diagnosis asked for. `source` is a folder in the layout of the Agent World
    Model; "": environments of our own, generated without regard to the diagnosis."""

    source: str = ""
    environments: Count


class AwmSftSettings(AwmSettings):
    """Supervised fine-tuning on the solutions that such environments know of their own tasks."""

    demonstrations: Count
    """Demonstrations of all environments together."""
    epochs: Count
    learning_rate: Rate


SolutionSource = Literal["reference", "rollouts"]


class FaultSettings(Section):
    """Faults of a known rate in solutions (see `captrain.training.solutions`)."""

    rate: Share
    kind: Literal["random", "systematic"]
    filtered: bool


class RoundSettings(Section):
    """Diagnoses of the trained agent, at most `count`, among which `tasks` of the discovery split are shared evenly.
    `condition` says whether there is a further one always, or only where the last left a candidate undecided."""

    count: Annotated[int, Field(ge=0)]
    tasks: Count
    condition: Literal["always", "undecided"]

    def tasks_before(self, number: int) -> int:
        """Count the tasks of earlier rounds; `number` counts from 1 on."""
        return self.tasks * (number - 1) // self.count


class SolutionsSettings(Switch):
    """TRACE without rewards: fine-tuning on the solutions that the synthesized environments know of their own tasks,
    of one adapter over all environments and of one for each, in rounds of diagnosis."""

    demonstrations: Count
    """Demonstrations of the adapter over all environments."""
    specialist: Count
    """Demonstrations of the adapter of one environment."""
    epochs: Count
    learning_rate: Rate
    source: SolutionSource
    rollouts: Count
    """Played in all environments where the source is the agent's own passed rollouts."""
    faults: FaultSettings
    rounds: RoundSettings


class FailuresSftSettings(Switch):
    """Supervised fine-tuning on the target's own solutions of the tasks that failed in the diagnosis."""

    demonstrations: Count
    """Demonstrations in all: each solution is repeated."""
    epochs: Count
    learning_rate: Rate


CONTINUED = {"warm_grpo": "adp", "solutions_grpo": "solutions"}
"""Rows that go on from the adapter of another row."""


def row_names() -> set[str]:
    """List the names that rows have: those that the pipeline has a stage for."""
    stages = read_stages(shipped("dvc.yaml"), "install captrain anew").values()
    return {name for stage in stages if (name := stage["cmd"].partition("stages/row.py ")[2])}


class BaselineSettings(Section):
    """Rows that TRACE is compared with, one stage each. A row that is not declared here is trained by GRPO, and has the
    settings of those that are."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, GrpoSettings]  # pyright: ignore[reportIncompatibleVariableOverride]: as pydantic asks

    grpo_target: GrpoSettings
    grpo_untuned: GrpoSettings
    rejection_sft: RejectionSftSettings
    gepa: GepaSettings
    adp: AdpSettings
    awm_sft: AwmSftSettings
    warm_grpo: GrpoSettings
    awm: AwmSettings
    single: Switch
    mixed: Switch
    solutions: SolutionsSettings
    solutions_grpo: GrpoSettings
    failures_sft: FailuresSftSettings
