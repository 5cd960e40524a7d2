"""Spans of OpenTelemetry's GenAI conventions and of OpenInference (Phoenix, Langfuse, MLflow): a trace is a rollout.

Spans hold no reward: a CSV of scores gives one to each trace, in columns `trace_id` and `reward`.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.errors import UserError
from captrain.interop.logs.exchange import loaded
from captrain.interop.logs.source import text_of
from captrain.interop.logs.traces import Run
from captrain.records import JsonObject, plain, read_text

OLDER = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(.+)")
INFERENCE = re.compile(r"llm\.(input|output)_messages\.(\d+)\.message\.(.+)")
CALLS = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
SCHEMA = re.compile(r"llm\.tools\.\d+\.tool\.json_schema")
SCORES = "trace_id,reward"


def recognizes_spans(row: JsonObject) -> bool:
    """Return whether a row is a span, or a batch of them as OTLP exports it."""
    if "resourceSpans" in row or "resource_spans" in row:
        return True
    return isinstance(row.get("attributes"), dict | list) and bool(_trace_id(row))


def read_scores(path: Path) -> dict[str, float]:
    """Read the rewards of a CSV, by trace.

    Raises:
        UserError: it is empty, has other columns, or a reward that is no number.
    """
    remedy = f"give a CSV with the columns {SCORES}"
    try:
        rows = csv.DictReader(io.StringIO(read_text(path, remedy), newline=""))
        pairs = [(row["trace_id"], float(row["reward"])) for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error):
        pairs = []
    if not pairs or not all(trace and math.isfinite(reward) for trace, reward in pairs):
        raise UserError(f"{path} is not a table of scores", remedy)
    trace, times = Counter(trace for trace, _ in pairs).most_common(1)[0]
    if times > 1:
        raise UserError(f"{path} scores trace {plain(trace)} {times} times", "give each trace one reward")
    return dict(pairs)


def span_runs(row: object) -> Iterator[Run]:
    """Yield the spans of a row that hold messages."""
    for span in _spans(row):
        attributes = _attributes(span.get("attributes"))
        model = attributes.get("gen_ai.request.model") or attributes.get("llm.model_name")
        yield Run(_trace_id(span), [*_messages(attributes)], model, _definitions(attributes))


def _trace_id(span: Mapping[str, object]) -> str:
    context = span.get("context")
    inner = context.get("trace_id") if isinstance(context, Mapping) else None
    return str(span.get("traceId") or span.get("trace_id") or inner or "")


def _spans(row: object) -> Iterator[JsonObject]:
    if not isinstance(row, dict):
        return
    batches = row.get("resourceSpans") or row.get("resource_spans")
    if batches is None:
        yield row
    for batch in batches or []:
        for scope in batch.get("scopeSpans") or batch.get("scope_spans") or []:
            yield from scope.get("spans") or []


def _attributes(attributes: object) -> JsonObject:
    """Return attributes by name, also where OTLP lists them as keys and typed values."""
    if isinstance(attributes, list):
        return {entry["key"]: next(iter((entry.get("value") or {}).values()), None) for entry in attributes}
    return attributes if isinstance(attributes, dict) else {}


def _definitions(attributes: JsonObject) -> list[JsonObject]:
    """List the tools that a model was offered, by either convention."""
    definitions = loaded(attributes.get("gen_ai.tool.definitions"))
    schemas = [loaded(value) for name, value in attributes.items() if SCHEMA.fullmatch(name)]
    tools = [*(definitions if isinstance(definitions, list) else []), *schemas]
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return [function for function in functions if isinstance(function, dict) and "name" in function]


def _messages(attributes: JsonObject) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if instructions := loaded(attributes.get("gen_ai.system_instructions")):
        messages.append({"role": "system", "content": _parts_text(instructions)})
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        entries = loaded(attributes.get(name))
        messages += [chat for entry in entries for chat in _of_parts(entry)] if isinstance(entries, list) else []
    return messages or _flat(attributes)


def _parts_text(parts: object) -> str:
    if isinstance(parts, list):
        return "".join(str(part.get("content") or "") for part in parts if isinstance(part, dict))
    return text_of(parts)


def _of_parts(message: JsonObject) -> list[JsonObject]:
    """Divide a message of typed parts: its words and calls as one message, each response as one of a tool."""
    parts = message.get("parts") or []
    responses = [part for part in parts if part.get("type") == "tool_call_response"]
    if responses:
        return [
            {
                "role": "tool",
                "tool_call_id": part.get("id"),
                "content": part["response"]
                if isinstance(part.get("response"), str)
                else json.dumps(part.get("response")),
            }
            for part in responses
        ]
    calls = [
        {"id": part.get("id"), "function": {"name": part.get("name"), "arguments": part.get("arguments")}}
        for part in parts
        if part.get("type") == "tool_call"
    ]
    words = "".join(str(part.get("content") or "") for part in parts if part.get("type") == "text")
    chat = {"role": message.get("role"), "content": words or message.get("content") or ""}
    return [{**chat, "tool_calls": calls} if calls else chat]


def _flat(attributes: JsonObject) -> list[JsonObject]:
    """Join messages that are spread over numbered attributes, by either convention."""
    entries: dict[tuple[str, int], JsonObject] = {}
    for name, value in attributes.items():
        match = OLDER.fullmatch(name) or INFERENCE.fullmatch(name)
        if match:
            entries.setdefault((match[1], int(match[2])), {})[match[3]] = value
    order = {"prompt": 0, "input": 0, "completion": 1, "output": 1}
    return [_of_fields(entries[key]) for key in sorted(entries, key=lambda key: (order[key[0]], key[1]))]


def _of_fields(fields: JsonObject) -> JsonObject:
    calls: dict[int, JsonObject] = {}
    for name, value in fields.items():
        if match := CALLS.fullmatch(name):
            calls.setdefault(int(match[1]), {})[match[2]] = value
    message = {"role": fields.get("role"), "content": fields.get("content") or ""}
    if fields.get("tool_call_id"):
        message["tool_call_id"] = fields["tool_call_id"]
    if calls:
        message["tool_calls"] = [
            {"id": call.get("id"), "function": {"name": call.get("name"), "arguments": call.get("arguments")}}
            for _, call in sorted(calls.items())
        ]
    return message
