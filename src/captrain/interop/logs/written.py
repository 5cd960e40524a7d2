"""Finds tool calls that the model wrote as text, in logs without structured calls.

Some agents write calls as text: ReAct's `Action:` and `Action Input:`, tags, JSON, or an HTTP request line. If a result
follows, the call was executed, and it becomes a structured call with its result. If no result follows, nobody executed
the call. The message then gets the field `unexecuted` with the names of its calls.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from captrain.interop.logs.source import CallEntry, call_entry, call_of, literal, parsed
from captrain.records import Message

TAG = re.compile(r"<\|?(?:tool_?calls?|function_?calls?|tool_use|TOOL_CALLS?)\b([^>]*)>(.*?)(?:</|<\||\Z)", re.DOTALL)
FENCE = re.compile(r"\A\s*```(?:json|tool_call|python)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL)
ELEMENT = re.compile(r"<(?:function|invoke)(?:=| name=\"?)([\w.-]+)\"?>(.*?)(?:</(?:function|invoke)>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter(?:=| name=\"?)([\w.-]+)\"?>(.*?)</parameter>", re.DOTALL)
REACT = re.compile(
    r"^\W*Action(?: \d+)?\W*:\s*`?([A-Za-z_][\w. -]*?)`?\s*(?:\[(.*)\]|\n\W*Action Input(?: \d+)?\W*:\s*(.*?))"
    r"\s*(?:\n\W*Observation|\Z)",
    re.DOTALL | re.MULTILINE,
)
BLOCK = re.compile(r"```(bash|sh|shell|mswea_bash_command|python|py|ipython|sql)\s*\n(.*?)\n?```", re.DOTALL)
SHELLS = {"sh": "bash", "shell": "bash", "mswea_bash_command": "bash", "py": "python", "ipython": "python"}
ACTION = re.compile(r"^\W*Action\W*:\s*(?=\{)", re.MULTILINE)
"""The line before a JSON call, as tau-bench's ReAct agents write it."""
THOUGHT = re.compile(r"\A\s*(?:<think>.*?</think>|(?:(?!<think>).)*?^</think>$)\s*", re.DOTALL | re.MULTILINE)
"""The model's thoughts at the start of a message, which nobody else reads."""
SPEAKING = "respond"
"""Name of the action with which such an agent sends a message to the user."""
REQUEST = re.compile(r"\A\s*(GET|POST|PUT|PATCH|DELETE) (https?://\S+)\s*(\{.*\})?\s*\Z", re.DOTALL)
WRAPPERS = ("function_call", "tool_call", "tool_calls", "function_calls", "call")
RESULT = re.compile(
    r"\W*(?:observation|exit ?code|return ?code|here is the response|(?:GET|POST|PUT|PATCH|DELETE) request |"
    r"(?:tool|function|code|execution|api)?[ _]?(?:output|results?|responses?)\b)",
    re.IGNORECASE,
)
"""Start of a message that a harness writes after it has executed a call."""


def executed(dialogue: Sequence[Message]) -> list[Message]:
    """Return the dialogue with written calls that have a result as structured calls, and the other calls marked."""
    messages = [_spoken(message) for message in dialogue]
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("tool_calls"):
            continue
        if place + 1 == len(messages):
            continue
        answer, calls = messages[place + 1], [*written_calls(message["content"])]
        is_answered = answer["role"] == "tool" or (answer["role"] == "user" and bool(RESULT.match(answer["content"])))
        if is_answered and not calls:
            calls = [*block_calls(message["content"])]
        if not calls:
            continue
        if is_answered:
            entries = [
                {"id": "", "type": "function", "function": {**call["function"], "arguments": _arguments(call)}}
                for call in calls
            ]
            messages[place] = {**message, "tool_calls": entries}
            messages[place + 1] = {"tool_call_id": "", **answer, "role": "tool"}
        else:
            messages[place] = {**message, "unexecuted": [str(call["function"]["name"]) for call in calls]}
    return messages


def _spoken(message: Message) -> Message:
    """Return a message as others read it: without thoughts, and with the text of a `respond` action as its content."""
    text = message.get("content")
    if message["role"] not in ("assistant", "user") or not isinstance(text, str):
        return message
    said = THOUGHT.sub("", text, count=1) if "</think>" in text else text
    if message["role"] == "assistant" and f'"{SPEAKING}"' in said and len(calls := [*written_calls(said)]) == 1:
        function = calls[0]["function"]
        words = function["arguments"].get("content") if isinstance(function["arguments"], Mapping) else None
        said = words if function["name"] == SPEAKING and isinstance(words, str) else said
    return message if said == text else {**message, "content": said}


def _arguments(call: CallEntry) -> object:
    arguments = parsed(call["function"]["arguments"])
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def block_calls(text: str) -> Iterator[CallEntry]:
    """Yield each code block in a text as a call of the tool that runs its language."""
    for language, code in BLOCK.findall(text):
        yield call_entry(
            SHELLS.get(language, language), {"code" if language in ("python", "py", "ipython") else "command": code}
        )


def written_calls(text: str) -> Iterator[CallEntry]:
    """Yield the tool calls that are written in a text."""
    if request := REQUEST.match(text):
        yield call_entry(request[1], {"url": request[2], **({"body": _value(request[3])} if request[3] else {})})
        return
    if elements := ELEMENT.findall(text):
        for name, body in elements:
            parameters = {key: value.strip() for key, value in PARAMETER.findall(body)}
            yield call_entry(name, parameters or _value(body))
        return
    if "Action" in text and (match := REACT.search(text)):
        yield call_entry(match[1].strip(), _value(match[2] if match[3] is None else match[3]))
        return
    if (action := ACTION.search(text)) and (inner := [*_in_value(_value(text[action.end() :]), is_call=True)]):
        yield from inner
        return
    parts = [f"{body or attributes}" for attributes, body in TAG.findall(text)] if "<" in text else []
    whole = FENCE.sub(r"\1", text).strip()
    if not parts and whole[:1] in ("{", "["):
        parts = [whole]
    for part in parts:
        yield from _in_value(_value(part))


def _value(text: str) -> object:
    """Parse JSON or a Python literal. Return any other text unchanged."""
    text = text.strip()
    try:
        return json.JSONDecoder().raw_decode(text)[0] if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return literal(text)


def _in_value(value: object, *, is_call: bool = False) -> Iterator[CallEntry]:
    """Yield the calls in a value: objects with a name and arguments, possibly wrapped or in a list.

    is_call: the text says that the value is a call. The arguments may then be missing.
    """
    if isinstance(value, list):
        for element in value:
            yield from _in_value(element, is_call=is_call)
    elif isinstance(value, Mapping):
        inner = next((value[name] for name in WRAPPERS if isinstance(value.get(name), list | Mapping)), None)
        if inner is not None:
            yield from _in_value(inner, is_call=is_call)
        elif (call := call_of(value)) and (is_call or call["function"]["arguments"] != {}):
            yield call
