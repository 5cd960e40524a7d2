"""Results of bfcl-eval: result files hold the dialogues, score files the verdicts.

A score file lists only failures, with their gold calls; every other result has passed. So a result file is read
together with its score file (`result/MODEL/...` and `score/MODEL/...`, as the library lays them, or in one folder);
either may be named. The calls of a passed rollout are its solution, as no file repeats its gold calls. Calls are
written as Python: they are parsed and never run.

In single-turn categories, the files have the question only for failures. A passed rollout then has only its calls. The
grader's error type is read as the grader's comment, not as the way the dialogue ended.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from captrain.interop.logs.chat import chat_message
from captrain.interop.logs.records import rows_of
from captrain.interop.logs.source import Entry, Foreign, Read, Source, cleaned, entries_of, loaded, parsed, text_of
from captrain.records import JsonObject, Message, counted, file_digest, plain

RESULT, SCORE = "result", "score"
HEADER = {"accuracy", "correct_count", "total_count"}
"""Keys of the first line of a score file."""
NO_SCORES = "there is no score file to it: run `bfcl evaluate`, or put it beside the results"
UNREADABLE = "its scores cannot be read"
BROKEN = "Error during inference"
VERSION = re.compile(r"(?:gorilla_openfunctions_v\d+_test|BFCL_v\d+)_")
"""Start of a file's name that names the version. Score files lacked it until version 3."""
NUMBER = "idx"
"""Number of a result from 0, which version 1 wrote in place of an id. Its scores count from 1."""
OF_VERSION_1 = {NUMBER, RESULT, "latency", "input_token_count", "output_token_count"}
"""All fields of a result of version 1. A row with more of them is another tool's."""
ANY = ""
"""Allowed value which means that the argument may be left out."""
Call = tuple[str, JsonObject]


def is_bfcl(row: Foreign) -> bool:
    """Return whether the first row of a file is a result, or the header of scores."""
    is_first = {NUMBER, RESULT, "latency"} <= row.keys() <= OF_VERSION_1
    is_result = row.keys() >= {"id", RESULT} and ("inference_log" in row or "latency" in row)
    return row.keys() >= HEADER or is_first or is_result


@dataclass(frozen=True)
class _Failure:
    """A failure in a score file, with the gold calls of all turns and, in single-turn categories, the question."""

    kind: str
    model: str
    answer: list[str]
    alternatives: list[object]
    question: list[Message]


@dataclass(frozen=True)
class _Scores:
    """A score file.

    total: number of results. arguments: tool -> names of its arguments in order, learned from calls with keywords.
    """

    total: int
    failures: dict[str, _Failure]
    arguments: dict[str, list[str]]


def _category(path: Path) -> str:
    """Return the category that the name of a result or score file holds."""
    return VERSION.sub("", re.sub(rf"_(?:{RESULT}|{SCORE})\.json$", "", path.name))


def _name(row: Foreign, category: str) -> str:
    """Return the id of a result or failure, as version 2 and later write it: the category and a number from 0."""
    if NUMBER in row:
        return f"{category}_{row[NUMBER]}"
    return f"{category}_{row['id'] - 1}" if isinstance(row["id"], int) else str(row["id"])


def read_bfcl(path: Path) -> Source:
    """Read the rollouts of a result file with the verdicts of its score file; either may be named.

    Raises:
        ValueError: the score file is damaged, or its counts do not match the results. Results that it does not list
            would wrongly count as passed.
    """
    results = results_of(path) or path
    if results.name.endswith(f"_{SCORE}.json"):
        raise ValueError("there are no results beside it: put its result file there")
    scores = _beside(results, RESULT, SCORE)
    verdicts = _read_scores(scores) if scores else None
    if verdicts and (count := sum(1 for _ in rows_of(results))) != verdicts.total:
        raise ValueError(f"it has {count} results, and its scores are of {verdicts.total}: evaluate it whole")
    if verdicts and (strange := verdicts.failures.keys() - {*_names(results)}):
        raise ValueError(
            f"its scores list {plain(min(strange))}, which the results lack: put those of one run together"
        )
    # The model is the name of the folder below `result`. Otherwise a failure names it.
    parts = results.absolute().parts
    models = [parts[place + 1] for place, part in enumerate(parts[:-2]) if part == RESULT]
    failures = verdicts.failures.values() if verdicts else ()
    models += [failure.model for failure in failures if failure.model]
    file = file_digest(results)
    entries = entries_of(rows_of(results), partial(_read, _category(results), [*models, "unknown"][0], verdicts))
    return Source(file, {"format": "BFCL results", "scores": scores.name if scores else "none"}, entries)


def _names(results: Path) -> Iterator[str]:
    return (_name(row, _category(results)) for _, row in rows_of(results) if isinstance(row, dict))


def results_of(path: Path) -> Path | None:
    """Return the result file of a score file; None for any other file."""
    return _beside(path, SCORE, RESULT) if path.name.endswith(f"_{SCORE}.json") else None


def _beside(path: Path, kind: str, twin: str) -> Path | None:
    """Find the result file of a score file, or the reverse, in the parallel folder or in the same folder."""
    parts = path.absolute().parts[:-1]
    folders = [path.parent]
    for place in (index for index, part in enumerate(parts) if part == kind):
        folders.insert(0, Path(*parts[:place], twin, *parts[place + 1 :]))
    name = f"{path.name.removesuffix(f'_{kind}.json')}_{twin}.json"
    twins = [file for folder in folders for file in sorted(folder.glob(f"*_{twin}.json"))]
    # If both names have a version, they must have the same.
    found = [
        file for file in twins if name in (file.name, VERSION.sub("", file.name)) or file.name == VERSION.sub("", name)
    ]
    return min(found, key=lambda file: file.name != name, default=None)


def _read_scores(path: Path) -> _Scores:
    (_, header), *rows = rows_of(path)
    if not isinstance(header, dict) or not header.keys() >= HEADER:
        raise ValueError(f"the first line of {path.name} is not the account of its scores")
    failures: dict[str, _Failure] = {}
    arguments: dict[str, list[str]] = {}
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}, {place}: {row if isinstance(row, str) else 'it is not an object'}")
        answer = _answer(row)
        failure = failures[_name(row, _category(path))] = _Failure(
            _kind(row),
            str(row.get("model_name", "")),
            [text for turn in answer if isinstance(turn, list) for text in turn],
            [call for call in answer if isinstance(call, dict)],
            _question(row.get("prompt")),
        )
        for text in failure.answer:
            node = _parsed_call(text)
            names = [keyword.arg for keyword in node.keywords if keyword.arg] if node and not node.args else []
            if node and len(names) > len(arguments.get(ast.unparse(node.func), [])):
                arguments[ast.unparse(node.func)] = names
    if len(failures) != header["total_count"] - header["correct_count"]:
        raise ValueError(f"{path.name} lists {counted(len(failures), 'failure')}, and its first line counts others")
    return _Scores(header["total_count"], failures, arguments)


def _kind(row: Foreign) -> str:
    """Return the type of a grader's error with its message."""
    error = row.get("error")
    texts = [row.get("error_type"), *(error if isinstance(error, list) else [error])]
    if isinstance(error, dict):
        texts = [error.get("error_type"), error.get("error_message")]
    return ": ".join(text_of(text) for text in texts if text)


def _answer(row: Foreign) -> list[object]:
    """List the expected answer: for each turn its calls as text, or of a single turn each call with allowed values."""
    turns = row.get("possible_answer") or []
    if isinstance(turns, dict):
        return [turns]
    if not isinstance(turns, list) or not all(isinstance(turn, list | dict) for turn in turns):
        raise ValueError("its possible_answer is no list of turns")
    return turns


def _question(prompt: object) -> list[Message]:
    turns = (prompt.get("question") if isinstance(prompt, dict) else None) or []
    turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    return [chat_message(message) for turn in turns for message in (turn if isinstance(turn, list) else [turn])]


def _allowed(call: object) -> list[Call]:
    """Return a gold call of a single turn with the first value that each argument may have."""
    calls = call.items() if isinstance(call, dict) else ()
    return [
        (
            name,
            {
                key: values[0] if isinstance(values, list) else values
                for key, values in arguments.items()
                if _is_due(values)
            },
        )
        for name, arguments in calls
    ]


def _is_due(values: object) -> bool:
    return not (isinstance(values, list) and (not values or ANY in values))


def _read(category: str, model: str, scores: _Scores | None, number: int, row: Foreign) -> Read:
    name, log, result = _name(row, category), row.get("inference_log"), row.get(RESULT)
    if isinstance(result, str) and result.startswith(BROKEN):
        return f"inference failed, and nothing was played ({result.removeprefix(BROKEN).strip(': ')[:200]})"
    if scores is None:
        return NO_SCORES
    failure = scores.failures.get(name)
    messages: list[Message] = []
    if not isinstance(log, list) or not log:
        asked: list[Message] = failure.question if failure else []
        calls = _single(loaded(result), scores.arguments)
        said = _calling(calls) if calls else {"role": "assistant", "content": text_of(result)}
        messages, log = [*asked, said], []
    for turn in log:
        # Anything else is a note on the world's state.
        if isinstance(turn, dict):
            messages += [chat_message(message) for message in turn.get("begin_of_turn_query") or []]
            for step in (entries for key, entries in turn.items() if key.startswith("step_")):
                messages += _step_messages(step, scores.arguments)
    solution = [message for message in messages if message.get("tool_calls")]
    if failure:
        gold = [_call_of(text, scores.arguments) for text in failure.answer]
        solution = [
            _calling([call]) for call in [*gold, *(call for one in failure.alternatives for call in _allowed(one))]
        ]
    kind = failure.kind if failure else ""
    limit = "max_steps" if "force_terminated" in kind else ""
    data = {"kind": name.rpartition("_")[0], "ending": limit, "limit": limit, "grading": kind}
    return Entry(
        number,
        "bfcl",
        name,
        messages,
        0.0 if failure else 1.0,
        model,
        data={field: value for field, value in data.items() if value},
        reference=solution,
    )


def _single(result: object, arguments: Mapping[str, list[str]]) -> list[Call]:
    """Return the calls of a single turn: a list in Python's notation, or objects of a name and its arguments."""
    if isinstance(result, list):
        pairs = [(name, parsed(value)) for call in result if isinstance(call, dict) for name, value in call.items()]
        return [(name, value) for name, value in pairs if isinstance(value, dict)]
    try:
        node = ast.parse(str(result).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    nodes = node.elts if isinstance(node, ast.List) else [node]
    return [_call_of(ast.unparse(call), arguments) for call in nodes if isinstance(call, ast.Call)]


def _step_messages(step: list[Foreign], arguments: Mapping[str, list[str]]) -> Iterator[Message]:
    """Yield the assistant's message of a step with its parsed calls, and the results of the tools."""
    spoken = next((entry.get("content") for entry in step if entry.get("role") == "assistant"), "")
    decoded = next((entry["model_response_decoded"] for entry in step if entry.get("model_response_decoded")), [])
    results = [text_of(entry.get("content")) for entry in step if entry.get("role") == "tool"]
    calls = [_call_of(text, arguments) for text in decoded] if results else []
    # Text beside calls is the calls themselves, as a prompted model writes them.
    yield _calling(calls) if calls else {"role": "assistant", "content": spoken if isinstance(spoken, str) else ""}
    for number, result in enumerate(results):
        message: Message = {"role": "tool", "tool_call_id": str(number), "content": result}
        yield message | ({"error": True} if result.startswith("Error during execution") else {})


def _calling(calls: list[Call]) -> Message:
    entries = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": entries}


def _call_of(text: object, names: Mapping[str, list[str]]) -> Call:
    """Parse a Python call. Return the tool and its arguments.

    Text that is not a call is returned as a tool name without arguments. A positional argument gets its name from other
    calls of the tool, or else from its position.
    """
    node = _parsed_call(text)
    if node is None:
        return str(text), {}
    tool = ast.unparse(node.func)
    places = names.get(tool, [])
    arguments = {
        places[place] if place < len(places) else f"argument_{place + 1}": _value(argument)
        for place, argument in enumerate(node.args)
    }
    arguments |= {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    return tool, cast("JsonObject", cleaned(arguments))


def _parsed_call(text: object) -> ast.Call | None:
    try:
        node = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return node if isinstance(node, ast.Call) else None


def _value(node: ast.expr) -> object:
    """Convert a literal to a JSON value, and anything else to its source text."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.unparse(node)
    return _json_value(value)


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _json_value(element) for name, element in value.items()}
    if isinstance(value, set):
        value = sorted(value, key=repr)  # the order of a set differs between processes
    if isinstance(value, list | tuple):
        return [_json_value(element) for element in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
