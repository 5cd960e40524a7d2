"""Tool calls that the model wrote as text, for logs without structured calls.

Some agents call by text: ReAct's `Action:` and `Action Input:`, tags, JSON, or the request line of HTTP. If a result
follows, the call was executed, and the dialogue gets it as a call with its result. If none follows, nobody executed it:
the message is marked `unexecuted` with the names of its calls.
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
"""The line before a call in JSON, as tau-bench's ReAct agents write it."""
THOUGHT = re.compile(r"\A\s*(?:<think>.*?</think>|(?:(?!<think>).)*?^</think>$)\s*", re.DOTALL | re.MULTILINE)
"""What a model thinks before it speaks: nobody else reads it."""
SPEAKING = "respond"
"""The action by which such an agent speaks to the user."""
REQUEST = re.compile(r"\A\s*(GET|POST|PUT|PATCH|DELETE) (https?://\S+)\s*(\{.*\})?\s*\Z", re.DOTALL)
WRAPPERS = ("function_call", "tool_call", "tool_calls", "function_calls", "call")
RESULT = re.compile(
    r"\W*(?:observation|exit ?code|return ?code|here is the response|(?:GET|POST|PUT|PATCH|DELETE) request |"
    r"(?:tool|function|code|execution|api)?[ _]?(?:output|results?|responses?)\b)",
    re.IGNORECASE,
)
"""How a message begins that a harness writes after it executed a call."""


def executed(dialogue: Sequence[Message]) -> list[Message]:
    """Give calls that stand in texts their places: those with a result become calls, the others are marked."""
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
    """Return a message in the words that others read: without thoughts, and without the action of speaking."""
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
    """Yield the blocks of code that a text holds, as calls of what runs them."""
    for language, code in BLOCK.findall(text):
        yield call_entry(
            SHELLS.get(language, language), {"code" if language in ("python", "py", "ipython") else "command": code}
        )


def written_calls(text: str) -> Iterator[CallEntry]:
    """Yield the calls that stand in a text."""
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
    """Parse JSON or Python's notation of it; return other text as it is."""
    text = text.strip()
    try:
        return json.JSONDecoder().raw_decode(text)[0] if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return literal(text)


def _in_value(value: object, *, is_call: bool = False) -> Iterator[CallEntry]:
    """Yield the calls of a value: objects that hold a name and arguments, wrapped or in a list.

    is_call: whether the text says that the value is a call; it then needs no arguments.
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
