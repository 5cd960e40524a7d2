"""Chat messages to token ids and back, for any tokenizer with a chat template.

One contract holds everywhere tokens are made (demonstrations, rollouts, training): prompt + assistant turn + suffix +
assistant turn + ... concatenates to what the chat template renders for the whole dialogue. Only the template makes
turns: a special token that stands in a message or a tool's schema is tokenized as the text that it is, so that no
user's words and no tool's result can end a turn or begin one. What the model wrote is never tokenized again. Tool calls
are read in Hermes format; a call that is not well formed is plain text, as it would be for a real model.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from captrain.errors import UserError
from captrain.records import JsonObject, Message

CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
USER: Message = {"role": "user", "content": "?"}
THOUGHT = re.compile(r"\A.*?</think>\s*", re.DOTALL)
"""Thinking of a model before it answers: it stays among the tokens, and is no part of the message."""
MARK = "\x01"
SPLIT = "\ufdd0"
"""Stands between the first sign of a special token and the rest, where it is text: no character, and never encoded."""
REMEMBERED = 2048
"""Texts, turns and replies whose encodings are remembered, each; of texts those up to `REMEMBERED` characters."""

OPENINGS, LONGEST_OPENING = 8, 1 << 16
"""Longer texts that are remembered, policies with tools mostly, and their characters at most."""


class Chat:
    """Renderer and parser of one tokenizer's dialogues with one set of tools.

    Args:
        tokenizer: a Hugging Face tokenizer with a prefix-preserving chat template.
        tools: OpenAI function schemas.
        template: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        UserError: the tokenizer has no chat template, or one that does not end turns with its end token.
    """

    def __init__(self, tokenizer: Any, tools: list[JsonObject], template: JsonObject | None = None) -> None:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", "use an instruction-tuned model")
        self.tokenizer = tokenizer
        self.tools = tools
        self._template = template or {}
        self.end: int = tokenizer.eos_token_id
        self._core = tokenizer.backend_tokenizer
        special = {tokenizer.eos_token, *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)}
        longest = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in longest))
        rests = "|".join(re.escape(token[1:]) for token in longest)
        self._split = re.compile(f"(?<=[{''.join(re.escape(token[0]) for token in longest)}]){SPLIT}(?={rests})")
        self._shown_tools = self._as_text(tools) or None
        self._pieces: dict[tuple[bool | str, ...], list[str] | None] = {}
        self._encoded = lru_cache(REMEMBERED)(self._ids)
        self._openings = lru_cache(OPENINGS)(self._ids)
        self._turns = lru_cache(REMEMBERED)(self._turn)
        self._parsed = lru_cache(REMEMBERED)(self._parse)
        self._header = self._render([USER], generate=True)
        self._up_to_end([USER, {"role": "assistant", "content": "?"}])  # raises

    def _render(self, messages: list[Message], *, tools: bool = False, generate: bool = False) -> str:
        settings: JsonObject = {"add_generation_prompt": generate, "tokenize": False, **self._template}
        return self.tokenizer.apply_chat_template(messages, tools=self._shown_tools if tools else None, **settings)

    def _up_to_end(self, messages: list[Message]) -> str:
        text = self._render(messages)
        return text[: self._past_end(text, text.rfind(self.tokenizer.eos_token))]

    def _past_end(self, text: str, end: int) -> int:
        if end < 0:
            raise UserError(
                f"the chat template does not end turns with {self.tokenizer.eos_token!r}",
                "set the tokenizer's eos_token to the token that ends an assistant turn",
            )
        return end + len(self.tokenizer.eos_token)

    def encode(self, text: str) -> list[int]:
        """Tokenize text, without added special tokens.

        The end token is special: no token crosses it, so the parts between two of them are encoded, and remembered,
        one by one.
        """
        ids: list[int] = []
        for part in re.split(f"(?<={re.escape(self.tokenizer.eos_token)})", text):
            long = self._openings if len(part) <= LONGEST_OPENING else self._ids
            ids += self._encoded(part) if len(part) <= REMEMBERED else long(part)
        return ids

    def _ids(self, text: str) -> list[int]:
        pieces = self._split.split(text) if SPLIT in text else [text]
        if len(text) > REMEMBERED:  # a batch lets other threads go on meanwhile
            return [i for piece in self._core.encode_batch(pieces, add_special_tokens=False) for i in piece.ids]
        return [i for piece in pieces if piece for i in self._core.encode(piece, add_special_tokens=False).ids]

    def _as_text(self, value: Any) -> Any:
        """Split the special tokens in all texts of a JSON value, as `_ids` encodes them."""
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0] + SPLIT, value)
        if isinstance(value, list):
            return [self._as_text(element) for element in value]
        if isinstance(value, dict):
            return {self._as_text(key): self._as_text(element) for key, element in value.items()}
        return value

    def prompt(self, messages: list[Message]) -> list[int]:
        """Render the opening messages with the tools and the header of the assistant's first turn, as token ids."""
        return self.encode(
            self._filled(True, self._as_text(messages), lambda filled: self._render(filled, tools=True, generate=True))
        )

    def dialogue(self, messages: list[Message]) -> list[int]:
        """Render a whole dialogue, assistant turns and calls among it, with the header of the next assistant turn, as
        token ids."""
        return self.encode(self._render(self._as_text(messages), tools=True, generate=True))

    def turn(self, message: Message) -> list[int]:
        """Render an assistant message as the model would have written it, its end token included, as token ids."""
        return self._turns(json.dumps(message))

    def _turn(self, text: str) -> list[int]:
        return self.encode(self._up_to_end([USER, self._as_text(json.loads(text))])[len(self._header) :])

    def suffix(self, messages: list[Message]) -> list[int]:
        """Render what stands between the end token of an assistant turn and the first token of the next one, as token
        ids."""
        before = [USER, {"role": "assistant", "content": MARK}]

        def render(replies: list[Message]) -> str:
            # Some templates render a turn in another way where others follow: what matters stands behind it.
            text = self._render([*before, *replies], generate=True)
            turn = text.find(MARK)
            return text[self._past_end(text, -1 if turn < 0 else text.find(self.tokenizer.eos_token, turn)) :]

        return self.encode(self._filled(False, self._as_text(messages), render))

    def _filled(self, opening: bool, messages: list[Message], render: Callable[[list[Message]], str]) -> str:
        """Render messages without calls. Rendering is slow beside a tiny model, so each sequence of roles is rendered
        once, with marks for the contents; a template that does more than insert contents is always rendered whole."""
        key = (opening, *(message["role"] for message in messages))
        if key not in self._pieces:
            # With blanks around them, so that a template that trims contents is seen to do more.
            marks = [f" \x00{i}\x00 " for i in range(len(messages))]
            text = render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
            pieces = re.split(" \x00[0-9]+\x00 ", text)
            self._pieces[key] = pieces if _fill(pieces, messages) == render(messages) else None
        pieces = self._pieces[key]
        return render(messages) if pieces is None else _fill(pieces, messages)

    def parse(self, ids: list[int]) -> Message:
        """Parse a turn's ids (with or without the end token) to an assistant message, thoughts left out."""
        return self._parsed(tuple(ids))

    def _parse(self, ids: tuple[int, ...]) -> Message:
        text = self.tokenizer.decode([*(ids[:-1] if ids and ids[-1] == self.end else ids)])
        return parse_text(THOUGHT.sub("", text, count=1))


def _fill(pieces: list[str], messages: list[Message]) -> str:
    if len(pieces) != len(messages) + 1:
        return ""
    return pieces[0] + "".join(m["content"] + piece for m, piece in zip(messages, pieces[1:], strict=True))


def parse_text(text: str) -> Message:
    """Read Hermes tool calls out of what a model wrote; text with a malformed call comes back as plain content."""
    calls = []
    for body in CALL.findall(text):
        try:
            call = json.loads(body)
            # Strictly: Python also reads NaN and halves of surrogate pairs, which no record could hold.
            json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            return {"role": "assistant", "content": text}
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            return {"role": "assistant", "content": text}
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            return {"role": "assistant", "content": text}
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": CALL.sub("", text).strip(), "tool_calls": calls}


def guide(opening: list[Message], lines: list[str]) -> list[Message]:
    """Add guidance lines at the end of the system prompt of the opening messages."""
    extra = "".join(f"\n- {line}" for line in lines)
    return [{**m, "content": m["content"] + extra} if m["role"] == "system" else m for m in opening]


def dialogue_tokens(chat: "Chat", opening: list[Message], messages: list[Message]) -> tuple[list[int], list[int]]:
    """Tokenize a dialogue: ids, and a mask of the same length (1 = written by the agent)."""
    ids = chat.prompt(opening)
    mask = [0] * len(ids)
    pending: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            pending.append(message)
            continue
        if pending:
            suffix = chat.suffix(pending)
            ids, mask, pending = ids + suffix, mask + [0] * len(suffix), []
        turn = chat.turn(message)
        ids, mask = ids + turn, mask + [1] * len(turn)
    return ids, mask
