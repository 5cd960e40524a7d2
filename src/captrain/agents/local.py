"""Policy of a model in this process: the embedded base, or any Hugging Face causal LM, with LoRA adapters.

Plays are grouped by adapter; each group runs on weights with its adapter merged in (exact for one adapter, and as
fast as the base). A mixture of adapters is computed by the modules of the model, with its gates.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from captrain.agents.policy import ClosedQuestion, options, outgrown
from captrain.contract import RunningEpisode
from captrain.errors import UserError
from captrain.models import (
    DENSE,
    Chat,
    adapts_experts,
    guide,
    is_mixture,
    merge_experts,
    read_plain_lora,
    require_recorded,
    trusts_code,
)
from captrain.records import JsonObject, Message, digest, file_digest, read_json
from captrain.run import prepare_torch

if TYPE_CHECKING:
    from captrain.agents.engine import Decoder, EngineRow, State

    Row = TypeVar("Row", bound=EngineRow)

LONGEST = 8192
"""Tokens of the longest dialogue, even if the model takes more."""
CHATS = 16
"""Number of cached chat renderers, one per set of tools. Each request to a server may have a new set."""
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


class LocalPolicy:
    """Batched in-process policy.

    Args:
        model: folder with the model, in Hugging Face format.
        batch: rows sampled together; changes speed, never results.
        temperature: sampling temperature, 0 is greedy.
        max_turns: assistant turns in one episode.
        max_tokens: tokens in one assistant turn.
        guidance: lines appended to the system prompt.
        precision: float64 makes results independent of the batch. float32 is 1.5 times as fast, and one token in a
            million may depend on the batch; in bfloat16, for large models, one in some hundreds.
        top_p: sample from the likeliest tokens with this total probability; None: all tokens.
        top_k: sample from this many of the likeliest tokens; None: all tokens.
        chat_template_kwargs: further arguments of the chat template, such as {enable_thinking: false}.

    Raises:
        UserError: a model file is missing, altered since it was recorded, or cannot be loaded.
    """

    def __init__(
        self,
        model: Path,
        batch: int = 128,
        *,
        temperature: Annotated[float, Field(ge=0)],
        max_turns: Annotated[int, Field(ge=1)],
        max_tokens: Annotated[int, Field(ge=1)],
        guidance: Sequence[str] = (),
        precision: Literal["float64", "float32", "bfloat16"] = "float64",
        top_p: Annotated[float, Field(gt=0, lt=1)] | None = None,
        top_k: Annotated[int, Field(ge=1)] | None = None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> None:
        prepare_torch()
        self.folder, self.batch, self.temperature, self.max_turns, self.max_tokens = (
            model,
            batch,
            temperature,
            max_turns,
            max_tokens,
        )
        self.guidance, self.precision = list(guidance), precision
        self.top_p, self.top_k = top_p, top_k
        weights = sorted(model.glob("*.safetensors"))
        missing = [name for name in MODEL_FILES if not (model / name).exists()]
        if missing or not weights:
            lacking = ", ".join(missing or ["*.safetensors"])
            raise UserError(f"model {model} lacks {lacking}", "run `dvc repro base` to make it again")
        require_recorded(model)
        templates = [path for path in [model / "chat_template.jinja"] if path.exists()]
        identity = file_digest(*(model / name for name in MODEL_FILES), *templates, *weights)
        self.config, self.tokenizer, self.state, self.module = load_model(model, identity)
        self.max_length: int = min(self.config.max_position_embeddings, LONGEST)
        further = options(top_p=top_p, top_k=top_k, chat_template_kwargs=chat_template_kwargs)
        self.digest = digest(identity, temperature, max_turns, max_tokens, self.guidance, precision, *further.items())
        self._chats = lru_cache(CHATS)(lambda tools: Chat(self.tokenizer, json.loads(tools), chat_template_kwargs))
        self._adapter = ""
        self._decoder: Decoder | None = None

    def chat(self, tools: list[JsonObject]) -> Chat:
        """Return the dialogue renderer for a set of tools."""
        return self._chats(json.dumps(tools))

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a turn."""
        return self.chat([]).ends

    def scores(self, prompt: Sequence[int], tokens: Sequence[int], adapter: str = "") -> list[float]:
        """Return the log-probability of each of `tokens` as the next token, among `tokens`, at temperature 1."""
        import torch

        decoder = self.decoder(adapter)
        decoder.reset()
        logits = decoder.forward(torch.tensor([prompt[-self.max_length :]]), [0])[0]
        return logits[list(tokens)].log_softmax(0).tolist()

    def answer_scores(self, questions: Sequence[ClosedQuestion]) -> list[list[float]]:
        """See `Scorer`."""
        chat = self.chat([])
        return [
            self.scores(chat.prompt(question.messages), [chat.encode(text)[0] for text in question.answers])
            for question in questions
        ]

    def decoder(self, adapter: str) -> "Decoder":
        """Return the fastest decoder of this architecture, with an adapter merged in ("" for the base)."""
        import torch

        from captrain.agents.engine import DenseDecoder, HuggingFaceDecoder, MixtureDecoder

        if self._decoder is None or adapter != self._adapter:
            dtype = getattr(torch, self.precision)
            if adapter and is_mixture(Path(adapter)):
                from captrain.models import load_mixture, load_module  # torch

                base = load_module(self.folder, self.precision)
                load_mixture(base, Path(adapter))
                self._decoder = MixtureDecoder(base, dtype)
            elif self.module is None:
                state = with_adapter(self.state, adapter)
                self._decoder = DenseDecoder(self.config, state, self.max_length, dtype)
            elif adapter and adapts_experts(Path(adapter)):
                self._decoder = HuggingFaceDecoder(merge_experts(self.module, Path(adapter)).to(dtype), dtype)
            else:
                module = copy.deepcopy(self.module).to(dtype)
                module.load_state_dict(with_adapter(self.state, adapter))
                self._decoder = HuggingFaceDecoder(module, dtype)
            self._adapter = adapter
        return self._decoder

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        """See `Policy.play`."""
        for adapter in dict.fromkeys(play.adapter for play in plays):
            group = [play for play in plays if play.adapter == adapter]
            for start in range(0, len(group), self.batch):
                yield from self.play_with(self.decoder(adapter), group[start : start + self.batch])

    def play_with(self, decoder: "Decoder", plays: Sequence[RunningEpisode]) -> list[RunningEpisode]:
        """Play one batch with a decoder."""
        from captrain.agents.engine import EngineRow, sample_rows

        rows = [(play, row) for play in plays if play.start() and (row := self.row(play, EngineRow)) is not None]
        sample_rows(
            decoder,
            [row for _, row in rows],
            ends=self.ends,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            max_length=self.max_length,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        for play, row in rows:
            play.truncated = self.truncation(row)
            play.completion_tokens = sum(row.mask)
            play.prompt_tokens = len(row.mask) - play.completion_tokens
            prompt, start = play.token_ids, row.mask.index(1)
            play.token_ids = prompt + row.ids[start:]
            play.mask = [0] * len(prompt) + row.mask[start:]
            play.logprobs = [0.0] * len(prompt) + row.logprobs[start:]
        return list(plays)

    def truncation(self, row: "EngineRow") -> str:
        """Return why a dialogue was cut off; "" if it was not."""
        return outgrown(self.max_length) if row.truncated else ""

    def row(self, play: RunningEpisode, kind: "type[Row]") -> "Row | None":
        """Return the engine row of an episode. None if its prompt is too long."""
        chat = self.chat(play.tools)
        play.messages = guide(play.messages, self.guidance)
        play.token_ids = chat.prompt(play.messages)
        prompt = chat.prompt(with_hint(play.messages, play.hint)) if play.hint else play.token_ids
        if len(prompt) > self.max_length:
            play.truncated, play.token_ids = outgrown(self.max_length, len(prompt)), []
            return None

        def answer(turn: list[int]) -> list[int]:
            replies = play.advance(chat.parse(turn))
            return chat.suffix(replies, turn[-1]) if replies and play.turns < self.max_turns else []

        return kind(play.key, prompt, answer)


def with_hint(opening: list[Message], hint: str) -> list[Message]:
    """Append a hint to the system prompt, or else to the first message."""
    index = next((index for index, message in enumerate(opening) if message["role"] == "system"), 0)
    hinted = {**opening[index], "content": f"{opening[index]['content']}\n\n{hint}"}
    return [*opening[:index], hinted, *opening[index + 1 :]]


@lru_cache(maxsize=1)
def load_model(folder: Path, identity: str) -> tuple[Any, Any, "State", Any]:
    """Load the configuration, tokenizer, weights and Hugging Face module of a model.

    The module is None for dense Qwen3 and Llama. The engine needs only the weights of these, and importing the
    modelling code would take seconds. The last model is cached, because a search over prompts builds a policy for each
    prompt. Do not change it.

    Args:
        folder: folder of the model.
        identity: digest of its files, so that altered files are loaded again.
    """
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from captrain.agents.engine import DenseDecoder

    remedy = f"a file in it is damaged: delete {folder} and run `dvc repro base`"
    weights = sorted(folder.glob("*.safetensors"))
    trust = trusts_code(folder)
    module: Any = None
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        rope = getattr(config, "rope_parameters", None) or {}
        if (
            config.model_type in DENSE
            and rope.get("rope_type") == "default"
            and not (getattr(config, "use_sliding_window", False) or config.attention_bias)
            and not getattr(config, "mlp_bias", False)
        ):
            state = {name: w for path in weights for name, w in load_file(path).items()}
            missing = {*DenseDecoder.names(config)} - state.keys()
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust
            )
            module, report = loaded
            state, missing = dict(module.eval().state_dict()), report["missing_keys"]
    except Exception as error:
        # Read each file separately, to name the damaged one.
        for name in MODEL_FILES:
            read_json(folder / name, object, remedy)
        for path in weights:
            try:
                with safe_open(path, "pt"):
                    pass
            except (SafetensorError, OSError) as fault:
                raise UserError(f"{path} does not load ({fault})", remedy) from fault
        raise UserError(f"model {folder} does not load ({error})", remedy) from error
    if missing:  # transformers would initialize missing weights at random
        raise UserError(
            f"config.json of {folder} asks for weights that are not there, {min(missing)} among them", remedy
        )
    return config, tokenizer, state, module


def with_adapter(state: "State", adapter: str) -> "State":
    """Merge a saved PEFT LoRA adapter into the weights: W + (alpha / r) B A. "" returns the weights unchanged.

    Raises:
        UserError: the adapter is missing, damaged, or not a plain LoRA adapter of this model.
    """
    if not adapter:
        return state
    lora = read_plain_lora(Path(adapter))
    out = dict(state)
    try:
        for name, (up, down) in lora.factors.items():
            module = name.removeprefix("base_model.model.")
            # In float64, because sums in float32 differ between CPUs.
            change = up.double() @ down.double()
            weight = out[f"{module}.weight"] = out[f"{module}.weight"].double().clone()
            if change.shape != weight.shape:
                raise UserError(
                    f"adapter {adapter} is for another model: {module} has shape {tuple(weight.shape)}, and its change "
                    f"{tuple(change.shape)}",
                    "use it with its own base",
                )
            weight += lora.scale * change
    except KeyError as error:
        raise UserError(
            f"adapter {adapter} changes {error}, which the model lacks", "use it with its own base"
        ) from error
    return out
