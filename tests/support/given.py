"""A small model with given answers, for tests of other packages' trainers."""

from collections.abc import Sequence
from typing import Any

from captrain.records import Message


def given_model(dialogues: Sequence[tuple[str, Sequence[Message]]]) -> tuple[Any, Any]:
    """Return a random Qwen3 over bytes with its tokenizer.

    For a user's request from one of the dialogues, every other sequence of a batch answers with the assistant's
    messages of that dialogue. The remaining sequences say nothing.
    """
    from pathlib import Path

    import torch
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / "qwen3_instruct_2507.jinja").read_text()
    torch.manual_seed(0)
    size = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(size)

    def answer(prompt: str, solving: bool) -> list[int]:
        script = next((messages for wish, messages in dialogues if f"\n{wish}<|im_end|>" in prompt), [])
        turn = prompt.count("<|im_start|>assistant\n") - 1
        message = script[turn] if solving and turn < len(script) else {"role": "assistant", "content": ""}
        return encoded(message)

    def encoded(message: Message) -> list[int]:
        text = tokenizer.apply_chat_template([message], tokenize=False)
        start = text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        return tokenizer.encode(text[start:].rstrip("\n"), add_special_tokens=False)

    def generate(input_ids: Any, **settings: Any) -> Any:
        prompts = tokenizer.batch_decode(input_ids)
        turns = [answer(prompt, row % 2 == 0 or "</tool_response>" in prompt) for row, prompt in enumerate(prompts)]
        longest = max(map(len, turns))
        padded = [turn + [tokenizer.pad_token_id] * (longest - len(turn)) for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    model.generate = generate
    return model, tokenizer
