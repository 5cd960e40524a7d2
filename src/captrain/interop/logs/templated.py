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

MARK = r"(?:<\|im_start\|>|<\|start_header_id\|>)"
"""What begins a message."""
TURN = re.compile(
    r"(?:<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*)"
    rf"(.*?)(<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|(?={MARK})|\Z)",
    re.DOTALL,
)
BEFORE = re.compile(rf"\s*(?:(?!{MARK})<\|?\w+\|?>\s*)*")
"""What some models have before the first message, such as `<|begin_of_text|>` or padding."""
OPENED = "<|im_start|>assistant\n"
TASK = ("example_id", "problem_id")
RESULT = re.compile(r"\s*(?:<tool_response>(?:(?!</tool_response>).)*</tool_response>\s*)+", re.DOTALL)
"""A message of results, which some templates write in the name of the user."""


def is_templated(row: Foreign) -> bool:
    """Return whether a row holds a prompt in a chat template and its completion."""
    return bool(_text(row))


def _text(row: Foreign) -> str:
    """Return the prompt and the completion of a row as one text; "" if the prompt is not in a chat template."""
    prompts = (BEFORE.sub("", row[name], count=1) for name in texts_of(row, PROMPTS))
    prompt = next((prompt for prompt in prompts if TURN.match(prompt)), "")
    answer = next((row[name] for name in texts_of(row, ANSWERS) if BEFORE.sub("", row[name], count=1) != prompt), "")
    if not prompt or not answer:
        return ""
    *_, last = TURN.finditer(prompt)
    is_closed = bool(last[4]) and not TURN.match(BEFORE.sub("", answer, count=1))
    return f"{prompt}{OPENED if is_closed else ''}{answer}"


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    messages: list[Message] = []
    for one, other, text, _ in TURN.findall(_text(row)):
        role = "tool" if RESULT.fullmatch(text) else OTHER_ROLES.get(one or other, one or other)
        messages.append({"role": role, "content": text.strip()})
    task = next((row[name] for name in TASK if row.get(name) is not None), None)
    return chat_row({"task_id": task, **row, "messages": messages})


TEMPLATED = RowFormat("texts in a chat template", is_templated, _chat_row)
