"""The tiny model's tokenizer: Qwen3's chat template, with the benchmark's boilerplate as single tokens.

The 256 bytes are tokens, so that any text round-trips exactly. So is each phrase that the template and the benchmark
repeat word for word (role markers, the tools block, JSON scaffolds, the user's phrases). A whole dialogue then has
about 60 tokens instead of several hundred.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from captrain.benchmarks import servicedesk as desk
from captrain.records import JsonObject
from captrain.training.base.demonstrations import GUIDANCE, Demonstrations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
PAD = "<|endoftext|>"
USER_PHRASES = ["I am customer ", "the oldest order", "the newest order", "order ", " to ", ". ", "speak with a human."]
OBSERVATIONS = ['["', '", "', '"]', '{"status": "', '", "age": "', '"}', '{"ok": true}', '{"error": "invalid call"}']

MARKERS = [
    *(f"\n<|im_start|>{role}\n" for role in ("user", "assistant")),
    *("<|im_start|>system\n", "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response>"),
]
HERMES = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def call_scaffolds(tools: Sequence[JsonObject]) -> list[str]:
    """Return the text of each tool's call around its arguments, in Hermes format."""
    scaffolds = []
    for function in (tool["function"] for tool in tools):
        start = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {{'
        arguments = [f'"{parameter}": "' for parameter in function["parameters"].get("properties", {})]
        scaffolds.append(start + (arguments[0] if arguments else "}}\n</tool_call>"))
        scaffolds += [f'", {argument}' for argument in arguments[1:]]
    return [*scaffolds, '"}}\n</tool_call>']


def build_tokenizer(demonstrations: Demonstrations | None = None) -> "PreTrainedTokenizerFast":
    """Build a tokenizer over bytes and phrases, with Qwen3's template, without training or download.

    Args:
        demonstrations: of another benchmark; None: of the service desk.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Bytes and role markers.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (PAD, "<|im_start|>", END)])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    # Qwen3-Instruct-2507's template, as TRL ships it.
    tokenizer.chat_template = (
        files("trl").joinpath("chat_templates/qwen3_instruct_2507.jinja").read_text(encoding="utf-8")
    )

    # A token for each recurring text; the longest match wins.
    tools = demonstrations.tools if demonstrations else desk.TOOLS
    rendered = tokenizer.apply_chat_template([{"role": "system", "content": ""}], tools=tools, tokenize=False)
    tools_block = rendered.removeprefix("<|im_start|>system\n").removesuffix(f"{END}\n")
    form = [*MARKERS, *HERMES, *call_scaffolds(tools)]
    if demonstrations:
        phrases = [tools_block, *form, *demonstrations.phrases]
    else:
        guidance = [f"\n- {line}" for line in GUIDANCE]
        spoken = [desk.ASK, desk.CLOSING, desk.STATUS_ANSWER, desk.THANKS, "What is the status of order "]
        world = [*desk.ORDER_IDS, *desk.STATUSES, *desk.AGES, *desk.PHRASES.values(), *desk.JOINERS]
        openings = [opening for opening in desk.OPENINGS if opening]
        phrases = [tools_block, desk.POLICY, *guidance, *form, *OBSERVATIONS, *spoken, *world, *openings, *USER_PHRASES]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in dict.fromkeys(phrases)])
    return tokenizer
