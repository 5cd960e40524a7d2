"""Schema of the section `machine`: where work runs, with how many processes, and which services it uses.

No result depends on this section, so it is no param of any stage and no part of any fingerprint. Changing it makes
nothing stale.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from captrain.run.components import Count, Rate, Section, Variable

PRETRAINED = "~/.cache/captrain"
"""Default folder of the models of base.pretrained."""


class Installation(Section):
    """Installation of a benchmark with its own Python environment."""

    python: str
    """Interpreter of the benchmark's environment; "" if there is none."""
    data: str = ""
    """Folder of the benchmark's data; "" if the benchmark finds them itself."""
    processes: Count = 1
    timeout: Rate = 120.0
    """Seconds for one request."""


class ModelAccess(Section):
    """Access of analysts and synthesizers to a language model, and its budget.

    Prices are per million tokens. A budget applies to one run of one stage. Cached answers are free. null means no
    limit.
    """

    endpoint: Variable = "OPENAI_BASE_URL"
    """Environment variable with the base URL."""
    key: Variable = "OPENAI_API_KEY"
    """Environment variable with the API key."""
    concurrency: Count = 16
    retries: Annotated[int, Field(ge=0)] = 6
    """Number of retries of a question, with growing pauses."""
    timeout: Rate = 600.0
    """Seconds for one request."""
    input_price: Annotated[float, Field(ge=0)] | None = None
    output_price: Annotated[float, Field(ge=0)] | None = None
    money: Rate | None = None
    """Budget in the currency of the prices."""
    tokens: Count | None = None
    """Budget in tokens, counting prompts and completions."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of this node that the endpoint uses; 0 if it runs elsewhere."""


class Slurm(Section):
    """Resources of one Slurm job, and its restarts (see `captrain.run.slurm`)."""

    partition: str = ""
    """Partition; "" for the cluster's default."""
    nodes: Count = 1
    """Nodes of one job, which share the processes of a training. The other resources are per node."""
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Count = 1
    memory: Annotated[str, Field(pattern=r"^[1-9]\d*(MB|GB)$")] = "8GB"
    minutes: Annotated[int, Field(ge=5)] = 240
    """Time limit of a job in minutes. A job is warned 90 seconds before."""
    setup: list[str] = []
    """Shell lines before the work, such as `module load`."""
    options: dict[str, str | int | bool] = {}
    """Further options of sbatch, such as account or qos."""
    requeues: Annotated[int, Field(ge=0)] = 20
    """How often a job is requeued after it reached its time limit. Preempted jobs are always requeued."""
    resubmissions: Annotated[int, Field(ge=0)] = 3
    """How often an item is submitted again after its job died, per run of a stage."""


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
"""Server arguments that change results, and the setting to use instead."""


class VLLM(Section):
    """The servers of policy vllm: child processes with their own Python environment.

    They take the last visible GPUs and leave the first ones to training.
    """

    python: str = ""
    """Interpreter of vLLM's environment; "" if there is none."""
    command: list[str] = ["-m", "vllm.entrypoints.cli.main", "serve"]
    """Arguments of the interpreter that start a server with the arguments of `vllm serve`."""
    arguments: list[str] = []
    """Further arguments that change no result, such as --gpu-memory-utilization=0.5."""
    replicas: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs per replica; 0 lets the server choose."""
    max_lora_rank: Count = 16
    """Largest rank of an adapter; conf/ sets the trainer's."""
    max_loras: Count = 1
    """Adapters that act together. Their ranks add up, and vLLM is started with the smallest rank that fits the sum.
    conf/ sets this to the number of capabilities."""
    start_timeout: Rate = 900.0
    """Seconds until a server must be healthy."""

    @model_validator(mode="after")
    def _decides_nothing(self) -> "VLLM":
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            if setting := DECISIVE.get(flag):
                raise ValueError(f"{flag} changes the model's answers, so it is not a machine setting: set {setting}")
        return self


class Accelerate(Section):
    """How the training of one adapter is distributed.

    Training runs in the calling process, or in several processes of `accelerate launch` (see `captrain.training`).
    Between these settings, trained adapters differ in their last digits, as they do between CPU and GPU.
    """

    processes: Count = 1
    """Processes of one training; on GPUs, one per GPU. They share the groups of a step or the demonstrations of an
    update. If fewer than `machine.workers` trainings run, each of them gets several times as many processes."""
    strategy: Literal["none", "ddp", "fsdp"] = "none"
    """Each process holds the whole model (ddp), or a shard of each layer (fsdp)."""
    precision: Literal["float64", "float32", "bfloat16"] = "float64"
    """Type of the base's weights.

    float64 is for the embedded base: an adapter has the same bytes on every CPU (see `captrain.models.barrier`). Then
    the adapter's weights are float64, otherwise float32.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    rows: Count | None = None
    """Rollouts or demonstrations per forward pass of a process; null for all of a step."""

    @model_validator(mode="after")
    def _shared(self) -> "Accelerate":
        if (self.processes > 1) == (self.strategy == "none"):
            raise ValueError(
                f"processes is {self.processes} and strategy is {self.strategy}: several processes need ddp or "
                "fsdp, one process needs none"
            )
        return self


class Machine(Section):
    """Machine that the work runs on.

    - `launcher`: run work in processes of this machine, or as jobs of a Slurm cluster.
    - `workers`: number of work items, such as trainings, that run in parallel on this machine. With the servers of
      policy vllm, one item runs at a time. 0: as many trainings as fit on `gpus`, or 1 if `gpus` is 0.
    - `pretrained`: folder of the models for `base.pretrained`.
    - `sandbox`: minimum confinement of untrusted code (see `captrain.environments.sandbox`).
    - `report_to`: experiment trackers for trainings (see `captrain.training.trackers`).
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
    """GPUs of this node for training, servers and endpoint; 0 if they are not counted before a run."""

    def gpu_sets(self, items: int) -> int:
        """Return how many trainings' worth of GPUs each of `items` work items gets. Above 1 if items < `workers`."""
        return self.workers // min(self.workers, items) if self.gpus else 1

    @model_validator(mode="after")
    def _goes_together(self) -> "Machine":
        serving, processes = self.vllm.replicas * self.vllm.gpus, self.accelerate.processes
        if self.launcher == "slurm" and self.slurm is None:
            raise ValueError("launcher is slurm, but the section slurm is empty: choose machine=slurm")
        if processes % self.nodes:
            raise ValueError(
                f"accelerate.processes = {processes} cannot be divided evenly among slurm.nodes = {self.nodes}: set "
                f"accelerate.processes={-(-processes // self.nodes) * self.nodes}, with strategy ddp or fsdp"
            )
        if self.workers == 0:
            # Replace 0 here, once for all readers.
            object.__setattr__(self, "workers", max(1, (self.gpus - serving - self.asking.gpus) // processes))
        training = self.workers * processes
        if self.gpus and training + serving + self.asking.gpus > self.gpus:
            raise ValueError(
                f"{self.gpus} GPUs are too few: {training} train (workers x accelerate.processes), {serving} serve "
                f"(vllm.replicas x vllm.gpus) and the endpoint uses {self.asking.gpus} (asking.gpus)"
            )
        return self

    @property
    def nodes(self) -> int:
        """Number of nodes that share the processes of a training."""
        return self.slurm.nodes if self.launcher == "slurm" and self.slurm else 1
