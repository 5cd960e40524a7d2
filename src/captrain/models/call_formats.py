"""Formats in which families of models write tool calls, and their readers.

`FORMATS` has them by the families that brought them up, in the order in which they are tried. A format is recognised by
what a model's own chat template makes of a call (`captrain.models.chat`), not by the model's name. Reading is strict: a
call that is not well formed is plain text, as it would be for a real model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from captrain.records import JsonObject, Message


@dataclass(frozen=True)
class CallFormat:
    """Format of calls in a turn.

    Args:
        block: pattern of what holds calls; its first group is they.
        call: pattern of one call: `name` and `arguments`; None where a block is a JSON object of the two.
        argument: pattern of one argument: `key` and `value`; None where arguments are a JSON object.
        arguments: key of the arguments where a block is a JSON object.
        quote: what stands around text in arguments that are JSON but for it, and for keys without quotes; "" for JSON.
        thought: pattern of what a model thinks before it answers: it stays among the tokens, and is no part of the
            message.
        words: pattern of a turn without calls; its first group is what is said.
    """

    block: str
    call: str | None = None
    argument: str | None = None
    arguments: str = "arguments"
    quote: str = ""
    thought: str = r"\A.*?</think>\s*"
    words: str = r"\A(.*)\Z"

    def read(self, block: str, schemas: Mapping[str, JsonObject]) -> list[JsonObject]:
        """Read the calls of a block: names and arguments.

        Raises:
            ValueError: they are not well formed.
        """
        if self.call is None:
            call = json.loads(block)
            if not isinstance(call, dict) or set(call) != {"name", self.arguments}:
                raise ValueError("no name and arguments")
            return [{"name": call["name"], "arguments": call[self.arguments]}]
        return [
            {
                "name": name,
                "arguments": json.loads(_as_json(body, self.quote))
                if self.argument is None
                else {key: _value(text, schemas.get(name, {}).get(key, {})) for key, text in _all(self.argument, body)},
            }
            for name, body in _all(self.call, block)
        ]


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
    """Read tool calls out of what a model wrote; text with a malformed call comes back as plain content.

    Args:
        text: what the model wrote, without the token that ends the turn.
        form: of the calls.
        tools: OpenAI function schemas, which say what stands for text and what for JSON where a format does not.
    """
    text = re.sub(form.thought, "", text, count=1, flags=re.DOTALL)
    words = re.match(form.words, text, re.DOTALL)
    plain: Message = {"role": "assistant", "content": words[1] if words else text}
    schemas = {
        function["name"]: (function.get("parameters") or {}).get("properties") or {}
        for function in (tool["function"] for tool in tools)
    }
    calls: list[JsonObject] = []
    try:
        for block in re.findall(form.block, text, re.DOTALL):
            for call in form.read(block, schemas):
                # Strictly: Python also reads NaN and halves of surrogate pairs, which no record could hold.
                json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
                if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
                    return plain
                calls.append({"type": "function", "function": call})
    except ValueError:
        return plain
    if not calls:
        return plain
    return {**plain, "content": re.sub(form.block, "", text, flags=re.DOTALL).strip(), "tool_calls": calls}


def _all(pattern: str, text: str) -> list[tuple[str, str]]:
    # Nothing but blanks may stand between them.
    if re.sub(pattern, "", text, flags=re.DOTALL).strip():
        raise ValueError("more than the pattern")
    return re.findall(pattern, text, re.DOTALL)


def _as_json(text: str, quote: str) -> str:
    """Write arguments as JSON that have signs of their own around text, and none around keys."""
    if not quote:
        return text
    parts = text.split(quote)  # what stands between two of them is text
    return "".join(
        json.dumps(part, ensure_ascii=False)
        if place % 2
        else re.sub(r"\bNone\b", "null", re.sub(r"(?<=[{,])([^{},:\[\]\s]+):", r'"\1":', part))
        for place, part in enumerate(parts)
    )


def _value(text: str, schema: JsonObject) -> object:
    """Read an argument that was written as text or as JSON: as text where the schema says so, or says nothing."""
    choices = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())] if isinstance(schema, dict) else []
    declared = [choice.get("type", ()) for choice in choices if isinstance(choice, dict)]
    types = {name for names in declared for name in ([names] if isinstance(names, str) else names)}
    if not types or ("string" in types and not ("null" in types and text in ("null", "None"))):
        return text
    try:
        # Some templates write true, false and null as Python does.
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text
