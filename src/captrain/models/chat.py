"""Chat messages to token ids and back, for any tokenizer with a chat template.

Demonstrations, rollouts and training share one contract: prompt + assistant turn + suffix + assistant turn + ... equals
what the chat template renders for the whole dialogue. What the model wrote is never tokenized again.

- Only the template makes turns. A special token in a message or a tool's schema is tokenized as text, so that neither a
  user nor a tool's result can end a turn or begin one.
- Tool calls are read in the format in which the template writes them. `FORMATS` are tried in order on what the model's
  own template makes of a call; the model's name does not matter.
- Reading is strict: a malformed call is plain text. That is why transformers' and TRL's own parsing is not used: it
  takes calls without arguments, unclosed calls, and arguments that are no object.
- If the template's header opens a thought, a turn closes it first.
- A turn ends with the special token that the template puts behind it. In templates such as GLM's, that token begins the
  next turn: it is then the one of a tool's answer after calls, otherwise the user's.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from captrain.errors import UserError
from captrain.records import JsonObject, Message

USER: Message = {"role": "user", "content": "?"}
REPLY: Message = {"role": "assistant", "content": ""}
ANSWER = "an answer of a tool"
TEMPLATE_FAULTS = (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError, RecursionError)
"""Exceptions that a chat template may raise, for example for messages that it does not support."""
MARK = "~mark~"
SPLIT = "\ufdd0"
"""Inserted after the first character of a special token in plain text, so that it is not encoded as a special token.

U+FDD0 is not a valid character, and is removed before encoding.
"""
REMEMBERED = 2048
"""Size of each cache of encodings: of texts, turns and replies. Texts are cached up to this many characters."""

OPENINGS, LONGEST_OPENING = 8, 1 << 16
"""Number of longer texts that are cached, and their largest size in characters. Most are policies with tools."""


@dataclass(frozen=True)
class CallFormat:
    """Format of calls in a turn.

    Args:
        block: pattern of a block of calls. Its first group has the calls.
        call: pattern of one call, with groups for name and arguments. None: a block is a JSON object with both.
        argument: pattern of one argument, with groups for key and value. None: arguments are a JSON object.
        arguments: key of the arguments if a block is a JSON object.
        quote: quotation mark around text in JSON-like arguments whose keys are not quoted. "": plain JSON.
        thought: pattern of the thought before an answer. It is kept in the tokens but removed from the message.
        words: pattern of a turn without calls. Its first group is the content.
    """

    block: str
    call: str | None = None
    argument: str | None = None
    arguments: str = "arguments"
    quote: str = ""
    thought: str = r"\A.*?</think>\s*"
    words: str = r"\A(.*)\Z"

    def read(self, block: str, schemas: Mapping[str, Mapping[str, object]]) -> list[tuple[object, object]]:
        """Return the (name, arguments) of each call in a block.

        Raises:
            ValueError: a call is malformed.
        """
        if self.call is None:
            call = json.loads(block)
            if not isinstance(call, dict) or set(call) != {"name", self.arguments}:
                raise ValueError("no name and arguments")
            return [(call["name"], call[self.arguments])]
        calls = _all(self.call, block)
        if self.argument is None:
            return [(name, json.loads(_as_json(body, self.quote))) for name, body in calls]
        return [(name, self._typed(self.argument, body, schemas.get(name, {}))) for name, body in calls]

    @staticmethod
    def _typed(argument: str, body: str, schema: Mapping[str, object]) -> dict[str, object]:
        return {key: _value(text, schema.get(key)) for key, text in _all(argument, body)}


FORMATS = {
    "Hermes": CallFormat(r"<tool_call>\n?(.*?)\n?</tool_call>"),
    "Qwen3.5": CallFormat(
        r"<tool_call>(.*?)</tool_call>",
        r"<function=([^>\n]+)>(.*?)</function>",
        r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>",
    ),
    "GLM": CallFormat(
        r"<tool_call>(.*?)</tool_call>",
        r"\A\s*([^<>{}\s]+)\s*(.*)\Z",
        r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        words=r"\A\n?(.*)\Z",
    ),
    "Gemma 4": CallFormat(
        r"<\|tool_call>(.*?)<tool_call\|>",
        r"\Acall:([^{\s]+)(\{.*\})\Z",
        quote='<|"|>',
        thought=r"\A<\|channel>.*?<channel\|>\s*",
    ),
    "Harmony": CallFormat(
        r"\A((?:<\|channel\|>commentary)? to=functions\..*)\Z",
        r"\A(?:<\|channel\|>commentary)? to=functions\.([^<\s]+)"
        r"(?:<\|channel\|>commentary)? (?:<\|constrain\|>)?json<\|message\|>(.*)\Z",
        thought=r"\A<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant",
        words=r"\A<\|channel\|>final<\|message\|>(.*)\Z",
    ),
    "MiniMax": CallFormat(
        r"<minimax:tool_call>(.*?)</minimax:tool_call>",
        r'<invoke name="([^"\n]+)">(.*?)</invoke>',
        r'<parameter name="([^"\n]+)">(.*?)</parameter>',
    ),
    "Llama": CallFormat(r"\A\s*(\{.*\})\s*\Z", arguments="parameters"),
    "DeepSeek": CallFormat(
        r"<｜tool▁calls▁begin｜>(.*?)<｜tool▁calls▁end｜>",
        r"<｜tool▁call▁begin｜>([^<\n]+)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>",
    ),
    "DeepSeek V3": CallFormat(
        r"<｜tool▁calls▁begin｜>(.*?)<｜tool▁calls▁end｜>",
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^<\n]+)\n```json\n(.*?)\n```<｜tool▁call▁end｜>",
    ),
}


def parse_text(text: str, form: CallFormat = FORMATS["Hermes"], tools: Sequence[JsonObject] = ()) -> Message:
    """Parse the tool calls in a model's text. If a call is malformed, the whole text becomes plain content.

    Args:
        text: the model's text, without the token that ends the turn.
        form: format of the calls.
        tools: OpenAI function schemas. Some formats do not mark text arguments, and the schemas tell text from JSON.
    """
    text = re.sub(form.thought, "", text, count=1, flags=re.DOTALL)
    words = re.match(form.words, text, re.DOTALL)
    plain: Message = {"role": "assistant", "content": words[1] if words else text}
    schemas = {
        function["name"]: (function.get("parameters") or {}).get("properties") or {}
        for function in (tool["function"] for tool in tools)
    }
    try:
        calls = [call for block in re.findall(form.block, text, re.DOTALL) for call in form.read(block, schemas)]
        # Strict JSON: Python also reads NaN and halves of surrogate pairs, which records cannot hold.
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return plain
    if not calls or not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls):
        return plain
    content = re.sub(form.block, "", text, flags=re.DOTALL).strip()
    return {**plain, "content": content, "tool_calls": [_call(name, arguments) for name, arguments in calls]}


def _all(pattern: str, text: str) -> list[tuple[str, str]]:
    # Only whitespace may be between matches.
    if re.sub(pattern, "", text, flags=re.DOTALL).strip():
        raise ValueError("more than the pattern")
    return re.findall(pattern, text, re.DOTALL)


def _as_json(text: str, quote: str) -> str:
    """Convert JSON-like arguments to JSON: text is inside `quote`, and keys are not quoted."""
    if not quote:
        return text
    parts = text.split(quote)  # odd parts are quoted text
    return "".join(
        json.dumps(part, ensure_ascii=False)
        if place % 2
        else re.sub(r"\bNone\b", "null", re.sub(r"(?<=[{,])([^{},:\[\]\s]+):", r'"\1":', part))
        for place, part in enumerate(parts)
    )


def _value(text: str, schema: object) -> object:
    """Read an argument that is text or JSON. It is text if its schema says so or has no type."""
    choices = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())] if isinstance(schema, dict) else []
    declared = [choice.get("type", ()) for choice in choices if isinstance(choice, dict)]
    types = {name for names in declared for name in ([names] if isinstance(names, str) else names)}
    if not types or ("string" in types and not ("null" in types and text in ("null", "None"))):
        return text
    try:
        # Some templates write true, false and null in Python's spelling.
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


class Chat:
    """Renderer and parser of one tokenizer's dialogues with one set of tools.

    Args:
        tokenizer: a Hugging Face tokenizer with a prefix-preserving chat template.
        tools: OpenAI function schemas.
        template: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        UserError: the tokenizer has no chat template, or one whose turns end without a special token.
    """

    def __init__(self, tokenizer: Any, tools: list[JsonObject], template: Mapping[str, object] | None = None) -> None:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", "use an instruction-tuned model")
        self.tokenizer = tokenizer
        self.tools = tools
        self._template = template or {}
        self._core = tokenizer.backend_tokenizer
        special = {tokenizer.eos_token, *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)}
        longest = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._token = re.compile(rf"\s*({'|'.join(map(re.escape, longest))})")
        self._special = re.compile("|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in longest))
        rests = "|".join(re.escape(token[1:]) for token in longest)
        self._split = re.compile(f"(?<=[{''.join(re.escape(token[0]) for token in longest)}]){SPLIT}(?={rests})")
        self._shown_tools = self._as_text(tools) or None
        self._pieces: dict[tuple[bool | str, ...], list[str] | None] = {}
        self._encoded = lru_cache(REMEMBERED)(self._ids)
        self._openings = lru_cache(OPENINGS)(self._ids)
        self._turns = lru_cache(REMEMBERED)(self._turn)
        self._parsed = lru_cache(REMEMBERED)(self._parse)
        # Render examples to find the header of a turn, and the end tokens of turns without and with calls.
        try:
            header, marked = self._render([USER], generate=True), self._ended({**REPLY, "content": MARK})
        except (*TEMPLATE_FAULTS, MemoryError) as error:
            fault = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"the chat template does not render a question and its answer: {fault}",
                "correct it, or use the one that came with the model",
            ) from None
        self._shared = len(commonprefix([header, marked]))
        self._closing = self.encode("</think>\n\n") if "<think>" in header[self._shared :] else []
        self._plain_end = self._call_end = self._token.findall(marked)[-1]
        probe: Message = {**REPLY, "tool_calls": [_call("probe", {"text": "a", "number": 3})]}
        # Find the format of calls (Hermes if none matches), and whether a tool result without a call is rendered.
        self._format, self._shows_answers = FORMATS["Hermes"], False
        with suppress(*TEMPLATE_FAULTS):
            text = self._ended(probe)
            self._call_end = self._token.findall(text)[-1]
            types = {"text": {"type": "string"}, "number": {"type": "integer"}}
            schemas = [{"function": {"name": "probe", "parameters": {"properties": types}}}]
            text = text[self._shared :].removesuffix(self._call_end)
            readers = (form for form in FORMATS.values() if parse_text(text, form, schemas) == probe)
            self._format = next(readers, self._format)
        with suppress(*TEMPLATE_FAULTS):
            text = self._render([USER, REPLY, {"role": "tool", "name": "probe", "content": ANSWER}])
            self._shows_answers = ANSWER in text
        self.end: int = tokenizer.convert_tokens_to_ids(self._plain_end)
        """Id of the token that ends a turn without calls."""
        call_end = tokenizer.convert_tokens_to_ids(self._call_end)
        self.ends = frozenset((self.end, call_end, tokenizer.eos_token_id))
        """Ids of the tokens that end a turn."""

    def _render(self, messages: list[Message], *, tools: bool = False, generate: bool = False) -> str:
        schemas = self._shown_tools if tools else None
        settings = {"add_generation_prompt": generate, "tokenize": False, **self._template}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=schemas, **settings)
        except TypeError:  # some templates need arguments as JSON text
            textual = copy.deepcopy(messages)
            for function in (call["function"] for message in textual for call in message.get("tool_calls") or ()):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            return self.tokenizer.apply_chat_template(textual, tools=schemas, **settings)

    def _ended(self, message: Message) -> str:
        """Render a user message and then this assistant message, up to and including the end token."""
        text = self._render([USER, message])
        body = text.rstrip()
        last = [match for match in self._token.finditer(body) if match.end() == len(body)]
        if last:
            return body
        calls = message.get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        answers: list[Message] = [{"role": "tool", "name": name, "content": ANSWER} for name in names]
        whole = self._render([USER, message, *(answers or [USER])])
        end = self._token.match(whole, len(body)) if whole.startswith(body) else None
        if end is None:
            raise UserError(
                "the chat template ends a turn with no special token of the tokenizer",
                "set the tokenizer's eos_token to the token that ends an assistant turn",
            )
        return whole[: end.end()]

    def encode(self, text: str) -> list[int]:
        """Tokenize text, without adding special tokens.

        No token spans an end-of-sequence token, so the parts between these are encoded and cached separately.
        """
        ids: list[int] = []
        for part in re.split(f"(?<={re.escape(self.tokenizer.eos_token)})", text):
            long = self._openings if len(part) <= LONGEST_OPENING else self._ids
            ids += self._encoded(part) if len(part) <= REMEMBERED else long(part)
        return ids

    def _ids(self, text: str) -> list[int]:
        pieces = self._split.split(text) if SPLIT in text else [text]
        if len(text) > REMEMBERED:  # a batch releases the GIL
            return [i for piece in self._core.encode_batch(pieces, add_special_tokens=False) for i in piece.ids]
        return [i for piece in pieces if piece for i in self._core.encode(piece, add_special_tokens=False).ids]

    def _as_text(self, value: Any) -> Any:
        """Split the special tokens in all texts of a JSON value, so that `_ids` encodes them as text."""
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0] + SPLIT, value)
        if isinstance(value, list):
            return [self._as_text(element) for element in value]
        if isinstance(value, dict):
            return {self._as_text(key): self._as_text(element) for key, element in value.items()}
        return value

    def prompt(self, messages: list[Message]) -> list[int]:
        """Render the opening messages, with tools and the header of the first assistant turn, as token ids."""
        return self.encode(
            self._filled(True, self._as_text(messages), lambda filled: self._render(filled, tools=True, generate=True))
        )

    def dialogue(self, messages: list[Message]) -> list[int]:
        """Render a whole dialogue, with the header of the next assistant turn, as token ids."""
        return self.encode(self._render(self._as_text(messages), tools=True, generate=True))

    def turn(self, message: Message, context: Sequence[int] = ()) -> list[int]:
        """Render an assistant message as the model would have written it, with its end token, as token ids.

        Args:
            message: the assistant's.
            context: token ids before the message; empty if it follows the opening.
        """
        # After a tool result, some templates render no header, so there is no open thought to close.
        headless = context and self._closing and "<think>" not in self.tokenizer.decode([*context[-16:]])[-9:]
        return ([] if headless else self._closing) + self._turns(json.dumps(message))

    def _turn(self, text: str) -> list[int]:
        return self.encode(self._ended(self._as_text(json.loads(text)))[self._shared :])

    def suffix(self, messages: list[Message], last: int | None = None) -> list[int]:
        """Return the token ids between an assistant turn and the next assistant turn.

        Args:
            messages: the messages between the two turns.
            last: last token of the first turn. If it is not the end token (the turn was cut off), the result starts
                with the end token.
        """
        is_answered = any(message["role"] == "tool" for message in messages)

        def render(replies: list[Message]) -> str:
            calls = [_call(reply.get("name", ""), {}) for reply in replies if reply["role"] == "tool"]
            turn: Message = {**REPLY, "content": MARK}
            if calls and not self._shows_answers:
                calls[-1] = _call(calls[-1]["function"]["name"], {"mark": MARK})
                turn = {**REPLY, "tool_calls": calls}
            # Some templates render a turn differently if messages follow, so render both and cut off the turn.
            text = self._render([USER, turn, *replies], generate=True)
            start = max(0, text.find(MARK))
            if "tool_calls" in turn:
                return text[text.index(self._call_end, start) + len(self._call_end) :]
            end = self._token.search(text, start)
            return text[end.end() :] if end else ""

        expected = self.tokenizer.convert_tokens_to_ids(self._call_end) if is_answered else self.end
        follows = self.encode(self._filled(False, self._as_text(messages), render))
        return follows if last in (None, expected) else [expected, *follows]

    def _filled(self, opening: bool, messages: list[Message], render: Callable[[list[Message]], str]) -> str:
        """Render messages without calls, quickly.

        Rendering is slow compared to a tiny model. So each sequence of roles is rendered once with placeholders, and
        contents are then inserted. If the template does more than insert contents, every dialogue is rendered whole.
        """
        key = (opening, *(message["role"] for message in messages))
        if key not in self._pieces:
            # The spaces around the marks reveal a template that trims contents.
            marks = [f" \x00{i}\x00 " for i in range(len(messages))]
            text = render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
            pieces = re.split(" \x00[0-9]+\x00 ", text)
            self._pieces[key] = pieces if _fill(pieces, messages) == render(messages) else None
        pieces = self._pieces[key]
        return render(messages) if pieces is None else _fill(pieces, messages)

    def parse(self, ids: list[int]) -> Message:
        """Parse a turn's ids (with or without the end token) to an assistant message without thoughts."""
        return self._parsed(tuple(ids))

    def _parse(self, ids: tuple[int, ...]) -> Message:
        text = self.tokenizer.decode([*(ids[:-1] if ids and ids[-1] in self.ends else ids)])
        return parse_text(text, self._format, self.tools)


def _call(name: object, arguments: object) -> JsonObject:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _fill(pieces: list[str], messages: list[Message]) -> str:
    if len(pieces) != len(messages) + 1:
        return ""
    return pieces[0] + "".join(m["content"] + piece for m, piece in zip(messages, pieces[1:], strict=True))


def guide(opening: list[Message], lines: list[str]) -> list[Message]:
    """Add guidance lines at the end of the system prompt of the opening messages."""
    extra = "".join(f"\n- {line}" for line in lines)
    return [{**m, "content": m["content"] + extra} if m["role"] == "system" else m for m in opening]


def dialogue_tokens(chat: "Chat", opening: list[Message], messages: list[Message]) -> tuple[list[int], list[int]]:
    """Tokenize a dialogue: ids, and a mask that is 1 where the agent wrote."""
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
        turn = chat.turn(message, ids)
        ids, mask = ids + turn, mask + [1] * len(turn)
    return ids, mask
