"""Rollouts as the text that a model saw: a prompt and its completion in a chat template, as trainers dump them.

The markers of ChatML and of Llama 3 separate the messages. Calls stay text; `written` reads them where a result
follows.
"""

import re
from pathlib import Path

from captrain.interop.logs.chat import OTHER_ROLES, chat_row
from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign
from captrain.interop.logs.steps import ANSWERS, PROMPTS, texts_of
from captrain.records import Message

TURN = re.compile(
    r"(?:<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*)"
    r"(.*?)(?=<\|im_end\|>|<\|eot_id\|>|<\|im_start\|>|<\|start_header_id\|>|\Z)",
    re.DOTALL,
)
RESULT = re.compile(r"\s*(?:<tool_response>(?:(?!</tool_response>).)*</tool_response>\s*)+", re.DOTALL)
"""A message of results, which some templates write in the name of the user."""


def _text(row: Foreign) -> str:
    """Return the prompt and the completion of a row as one text; "" if the prompt is not in a chat template."""
    prompt = next((row[name] for name in texts_of(row, PROMPTS) if TURN.match(row[name].lstrip())), "")
    answer = next((row[name] for name in texts_of(row, ANSWERS) if row[name] != prompt), "")
    return f"{prompt}{answer}" if prompt and answer else ""


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    messages: list[Message] = []
    for one, other, text in TURN.findall(_text(row)):
        role = "tool" if RESULT.fullmatch(text) else OTHER_ROLES.get(one or other, one or other)
        messages.append({"role": role, "content": text.strip()})
    return chat_row({**row, "messages": messages})


TEMPLATED = RowFormat("texts in a chat template", lambda row: bool(_text(row)), _chat_row)
