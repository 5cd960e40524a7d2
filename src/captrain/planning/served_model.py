"""Checks of a model before a run.

Its template is held against the parser of calls, its layers against the adapters that are to be trained, and both
against what servers take; the model is looked at without weights.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import TemplateError

from captrain.benchmarks import build_model, build_tokenizer, pretrained_folder
from captrain.config import Spec, build
from captrain.errors import UserError
from captrain.models import FORMATS, Chat, lora_config, trusts_code
from captrain.planning.assumptions import VLLM
from captrain.policies import RANKS, served_rank
from captrain.records import JsonObject, Message
from captrain.training import GRPO

PATIENCE = 20.0
"""Seconds that an interpreter, a cluster or an endpoint may take to answer."""


class Finding(NamedTuple):
    """One thing that was looked at: whether it is as the run needs it (None: it cannot be seen yet), what was seen, and
    what to do if it is not."""

    subject: str
    passed: bool | None
    detail: str
    remedy: str = ""


def command_output(*command: str, patience: float = PATIENCE) -> str | None:
    """Run a command and return what it prints; None where it fails, is not there, or takes too many seconds."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEAST_VERSION = (0, 10, 2)
"""First version of vLLM that shows the token ids which it read and wrote."""
IMPORT = 120.0
"""Seconds that vLLM may take to be imported."""
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
ADAPTABLE = """
import json, sys, torch
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import supports_lora
model = ModelRegistry._try_load_model_cls(sys.argv[1])
print(json.dumps({"known": model is not None, "lora": model is not None and supports_lora(model),
                  "gpu": torch.cuda.is_available()}))
"""
"""Program by which an interpreter with vLLM tells what it knows of an architecture."""


def named_model(name: str) -> Finding:
    """Check that a model of the hub is in its cache, or may be downloaded."""
    if cached_file(name) is not None:
        return Finding("model", True, f"{name} is in the cache of the hub")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        remedy = "set HF_HUB_OFFLINE=0, so that it is downloaded, or download it first"
        return Finding("model", False, f"{name} is not in the cache of the hub, and HF_HUB_OFFLINE is set", remedy)
    return Finding("model", True, f"{name} is not in the cache of the hub: the first stage that acts downloads it")


def cached_file(name: str) -> Path | None:
    """Find the configuration of a model of the hub in its cache."""
    from huggingface_hub import try_to_load_from_cache

    model, _, revision = name.partition("@")
    path = try_to_load_from_cache(model, "config.json", revision=revision or None)
    return Path(path) if isinstance(path, str) else None


def template_findings(spec: Spec, _: Path) -> Iterator[Finding]:
    """Check that the parser of the rollouts reads what the template makes of tool calls."""
    folder = _folder(spec)
    if folder is False:
        yield Finding("template", None, "is looked at when the model is there")
        return
    try:
        template = spec.policy.settings().get("chat_template_kwargs")
        yield _round_trip(build_tokenizer() if folder is None else _tokenizer(folder), template)
    except UserError as error:
        yield Finding("template", False, error.problem, error.remedy)


def _folder(spec: Spec) -> Path | Literal[False] | None:
    """Locate the model's files; None for the embedded base, False where they are not here."""
    if spec.base.pretrained:
        try:
            return pretrained_folder(spec.base.pretrained, Path(spec.machine.pretrained))
        except UserError:
            return False
    if spec.base.model is None:
        return None
    path = cached_file(spec.base.model)
    return path.parent if path is not None else False


def _tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusts_code(folder))
    except (OSError, ValueError) as error:
        problem = f"the tokenizer in {folder} does not load ({error})"
        raise UserError(problem, "download the whole model") from None


def _round_trip(tokenizer: "PreTrainedTokenizerBase", template: JsonObject | None) -> Finding:
    chat = Chat(tokenizer, [TOOL], template)
    opening: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hello."}]
    call = {"type": "function", "function": {"name": "find_record", "arguments": ARGUMENTS}}
    remedy = f"choose a model whose calls are like those of {', '.join(FORMATS)}, or serve it by policy=openai"
    if "find_record" not in tokenizer.decode(chat.prompt(opening)):
        return Finding("template", False, "does not show the model its tools", remedy)
    if "7041" not in tokenizer.decode(chat.suffix([{"role": "tool", "content": "record 7041"}])):
        return Finding("template", False, "does not show the model what a tool has answered", remedy)
    missing = []
    for name, content, count in (("a call", "", 1), ("two calls in a turn", "", 2), ("text beside a call", "Wait.", 1)):
        message: Message = {"role": "assistant", "content": content, "tool_calls": [call] * count}
        try:
            turn = chat.turn(message)
        except TemplateError:
            turn = []
        missing += [name] if chat.parse(turn) != message else []
        if "a call" in missing:
            problem = f"writes a call as {tokenizer.decode(turn)[:80]!r}, which is read as another one"
            return Finding("template", False, problem, remedy)
    lacks = f", but it writes no {' and no '.join(missing)}" if missing else ""
    return Finding(
        "template", True, f"shows tools and their answers, and its calls are read as they were written{lacks}"
    )


def adapter_findings(spec: Spec, root: Path) -> Iterator[Finding]:
    """Check that the model has the layers that are to be adapted, and that servers take adapters of them."""
    folder, recipe = _folder(spec), build(spec.trainer, GRPO)
    if folder is False:
        yield Finding("adapters", None, "are looked at when the model is there")
        return
    try:
        model = build_model(build_tokenizer(), spec.base, 0) if folder is None else _skeleton(folder)
        lora_config(model, recipe.shape)
    except UserError as error:
        yield Finding("adapters", False, error.problem, error.remedy)
        return
    experts = " and experts" if recipe.experts else ""
    yield Finding("adapters", True, f"rank {recipe.rank}, of {', '.join(recipe.targets)}{experts}, which the model has")
    if spec.policy.target == VLLM:
        yield _ranks(spec, recipe.rank)
        python = interpreter(spec.machine.vllm.python, root)
        if python is not None:
            yield _architecture(type(model).__name__, recipe.experts or bool(_experts(model)), python)


def _skeleton(folder: Path) -> "PreTrainedModel":
    """Build the model without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = trusts_code(folder)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)


def _experts(model: "PreTrainedModel") -> bool:
    return any(".experts." in name for name, _ in model.named_parameters())


def _ranks(spec: Spec, rank: int) -> Finding:
    machine = spec.machine.vllm
    try:
        limit = served_rank(machine)
    except UserError as error:
        return Finding("ranks", False, error.problem, error.remedy)
    if rank > machine.max_lora_rank:
        problem = f"trainer.rank = {rank}, and machine.vllm.max_lora_rank = {machine.max_lora_rank}"
        return Finding("ranks", False, problem, f"set machine.vllm.max_lora_rank={rank}")
    if rank * machine.max_loras > limit:
        problem = f"{machine.max_loras} adapters of rank {rank} together are beyond vLLM's {RANKS[-1]}"
        return Finding("ranks", False, problem, "lower trainer.rank, or machine.vllm.max_loras with router.most")
    return Finding("ranks", True, f"servers take rank {limit}: {machine.max_loras} adapters of rank {rank} together")


def interpreter(name: str, root: Path) -> str | None:
    """Find an interpreter that the configuration names, as the stages find it; None where there is none."""
    path = os.path.expanduser(name or "-")
    return shutil.which(str(root / path) if os.sep in path else path)


def _architecture(name: str, experts: bool, python: str) -> Finding:
    """Ask the servers' vLLM about an architecture."""
    text = command_output(python, "-c", ADAPTABLE, name, patience=IMPORT)
    try:
        answer = json.loads((text or "").splitlines()[-1])
    except (ValueError, IndexError):
        return Finding("servers", False, f"{python} does not import vLLM", "see what `import vllm` says in it")
    if not answer["known"] or not answer["lora"]:
        problem = f"vLLM {'takes no adapters of' if answer['known'] else 'does not know'} {name}"
        return Finding("servers", False, problem, "install a later vLLM, or choose policy=local")
    if experts and not answer["gpu"]:
        problem = f"{name} is a mixture of experts, and vLLM's kernels for adapters of these need a GPU"
        return Finding("servers", False, problem, "serve it on GPUs, or choose policy=local")
    return Finding("servers", True, f"vLLM takes adapters of {name}")


def vllm_findings(spec: Spec, root: Path) -> Iterator[Finding]:
    """Check the interpreter of the servers, and the version of the vLLM in it."""
    if spec.policy.target != VLLM:
        return
    python = interpreter(spec.machine.vllm.python, root)
    if python is None:
        remedy = "install vLLM in an environment of its own (docs/model.md) and name its interpreter"
        yield Finding(
            "vLLM", False, f"machine.vllm.python = {spec.machine.vllm.python!r} is not an interpreter", remedy
        )
        return
    text = command_output(python, "-c", DISTRIBUTION)
    remedy = f"{python} -m pip install -r requirements-vllm.lock"
    if not text:
        yield Finding("vLLM", False, f"{python} has no vLLM", remedy)
        return
    parts = [int(part) for part in text.split()[-1].split("+")[0].split(".")[:3] if part.isdigit()]
    if tuple(parts) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        yield Finding("vLLM", False, f"{text}, which is before {least} and does not show its tokens", remedy)
        return
    yield Finding("vLLM", True, f"{text}, in {python}")
