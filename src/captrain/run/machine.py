"""The machine: where work runs, how many processes share it, which services it asks, and what those may cost.

A section of the configuration apart from all others, because no result depends on it: it is a param of no stage and
part of no fingerprint, and whatever reads it may change without anything being made again.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from captrain.run.components import Count, Rate, Section, Variable

PRETRAINED = "~/.cache/captrain"
"""Default folder of the models that base.pretrained names."""


class Installation(Section):
    """Installation of a benchmark that has an environment of its own."""

    python: str
    """Interpreter of that environment, "" where there is none."""
    data: str = ""
    """Folder of the benchmark's data, "" where the benchmark finds them itself."""
    processes: Count = 1
    timeout: Rate = 120.0
    """Seconds for one request."""


class ModelAccess(Section):
    """Access of analysts and synthesizers to a language model, and its budget.

    Prices are money for a million tokens; the budgets are those of one run of one stage, answers found on disk not
    counted. null: no limit.
    """

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
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of this node that the endpoint holds; 0: it is somewhere else."""


class Slurm(Section):
    """Resources of one Slurm job, and how often it is started again (see `captrain.run.slurm`)."""

    partition: str = ""
    """Partition of the cluster; "" is its default."""
    nodes: Count = 1
    """Nodes of one job, over which the processes of a training are divided; all else of these is for each node."""
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
    """Times that a job which met its time limit is queued again, to go on from its checkpoint; one that was preempted
    always is."""
    resubmissions: Annotated[int, Field(ge=0)] = 3
    """Times that one run of a stage submits an item again whose job died."""


DECISIVE = {
    "--dtype": "policy.dtype",
    "--max-model-len": "policy.max_length",
    **dict.fromkeys(
        (
            "--quantization",
            "-q",
            "--kv-cache-dtype",
            "--calculate-kv-scales",
            "--hf-overrides",
            "--rope-scaling",
            "--rope-theta",
            "--load-format",
            "--lora-dtype",
            "--model-impl",
            "--seed",
            "--speculative-config",
            "--logits-processors",
            "--reasoning-parser",
        ),
        "policy.arguments",
    ),
}
"""Arguments of a server that decide results, and the settings of policy vllm that they are instead."""


class VLLM(Section):
    """The servers of policy vllm: child processes of whatever plays, in an environment of their own. They take their
    GPUs from the last of the visible ones on, so that the first is left to training where there are more."""

    python: str = ""
    """Interpreter of vLLM's environment, "" where there is none."""
    command: list[str] = ["-m", "vllm.entrypoints.cli.main", "serve"]
    """Arguments of the interpreter: a server that takes `vllm serve`'s arguments."""
    arguments: list[str] = []
    """Further arguments that decide no result, such as --gpu-memory-utilization=0.5."""
    replicas: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each replica; 0 leaves the choice to the server."""
    max_lora_rank: Count = 16
    """Rank of an adapter; conf/ gives that of the trainer."""
    max_loras: Count = 1
    """Adapters that act together, each in a place of its own or summed up in one, whose rank is the sum of theirs: vLLM
    is asked for the least rank that it knows and that is enough. conf/ gives the number of capabilities."""
    start_timeout: Rate = 900.0
    """Seconds until a server must be healthy."""

    @model_validator(mode="after")
    def _decides_nothing(self) -> "VLLM":
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            if setting := DECISIVE.get(flag):
                raise ValueError(f"{flag} decides what a model answers, and is no matter of the machine: set {setting}")
        return self


class Accelerate(Section):
    """Layout of the training of one adapter.

    It trains in the process that asks for it, or in several that `accelerate launch` starts (see `captrain.training`).
    Adapters differ between these settings in their last digits, as they do between CPU and GPU.
    """

    processes: Count = 1
    """Processes; on GPUs one for each. Where fewer trainings run at once than there are places for on the machine's
    GPUs (`machine.workers`), one has the processes of several.

    The groups of a step, or the demonstrations of an update, divide among them.
    """
    strategy: Literal["none", "ddp", "fsdp"] = "none"
    """Sharing of the work: each process holds the whole model (ddp), or its part of each layer (fsdp)."""
    precision: Literal["float64", "float32", "bfloat16"] = "float64"
    """Type of the base's weights. float64 is for the embedded default: an adapter has the same bytes on every CPU (see
    `captrain.models.barrier`). The weights of the adapter are float64 then, else float32."""
    gradient_checkpointing: bool = False
    """True to compute activations again in the backward pass, which saves memory."""
    rows: Count | None = None
    """Rollouts or demonstrations in one forward and backward pass of a process; null: all that it has of a step."""

    @model_validator(mode="after")
    def _shared(self) -> "Accelerate":
        if (self.processes > 1) == (self.strategy == "none"):
            raise ValueError(
                f"processes is {self.processes} and strategy is {self.strategy}: several processes have ddp or fsdp, "
                "one has none"
            )
        return self


class Machine(Section):
    """Machine that the work runs on; no param of any stage.

    `pretrained`: the folder that holds models of `base.pretrained`. `sandbox`: the least level of confinement that code
    which nobody has vouched for may run at (see `captrain.environments.sandbox`). `launcher`: whether independent items
    of work run in processes of this machine or as jobs of a Slurm cluster. `workers`: items of work at once on this
    machine, such as trainings over one base (with servers of policy vllm one at a time, on the GPUs of all); 0: as many
    as have GPUs of their own (see `gpus`), one where these are not counted. `report_to`: the trackers of trainings (see
    `captrain.training.trackers`).
    """

    launcher: Literal["local", "slurm"] = "local"
    slurm: Slurm | None = None
    workers: Annotated[int, Field(ge=0)]
    batch: Count
    benchmarks: dict[str, Installation] = {}
    asking: ModelAccess = ModelAccess()
    pretrained: str = PRETRAINED
    vllm: VLLM = VLLM()
    accelerate: Accelerate = Accelerate()
    sandbox: Literal["strong", "strong, one layer", "basic"] = "strong"
    report_to: list[Literal["trackio", "wandb", "mlflow", "tensorboard"]] = []

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of this node, which training, servers and endpoint share; 0: they are not counted before a run."""

    def places(self, items: int) -> int:
        """Count the places for a training on the GPUs of this node that one of so many items of work has: several where
        there are fewer than `workers`."""
        return self.workers // min(self.workers, items) if self.gpus else 1

    @model_validator(mode="after")
    def _goes_together(self) -> "Machine":
        serving, processes = self.vllm.replicas * self.vllm.gpus, self.accelerate.processes
        if self.launcher == "slurm" and self.slurm is None:
            raise ValueError("launcher is slurm, and slurm says nothing of its jobs: choose machine=slurm")
        if processes % self.nodes:
            raise ValueError(
                f"accelerate.processes = {processes} cannot be divided evenly among slurm.nodes = {self.nodes}: set "
                f"accelerate.processes={-(-processes // self.nodes) * self.nodes}, with strategy ddp or fsdp"
            )
        if self.workers == 0:
            # What this section says is settled here, once for all who read it.
            object.__setattr__(self, "workers", max(1, (self.gpus - serving - self.asking.gpus) // processes))
        training = self.workers * processes
        if self.gpus and training + serving + self.asking.gpus > self.gpus:
            raise ValueError(
                f"of {self.gpus} GPUs {training} train (workers x accelerate.processes), {serving} serve "
                f"(vllm.replicas x vllm.gpus) and {self.asking.gpus} are the endpoint's (asking.gpus): they overlap"
            )
        return self

    @property
    def nodes(self) -> int:
        """Nodes that the processes of a training are divided among."""
        return self.slurm.nodes if self.launcher == "slurm" and self.slurm else 1
