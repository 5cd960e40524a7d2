"""The configuration: one typed schema, composed once, read by every later stage.

`params.yaml` selects, `conf/` defines, and the first stage derives `results/spec.yaml` from the two; every later
stage reads that file with `load` and never composes. Because the whole configuration passes through this schema
before anything runs, a mistake ends here, in one message that names the key and the remedy, and not in the middle
of a training run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from captrain.components import (
    REMEDY,
    Component,
    Count,
    Interval,
    Level,
    Rate,
    Section,
    Share,
    Variable,
    alternatives,
    build,
    check,
    said,
)
from captrain.errors import UserError
from captrain.records import publish_text

__all__ = ["Choice", "Component", "Spec", "build", "choice", "compose", "dump", "load"]


class Trainer(Component):
    """A trainer, of which the exact rollout budget needs to know the size of an update."""

    group_size: Annotated[int, Field(ge=2)]
    groups_per_step: Count


class Base(Section):
    """The tiny base model and its supervised training; or a `model` that is served elsewhere, name or name@revision,
    in whose place nothing is trained."""

    model: Annotated[str, Field(pattern=r"^[^@\s]+(@[^@\s]+)?$")] | None = None
    hidden: Count
    layers: Count
    heads: Count
    steps: Count
    batch: Count
    learning_rate: Rate
    weight_decay: Annotated[float, Field(ge=0)]


class Rollouts(Section):
    """Diagnostic rollouts of the base on the discovery split."""

    tasks: Count
    trials: Count
    retries: Annotated[int, Field(ge=0)]


class Labels(Section):
    """Labelling runs over the same rollouts."""

    runs: Count


class Selection(Section):
    """What a candidate capability must show to be selected."""

    delta: Share
    coverage: Share
    agreement: Count
    confidence: Level
    floor: Annotated[float, Field(ge=-1, le=1)]
    resamples: Count


class Capabilities(Section):
    """How many selected capabilities are kept."""

    count: Count


class Environments(Section):
    """Synthesized environments and the bounds that their passport checks on the base. `temperature` is the policy's
    while it calibrates and trains; null: its own. Groups sampled at 0 are constant and teach nothing."""

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


class Adapters(Section):
    """Training budget of each adapter."""

    rollouts: Count


class GrpoTarget(Section):
    """GRPO on the target itself: what differs from the trainer of the adapters."""

    run: bool
    learning_rate: Rate


class Gepa(Section):
    """Optimisation of the system prompt by GEPA, with rollouts on the training split. `model` names the one that
    reflects, asked as `machine.asking` says; null: a programmatic proposer over the lines that the base knows."""

    run: bool
    model: str | None = None
    minibatch: Count
    validation: Count
    """Training tasks set aside to choose among prompts."""


class Adp(Section):
    """Supervised fine-tuning on trajectories in the schema of the Agent Data Protocol. `source` is a JSONL file of
    them; "": generic demonstrations of our own, written in that schema."""

    run: bool
    source: str = ""
    demonstrations: Count
    epochs: Count
    learning_rate: Rate


class Awm(Section):
    """GRPO in synthetic environments that no diagnosis asked for. `source` is a folder in the layout of the Agent World
    Model; "": environments of our own, generated without regard to the diagnosis."""

    run: bool
    source: str = ""
    environments: Count


class Row(Section):
    """A row that has no setting but whether it is wanted."""

    run: bool


class RampRow(Section):
    """One adapter on a ramp from targeted environments to the target (see `captrain.ramp.Ramp`)."""

    run: bool
    start: Share
    slope: Share
    window: Count
    learning_rate: Rate


class Baselines(Section):
    """What TRACE is compared with, one stage and one row each."""

    grpo_target: GrpoTarget
    gepa: Gepa
    adp: Adp
    awm: Awm
    single: Row
    mixed: Row
    ramp: RampRow


class Pairs(Section):
    """Environments that demand two capabilities at once, of those that failed rollouts lack together most often; they
    cost no rollout. 0: none."""

    count: Annotated[int, Field(ge=0)]


class Merging(Section):
    """One adapter made of TRACE's adapters, by each of the methods."""

    methods: list[Literal["sum", "mean", "ties", "dare", "svd", "core", "distillation"]]
    density: Annotated[float, Field(gt=0, le=1)]
    """Share of the weights that TIES and DARE keep."""
    rollouts: Count
    """Of the student, in on-policy distillation; beyond what the adapters have cost."""
    learning_rate: Rate
    """Of on-policy distillation."""


class Evaluation(Section):
    """The comparison on the test split."""

    tasks: Count
    trials: Annotated[int, Field(ge=2)]
    resamples: Count
    confidence: Level


class Installation(Section):
    """Where a benchmark is installed that has an environment of its own."""

    python: str
    """Interpreter of that environment, "" where there is none."""
    data: str = ""
    """Folder of the benchmark's data, "" where the benchmark finds them itself."""
    processes: Count = 1
    timeout: Rate = 120.0
    """Seconds for one request."""


class Asking(Section):
    """How a language model is asked by analysts and synthesizers, and what it may cost. Prices are money for a million
    tokens; the budgets are those of one run of one stage, answers found on disk not counted. null: no limit."""

    endpoint: Variable = "OPENAI_BASE_URL"
    """Name of the environment variable that holds the base URL."""
    key: Variable = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    concurrency: Count = 16
    retries: Annotated[int, Field(ge=0)] = 6
    """Further attempts at a question, each after a longer pause."""
    timeout: Rate = 600.0
    """Seconds for one request."""
    input_price: Annotated[float, Field(ge=0)] | None = None
    output_price: Annotated[float, Field(ge=0)] | None = None
    money: Rate | None = None
    """Budget in the currency of the prices."""
    tokens: Count | None = None
    """Budget in tokens, read and written."""


class Slurm(Section):
    """What one Slurm job gets, and how often it is helped up (see `captrain.dispatch`)."""

    partition: str = ""
    """Of the cluster; "" is its default."""
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Count = 1
    memory: Annotated[str, Field(pattern=r"^[1-9]\d*(MB|GB)$")] = "8GB"
    minutes: Annotated[int, Field(ge=5)] = 240
    """Time limit; a job is told of it 90 seconds before."""
    setup: list[str] = []
    """Lines of shell before the work, such as `module load`."""
    options: dict[str, str | int | bool] = {}
    """Further options of sbatch, such as account or qos."""
    requeues: Annotated[int, Field(ge=0)] = 20
    """Times that a job which was preempted or met its time limit is queued again, to go on from its checkpoint."""
    resubmissions: Annotated[int, Field(ge=0)] = 3
    """Times that one run of a stage submits an item again whose job died."""


class VLLM(Section):
    """The servers of policy vllm: child processes of whatever plays, in an environment of their own. They take their
    GPUs from the last of the visible ones on, so that the first is left to training where there are more."""

    python: str = ""
    """Interpreter of vLLM's environment, "" where there is none."""
    command: list[str] = ["-m", "vllm.entrypoints.cli.main", "serve"]
    """What the interpreter runs: a server that takes `vllm serve`'s arguments."""
    arguments: list[str] = []
    """Further arguments, such as --max-lora-rank=32 or --gpu-memory-utilization=0.5."""
    replicas: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 1
    """Of each replica; 0 leaves the choice to the server."""
    start_timeout: Rate = 900.0
    """Seconds until a server must be healthy."""


class Accelerate(Section):
    """How one adapter is trained by GRPO: in the process that asks for it, or in several that `accelerate launch`
    starts (see `captrain.distributed`). Adapters differ between these settings in their last digits, as they do between
    CPU and GPU."""

    processes: Count = 1
    """On one machine; on GPUs one for each. The groups of a step divide among them."""
    strategy: Literal["none", "ddp", "fsdp"] = "none"
    """How several share the work: each holds the whole model (ddp), or its part of each layer (fsdp)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the base's weights; those of the adapter are float32."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass, which saves memory."""
    rows: Count | None = None
    """Rollouts in one forward and backward pass of a process; null: all that it has of a step."""

    @model_validator(mode="after")
    def _shared(self) -> "Accelerate":
        if (self.processes > 1) == (self.strategy == "none"):
            raise ValueError(
                f"processes is {self.processes} and strategy is {self.strategy}: several processes have ddp or fsdp, "
                "one has none"
            )
        return self


class Machine(Section):
    """Where and how fast; never a param of a stage, because no result depends on it. `sandbox`: the least level of
    confinement that code which nobody has vouched for may run at (see `captrain.environments.sandbox`). `launcher`:
    whether independent items of work run in processes of this machine or as jobs of a Slurm cluster."""

    launcher: Literal["local", "slurm"] = "local"
    slurm: Slurm | None = None
    workers: Count
    batch: Count
    benchmarks: dict[str, Installation] = {}
    asking: Asking = Asking()
    vllm: VLLM = VLLM()
    accelerate: Accelerate = Accelerate()
    sandbox: Literal["strong", "strong, one layer", "basic"] = "strong"

    @model_validator(mode="after")
    def _described(self) -> "Machine":
        if self.launcher == "slurm" and self.slurm is None:
            raise ValueError("launcher is slurm, and slurm says nothing of its jobs: choose machine=slurm")
        return self


class Spec(Section):
    """The whole configuration of one run."""

    seed: Annotated[int, Field(ge=0)]
    benchmark: Component
    base: Base
    policy: Component
    rollouts: Rollouts
    analyst: Component
    labels: Labels
    selection: Selection
    capabilities: Capabilities
    synthesizer: Component
    environments: Environments
    trainer: Trainer
    adapters: Adapters
    baselines: Baselines
    pairs: Pairs
    merging: Merging
    controls: Row
    router: Component
    evaluation: Evaluation
    machine: Machine

    def exploring(self) -> Component:
        """The policy as it calibrates and trains."""
        if self.environments.temperature is None:
            return self.policy
        return self.policy.model_copy(update={"temperature": self.environments.temperature})

    @model_validator(mode="after")
    def _relations(self) -> "Spec":
        update = self.trainer.group_size * self.trainer.groups_per_step
        # The baseline on the target spends exactly what TRACE spends in all, and can only spend whole updates.
        totals = {
            "rollouts.tasks x rollouts.trials": self.rollouts.tasks * self.rollouts.trials,
            "environments.groups x environments.group_size": self.environments.groups * self.environments.group_size,
            "adapters.rollouts": self.adapters.rollouts,
        }
        broken = [
            f"{name} = {total} is not a multiple of trainer.group_size x trainer.groups_per_step = {update}"
            for name, total in totals.items()
            if total % update
        ]
        if self.trainer.groups_per_step % (processes := self.machine.accelerate.processes):
            broken.append(
                f"trainer.groups_per_step = {self.trainer.groups_per_step} is not a multiple of "
                f"machine.accelerate.processes = {processes}"
            )
        if self.selection.agreement > self.labels.runs:
            broken.append(f"selection.agreement = {self.selection.agreement} exceeds labels.runs = {self.labels.runs}")
        if self.base.hidden % (2 * self.base.heads):
            broken.append(
                f"base.hidden = {self.base.hidden} is not a multiple of 2 x base.heads = {2 * self.base.heads}"
            )
        if broken:
            raise ValueError("; ".join(broken))
        return self


class Choice(Section):
    """What params.yaml selects."""

    experiment: str
    seed: int
    overrides: list[str]


S = TypeVar("S", bound=Section)


def choice(path: Path) -> Choice:
    """Read params.yaml.

    Raises:
        UserError: the file is missing or not of the form {experiment, seed, overrides}.
    """
    return _validated(Choice, _read(path, "restore it from git"), f"{path}: ", "see the comments in params.yaml")


def compose(experiment: str, seed: int, overrides: Sequence[str], conf_dir: Path) -> Spec:
    """Compose the configuration of an experiment from `conf_dir` and check all of it.

    Args:
        experiment: one of conf/experiment/.
        overrides: key=value lines; a key is a setting (selection.delta=0.1) or a group (router=classifier), and
            `+key=value` adds a setting of a component that conf/ does not list.

    Raises:
        UserError: an unknown experiment, option or key, a line that is no key=value, a value of the wrong type or
            out of range, settings that do not go together, or a component that does not exist or does not take
            its settings.
    """
    groups = _groups(conf_dir)
    if experiment not in groups["experiment"]:
        raise UserError(f"unknown experiment {experiment!r}", alternatives(experiment, groups["experiment"]))
    pairs = [_parsed(override, groups) for override in overrides]
    chosen = [f"experiment={experiment}", f"seed={seed}", *(text for text, key in pairs if key in groups)]
    data = _composed(conf_dir, chosen)
    if values := [(text, key) for text, key in pairs if key not in groups]:
        known = _dotted(data)
        for text, key in values:
            if key not in known and not text.startswith("+"):
                raise UserError(f"override {text!r}: there is no setting {key}", alternatives(key, known))
        data = _composed(conf_dir, [*chosen, *(text for text, _ in values)])
    spec = _validated(Spec, data, "", REMEDY)
    for name, section in spec:
        if isinstance(section, Component):
            check(name, section)
    return spec


def load(path: Path = Path("results/spec.yaml")) -> Spec:
    """Read the derived configuration, without composing and without importing any component.

    Raises:
        UserError: the file is missing, corrupt, or not of the schema.
    """
    remedy = "run `dvc repro compose` to derive it again"
    return _validated(Spec, _read(path, remedy), f"{path}: ", remedy)


def dump(spec: Spec, path: Path) -> None:
    """Publish the configuration as YAML, keys in the order of the schema."""
    text = yaml.safe_dump(spec.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)
    publish_text(path, f"# Derived from params.yaml and conf/; change those, not this.\n{text}")


def _read(path: Path, remedy: str) -> Any:
    if not path.exists():
        raise UserError(f"{path} is missing", remedy)
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {_line(error)}", remedy) from None


def _groups(conf_dir: Path) -> dict[str, list[str]]:
    """The options of each config group, `experiment` among them."""
    groups = {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(conf_dir.glob("*"))
        if folder.is_dir()
    }
    if "experiment" not in groups:
        raise UserError(f"there is no folder {conf_dir}/experiment", "run from the root of the repository")
    return groups


def _parsed(override: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The override and its key, once its form and its place are known to be right."""
    form = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", override.strip(), re.DOTALL)
    if form is None:
        raise UserError(
            f"override {override!r} is not of the form key=value", "write, for example, selection.delta=0.1"
        )
    key, value = form[2], form[3]
    if key in ("experiment", "seed"):
        raise UserError(f"override {override!r}: {key} is not an override", f"set `{key}:` in params.yaml itself")
    if key in groups and value not in groups[key]:
        raise UserError(f"override {override!r}: there is no {key} {value!r}", alternatives(value, groups[key]))
    return override.strip(), key


def _composed(conf_dir: Path, overrides: list[str]) -> dict[str, Any]:
    # Hydra is needed by the compose stage only; every other stage imports this module for `load`.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(config_dir=str(conf_dir.resolve()), version_base="1.3"):
            config = hydra_compose("config", overrides)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"the configuration in {conf_dir}/ does not compose: {_line(error)}", REMEDY) from None
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _dotted(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All keys of a nested mapping, inner ones too, as a.b.c."""
    keys: list[str] = []
    for key, value in data.items():
        keys.append(prefix + key)
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def _validated(kind: type[S], data: Any, source: str, remedy: str) -> S:
    try:
        # Through JSON text, because only there does strict validation take a list for a tuple.
        return kind.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    if unknown := next((problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"), None):
        remedy = alternatives(str(unknown[-1]), _settings_of(kind, unknown[:-1]))
    raise UserError(source + "; ".join(said(problem) for problem in problems), remedy)


def _settings_of(kind: type[BaseModel], where: tuple[int | str, ...]) -> list[str]:
    """The names of the fields of the section at `where`."""
    annotation: Any = kind
    for part in where:
        of_mapping = get_origin(annotation) is dict
        annotation = get_args(annotation)[1] if of_mapping else annotation.model_fields[str(part)].annotation
    return list(annotation.model_fields)
