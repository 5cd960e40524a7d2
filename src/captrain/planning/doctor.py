"""Examination of this machine for what a configuration needs, before anything is spent; each lack with its remedy.

Nothing is trained, started or downloaded: an endpoint is asked for the names of its models, and for one short answer
with a tool; an interpreter for the version of its vLLM; the model is looked at without weights. What only a run on GPUs
can show is a list of commands.

A check returns what it has seen, or "" where the configuration has no need of it, and raises what is lacking.
"""

import importlib.metadata
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError

from captrain.agents import RANKS, collect, load_policy, served_rank
from captrain.benchmarks import load_benchmark, made_installation
from captrain.environments.sandbox import LEVELS, active_confinement
from captrain.errors import InfrastructureError, UserError
from captrain.models import FORMATS, Chat, ContextLengthExceeded, Endpoint, TransientFault, lora_config, trusts_code
from captrain.planning.assumptions import ANALYST, LOCAL, SERVED, SYNTHESIZER, VLLM
from captrain.planning.estimate import Estimate, Node
from captrain.planning.feasibility import mixture_without_gpus, problems
from captrain.records import JsonObject, Message, first_fault
from captrain.run import Spec, build, nested
from captrain.training import GRPO, build_model, build_tokenizer, pretrained_folder

PATIENCE = 20.0
"""Seconds that an interpreter, a cluster or an endpoint may take to answer."""
SPACE = 5.0
"""GiB of disk that a run of the embedded default leaves free; a named model needs its weights beside them."""
LEAST_VERSION = (0, 10, 2)
"""First version of vLLM that shows the token ids which it read and wrote."""
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
"""Arguments of each kind of JSON, with what a template might escape."""
DISTRIBUTION = (
    "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in m.packages_distributions()['vllm']))"
)


class Finding(NamedTuple):
    """One thing that was looked at: whether it is as the run needs it (None: it cannot be seen yet), what was seen, and
    what to do if it is not."""

    subject: str
    passed: bool | None
    detail: str
    remedy: str = ""


class NotVisible(UserError):
    """Something that cannot be seen yet."""


def examine_machine(spec: Spec, root: Path, node: Node) -> list[Finding]:
    """Examine all that the configuration needs of this machine."""
    refusals = [Finding("settings", False, error.problem, error.remedy) for error in problems(Estimate(spec, node, 1))]
    findings = refusals or [Finding("settings", True, "go together, and fit the GPUs that are planned with")]
    checks: dict[str, Callable[[Spec, Path], str]] = {
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
    for subject, check in checks.items():
        lacks = {finding.detail for finding in findings if finding.passed is False}
        findings += [finding for finding in _examine(subject, check, spec, root) if finding.detail not in lacks]
    # Whatever is asked at an endpoint: variables are set, it answers, and it knows the model.
    user = nested("benchmark.user", spec.benchmark.settings().get("user"))
    parties = {"agent": spec.policy, "user": user, "analyst": spec.analyst, "synthesizer": spec.synthesizer}
    for party, component in parties.items():
        if component is None or component.target not in (SERVED, ANALYST, SYNTHESIZER):
            continue
        access = spec.machine.asking
        settings = {"endpoint": access.endpoint, "key": access.key, **component.settings()}
        name, base_url, key = (str(settings[setting]) for setting in ("name", "endpoint", "key"))
        endpoint = Endpoint(name.partition("@")[0], endpoint=base_url, key=key, retries=0, timeout=PATIENCE)
        findings += _examine(f"endpoint of the {party}", _answer, endpoint)
        if party == "agent" and findings[-1].passed:
            findings += _examine("calls of the agent", _tool_call, endpoint)
    return findings


def _examine(subject: str, check: Callable[..., str], *arguments: object) -> list[Finding]:
    """Make the finding of a check; none where the configuration has no need of it."""
    try:
        detail = check(*arguments)
    except UserError as error:
        passed = None if isinstance(error, NotVisible) else False
        return [Finding(subject, passed, error.problem, error.remedy)]
    return [Finding(subject, True, detail)] if detail else []


def command_output(*command: str) -> str | None:
    """Run a command and return what it prints; None where it fails, is not there, or takes too many seconds."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _interpreter(name: str, root: Path) -> str | None:
    """Find an interpreter that the configuration names, as the stages find it; None where there is none."""
    path = os.path.expanduser(name or "-")
    return shutil.which(str(root / path) if os.sep in path else path)


def _model(spec: Spec, _: Path) -> str:
    """Check the weights: trained here, in the folder of pretrained ones, in the hub's cache, or to be downloaded."""
    if spec.base.model and spec.policy.target not in (LOCAL, VLLM):
        return ""
    try:
        folder = _model_folder(spec)
    except NotVisible:
        problem = f"{spec.base.model} is not in the cache of the hub"
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            remedy = "set HF_HUB_OFFLINE=0, so that it is downloaded, or download it first"
            raise UserError(f"{problem}, and HF_HUB_OFFLINE is set", remedy) from None
        return f"{problem}: the first stage that acts downloads it"
    return f"{folder} holds it" if folder else "the base is trained here"


def _model_folder(spec: Spec) -> Path | None:
    """Locate the model's files; None for the embedded base.

    Raises:
        UserError: the pretrained one is not where the machine has them.
        NotVisible: a model of the hub is not in its cache.
    """
    if spec.base.pretrained:
        return pretrained_folder(spec.base.pretrained, Path(spec.machine.pretrained))
    if spec.base.model is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    model, _, revision = spec.base.model.partition("@")
    path = try_to_load_from_cache(model, "config.json", revision=revision or None)
    if not isinstance(path, str):
        raise NotVisible("to be looked at when the model is there", "")
    return Path(path).parent


def _template(spec: Spec, _: Path) -> str:
    """Check that the parser of the rollouts reads what the template makes of tool calls."""
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
    # A model must be shown its tools, and what they answer.
    opening: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hello."}]
    if "find_record" not in tokenizer.decode(chat.prompt(opening)):
        raise UserError("does not show the model its tools", remedy)
    if "7041" not in tokenizer.decode(chat.suffix([{"role": "tool", "content": "record 7041"}])):
        raise UserError("does not show the model what a tool has answered", remedy)
    # A call must be read as it was written.
    call = {"type": "function", "function": {"name": "find_record", "arguments": ARGUMENTS}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn = list[int]()
    with suppress(TemplateError):
        turn = chat.turn(message)
    if chat.parse(turn) != message:
        raise UserError(f"writes a call as {tokenizer.decode(turn)[:80]!r}, which is read as another one", remedy)
    return "shows tools and their answers, and its calls are read as they were written"


def _vllm(spec: Spec, root: Path) -> str:
    """Check the interpreter of the servers, and the version of the vLLM in it."""
    if spec.policy.target != VLLM:
        return ""
    python = _interpreter(spec.machine.vllm.python, root)
    if python is None:
        raise UserError(
            f"machine.vllm.python = {spec.machine.vllm.python!r} is not an interpreter",
            "install vLLM in an environment of its own (docs/model.md) and name its interpreter",
        )
    text, remedy = command_output(python, "-c", DISTRIBUTION), f"{python} -m pip install -r requirements-vllm.lock"
    if not text:
        raise UserError(f"{python} has no vLLM", remedy)
    parts = text.split()[-1].partition("+")[0].split(".")
    if tuple(int(part) for part in parts[:3] if part.isdigit()) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise UserError(f"{text} in {python} is before {least} and does not show its tokens", remedy)
    return f"{text}, in {python}"


def _adapters(spec: Spec, _: Path) -> str:
    """Check that the model has the layers that are to be adapted, and that servers take adapters of that rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, recipe, machine = _model_folder(spec), build(spec.trainer, GRPO), spec.machine.vllm
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
    if not machine.gpus and any(".experts." in name for name, _ in model.named_parameters()):
        raise mixture_without_gpus(str(spec.base.model or spec.base.pretrained).partition("@")[0])
    limit = served_rank(machine)
    if recipe.rank > machine.max_lora_rank:
        raise UserError(
            f"trainer.rank = {recipe.rank}, and machine.vllm.max_lora_rank = {machine.max_lora_rank}",
            f"set machine.vllm.max_lora_rank={recipe.rank}",
        )
    if recipe.rank * machine.max_loras > limit:
        raise UserError(
            f"{machine.max_loras} adapters of rank {recipe.rank} together are beyond vLLM's {RANKS[-1]}",
            "lower trainer.rank, or machine.vllm.max_loras with router.most",
        )
    return f"{detail}; servers take rank {limit}: {machine.max_loras} of them together"


def _gpus(spec: Spec, _: Path) -> str:
    """Check that as many GPUs are free as training, servers and endpoint hold, and that torch knows them."""
    machine = spec.machine
    serving = machine.vllm.replicas * machine.vllm.gpus if spec.policy.target == VLLM else 0
    demand = (machine.accelerate.processes if serving else 0) + serving + machine.asking.gpus
    if not demand or machine.launcher == "slurm":
        return ""
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = [int(line) for line in (command_output("nvidia-smi", *query) or "").splitlines()]
    free = sum(amount < 1024 for amount in memory) + min(machine.asking.gpus, sum(amount >= 1024 for amount in memory))
    detail = f"{demand} are needed, {len(memory)} are visible, {free} of them free or the endpoint's"
    if free < demand:
        raise UserError(
            detail,
            "end what holds them, ask for fewer (machine.accelerate.processes, machine.vllm), or use machine=slurm",
        )
    if serving and (version := importlib.metadata.version("torch")).endswith("+cpu"):
        raise UserError(
            f"{detail}; torch {version} of this environment knows none",
            "pip install -r requirements-gpu.lock, into an environment of its own",
        )
    return detail


def _processor(spec: Spec, _: Path) -> str:
    """Check for instructions for bfloat16 where it is computed here: without them it is some thirty times slower than
    float32."""
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
    if not capability.startswith("AVX512"):
        raise UserError(detail, f"set {' '.join(settings)}: on such a CPU that is some thirty times faster")
    return detail


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    """Fields that are read of an endpoint's list of models."""

    data: list[_Model]


def _answer(endpoint: Endpoint) -> str:
    """Check that an endpoint answers, and serves the model."""
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
    if endpoint.name not in names:
        listing = ", ".join(model[:80] for model in names[:5]) or "no model"
        raise UserError(f"serves {listing}, and not {endpoint.name}", "correct the name, or serve that model")
    return f"answers, and serves {endpoint.name}"


def _tool_call(endpoint: Endpoint) -> str:
    """Check that the endpoint's own parser makes a call of what the model writes."""
    question = {"role": "user", "content": "Find the record called Ada, with the tool."}
    try:
        completion = endpoint.chat(messages=[question], tools=[TOOL], temperature=0, max_tokens=256)
    except (TransientFault, ContextLengthExceeded) as error:
        raise NotVisible(f"were not seen: {error}", "try again") from None
    message = completion.choices[0].message
    if message.tool_calls:
        return f"come as calls ({message.tool_calls[0].function.name})"
    if "<tool_call>" in (message.content or ""):
        raise UserError(
            "come as text: the endpoint does not parse them",
            "serve it with the parser of its template (vLLM: --enable-auto-tool-choice --tool-call-parser)",
        )
    raise NotVisible("were not seen: it answered a request with a tool in text", "")


def _benchmark(spec: Spec, root: Path) -> str:
    """Check the interpreter of a benchmark that has an environment of its own."""
    name = spec.benchmark.target.split(".")[-2]
    if (setting := spec.machine.benchmarks.get(name)) is None:
        return ""
    installation = setting if setting.python else made_installation(name, root)
    python = _interpreter(installation.python, root) if installation else None
    if python is None:
        raise UserError(
            f"{name} is not installed: machine.benchmarks.{name}.python = {setting.python!r} is no interpreter",
            "install it as docs/benchmark.md says",
        )
    return python


def _sandbox(spec: Spec, _: Path) -> str:
    """Check the confinement of code that nobody has vouched for, as a confined process finds it."""
    confinement = active_confinement()
    if LEVELS.index(confinement.level) < LEVELS.index(spec.machine.sandbox):
        raise UserError(
            str(confinement),
            "run on Linux 5.13 or later, outside of a container that forbids Landlock and seccomp; or, where what is "
            f"exposed may be exposed, set machine.sandbox={confinement.level!r}",
        )
    return str(confinement)


def _slurm(spec: Spec, _: Path) -> str:
    """Check the cluster's commands, and the partition."""
    slurm = spec.machine.slurm
    if spec.machine.launcher != "slurm" or slurm is None:
        return ""
    text = command_output("sinfo", "--noheader", "--format=%P")
    if text is None or shutil.which("sbatch") is None:
        raise UserError("sinfo or sbatch does not answer", "run it where jobs are submitted")
    partitions = [line.strip().removesuffix("*") for line in text.splitlines()]
    if slurm.partition and slurm.partition not in partitions:
        raise UserError(
            f"there is no partition {slurm.partition}", f"set machine.slurm.partition to one of {', '.join(partitions)}"
        )
    return f"partition {slurm.partition or 'of the default'}, of {len(partitions)}"


def _disk(spec: Spec, root: Path) -> str:
    """Check the room for what a run leaves, and for weights that are still to be downloaded."""
    free = shutil.disk_usage(root).free / 2**30
    size = Estimate(spec, Node(), 1).size if spec.base.model and spec.policy.target != SERVED else None
    demand = SPACE + (2 * size.parameters / 2**30 if size else 0)
    detail = f"{free:.0f} GiB are free, about {demand:.0f} are needed"
    if free < demand:
        raise UserError(detail, "free some, or `dvc gc --workspace`")
    return detail


def examine_agent(spec: Spec, root: Path, count: int) -> Finding:
    """Play the first discovery tasks with the agent that the diagnosis would play with: it must pass some, and fail
    some. Nothing of it is kept."""
    return _examine("agent", _passes, spec, root, count)[0]


def _passes(spec: Spec, root: Path, count: int) -> str:
    """Play so many discovery tasks, and check how many the agent passes."""
    base = root / "artifacts/base"
    if spec.policy.target in (LOCAL, VLLM) and not base.exists():
        raise NotVisible("the base is not there yet, so that it plays nothing", "run `dvc repro base` first")
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
            raise UserError(f"plays nothing: {error}", "mend what it names, and try again") from None
    passed = sum(rollout.outcome == "passed" for rollout in rollouts)
    detail = f"passes {passed} of {len(rollouts)} discovery tasks"
    if not passed:
        lessons = "set base.demonstrations._target_=MODULE:CLASS to dialogues of this benchmark, or raise base.steps"
        raise UserError(
            f"{detail}: there would be nothing to contrast failures with",
            "set another base.model" if spec.base.model or spec.base.pretrained else lessons,
        )
    if passed == len(rollouts):
        raise NotVisible(f"{detail}: there may be no failures to learn from", "play more with --play")
    return detail


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
