"""Home-made traces: a list of steps, each a call with its result, or lists of thoughts, actions and observations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from captrain.contract import calls_of
from captrain.interop.logs.beside import task_of
from captrain.interop.logs.chat import chat_row, dialogue_of, is_message, is_spoken, messages_in
from captrain.interop.logs.outcomes import DEEPEST, LAST, at
from captrain.interop.logs.records import ChatRow, FileFormat, RowFormat
from captrain.interop.logs.source import ARGUMENTS, Foreign, call_entry, call_of, calling, loaded, text_of
from captrain.interop.logs.turns import speaker_of
from captrain.interop.logs.written import written_calls
from captrain.records import Message

RESULTS = ("result", "observation", "output", "response", "tool_output", "tool_result", "obs")
ACTIONS = ("action", "tool", "tool_name", "command", "function", "call", "act")
CALLS = ("tool_calls", "toolCalls", "calls", "tool_uses", "function_calls", "actions")
"""Names of a list of calls in a step. Each call holds its result, or the step has a list of results."""
CALLS_RESULTS = (
    "tool_results",
    "toolResults",
    "results",
    "tool_outputs",
    "tool_responses",
    "observations",
    "outputs",
)
THOUGHTS = ("thought", "reasoning", "message", "text", "content", "model_output")
PROMPTS = (
    "query",
    "question",
    "instruction",
    "task_description",
    "problem_statement",
    "prompt",
    "goal",
    "objective",
    "task",
    "input",
    "user_message",
)
ANSWERS = (
    "model_answer",
    "response",
    "completion",
    "solution",
    "output",
    "answer",
    "prediction",
    "generation",
    "model_output",
)
FINAL = ("output", "response", "final_answer", "model_answer", "prediction", "completion")
"""Names of the text that an agent ends a trace with. `answer` and `solution` are often the right ones."""
TRACES = ("trace", "steps", "turn_history", "trajectory", "history", "turns", "actions", "events", "log")
SPOKEN = ("model_output", "agent")
"""Names of objects in a step that hold the model's thought and action. The result may be in `environment`."""
TRUTHS = {"true", "truth", "gold", "golden", "reference", "expected", "target", "correct"}
"""Words that mark a field as the correct answer, not the agent's answer."""
SPEAKERS = ("role", "type", "from", "source", "speaker", "sender", "author", "kind", "event", "agent", "actor")
COUNTERS = ("step", "step_num", "step_number", "step_id", "step_idx", "turn", "round")
RUN = ("task_id", "instance_id", "id", "episode", "episode_id", "run_id")
"""Fields that differ between rows if each row is a separate run."""
MANY = 50
"""Number of turns of a list that are inspected."""
ACTION = re.compile(r"\s*([A-Za-z_]\w*)\s*[\[(](.*)[\])]\s*", re.DOTALL)
"""An action such as `search[cats]`."""


def _is_step(step: object) -> TypeGuard[Foreign]:
    if not isinstance(step, Mapping):
        return False
    opened = _opened(step)
    is_acting = any(name in opened for name in ACTIONS) or bool(_calls(opened)) or _is_answered_call(opened)
    return is_acting and not is_message(step)


def _is_answered_call(step: Foreign) -> bool:
    """Return whether an object is a call with its result: it has a name, arguments and a result."""
    parts = (any(step.get(name) is not None for name in names) for names in (ARGUMENTS, RESULTS))
    return all(parts) and call_of(step) is not None


def _calls(step: Foreign) -> list[Foreign]:
    """Return the calls that a step holds in a list; [] if it holds none."""
    lists = [step[name] for name in CALLS if isinstance(step.get(name), list)]
    return next((calls for calls in lists if calls and all(map(call_of, calls))), [])


def _is_words(step: object) -> TypeGuard[Foreign]:
    """Return whether a step has no call, only words. With a speaker, the words may be anybody's."""
    return isinstance(step, Mapping) and not any(name in step for name in SPEAKERS) and bool(_words(step))


def _words(step: Foreign) -> str:
    return next((step[name] for name in (*THOUGHTS, *ANSWERS) if isinstance(step.get(name), str)), "")


def _opened(step: Foreign) -> Foreign:
    """Return a step merged with the inner object in which some tools keep the model's thought and action."""
    inner = next((step[name] for name in SPOKEN if isinstance(step.get(name), Mapping)), None)
    if inner is None:
        return step
    seen = {"observation": step["environment"]} if isinstance(step.get("environment"), str) else {}
    return {**inner, **seen, **step}


def steps_in(value: object) -> list[Foreign]:
    """Return the steps of a trace, from a list of steps or from parallel lists. [] if there are none."""
    if isinstance(value, Mapping):
        lists = {name.removesuffix("s"): part for name, part in value.items() if isinstance(part, list)}
        is_answered = any(name in RESULTS for name in lists)
        length = len(next((part for name, part in lists.items() if name in ACTIONS and is_answered), []))
        value = [{name: part[place] for name, part in lists.items() if place < len(part)} for place in range(length)]
    if isinstance(value, list) and value and all(map(_is_pair, value)):
        value = [{**_fields_of_action(action), "observation": text_of(seen)} for action, seen in value]
    if not isinstance(value, list) or not any(map(_is_step, value)):
        return []
    steps: list[Foreign] = [step for step in value if _is_step(step) or _is_words(step)]
    return steps if len(steps) == len(value) else []


def _is_pair(step: object) -> TypeGuard[list[object]]:
    """Return whether a step is a pair (action, observation), as LangChain's agents return them."""
    return isinstance(step, list) and len(step) == 2 and bool(_fields_of_action(step[0]))


def _fields_of_action(action: object) -> Foreign:
    """Return the tool, its input and the thought of an action: an object, or a list of them. {} if it is neither."""
    if isinstance(action, Mapping):
        given = {name: action[name] for name in ("tool", "tool_input") if name in action}
        return {**given, "thought": action.get("log")} if len(given) == 2 else {}
    if isinstance(action, list) and len(action) in (2, 3) and isinstance(action[0], str):
        return {"tool": action[0], "tool_input": action[1], "thought": action[-1] if len(action) == 3 else None}
    return {}


def messages_of_fields(value: object) -> list[Message]:
    """Convert a list of one-field objects: a goal, an action, an observation, in turn. [] for any other list."""
    items = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    rows = [[(name.lower(), part) for name, part in item.items() if name not in ("id", *COUNTERS)] for item in items]
    if not rows or any(len(row) != 1 for row in rows):
        return []
    messages: list[Message] = []
    for [(name, part)] in rows:
        if name in (*PROMPTS, *THOUGHTS):
            messages.append({"role": "user" if name in PROMPTS else "assistant", "content": text_of(part)})
        elif name in ACTIONS:
            messages += _of_action({"action": part})
        elif name in RESULTS:
            is_seen = any(message.get("tool_calls") for message in messages)
            messages.append({"role": "tool" if is_seen else "user", "content": text_of(part)})
    roles = {message["role"] for message in messages}
    return messages if {"assistant", "tool"} <= roles else []


def of_steps(steps: list[Foreign]) -> Iterator[Message]:
    """Convert steps to calls with their results. A step without a call is what the agent said."""
    for step in map(_opened, steps):
        if calls := _calls(step):
            said = next((step[name] for name in THOUGHTS if isinstance(step.get(name), str)), "")
            yield calling([call for entry in calls if (call := call_of(entry))], said)
            yield from _results_of(calls, step)
        elif any(name in step for name in ACTIONS) or _is_answered_call(step):
            yield from _of_action(step)
        else:
            yield calling([], _words(step))


def _results_of(calls: Sequence[Foreign], step: Foreign) -> Iterator[Message]:
    """Yield the results of the calls in a step: from the calls, from a list beside them, or the step's only result."""
    held = [(next((call[name] for name in RESULTS if call.get(name) is not None), None), call) for call in calls]
    if all(result is None for result, _ in held):
        beside = next((step[name] for name in CALLS_RESULTS if isinstance(step.get(name), list)), [])
        entries = [entry if isinstance(entry, Mapping) else {"content": entry} for entry in beside[: len(calls)]]
        named = (*RESULTS, "content")
        held = [(next((entry[name] for name in named if name in entry), entry), entry) for entry in entries]
        held = held or [(next((step[name] for name in RESULTS if step.get(name) is not None), None), step)]
    for result, holder in held:
        if result is not None:
            yield {"role": "tool", "content": text_of(result), "error": bool(holder.get("error"))}


def _of_action(step: Foreign) -> Iterator[Message]:
    """Yield the call of a step's action with its result."""
    # If the action is a text, `response` is the model's thought and not the result.
    is_worded = isinstance(step.get("action"), str)
    outputs = [name for name in RESULTS if name != "response" or not is_worded]
    thoughts = [*THOUGHTS, *(["response"] if is_worded else [])]
    said = next((step[name] for name in thoughts if isinstance(step.get(name), str)), "")
    action = next((step[name] for name in ACTIONS if step.get(name)), None)
    call = call_of(action) if isinstance(action, Mapping) else None
    if isinstance(action, list) and action and all(map(call_of, action)):
        yield calling([call for part in action if (call := call_of(part))], said)
        yield from _results_of(action, step)
        return
    if isinstance(action, list) and action and all(isinstance(part, Mapping) for part in action):
        yield calling([call_entry(name, given) for part in action for name, given in part.items() if given], said)
        yield from _results(step)
        return
    if call is None and any(step.get(name) is not None for name in ARGUMENTS):
        call = call_of(step)
    if call is None and len(spelled := [*written_calls(str(action))] if action else []) == 1:
        [call] = spelled
    if call is None and action:
        written = ACTION.fullmatch(str(action))
        call = (
            call_entry(written[1], {"input": written[2]}) if written else call_entry("action", {"input": str(action)})
        )
    seen = next((step[name] for name in outputs if step.get(name) is not None), None)
    if call is None and not said:  # what was seen before the first action
        yield from [{"role": "user", "content": text_of(seen)}] if seen else []
        return
    yield calling([call] if call else [], said)
    if seen is not None and (call or seen):
        yield {"role": "tool", "content": text_of(seen), "error": bool(step.get("error"))}


def _results(step: Foreign) -> Iterator[Message]:
    results = step.get("result")
    if not isinstance(results, list):
        return
    for result in results:
        if isinstance(result, Mapping):
            error = result.get("error")
            yield {"role": "tool", "content": text_of(error or result.get("extracted_content")), "error": bool(error)}


def likely_messages(row: Foreign, prefix: str = "") -> Iterator[str]:
    """Yield the paths of fields that may hold the dialogue: messages, steps, or the answer to a prompt."""
    for name, value in row.items():
        is_dialogue = isinstance(value, list) and len(value) > 1 and all(map(is_message, value)) and is_spoken(value)
        if is_dialogue or steps_in(value):
            yield f"{prefix}{name}"
        elif _are_requests(value):
            yield f"{prefix}{name}.{LAST}"
        elif isinstance(value, Mapping) and prefix.count(".") < DEEPEST:
            yield from likely_messages(value, f"{prefix}{name}.")
    if not prefix and texts_of(row, PROMPTS):
        yield from texts_of(row, ANSWERS)


def _are_requests(value: object) -> bool:
    """Return whether a list holds the messages of successive requests. The last request then has the whole dialogue."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(part, list) and part for part in value):
        return False
    return all(map(is_message, value[-1])) and len(value[-1]) == max(map(len, value))


def texts_of(row: Foreign, names: Sequence[str]) -> list[str]:
    """Return text fields whose name equals or ends with one of `names`, such as "LLM Answer", the best match first."""
    words = {field: re.findall(r"[a-z]+", _snake(field)) for field, value in row.items() if isinstance(value, str)}
    own = {field: "_".join(parts) for field, parts in words.items() if TRUTHS.isdisjoint(parts)}
    exact = [name for name in names if name in own]
    return [*exact, *(field for name in names for field, text in own.items() if f"_{text}".endswith(f"_{name}"))]


def _snake(name: str) -> str:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def resembles_dialogue(value: object, depth: int = 0) -> bool:
    """Return whether a value looks like a dialogue: at any depth, it has turns with texts whose speakers recur."""
    if isinstance(value, Mapping):
        return depth <= DEEPEST and any(resembles_dialogue(part, depth + 1) for part in value.values())
    turns = [turn for turn in value[:MANY] if isinstance(turn, Mapping)] if isinstance(value, list) else []
    for name in SPEAKERS:
        spoken = [turn for turn in turns if isinstance(turn.get(name), str) and any(map(_is_text, turn.values()))]
        if len(spoken) > 1 and (len({turn[name] for turn in spoken}) < len(spoken) or len(turns) == len(spoken) == 2):
            return True
    return depth <= DEEPEST and any(resembles_dialogue(turn, depth + 1) for turn in turns)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value.split()) > 1


def row_with(row: Foreign, value: object) -> ChatRow | str:
    """Read a row whose dialogue is this value: messages, steps, or a text that answers the row's prompt."""
    steps = [*of_steps(steps_in(value))] or messages_of_fields(value)
    prompt = next((row[name] for name in texts_of(row, PROMPTS)), "")
    if steps:
        last = next((row[name] for name in texts_of(row, FINAL)), "")
        is_said = not last or (steps[-1]["role"] == "assistant" and steps[-1]["content"] == last)
        asked = [{"role": "user", "content": prompt}] if prompt else []
        value = [*asked, *steps, *([] if is_said else [{"role": "assistant", "content": last}])]
    elif isinstance(value, str) and prompt:
        value = [{"role": "user", "content": prompt}, {"role": "assistant", "content": value}]
    if not isinstance(value, list):
        return "it holds no list of messages or steps there"
    return chat_row({**row, "messages": value})


def named(field: str) -> RowFormat:
    """Return the row format for messages in a field that the user named."""

    def convert(row: Foreign, path: Path) -> ChatRow | str:
        value = at(row, field)
        return f"it has no field {field}" if value is None else row_with(row, value)

    return RowFormat(f"rows with messages in {field}", lambda row: at(row, field) is not None, convert)


def _trace(row: Foreign) -> object:
    """Return the trace of a row: a list of steps under a usual name, or of steps with results under any name."""
    usual = next((row[name] for name in TRACES if steps_in(row.get(name)) or messages_of_fields(row.get(name))), None)
    if usual is not None or is_message(row):
        return _whole_dialogue(usual) or usual
    own = [value for name, value in row.items() if TRUTHS.isdisjoint(re.findall(r"[a-z]+", _snake(name)))]
    return next((value for value in own if isinstance(value, list) and _is_observed(value)), None)


def _whole_dialogue(steps: object) -> list[object] | None:
    """Return the messages of the last step, with what it did, if every step repeats and extends those before it.

    None if the steps do not hold the messages of their requests.
    """
    items = [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
    dialogues = [messages_in(step) or [] for step in items]
    is_growing = all(len(a) < len(b) and a[:1] == b[:1] for a, b in pairwise(dialogues))
    if not items or not is_growing or not any(speaker_of(item) == "user" for item in dialogues[0]):
        return None
    return [*dialogues[-1], *_done_after(dialogues, items)]


def _done_after(dialogues: Sequence[list[object]], steps: Sequence[Foreign]) -> list[Message]:
    """Return the last action and its result as far as the messages of the last step do not hold them.

    The first step tells whether the messages of a step end with its request, its action or its result.
    """
    own, first = (dialogue_of(of_steps([step])) for step in (steps[-1], steps[0]))
    told, first_told = (dialogue_of(messages) for messages in (dialogues[-1], dialogues[0]))
    is_answered = first_told[-1]["role"] == "assistant"
    # The result in a step may be what was seen before its action. Then the messages hold it already.
    if all(_is_told(message["content"], first_told) for message in first if message["role"] != "assistant"):
        own = [message for message in own if message["role"] == "assistant" or not _is_told(message["content"], told)]
    if is_answered:
        return [message for message in own if message["role"] != "assistant"]
    spoken = [message for message in told if message["role"] == "assistant"]
    has_results = any(message["role"] == "assistant" for message in first_told) and bool(own and spoken)
    return [] if has_results and calls_of(spoken[-1]) == calls_of(own[0]) else own


def _is_told(result: str, messages: Sequence[Message]) -> bool:
    """Return whether the last message that is not the agent's holds a result.

    It is the whole result, or one text in it, or has a sentence of it among its words.
    """
    text = next((message["content"] for message in reversed(messages) if message["role"] != "assistant"), "")
    parts = [part.strip() for part in _texts(loaded(result))]
    return any(part == text.strip() or (len(part.split()) > 2 and part in text) for part in parts)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts and numbers anywhere in a JSON value."""
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
    else:
        yield text_of(value)


def _is_observed(value: list[object]) -> bool:
    """Return whether a list consists of steps, most of them with a result."""
    steps = [*map(_opened, steps_in(value))]
    observed = sum(any(step.get(name) is not None for name in RESULTS) for step in steps)
    return 2 * observed > len(steps)


def _is_counted(rows: Sequence[Foreign]) -> bool:
    """Tell whether the rows of a file are the numbered steps of one run."""
    counter = next((name for name in COUNTERS if rows and isinstance(rows[0].get(name), int)), "")
    numbers = [number for row in rows if isinstance(number := row.get(counter), int)]
    is_rising = len(numbers) == len(rows) and numbers == sorted({*numbers})
    is_one = all(len({str(row.get(name)) for row in rows}) == 1 for name in RUN)
    return bool(counter) and is_rising and is_one and bool(steps_in([*rows]))


def _whole(rows: Sequence[Foreign], path: Path) -> ChatRow | str:
    chat = row_with(rows[0], [*rows])
    return chat if isinstance(chat, str) else replace(chat, reward=None, task_id=task_of(path))


STEPS_OF_FILE = FileFormat("numbered steps of one run", _is_counted, _whole)
STEPS = RowFormat("steps of a trace", lambda row: _trace(row) is not None, lambda row, _: row_with(row, _trace(row)))
