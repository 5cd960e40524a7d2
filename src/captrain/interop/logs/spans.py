"""Spans of OpenTelemetry's GenAI conventions and of OpenInference (Phoenix, Langfuse, MLflow): a trace is a rollout.

Spans hold no reward: a CSV of scores gives one to each trace, in columns `trace_id` and `reward`.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from captrain.errors import UserError
from captrain.interop.logs.exchange import loaded
from captrain.interop.logs.source import Foreign, call_entry, text_of
from captrain.interop.logs.traces import TraceRun, trace_key
from captrain.records import Message, plain, read_text

INDEXED = re.compile(
    r"(?:llm\.(?:(input)|output)_messages\.(\d+)\.message|gen_ai\.(?:(prompt)|completion)\.(\d+))\.(.+)"
)
"""Attributes of OpenInference, and of OpenLLMetry before it wrote `gen_ai.input.messages`."""
CALLS = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
SCHEMA = re.compile(r"llm\.tools\.\d+\.tool\.json_schema")
SCORES = "trace_id,reward"


def recognizes_spans(row: Foreign) -> bool:
    """Return whether a row is a span, or a batch of spans as OTLP exports it."""
    return "resourceSpans" in row or (isinstance(row.get("attributes"), dict | list) and bool(_trace_id(row)))


def read_scores(path: Path) -> dict[str, float]:
    """Read the rewards of a CSV, by trace.

    Raises:
        UserError: it is empty, has other columns, or a reward is no number.
    """
    remedy = f"give a CSV with the columns {SCORES}"
    try:
        rows = csv.DictReader(io.StringIO(read_text(path, remedy), newline=""))
        pairs = [(trace_key(row["trace_id"] or ""), float(row["reward"])) for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error):
        pairs = []
    if not pairs or not all(trace and math.isfinite(reward) for trace, reward in pairs):
        raise UserError(f"{path} is not a table of scores", remedy)
    trace, times = Counter(trace for trace, _ in pairs).most_common(1)[0]
    if times > 1:
        raise UserError(f"{path} scores trace {plain(trace)} {times} times", "give each trace one reward")
    return dict(pairs)


def span_runs(row: object) -> Iterator[TraceRun]:
    """Yield the runs in the spans of a row."""
    if not isinstance(row, dict):
        return
    batches = row.get("resourceSpans")
    scopes = [scope for batch in batches or [] for scope in batch.get("scopeSpans") or []]
    spans = [row] if batches is None else [span for scope in scopes for span in scope.get("spans") or []]
    for span in spans:
        attributes = span.get("attributes") or {}
        if isinstance(attributes, list):  # OTLP lists keys and typed values
            attributes = {entry["key"]: next(iter((entry.get("value") or {}).values()), None) for entry in attributes}
        model = attributes.get("gen_ai.request.model") or attributes.get("llm.model_name")
        definitions = loaded(attributes.get("gen_ai.tool.definitions"))
        tools = definitions if isinstance(definitions, list) else []
        tools = [*tools, *(loaded(value) for name, value in attributes.items() if SCHEMA.fullmatch(name))]
        yield TraceRun(_trace_id(span), _gen_ai(attributes) or _numbered(attributes), model, tools)


def _trace_id(span: Foreign) -> str:
    context = span.get("context")
    inner = context.get("trace_id") if isinstance(context, dict) else None
    return str(span.get("traceId") or span.get("trace_id") or inner or "")


def _gen_ai(attributes: Foreign) -> list[object]:
    """Read messages of typed parts."""
    messages: list[object] = []
    if instructions := loaded(attributes.get("gen_ai.system_instructions")):
        messages.append({"role": "system", "content": _words(instructions)})
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        entries = loaded(attributes.get(name))
        if isinstance(entries, list):
            messages += [message for entry in entries for message in _of_parts(entry)]
    return messages


def _of_parts(message: Foreign) -> list[Message]:
    """Convert a message of parts: text and calls are one message, each response is one of a tool."""
    parts = message.get("parts") or []
    messages: list[Message] = []
    for part in parts:
        if part.get("type") == "tool_call_response":
            text = part["response"] if isinstance(part.get("response"), str) else json.dumps(part.get("response"))
            messages.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
    if messages:
        return messages
    calls = [
        call_entry(part.get("name"), part.get("arguments"), part.get("id"))
        for part in parts
        if part.get("type") == "tool_call"
    ]
    words = _words([part for part in parts if part.get("type") == "text"])
    return [{"role": message.get("role"), "content": words or message.get("content") or "", "tool_calls": calls}]


def _words(parts: object) -> str:
    if isinstance(parts, list):
        return "".join(str(part.get("content") or "") for part in parts if isinstance(part, dict))
    return text_of(parts)


def _numbered(attributes: Foreign) -> list[object]:
    """Join messages that are spread over numbered attributes, inputs before outputs."""
    entries: dict[tuple[bool, int], dict[str, object]] = {}
    for name, value in attributes.items():
        if match := INDEXED.fullmatch(name):
            place = not (match[1] or match[3]), int(match[2] or match[4])
            entries.setdefault(place, {})[match[5]] = value
    messages: list[object] = []
    for _, fields in sorted(entries.items(), key=lambda item: item[0]):
        calls: dict[int, dict[str, object]] = {}
        for name, value in fields.items():
            if match := CALLS.fullmatch(name):
                calls.setdefault(int(match[1]), {})[match[2]] = value
        chat = {name: fields[name] for name in ("role", "tool_call_id") if fields.get(name)}
        entry_calls = [call_entry(c.get("name"), c.get("arguments"), c.get("id")) for _, c in sorted(calls.items())]
        messages.append({**chat, "content": fields.get("content") or "", "tool_calls": entry_calls})
    return messages
