"""Formats in which families of models write tool calls, and their readers.

A format is recognised by what a model's own chat template makes of a call (`captrain.models.chat`), not by the model's
name. Reading is strict: a call that is not well formed is plain text, as it would be for a real model.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from captrain.records import JsonObject, Message

PYTHON = {"True": True, "False": False, "None": None}
"""Spellings of true, false and null in templates that write a value as Python does."""


@dataclass(frozen=True)
class CallFormat:
    """Format of calls in a turn.

    Args:
        block: pattern of what holds calls; its first group is they.
        call: pattern of one call: `name` and `arguments`; None where a block is a JSON object of the two.
        argument: pattern of one argument: `key` and `value`; None where arguments are a JSON object.
        arguments: key of the arguments where a block is a JSON object.
    """

    block: str
    call: str | None = None
    argument: str | None = None
    arguments: str = "arguments"

    def read(self, block: str, tools: Sequence[JsonObject]) -> list[JsonObject]:
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
            {"name": name, "arguments": self._arguments(body, _parameters(name, tools))}
            for name, body in _all(self.call, block)
        ]

    def _arguments(self, body: str, parameters: JsonObject) -> object:
        if self.argument is None:
            return json.loads(body)
        return {key: _value(text, parameters.get(key)) for key, text in _all(self.argument, body)}


XML = r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
FORMATS = {
    "Hermes": CallFormat(r"<tool_call>\n?(.*?)\n?</tool_call>"),
    "Qwen3.5": CallFormat(r"<tool_call>(.*?)</tool_call>", r"<function=([^>\n]+)>(.*?)</function>", XML),
    "GLM": CallFormat(
        r"<tool_call>(.*?)</tool_call>",
        r"\A([^<\n]+)(.*)\Z",
        r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>",
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
"""Formats by the families that brought them up, in the order in which they are tried."""


def parse_text(text: str, form: CallFormat = FORMATS["Hermes"], tools: Sequence[JsonObject] = ()) -> Message:
    """Read tool calls out of what a model wrote; text with a malformed call comes back as plain content.

    Args:
        text: what the model wrote, thoughts left out.
        form: of the calls.
        tools: OpenAI function schemas, which say what stands for text and what for JSON where a format does not.
    """
    plain: Message = {"role": "assistant", "content": text}
    calls: list[JsonObject] = []
    try:
        for block in re.findall(form.block, text, re.DOTALL):
            for call in form.read(block, tools):
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
    """Find all occurrences of a pattern of two groups, which has to make up the text but for blanks."""
    if re.sub(pattern, "", text, flags=re.DOTALL).strip():
        raise ValueError("more than the pattern")
    return re.findall(pattern, text, re.DOTALL)


def _parameters(name: str, tools: Sequence[JsonObject]) -> JsonObject:
    functions = [tool["function"] for tool in tools]
    return next((f.get("parameters", {}).get("properties", {}) for f in functions if f["name"] == name), {})


def _types(schema: JsonObject) -> set[str]:
    """Collect the types that a schema allows."""
    declared = schema.get("type", [])
    unions = (_types(choice) for union in ("anyOf", "oneOf") for choice in schema.get(union, []))
    return {declared} if isinstance(declared, str) else {*declared}.union(*unions)


def _value(text: str, schema: JsonObject | None) -> object:
    """Read an argument that was written as text or as JSON: as text where the schema says so, or says nothing."""
    types = _types(schema or {})
    if not types or ("string" in types and not ("null" in types and text in ("null", "None"))):
        return text
    try:
        return PYTHON[text] if text in PYTHON else json.loads(text)
    except ValueError:
        return text
