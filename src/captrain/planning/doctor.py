"""`captrain doctor`: checks that this machine can run the configuration, before anything is spent.

The refusals of `captrain.planning.feasibility` come first. No check trains, starts or downloads anything:

- An endpoint is asked for its list of models and for one short tool call.
- vLLM's interpreter is asked for its version.
- The model is built without weights.

`GPU_COMMANDS` lists the commands that test what only a run on GPUs can show.

A check returns what it saw, or "" if the configuration does not need the check. It raises a `UserError` if something
is missing.
"""

import importlib.metadata
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError

from captrain.agents import collect, load_policy, served_rank
from captrain.benchmarks import load_benchmark, made_installation
from captrain.environments.sandbox import LEVELS, active_confinement
from captrain.errors import InfrastructureError, UserError
from captrain.models import FORMATS, Chat, ContextLengthExceeded, Endpoint, TransientFault, lora_config, trusts_code
from captrain.planning.assumptions import ANALYST, LOCAL, SERVED, SYNTHESIZER, VLLM
from captrain.planning.estimate import Node, RunEstimate
from captrain.planning.feasibility import mixture_without_gpus, refusals
from captrain.records import JsonObject, Message, counted, first_fault
from captrain.run import Component, ModelAccess, Spec, build, nested
from captrain.training import GRPO, build_model, build_tokenizer, pretrained_folder

PATIENCE = 20.0
"""Seconds that an interpreter, a cluster or an endpoint may take to answer."""
SPACE = 5.0
"""GiB of disk that a run of the embedded default needs; the weights of a named model come on top."""
LEAST_VERSION = (0, 10, 2)
"""First version of vLLM that returns the token ids it read and wrote."""
GPU_COMMANDS = {
    "GRPO on one GPU, in bfloat16": "captrain-sweep -m experiment=smoke machine.accelerate.precision=bfloat16 "
    "hydra.job.name=gpu",
    "FSDP over two GPUs": "captrain-sweep -m experiment=smoke machine=fsdp machine.accelerate.processes=2 "
    "trainer.groups_per_step=4 baselines.grpo_target.groups_per_step=4 hydra.job.name=fsdp",
    "servers on a GPU": "captrain-sweep -m experiment=smoke policy=vllm policy.dtype=float32 machine.workers=1 "
    "\"machine.vllm.python='~/vllm/bin/python'\" hydra.job.name=servers",
    "the paper's setting, its diagnosis": "dvc repro capabilities",
}
"""Commands that test what captrain's authors have not run themselves, by name."""
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "find_record",
        "description": "Find a record.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "limit": {"type": "integer"},
                "share": {"type": "number"},
                "fields": {"type": "array"},
                "by": {"type": "object"},
            },
            "required": ["name"],
        },
    },
}
ARGUMENTS = {"name": 'Zoë "Z" O\'Neil\n<b>', "limit": 10, "share": 0.5, "fields": ["id", None, True], "by": {}}
"""Arguments of every JSON type, with characters that a chat template might escape."""
DISTRIBUTION = (
    "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in m.packages_distributions()['vllm']))"
)


class Requirement(NamedTuple):
    """One requirement of the run: whether it is met (None: cannot be checked yet), what was seen, and the remedy."""

    subject: str
    passed: bool | None
    detail: str
    remedy: str = ""


class NotVisible(UserError):
    """The requirement cannot be checked yet."""


def require(holds: bool, problem: str, remedy: str) -> None:
    """Raise a UserError unless the condition holds."""
    if not holds:
        raise UserError(problem, remedy)


def examine_machine(spec: Spec, root: Path, node: Node) -> list[Requirement]:
    """Check everything that the configuration requires of this machine."""
    found = [Requirement(key, False, problem, remedy) for key, problem, remedy in refusals(RunEstimate(spec, node, 1))]
    found = found or [Requirement("settings", True, "fit together, and fit the GPUs that are planned with")]
    for subject, check in CHECKS.items():
        missing = {requirement.detail for requirement in found if requirement.passed is False}
        found += [result for result in _examine(subject, check, spec, root) if result.detail not in missing]
    user = nested("benchmark.user", spec.benchmark.settings().get("user"))
    parties = {"agent": spec.policy, "user": user, "analyst": spec.analyst, "synthesizer": spec.synthesizer}
    for party, component in parties.items():
        if component is not None and component.target in (SERVED, ANALYST, SYNTHESIZER):
            endpoint = _endpoint(component, spec.machine.asking)
            found += _examine(f"endpoint of the {party}", _answer, endpoint)
            if party == "agent" and found[-1].passed:
                found += _examine("calls of the agent", _tool_call, endpoint)
    return found


def _endpoint(component: Component, access: ModelAccess) -> Endpoint:
    """Build the endpoint of a component with a short timeout and no retries."""
    settings = {"endpoint": access.endpoint, "key": access.key, **component.settings()}
    name, base_url, key = (str(settings[setting]) for setting in ("name", "endpoint", "key"))
    return Endpoint(name.partition("@")[0], endpoint=base_url, key=key, retries=0, timeout=PATIENCE)


def _examine(subject: str, check: Callable[..., str], *arguments: object) -> list[Requirement]:
    """Run a check. Return an empty list if the configuration does not need it."""
    try:
        detail = check(*arguments)
    except UserError as error:
        return [Requirement(subject, None if isinstance(error, NotVisible) else False, error.problem, error.remedy)]
    return [Requirement(subject, True, detail)] if detail else []


def command_output(*command: str) -> str | None:
    """Run a command and return its output; None if it is missing, fails or takes too long."""
    try:
        process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _interpreter(name: str, root: Path) -> str | None:
    """Return the path of a configured interpreter, found the same way as in the stages. None if it is missing."""
    path = os.path.expanduser(name or "-")
    return shutil.which(str(root / path) if os.sep in path else path)


def _model(spec: Spec, _: Path) -> str:
    """Report where the weights come from: trained here, a pretrained folder, the hub's cache, or a download."""
    if spec.base.model and spec.policy.target not in (LOCAL, VLLM):
        return ""
    try:
        folder = _model_folder(spec)
    except NotVisible:
        problem = f"{spec.base.model} is not in the cache of the hub"
        online = os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0")
        require(online, f"{problem}, and HF_HUB_OFFLINE is set", "set HF_HUB_OFFLINE=0, or download the model first")
        return f"{problem}: the first stage that acts downloads it"
    return f"the model is in {folder}" if folder else "the base is trained here"


def _model_folder(spec: Spec) -> Path | None:
    """Return the folder of the model. None for the embedded base, which is trained here.

    Raises:
        UserError: the pretrained model is not in `machine.pretrained`.
        NotVisible: the model of the hub is not in the cache.
    """
    if spec.base.pretrained:
        return pretrained_folder(spec.base.pretrained, Path(spec.machine.pretrained))
    if spec.base.model is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    model, _, revision = spec.base.model.partition("@")
    path = try_to_load_from_cache(model, "config.json", revision=revision or None)
    if not isinstance(path, str):
        raise NotVisible("can be checked when the model is downloaded", "")
    return Path(path).parent


def _template(spec: Spec, _: Path) -> str:
    """Check that the chat template shows tools and their results, and that a rendered call parses to the same call."""
    from transformers import AutoTokenizer

    folder = _model_folder(spec)
    try:
        tokenizer: Any = (
            build_tokenizer()
            if folder is None
            else AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusts_code(folder))
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} does not load ({error})", "download the whole model") from None
    chat = Chat(tokenizer, [TOOL], spec.policy.settings().get("chat_template_kwargs"))
    remedy = f"choose a model whose calls are like those of {', '.join(FORMATS)}, or serve it by policy=openai"
    opening: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hello."}]
    answer: list[Message] = [{"role": "tool", "content": "record 7041"}]
    require("find_record" in tokenizer.decode(chat.prompt(opening)), "does not show the model its tools", remedy)
    require("7041" in tokenizer.decode(chat.suffix(answer)), "does not show the model what a tool answered", remedy)
    call = {"type": "function", "function": {"name": "find_record", "arguments": ARGUMENTS}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn = list[int]()
    with suppress(TemplateError):
        turn = chat.turn(message)
    problem = f"writes a call as {tokenizer.decode(turn)[:80]!r}, which is parsed as another one"
    require(chat.parse(turn) == message, problem, remedy)
    return "shows tools and their answers, and calls are parsed as they were written"


def _vllm(spec: Spec, root: Path) -> str:
    """Check that vLLM's interpreter exists and that its version of vLLM is recent enough."""
    if spec.policy.target != VLLM:
        return ""
    python = _interpreter(spec.machine.vllm.python, root)
    if python is None:
        raise UserError(
            f"machine.vllm.python = {spec.machine.vllm.python!r} is not an interpreter",
            "install vLLM in an environment of its own (docs/vllm.md) and name its interpreter",
        )
    text, remedy = command_output(python, "-c", DISTRIBUTION), f"{python} -m pip install -r requirements-vllm.lock"
    parts = text.split()[-1].partition("+")[0].split(".") if text else []
    least = ".".join(map(str, LEAST_VERSION))
    require(bool(text), f"{python} has no vLLM", remedy)
    is_recent = tuple(int(part) for part in parts[:3] if part.isdigit()) >= LEAST_VERSION
    require(is_recent, f"{text} in {python} is before {least} and does not return its tokens", remedy)
    return f"{text}, in {python}"


def _adapters(spec: Spec, _: Path) -> str:
    """Check that the model has the layers that LoRA adapts, and that the servers can adapt its experts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, recipe, servers = _model_folder(spec), build(spec.trainer, GRPO), spec.machine.vllm
    if folder is None:
        model = build_model(build_tokenizer(), spec.base, 0)
    else:
        trust = trusts_code(folder)
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    lora_config(model, recipe.shape)
    experts = " and experts" if recipe.experts else ""
    detail = f"rank {recipe.rank}, of {', '.join(recipe.targets)}{experts}, which the model has"
    if spec.policy.target != VLLM:
        return detail
    refusal = mixture_without_gpus(str(spec.base.model or spec.base.pretrained).partition("@")[0])
    is_mixture = any(".experts." in name for name, _ in model.named_parameters())
    require(servers.gpus > 0 or not is_mixture, refusal.problem, refusal.remedy)
    return f"{detail}; servers take rank {served_rank(servers)}: {servers.max_loras} of them together"


def _gpus(spec: Spec, _: Path) -> str:
    """Check that enough GPUs are free for training, servers and endpoint, and that torch can use them."""
    machine = spec.machine
    serving = machine.vllm.replicas * machine.vllm.gpus if spec.policy.target == VLLM else 0
    demand = (machine.accelerate.processes if serving else 0) + serving + machine.asking.gpus
    if not demand or machine.launcher == "slurm":
        return ""
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = [int(line) for line in (command_output("nvidia-smi", *query) or "").splitlines()]
    free = sum(amount < 1024 for amount in memory) + min(machine.asking.gpus, sum(amount >= 1024 for amount in memory))
    detail = f"{demand} are needed, {len(memory)} are visible, {free} of them free or the endpoint's"
    fewer = "ask for fewer (machine.accelerate.processes, machine.vllm)"
    remedy = f"end the processes that hold them, {fewer}" if memory else "run on a machine with GPUs"
    require(free >= demand, detail, f"{remedy}, or use machine=slurm")
    version = importlib.metadata.version("torch")
    require(
        not serving or not version.endswith("+cpu"),
        f"{detail}; torch {version} of this environment is for the CPU alone",
        "pip install -r requirements-gpu.lock, into an environment of its own",
    )
    return detail


def _processor(spec: Spec, _: Path) -> str:
    """If bfloat16 runs on the CPU, check that the CPU has instructions for it. Without them it is 30 times slower."""
    precisions = {
        "base.products": spec.base.products if spec.base.pretrained else None,
        "policy.precision": spec.policy.settings().get("precision"),
        "machine.accelerate.precision": spec.machine.accelerate.precision,
    }
    settings = [f"{name}=float32" for name, precision in precisions.items() if precision == "bfloat16"]
    if spec.policy.target != LOCAL or not settings or command_output("nvidia-smi", "--list-gpus"):
        return ""
    from torch.backends.cpu import get_cpu_capability

    detail = f"bfloat16 on a CPU with {(capability := get_cpu_capability())} kernels"
    remedy = f"set {' '.join(settings)}: about thirty times faster on this CPU"
    require(capability.startswith("AVX512"), detail, remedy)
    return detail


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    """Fields that are read of an endpoint's list of models."""

    data: list[_Model]


def _answer(endpoint: Endpoint) -> str:
    """Check that an endpoint answers and serves the model."""
    import openai

    variables = f"{endpoint.endpoint} and {endpoint.key}"
    try:
        answer = endpoint.client.models.with_raw_response.list()
        names = [model.id for model in _Models.model_validate_json(answer.content).data]
    except (openai.OpenAIError, InfrastructureError) as error:
        raise UserError(f"does not answer ({error})", f"start it, or correct {variables}") from None
    except ValidationError as error:
        raise UserError(
            f"does not list its models as OpenAI's interface does ({first_fault(error)})",
            f"correct {variables}: the base URL ends in /v1 on most servers",
        ) from None
    listing = ", ".join(model[:80] for model in names[:5]) or "no model"
    problem = f"serves {listing}, and not {endpoint.name}"
    require(endpoint.name in names, problem, "correct the name, or serve that model")
    return f"answers, and serves {endpoint.name}"


def _tool_call(endpoint: Endpoint) -> str:
    """Check that the endpoint returns the model's tool call as a structured call and not as text."""
    question = {"role": "user", "content": "Find the record called Ada, with the tool."}
    try:
        completion = endpoint.chat(messages=[question], tools=[TOOL], temperature=0, max_tokens=256)
    except (TransientFault, ContextLengthExceeded) as error:
        raise NotVisible(f"were not seen: {error}", "try again") from None
    message = completion.choices[0].message
    if message.tool_calls:
        return f"come as calls ({message.tool_calls[0].function.name})"
    require(
        "<tool_call>" not in (message.content or ""),
        "come as text: the endpoint does not parse them",
        "serve it with the parser of its template (vLLM: --enable-auto-tool-choice --tool-call-parser)",
    )
    raise NotVisible("were not seen: it answered a request with a tool in text", "")


def _benchmark(spec: Spec, root: Path) -> str:
    """Check the interpreter of a benchmark that is installed in its own Python environment."""
    name = spec.benchmark.target.split(".")[-2]
    if (setting := spec.machine.benchmarks.get(name)) is None:
        return ""
    installation = setting if setting.python else made_installation(name, root)
    python = _interpreter(installation.python, root) if installation else None
    problem = f"{name} is not installed: machine.benchmarks.{name}.python = {setting.python!r} is no interpreter"
    require(python is not None, problem, "install it as docs/benchmark.md says")
    return str(python)


def _sandbox(spec: Spec, _: Path) -> str:
    """Check that untrusted code can be confined as strongly as the machine asks."""
    confinement = active_confinement()
    require(
        LEVELS.index(confinement.level) >= LEVELS.index(spec.machine.sandbox),
        str(confinement),
        "run on Linux 5.13 or later, outside of a container that forbids Landlock and seccomp; or, where what is "
        f"exposed may be exposed, set machine.sandbox={confinement.level!r}",
    )
    return str(confinement)


def _slurm(spec: Spec, _: Path) -> str:
    """Check that Slurm answers, and that one node of the partition is large enough for a job."""
    slurm = spec.machine.slurm
    if spec.machine.launcher != "slurm" or slurm is None:
        return ""
    text = command_output("sinfo", "--noheader", "--format=%P|%c|%m|%G|%l") if shutil.which("sbatch") else None
    require(text is not None, "sinfo or sbatch does not answer", "run it where jobs are submitted")
    kinds = [Nodes.parse(line) for line in (text or "").splitlines() if line.count("|") == 4]
    names = sorted({nodes.partition for nodes in kinds})
    kinds = [nodes for nodes in kinds if nodes.partition == slurm.partition or (not slurm.partition and nodes.default)]
    title = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    require(bool(kinds), f"there is no {title}", f"set machine.slurm.partition to one of {', '.join(names)}")
    amount, unit = int(slurm.memory[:-2]), slurm.memory[-2:]
    wanted = {"cpus": slurm.cpus, "memory": amount * (1024 if unit == "GB" else 1), "gpus": slurm.gpus}
    wanted["minutes"] = slurm.minutes
    for name, value in wanted.items():
        most = max(nodes.has[name] for nodes in kinds)
        shown = f"{most:g}{' MB' * (name == 'memory')}"
        remedy = f"set machine.slurm.{name} to at most {shown}, or another machine.slurm.partition"
        require(value <= most, f"a job asks for {name} = {value}, and {title} has {shown} on a node", remedy)
    is_fitting = any(all(nodes.has[name] >= value for name, value in wanted.items()) for nodes in kinds)
    require(is_fitting, f"no node of {title} has all of {wanted}", "lower machine.slurm, or choose another partition")
    return f"{title}, of {len(names)}; a node fits one job"


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind in a partition: what one node has, with memory in MB, and the longest minutes of a job."""

    partition: str
    default: bool
    has: dict[str, float]

    @staticmethod
    def parse(line: str) -> "Nodes":
        """Read a line of `sinfo --format=%P|%c|%m|%G|%l`, such as "gpu*|64+|512000|gpu:h100:8(S:0-1)|7-00:00:00"."""
        partition, cpus, memory, resources, limit = line.strip().split("|")
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", resources))
        days, _, clock = limit.rpartition("-")
        hours, minutes, *_ = [0, 0, *(int(part) for part in re.findall(r"\d+", clock))][-3:]
        longest = math.inf if not re.search(r"\d", limit) else int(days or 0) * 1440 + hours * 60 + minutes
        has = {"cpus": int(cpus.rstrip("+")), "memory": int(memory.rstrip("+")), "gpus": gpus, "minutes": longest}
        return Nodes(partition.rstrip("*"), partition.endswith("*"), has)


def _disk(spec: Spec, root: Path) -> str:
    """Check the disk space for a run's files and for weights that are downloaded."""
    free = shutil.disk_usage(root).free / 2**30
    size = RunEstimate(spec, Node(), 1).size if spec.base.model and spec.policy.target != SERVED else None
    demand = SPACE + (2 * size.parameters / 2**30 if size else 0)
    detail = f"{free:.0f} GiB are free, about {demand:.0f} are needed"
    require(free >= demand, detail, "free some, or `dvc gc --workspace`")
    return detail


CHECKS: Mapping[str, Callable[[Spec, Path], str]] = {
    "model": _model,
    "template": _template,
    "vLLM": _vllm,
    "adapters": _adapters,
    "GPUs": _gpus,
    "processor": _processor,
    "benchmark": _benchmark,
    "sandbox": _sandbox,
    "Slurm": _slurm,
    "disk": _disk,
}
"""All checks of this machine, by subject, in the order in which they run."""


def examine_agent(spec: Spec, root: Path, count: int) -> Requirement:
    """Play the first `count` discovery tasks with the agent. It must pass some of them and fail some.

    The rollouts are thrown away.
    """
    return _examine("agent", _passes, spec, root, count)[0]


def _passes(spec: Spec, root: Path, count: int) -> str:
    """Play `count` discovery tasks and check how many the agent passes."""
    base = root / "artifacts/base"
    if spec.policy.target in (LOCAL, VLLM) and not base.exists():
        raise NotVisible("the base is not trained yet and cannot play", "run `dvc repro base` first")
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
            raise UserError(f"cannot play: {error}", "fix what it names, and try again") from None
    passed = sum(rollout.outcome == "passed" for rollout in rollouts)
    detail = f"passes {passed} of {counted(len(rollouts), 'discovery task')}"
    lessons = "set base.demonstrations._target_=MODULE:CLASS to dialogues of this benchmark, or raise base.steps"
    remedy = "set another base.model" if spec.base.model or spec.base.pretrained else lessons
    require(passed > 0, f"{detail}: failures need passed rollouts to be compared with", remedy)
    if passed == len(rollouts):
        raise NotVisible(f"{detail}: there may be no failures to learn from", "play more with --play")
    return detail


def run_on_gpus(commands: Mapping[str, str], root: Path) -> list[Requirement]:
    """Run the commands one after another; without a GPU run none and say so."""
    if not command_output("nvidia-smi", "--list-gpus"):
        remedy = "run it on a machine with a GPU; docs/honesty.md has each command"
        return [
            Requirement("GPU", False, f"no GPU is visible, so {counted(len(commands), 'command')} did not run", remedy)
        ]
    statuses = {subject: subprocess.run(shlex.split(line), cwd=root).returncode for subject, line in commands.items()}
    return [
        Requirement(
            subject, status == 0, f"`{commands[subject]}` ended with {status}", "read its output" if status else ""
        )
        for subject, status in statuses.items()
    ]
