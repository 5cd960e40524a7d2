"""Schema of the configuration, which is composed once and read by every later stage.

`params.yaml` selects and `conf/` defines. The first stage composes `results/spec.yaml` from them; later stages only
read that file with `load_spec`. The schema checks the whole configuration before anything runs, so a mistake ends in
one message with key and remedy, and not in the middle of a training.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from captrain.errors import UserError
from captrain.records import publish_text, read_yaml, refuse_keys, refuse_keys_in
from captrain.run.components import (
    REMEDY,
    Component,
    Count,
    Interval,
    Level,
    Rate,
    Section,
    Share,
    alternatives,
    check,
    problem_text,
    takes,
)
from captrain.run.compose import compose_data
from captrain.run.machine import Machine
from captrain.run.rows import CONTINUED, BaselineSettings, GrpoSettings, Switch, row_names


class TrainerSettings(Component):
    """A trainer. One update uses `group_size` x `groups_per_step` rollouts."""

    group_size: Annotated[int, Field(ge=2)]
    groups_per_step: Count


class BaseModelSettings(Section):
    """The base model.

    By default a tiny model is trained from scratch. `pretrained` starts from a folder in `machine.pretrained`, given as
    name@digest. `model` uses a hub model without training, given as name or name@revision. `demonstrations` is a
    component that returns demonstrations of your own benchmark. `products` is the type of matrix products while a
    pretrained model is trained. Everything else is float32.
    """

    model: Annotated[str, Field(pattern=r"^[^@\s]+(@[^@\s]+)?$")] | None = None
    hidden: Count
    layers: Count
    heads: Count
    steps: Count
    batch: Count
    learning_rate: Rate
    weight_decay: Annotated[float, Field(ge=0)]
    pretrained: Annotated[str, Field(pattern=r"^[\w.-]+@[0-9a-f]{16}$")] | None = None
    products: Literal["float32", "bfloat16"] = "float32"
    demonstrations: Component | None = None


class RolloutSettings(Section):
    """Rollouts of the base on the discovery split, for the diagnosis."""

    tasks: Count
    trials: Count
    retries: Annotated[int, Field(ge=0)]


class LabelSettings(Section):
    """Labelling runs over the same rollouts, each on a bootstrap resample of the tasks or on all tasks."""

    runs: Count
    resample: bool = True


Ranking = Literal["product", "gap", "mean_gap", "coverage"]
"""Number by which selected candidates are sorted, largest first.

product: pooled coverage x pooled gap. gap: pooled gap. mean_gap: mean gap over runs. coverage: pooled coverage.
"""


class SelectionSettings(Section):
    """Thresholds for selecting candidate capabilities, and the order of the selected ones.

    `proof` also selects a candidate if replay proves that at least this share of failures needs its repair (lower
    bound). null selects only by contrast, as in the paper.
    """

    delta: Share
    coverage: Share
    agreement: Count
    confidence: Level
    floor: Annotated[float, Field(ge=-1, le=1)]
    resamples: Count
    ranking: Ranking = "product"
    proof: Share | None = None


class CapabilitySettings(Section):
    """The largest number of capabilities to select."""

    count: Count


class EnvironmentSettings(Section):
    """Synthesized environments and the bounds of their passport.

    `temperature` is the sampling temperature in calibration and training. null keeps the policy's own temperature. At 0
    all rollouts of a group are equal and teach nothing.
    """

    seeds: Count
    groups: Count
    group_size: Annotated[int, Field(ge=2)]
    rounds: Count
    mean_reward: Interval
    success: Interval
    constant_groups: Share
    idle_reward: Share
    random_reward: Share
    hacking_reward: Share
    broken_reward: Share
    structures: Count
    transfer: Share
    temperature: Annotated[float, Field(gt=0)] | None = None
    seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time limit in seconds for the examination of an untrusted file."""


class AdapterSettings(Section):
    """Training budget of each adapter."""

    rollouts: Count


class PairSettings(Section):
    """Number of environments that need two capabilities at once.

    The pairs are those that failed rollouts most often lack together. These environments cost no rollouts.
    """

    count: Annotated[int, Field(ge=0)]


class MergingSettings(Section):
    """Methods that merge TRACE's adapters into one."""

    methods: list[Literal["sum", "mean", "ties", "dare", "svd", "core", "distillation"]]
    density: Annotated[float, Field(gt=0, le=1)]
    """Share of the weights that TIES and DARE keep."""
    rollouts: Count
    """Rollouts of the student in on-policy distillation, in addition to those of the adapters."""
    learning_rate: Rate
    """Learning rate of on-policy distillation."""


class CurveSettings(Section):
    """Number of checkpoints of a training to evaluate, including the end. 0 evaluates only the end."""

    points: Annotated[int, Field(ge=0)]


class EvaluationSettings(Section):
    """The comparison on the test split or, as in the paper, on all splits.

    With all splits, every row of the table says that not all tasks are held out. `alternatives` adds rows for other
    routers and for bounds, for which every adapter plays every task. Without `alternatives`, an adapter of one
    capability plays only the tasks routed to it.
    """

    tasks: Count
    splits: Literal["test", "all"] = "test"
    trials: Count
    alternatives: bool = True
    resamples: Count
    confidence: Level


class Spec(Section):
    """The whole configuration of a run."""

    seed: Annotated[int, Field(ge=0, lt=1 << 32)]
    benchmark: Component
    base: BaseModelSettings
    policy: Component
    rollouts: RolloutSettings
    analyst: Component
    labels: LabelSettings
    selection: SelectionSettings
    capabilities: CapabilitySettings
    synthesizer: Component
    environments: EnvironmentSettings
    trainer: TrainerSettings
    adapters: AdapterSettings
    baselines: BaselineSettings
    pairs: PairSettings
    merging: MergingSettings
    controls: Switch
    router: Component
    evaluation: EvaluationSettings
    curve: CurveSettings
    causality: Switch
    machine: Machine

    def exploring(self) -> Component:
        """Return the policy for calibration and training, which samples from the whole distribution."""
        changes: dict[str, float | None] = {name: None for name in ("top_p", "top_k") if name in self.policy.settings()}
        if self.environments.temperature is not None:
            changes["temperature"] = self.environments.temperature
        return self.policy.model_copy(update=changes) if changes else self.policy

    @model_validator(mode="after")
    def _relations(self) -> "Spec":
        processes, rows = self.machine.accelerate.processes, dict(self.baselines)
        steps: dict[str, int | None] = {"trainer": self.trainer.groups_per_step}
        for name, section in rows.items():
            if isinstance(section, GrpoSettings) and section.run:
                steps[f"baselines.{name}"] = section.groups_per_step
        broken = [
            f"{name}.groups_per_step = {groups} is not a multiple of machine.accelerate.processes = {processes}: set "
            f"{name}.groups_per_step={-(-groups // processes) * processes}"
            for name, groups in steps.items()
            if groups and groups % processes
        ]
        broken += [
            f"baselines.{name}.run needs baselines.{start}.run, because it starts from its adapters"
            for name, start in CONTINUED.items()
            if rows[name].run and not rows[start].run
        ]
        if further := {*rows} - {*BaselineSettings.model_fields}:
            broken += [f"baselines.{name} is not a row" for name in sorted(further - row_names())]
        rounds, width = self.baselines.solutions.rounds, 2 * self.base.heads
        relations = {
            f"baselines.solutions.rounds.tasks = {rounds.tasks} cannot be shared among {rounds.count} diagnoses": (
                rounds.tasks < rounds.count
            ),
            f"selection.agreement = {self.selection.agreement} exceeds labels.runs = {self.labels.runs}": (
                self.selection.agreement > self.labels.runs
            ),
            f"base.hidden = {self.base.hidden} is not a multiple of 2 x base.heads = {width}": (
                self.base.hidden % width > 0
            ),
            "base.pretrained is trained further and base.model is not trained: set only one of them": (
                self.base.pretrained is not None and self.base.model is not None
            ),
            "causality.run needs evaluation.alternatives, because every adapter must play every task": (
                self.causality.run and not self.evaluation.alternatives
            ),
        }
        broken += [text for text, is_broken in relations.items() if is_broken]
        if broken:
            raise ValueError("; ".join(broken))
        return self


class Choice(Section):
    """Content of params.yaml. Settings beside the first three are among the overrides, see `load_choice`."""

    experiment: str
    seed: int
    overrides: list[str]


S = TypeVar("S", bound=Section)
CODE = "code"
"""Key of the digests of code in results/spec.yaml."""


def load_choice(path: Path) -> Choice:
    """Read params.yaml.

    `selection: {delta: 0.3}` is the override selection.delta=0.3, so that `dvc exp run -S selection.delta=0.3` works.
    A null leaves the value of the experiment. The lines of `overrides` win.

    Raises:
        UserError: the file is missing or malformed, or an override contains an API key.
    """
    data, settings = read_yaml(path, object, "restore it from git"), dict[object, object]()
    if isinstance(data, dict):
        # Sections and options of groups are settings; other values are misspelt keys of `Choice`.
        names = {
            key for key, value in data.items() if isinstance(value, dict | str | NoneType)
        } - Choice.model_fields.keys()
        settings = {key: data.pop(key) for key in [*data] if key in names}
    choice = _validated(Choice, data, f"{path}: ", "see the comments in params.yaml")
    choice.overrides[:0] = _overrides(settings)
    refuse_keys(choice.overrides)
    return choice


def _overrides(settings: Mapping[object, object], prefix: str = "") -> Iterator[str]:
    """Yield nested settings as key=value lines, without nulls."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _overrides(value, f"{prefix}{name}.")
        elif value is not None:
            plain = isinstance(value, str) and re.fullmatch(r"[\w./@:-]+", value)
            yield f"{prefix}{name}={value if plain else json.dumps(value, ensure_ascii=False)}"


def compose_spec(experiment: str, seed: int, overrides: Sequence[str], conf_dir: Path) -> Spec:
    """Compose the configuration of an experiment from `conf_dir`, and check all of it.

    Args:
        experiment: one of conf/experiment/.
        seed: seed of the run.
        overrides: key=value lines. A key is a setting (selection.delta=0.1), also an unlisted one of a component, or a
            group (router=classifier). A leading `+` adds a new section (+machine.benchmarks.new.python=PATH).
        conf_dir: of the project.

    Raises:
        UserError: an experiment, option or key is unknown; an override is not key=value; a value has the wrong type or
            is out of range; settings conflict; a value contains an API key; a component does not exist or does not take
            its settings; a tracker is not installed.
    """
    refuse_keys(overrides)
    data = compose_data(experiment, seed, overrides, conf_dir)
    refuse_keys_in(data)
    spec = _validated(Spec, data, "", REMEDY)
    sections = {**dict(spec), "base.demonstrations": spec.base.demonstrations}
    for name, section in sections.items():
        if isinstance(section, Component):
            check(name, section)
    for tracker in spec.machine.report_to:
        package = find_spec(tracker)
        if package is None or package.origin is None:  # a folder of that name
            raise UserError(
                f"machine.report_to names {tracker}, which is not installed",
                f"pip install 'captrain[{tracker}]', or remove it from machine.report_to",
            )
    if spec.base.model is not None or not takes(spec.policy, "endpoint"):
        return spec
    # A model behind an endpoint is the base, and is not trained.
    data = spec.model_dump(by_alias=True)
    data["base"] |= {"model": spec.policy.settings()["name"], "pretrained": None}
    return _validated(Spec, data, "policy.name: ", REMEDY)


def load_spec(path: Path = Path("results/spec.yaml")) -> Spec:
    """Read the composed configuration, without importing any component.

    Raises:
        UserError: the file is missing, corrupt, or does not match the schema.
    """
    remedy = "run `dvc repro compose` to derive it again"
    content = read_yaml(path, object, remedy)
    if isinstance(content, dict):
        content.pop(CODE, None)
    return _validated(Spec, content, f"{path}: ", remedy)


def publish_spec(spec: Spec, path: Path, code: Mapping[str, str] | None = None) -> None:
    """Publish the configuration as YAML, with keys in the order of the schema.

    Args:
        spec: the configuration.
        path: of the file.
        code: digest of the code that each stage runs, on which the stages depend (`dvc.yaml`).
    """
    content = spec.model_dump(mode="json", by_alias=True) | ({CODE: dict(code)} if code else {})
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    publish_text(path, f"# Derived from params.yaml and conf/; change those, not this.\n{text}")


def _validated(kind: type[S], data: object, source: str, remedy: str) -> S:
    # Via JSON, because strict validation accepts a list for a tuple only there.
    try:
        text = json.dumps(data, default=str, ensure_ascii=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        # A recursive YAML anchor, a list as a key, or a lone surrogate.
        raise UserError(f"{source}a value in it contains itself, or cannot be written as JSON", remedy) from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    if unknown := next((problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"), None):
        # The fields of the section that these keys lead to.
        section: Any = kind
        for part in unknown[:-1]:
            field = getattr(section, "model_fields", {}).get(part)
            section = (
                field.annotation if field else GrpoSettings if section is BaselineSettings else get_args(section)[-1]
            )
            section = get_args(section)[0] if NoneType in get_args(section) else section  # slurm: Slurm | None
        remedy = alternatives(str(unknown[-1]), section.model_fields)
    raise UserError(source + "; ".join(problem_text(problem) for problem in problems), remedy)


def compose_configuration(settings: Sequence[str], root: Path) -> tuple[Spec, str]:
    """Compose the configuration of params.yaml with further settings; return it with a title.

    Args:
        settings: key=value, as in `overrides` of params.yaml; also experiment=NAME and seed=NUMBER.
        root: of the project.

    Raises:
        UserError: the configuration does not compose.
    """
    selection = load_choice(root / "params.yaml")
    pairs = ((key, value) for key, _, value in (setting.partition("=") for setting in settings))
    replaced = {key: value for key, value in pairs if key in ("experiment", "seed")}
    if not (seed := replaced.get("seed", str(selection.seed))).isdecimal():
        raise UserError(f"seed = {seed!r} is not a number", "write, for example, seed=42")
    overrides = [*selection.overrides, *(text for text in settings if text.partition("=")[0] not in replaced)]
    experiment = replaced.get("experiment", selection.experiment)
    title = ", ".join([f"experiment {experiment}", f"seed {seed}", *overrides])
    return compose_spec(experiment, int(seed), overrides, root / "conf"), title
