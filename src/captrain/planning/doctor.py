"""What a configuration needs of this machine, looked at before anything is spent; each lack with its remedy.

Nothing is trained, started or downloaded, and nothing heavy is imported: an endpoint is asked for the names of its
models, an interpreter for the version of its vLLM. What only a run on GPUs can show is a list of commands.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from captrain.benchmarks import pretrained_folder
from captrain.config import Component, Spec, nested
from captrain.errors import InfrastructureError, UserError
from captrain.models import Endpoint
from captrain.planning.assumptions import ANALYST, LOCAL, SERVED, SYNTHESIZER, VLLM
from captrain.planning.estimate import Estimate, Node
from captrain.planning.feasibility import problems

PATIENCE = 20.0
"""Seconds that an interpreter, a cluster or an endpoint may take to answer."""
ROOM = 5.0
"""GiB of disk that a run of the embedded default leaves free; a named model needs its weights beside them."""
VERSION = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in m.packages_distributions()['vllm']))"
GPU_COMMANDS = {
    "GRPO on one GPU, in bfloat16": "captrain-sweep -m experiment=smoke machine.accelerate.precision=bfloat16 "
    "hydra.job.name=gpu",
    "FSDP over two GPUs": "captrain-sweep -m experiment=smoke machine=fsdp machine.accelerate.processes=2 "
    "trainer.groups_per_step=4 baselines.grpo_target.groups_per_step=4 hydra.job.name=fsdp",
    "servers on a GPU": "captrain-sweep -m experiment=smoke policy=vllm policy.dtype=float32 machine.workers=1 "
    "machine.vllm.python=~/vllm/bin/python hydra.job.name=servers",
    "the paper's setting, its diagnosis": "dvc repro capabilities",
}
"""What has not been run here, and the command that would show it."""


class Finding(NamedTuple):
    """One thing that was looked at: whether it is as the run needs it, what was seen, and what to do if not."""

    subject: str
    passed: bool
    detail: str
    remedy: str = ""


def examine_machine(spec: Spec, root: Path, node: Node) -> list[Finding]:
    """All that the configuration needs of this machine, in the order in which a run meets it."""
    checks: list[Callable[[Spec, Path], Iterator[Finding]]] = [_model, _vllm, _gpus, _endpoints, _benchmark]
    refusals = [Finding("settings", False, error.problem, error.remedy) for error in problems(Estimate(spec, node, 1))]
    findings = refusals or [Finding("settings", True, "go together, and fit the GPUs that are planned with")]
    return [*findings, *(finding for check in (*checks, _slurm, _disk) for finding in check(spec, root))]


def _output(*command: str) -> str | None:
    """What a command prints; None where it fails or is not there."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _model(spec: Spec, _: Path) -> Iterator[Finding]:
    """Weights: trained here, in the folder of pretrained ones, in the hub's cache, or to be downloaded."""
    name = spec.base.model
    if spec.base.pretrained:
        try:
            folder = pretrained_folder(spec.base.pretrained, Path(spec.machine.pretrained))
            yield Finding("model", True, f"{folder} is the one that base.pretrained names")
        except UserError as error:
            yield Finding("model", False, error.problem, error.remedy)
    elif name is None:
        yield Finding("model", True, "the base is trained here")
    elif spec.policy.target in (LOCAL, VLLM):
        yield _named_model(name)


def _named_model(name: str) -> Finding:
    from huggingface_hub import try_to_load_from_cache

    model, _, revision = name.partition("@")
    if isinstance(try_to_load_from_cache(model, "config.json", revision=revision or None), str):
        return Finding("model", True, f"{name} is in the cache of the hub")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        remedy = "set HF_HUB_OFFLINE=0, so that it is downloaded, or download it first"
        return Finding("model", False, f"{name} is not in the cache of the hub, and HF_HUB_OFFLINE is set", remedy)
    return Finding("model", True, f"{name} is not in the cache of the hub: the first stage that acts downloads it")


def _vllm(spec: Spec, root: Path) -> Iterator[Finding]:
    """The interpreter of the servers and the vLLM in it."""
    if spec.policy.target != VLLM:
        return
    python = shutil.which(os.path.expanduser(spec.machine.vllm.python or "-"), path=f"{root}:{os.environ['PATH']}")
    if python is None:
        remedy = "install vLLM in an environment of its own (docs/model.md) and name its interpreter"
        yield Finding("vLLM", False, f"machine.vllm.python = {spec.machine.vllm.python!r} is no interpreter", remedy)
        return
    version = _output(python, "-c", VERSION)
    remedy = f"{python} -m pip install -r requirements-vllm.lock"
    yield Finding("vLLM", bool(version), version or f"{python} has no vLLM", "" if version else remedy)


def _gpus(spec: Spec, _: Path) -> Iterator[Finding]:
    """As many GPUs as training, servers and endpoint hold, none of them in use."""
    machine, served = spec.machine, spec.policy.target == VLLM
    serving = machine.vllm.replicas * machine.vllm.gpus if served else 0
    demand = serving + (machine.accelerate.processes if serving else 0) + machine.asking.gpus
    if not demand or machine.launcher == "slurm":
        return
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = [int(line) for line in (_output("nvidia-smi", *query) or "").splitlines()]
    free = sum(amount < 1024 for amount in memory) + min(machine.asking.gpus, sum(amount >= 1024 for amount in memory))
    remedy = "end what holds them, ask for fewer (machine.accelerate.processes, machine.vllm), or use machine=slurm"
    detail = f"{demand} are needed, {len(memory)} are visible, {free} of them free or the endpoint's"
    yield Finding("GPUs", free >= demand, detail, "" if free >= demand else remedy)


def _endpoints(spec: Spec, _: Path) -> Iterator[Finding]:
    """Whatever is asked at an endpoint: variables are set, it answers, and it knows the model."""
    user = nested("benchmark.user", spec.benchmark.settings().get("user"))
    defaults = {"endpoint": spec.machine.asking.endpoint, "key": spec.machine.asking.key}
    parties: dict[str, Component | None] = {"agent": spec.policy, "user": user}
    for party, component in (*parties.items(), ("analyst", spec.analyst), ("synthesizer", spec.synthesizer)):
        if component is None or component.target not in (SERVED, ANALYST, SYNTHESIZER):
            continue
        settings = defaults | component.settings()
        name = str(settings["name"]).partition("@")[0]
        endpoint = Endpoint(
            name, endpoint=str(settings["endpoint"]), key=str(settings["key"]), retries=0, timeout=PATIENCE
        )
        yield _answer(f"endpoint of the {party}", endpoint, name)


def _answer(subject: str, endpoint: Endpoint, name: str) -> Finding:
    import openai

    variables = f"{endpoint.endpoint} and {endpoint.key}"
    try:
        names = [model.id for model in endpoint.client.models.list()]
    except UserError as error:
        return Finding(subject, False, error.problem, error.remedy)
    except (openai.OpenAIError, InfrastructureError) as error:
        return Finding(subject, False, f"does not answer ({error})", f"start it, or correct {variables}")
    if name not in names:
        listing = ", ".join(names[:5])
        return Finding(subject, False, f"serves {listing}, and not {name}", "correct the name, or serve that model")
    return Finding(subject, True, f"answers, and serves {name}")


def _benchmark(spec: Spec, _: Path) -> Iterator[Finding]:
    """The interpreter of a benchmark that has an environment of its own."""
    name = spec.benchmark.target.split(".")[-2]
    if (installation := spec.machine.benchmarks.get(name)) is None:
        return
    python = shutil.which(os.path.expanduser(installation.python or "-"))
    detail = python or f"machine.benchmarks.{name}.python = {installation.python!r} is no interpreter"
    yield Finding("benchmark", python is not None, detail, "" if python else "install it as docs/benchmark.md says")


def _slurm(spec: Spec, _: Path) -> Iterator[Finding]:
    """The cluster's commands, and the partition."""
    slurm = spec.machine.slurm
    if spec.machine.launcher != "slurm" or slurm is None:
        return
    text = _output("sinfo", "--noheader", "--format=%P")
    partitions = [line.strip().removesuffix("*") for line in (text or "").splitlines()]
    if text is None or shutil.which("sbatch") is None:
        yield Finding("Slurm", False, "sinfo or sbatch does not answer", "run it where jobs are submitted")
    elif slurm.partition and slurm.partition not in partitions:
        remedy = f"set machine.slurm.partition to one of {', '.join(partitions)}"
        yield Finding("Slurm", False, f"there is no partition {slurm.partition}", remedy)
    else:
        yield Finding("Slurm", True, f"partition {slurm.partition or 'of the default'}, of {len(partitions)}")


def _disk(spec: Spec, root: Path) -> Iterator[Finding]:
    """Room for what a run leaves, and for weights that are still to be downloaded."""
    free = shutil.disk_usage(root).free / 2**30
    size = Estimate(spec, Node(), 1).size if spec.base.model and spec.policy.target != SERVED else None
    demand = ROOM + (2 * size.parameters / 2**30 if size else 0)
    detail = f"{free:.0f} GiB are free, about {demand:.0f} are needed"
    yield Finding("disk", free >= demand, detail, "" if free >= demand else "free some, or `dvc gc --workspace`")


def run_on_gpus(commands: Mapping[str, str], root: Path) -> list[Finding]:
    """Run the commands one after another where there is a GPU; else each is named, and none is run."""
    if not _output("nvidia-smi", "--list-gpus"):
        absent = "no GPU is visible"
        return [Finding(subject, False, absent, f"where there is one: {line}") for subject, line in commands.items()]
    statuses = {subject: subprocess.run(shlex.split(line), cwd=root).returncode for subject, line in commands.items()}
    return [
        Finding(subject, status == 0, f"`{commands[subject]}` ended with {status}", "read what it says" * (status != 0))
        for subject, status in statuses.items()
    ]
