"""Schema of the section `baselines` in conf/config.yaml: one section per row that TRACE is compared with.

It is separate from the rest of the schema (`captrain.run.spec`), because rows come and go. A row that trains by GRPO
needs no class here.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from captrain.records import JsonObject
from captrain.run.components import Count, Rate, Section, Share
from captrain.run.shipped import read_stages, shipped


class Switch(Section):
    """A row whose only setting is whether it runs."""

    run: bool


class GrpoSettings(Switch):
    """A row that trains by GRPO. Settings that are not null replace those of the section `trainer`."""

    group_size: Annotated[int, Field(ge=2)] | None = None
    groups_per_step: Count | None = None
    epochs: Count | None = None
    learning_rate: Rate | None = None
    schedule: Literal["constant", "linear"] | None = None
    clip_high: Rate | None = None

    def differences(self) -> JsonObject:
        """Return the settings that are not null."""
        return self.model_dump(exclude={"run"}, exclude_none=True)


class GateSettings(GrpoSettings):
    """A row of gates over adapters (`captrain.models.mixture`)."""

    scope: Literal["layer", "global"]
    decide: Literal["prompt", "turn", "token"]
    activation: Literal["softmax", "sigmoid"]
    start: Annotated[int, Field(ge=0)]
    """Gates are first fitted to the prompts of this many training tasks of each environment. With 0 they are not
    fitted, and weigh all adapters alike."""
    controls: bool
    """Also evaluate equal, random and partly trained gates."""

    def differences(self) -> JsonObject:
        """See `GrpoSettings.differences`."""
        return self.model_dump(include={*GrpoSettings.model_fields} - {"run"}, exclude_none=True)


class MixtureSettings(GateSettings):
    """Gates over TRACE's adapters."""

    share: Annotated[float, Field(gt=0, lt=1)]
    """Share of the training rollouts that the gates get. The adapters get the rest."""


class RejectionSftSettings(Switch):
    """Rejection fine-tuning on the target: rounds of rollouts, and fine-tuning on passed ones."""

    rounds: Count
    rows: Count
    """Approximate number of rows that one fine-tuning trains on, counting repetitions. It decides the epochs."""
    learning_rate: Rate


class GepaSettings(Switch):
    """Optimisation of the system prompt by GEPA, on the training split.

    `model` reflects, see `machine.asking`; null uses a programmatic proposer over lines that the base knows.
    """

    model: str | None = None
    minibatch: Count
    validation: Count
    """Training tasks set aside to choose among prompts."""
    prompts: Count | None = None
    """Most accepted prompts, not counting the base's. null: limited only by the budget."""


class AdpSettings(Switch):
    """Supervised fine-tuning on trajectories in the schema of the Agent Data Protocol.

    `source` is a JSONL file of trajectories; "" writes generic demonstrations of our own.
    """

    source: str = ""
    demonstrations: Count
    epochs: Count
    learning_rate: Rate


class AwmSettings(Switch):
    """GRPO in untargeted synthetic environments.

    `source` is a folder in the layout of the Agent World Model; "" draws environments of our own.
    """

    source: str = ""
    environments: Count


class AwmSftSettings(AwmSettings):
    """Supervised fine-tuning on the solutions of untargeted environments."""

    demonstrations: Count
    """Total of all environments."""
    epochs: Count
    learning_rate: Rate


SolutionSource = Literal["reference", "rollouts"]


class FaultSettings(Section):
    """Faults of a known rate in solutions, see `captrain.training.solutions`."""

    rate: Share
    kind: Literal["random", "systematic"]
    filtered: bool


class RoundSettings(Section):
    """Diagnoses of the trained agent.

    There are at most `count` diagnoses, which share `tasks` tasks of the discovery split evenly. `condition` decides
    whether a further diagnosis always follows, or only if the last one left a candidate undecided.
    """

    count: Annotated[int, Field(ge=0)]
    tasks: Count
    condition: Literal["always", "undecided"]

    def tasks_before(self, number: int) -> int:
        """Return the number of tasks used before round `number`. Rounds are numbered from 1."""
        return self.tasks * (number - 1) // self.count


class SolutionsSettings(Switch):
    """TRACE from solutions: in rounds of diagnosis, fine-tune one adapter on the solutions of all environments, and one
    specialist per environment."""

    demonstrations: Count
    """Demonstrations of the adapter over all environments."""
    specialist: Count
    """Demonstrations of a specialist."""
    epochs: Count
    learning_rate: Rate
    source: SolutionSource
    rollouts: Count
    """Rollouts in all environments together, if the source is the agent's own passed rollouts."""
    faults: FaultSettings
    rounds: RoundSettings


class FailuresSftSettings(Switch):
    """Supervised fine-tuning on the target's own solutions of tasks that failed in the diagnosis."""

    demonstrations: Count
    """Total; each solution is repeated."""
    epochs: Count
    learning_rate: Rate


CONTINUED = {"warm_grpo": "adp", "solutions_grpo": "solutions", "solutions_mixture": "solutions"}
"""Rows that start from the adapters of another row."""


def row_names() -> set[str]:
    """Return the names of rows that have a stage in the pipeline."""
    stages = read_stages(shipped("dvc.yaml"), "install captrain anew").values()
    return {name for stage in stages if (name := stage["cmd"].partition("stages/row.py ")[2])}


class BaselineSettings(Section):
    """Rows that TRACE is compared with. Rows without a field here are trained by GRPO and have `GrpoSettings`."""

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
    mixture: MixtureSettings
    solutions_mixture: GateSettings
    failures_sft: FailuresSftSettings
