"""Examination of this machine for what a configuration needs, before anything is spent; each lack with its remedy.

Nothing is trained, started or downloaded: an endpoint is asked for the names of its models, and for one short answer
with a tool; an interpreter for the version of its vLLM. What only a run on GPUs can show is a list of commands.
"""

import importlib.metadata
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, ValidationError

from captrain.benchmarks import load_benchmark, made_installation, pretrained_folder
from captrain.config import Component, Spec, nested
from captrain.environments.sandbox import LEVELS, active_confinement
from captrain.errors import InfrastructureError, UserError
from captrain.models import ContextLengthExceeded, Endpoint, TransientFault
from captrain.planning.assumptions import ANALYST, LOCAL, SERVED, SYNTHESIZER, VLLM
from captrain.planning.estimate import Estimate, Node
from captrain.planning.feasibility import problems
from captrain.planning.served_model import (
    PATIENCE,
    TOOL,
    Finding,
    adapter_findings,
    command_output,
    interpreter,
    named_model,
    template_findings,
    vllm_findings,
)
from captrain.policies import load_policy
from captrain.records import first_fault
from captrain.rollouts import collect

SPACE = 5.0
"""GiB of disk that a run of the embedded default leaves free; a named model needs its weights beside them."""
GPU_COMMANDS = {
    "GRPO on one GPU, in bfloat16": "captrain-sweep -m experiment=smoke machine.accelerate.precision=bfloat16 "
    "hydra.job.name=gpu",
    "FSDP over two GPUs": "captrain-sweep -m experiment=smoke machine=fsdp machine.accelerate.processes=2 "
    "trainer.groups_per_step=4 baselines.grpo_target.groups_per_step=4 hydra.job.name=fsdp",
    "servers on a GPU": "captrain-sweep -m experiment=smoke policy=vllm policy.dtype=float32 machine.workers=1 "
    "\"machine.vllm.python='~/vllm/bin/python'\" hydra.job.name=servers",
    "the paper's setting, its diagnosis": "dvc repro capabilities",
}
"""Commands that show what has not been run here."""


def examine_machine(spec: Spec, root: Path, node: Node) -> list[Finding]:
    """Examine all that the configuration needs of this machine, in the order in which a run meets it."""
    checks: list[Callable[[Spec, Path], Iterator[Finding]]] = [
        *(_model, template_findings, vllm_findings, adapter_findings, _gpus, _processor, _endpoints, _benchmark),
        *(_sandbox, _slurm, _disk),
    ]
    refusals = [Finding("settings", False, error.problem, error.remedy) for error in problems(Estimate(spec, node, 1))]
    findings = refusals or [Finding("settings", True, "go together, and fit the GPUs that are planned with")]
    return [*findings, *(finding for check in checks for finding in check(spec, root))]


def _model(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check the weights: trained here, in the folder of pretrained ones, in the hub's cache, or to be downloaded."""
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
        yield named_model(name)


def _gpus(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check that the machine has as many free GPUs as training, servers and endpoint hold."""
    machine, served = spec.machine, spec.policy.target == VLLM
    serving = machine.vllm.replicas * machine.vllm.gpus if served else 0
    demand = machine.together(machine.accelerate.processes if serving else 0, serving) + machine.asking.gpus
    if not demand or machine.launcher == "slurm":
        return
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = [int(line) for line in (command_output("nvidia-smi", *query) or "").splitlines()]
    free = sum(amount < 1024 for amount in memory) + min(machine.asking.gpus, sum(amount >= 1024 for amount in memory))
    remedy = "end what holds them, ask for fewer (machine.accelerate.processes, machine.vllm), or use machine=slurm"
    detail = f"{demand} are needed, {len(memory)} are visible, {free} of them free or the endpoint's"
    yield Finding("GPUs", free >= demand, detail, "" if free >= demand else remedy)
    if serving and memory and (version := importlib.metadata.version("torch")).endswith("+cpu"):
        remedy = "pip install -r requirements-gpu.lock, into an environment of its own"
        yield Finding("training", False, f"torch {version} of this environment knows no GPU", remedy)


def _processor(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check for instructions for bfloat16 where it is computed here: without them it is some thirty times slower than
    float32."""
    precisions = {
        "base.products": spec.base.products if spec.base.pretrained else None,
        "policy.precision": spec.policy.settings().get("precision"),
        "machine.accelerate.precision": spec.machine.accelerate.precision,
    }
    settings = [f"{name}=float32" for name, precision in precisions.items() if precision == "bfloat16"]
    if spec.policy.target != LOCAL or not settings or command_output("nvidia-smi", "--list-gpus"):
        return
    from torch.backends.cpu import get_cpu_capability

    capability = get_cpu_capability()
    passed = capability.startswith("AVX512")
    remedy = f"set {' '.join(settings)}: on such a CPU that is some thirty times faster"
    yield Finding("processor", passed, f"bfloat16 on a CPU with {capability} kernels", "" if passed else remedy)


def _endpoints(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check whatever is asked at an endpoint: variables are set, it answers, and it knows the model."""
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
        finding = _answer(f"endpoint of the {party}", endpoint, name)
        yield finding
        if party == "agent" and finding.passed:
            yield _tool_call(endpoint)


def _tool_call(endpoint: Endpoint) -> Finding:
    """Check that the endpoint's own parser makes a call of what the model writes."""
    subject = "calls of the agent"
    question = {"role": "user", "content": "Find the record called Ada, with the tool."}
    try:
        completion = endpoint.chat(messages=[question], tools=[TOOL], temperature=0, max_tokens=256)
    except UserError as error:
        return Finding(subject, False, error.problem, error.remedy)
    except (TransientFault, ContextLengthExceeded) as error:
        return Finding(subject, None, f"were not seen: {error}", "try again")
    message = completion.choices[0].message
    if message.tool_calls:
        return Finding(subject, True, f"come as calls ({message.tool_calls[0].function.name})")
    if "<tool_call>" in (message.content or ""):
        remedy = "serve it with the parser of its template (vLLM: --enable-auto-tool-choice --tool-call-parser)"
        return Finding(subject, False, "come as text: the endpoint does not parse them", remedy)
    return Finding(subject, None, "were not seen: it answered a request with a tool in text")


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    """Fields that are read of an endpoint's list of models."""

    data: list[_Model]


def _answer(subject: str, endpoint: Endpoint, name: str) -> Finding:
    import openai

    variables = f"{endpoint.endpoint} and {endpoint.key}"
    try:
        answer = endpoint.client.models.with_raw_response.list()
        names = [model.id for model in _Models.model_validate_json(answer.content).data]
    except UserError as error:
        return Finding(subject, False, error.problem, error.remedy)
    except (openai.OpenAIError, InfrastructureError) as error:
        return Finding(subject, False, f"does not answer ({error})", f"start it, or correct {variables}")
    except ValidationError as error:
        problem = f"does not list its models as OpenAI's interface does ({first_fault(error)})"
        return Finding(subject, False, problem, f"correct {variables}: the base URL ends in /v1 on most servers")
    if name not in names:
        listing = ", ".join(model[:80] for model in names[:5]) or "no model"
        return Finding(subject, False, f"serves {listing}, and not {name}", "correct the name, or serve that model")
    return Finding(subject, True, f"answers, and serves {name}")


def _benchmark(spec: Spec, root: Path) -> Iterator[Finding]:
    """Check the interpreter of a benchmark that has an environment of its own."""
    name = spec.benchmark.target.split(".")[-2]
    if (setting := spec.machine.benchmarks.get(name)) is None:
        return
    installation = setting if setting.python else made_installation(name, root)
    if installation is None:
        problem = f"{name} is not installed, and machine.benchmarks.{name}.python does not name an interpreter"
        yield Finding("benchmark", False, problem, "install it as docs/benchmark.md says")
    elif (python := interpreter(installation.python, root)) is None:
        problem = f"machine.benchmarks.{name}.python = {installation.python!r} is not an interpreter"
        yield Finding("benchmark", False, problem, "install it as docs/benchmark.md says")
    else:
        yield Finding("benchmark", True, python)


def _sandbox(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check the confinement of code that nobody has vouched for, as a confined process finds it."""
    confinement, least = active_confinement(), spec.machine.sandbox
    passed = LEVELS.index(confinement.level) >= LEVELS.index(least)
    remedy = "run on Linux 5.13 or later, outside of a container that forbids Landlock and seccomp; or, where what is "
    remedy += f"exposed may be exposed, set machine.sandbox={confinement.level!r}"
    yield Finding("sandbox", passed, str(confinement), "" if passed else remedy)


def _slurm(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check the cluster's commands, and the partition."""
    slurm = spec.machine.slurm
    if spec.machine.launcher != "slurm" or slurm is None:
        return
    text = command_output("sinfo", "--noheader", "--format=%P")
    partitions = [line.strip().removesuffix("*") for line in (text or "").splitlines()]
    if text is None or shutil.which("sbatch") is None:
        yield Finding("Slurm", False, "sinfo or sbatch does not answer", "run it where jobs are submitted")
    elif slurm.partition and slurm.partition not in partitions:
        remedy = f"set machine.slurm.partition to one of {', '.join(partitions)}"
        yield Finding("Slurm", False, f"there is no partition {slurm.partition}", remedy)
    else:
        yield Finding("Slurm", True, f"partition {slurm.partition or 'of the default'}, of {len(partitions)}")


def _disk(spec: Spec, root: Path) -> Iterator[Finding]:
    """Check the room for what a run leaves, and for weights that are still to be downloaded."""
    free = shutil.disk_usage(root).free / 2**30
    size = Estimate(spec, Node(), 1).size if spec.base.model and spec.policy.target != SERVED else None
    demand = SPACE + (2 * size.parameters / 2**30 if size else 0)
    detail = f"{free:.0f} GiB are free, about {demand:.0f} are needed"
    yield Finding("disk", free >= demand, detail, "" if free >= demand else "free some, or `dvc gc --workspace`")


def examine_agent(spec: Spec, root: Path, count: int) -> Finding:
    """Play the first discovery tasks with the agent that the diagnosis would play with: it must pass some, and fail
    some. Nothing of it is kept."""
    base = root / "artifacts/base"
    if spec.policy.target in (LOCAL, VLLM) and not base.exists():
        return Finding(
            "agent", None, "the base is not there yet, so that it plays nothing", "run `dvc repro base` first"
        )
    target = load_benchmark(spec.benchmark, spec.machine)
    policy = load_policy(spec.policy, base, spec.machine, batch=spec.machine.batch)
    most = target.size("discovery")
    tasks = target.tasks("discovery", count if most is None else min(count, most))
    with TemporaryDirectory() as journals:
        try:
            rollouts = collect(
                policy, target, tasks, purpose="diagnosis", seed=spec.seed, journals=Path(journals), quiet=True
            )
        except InfrastructureError as error:
            return Finding("agent", False, f"plays nothing: {error}", "mend what it names, and try again")
    passed = sum(rollout.outcome == "passed" for rollout in rollouts)
    detail = f"passes {passed} of {len(rollouts)} discovery tasks"
    if not passed:
        lessons = "set base.demonstrations._target_=MODULE:CLASS to dialogues of this benchmark, or raise base.steps"
        remedy = "set another base.model" if spec.base.model or spec.base.pretrained else lessons
        return Finding("agent", False, f"{detail}: there would be nothing to contrast failures with", remedy)
    if passed == len(rollouts):
        return Finding("agent", None, f"{detail}: there may be no failures to learn from", "play more with --play")
    return Finding("agent", True, detail)


def run_on_gpus(commands: Mapping[str, str], root: Path) -> list[Finding]:
    """Run the commands one after another where there is a GPU; else none, which is one finding."""
    if not command_output("nvidia-smi", "--list-gpus"):
        remedy = "run it where there is one; docs/honesty.md has each command"
        return [Finding("GPU", False, f"none is visible: none of {len(commands)} commands was run", remedy)]
    statuses = {subject: subprocess.run(shlex.split(line), cwd=root).returncode for subject, line in commands.items()}
    return [
        Finding(subject, status == 0, f"`{commands[subject]}` ended with {status}", "read what it says" * (status != 0))
        for subject, status in statuses.items()
    ]
