"""Reads spans of OpenTelemetry's GenAI conventions and of OpenInference (Phoenix, Langfuse, MLflow). A trace is a
rollout.

Spans have no rewards. A CSV of scores with the columns `trace_id` and `reward` adds them. Vercel's AI SDK writes
messages as `ai.prompt.messages` and the answer as `ai.response.*`.
"""

import json
import re
from collections.abc import Iterator

from captrain.interop.logs.source import Foreign, call_entry, call_of, loaded, text_of
from captrain.interop.logs.traces import TraceRun
from captrain.records import Message

INDEXED = re.compile(
    r"(?:llm\.(?:(input)|output)_messages\.(\d+)\.message|gen_ai\.(?:(prompt)|completion)\.(\d+))\.(.+)"
)
"""Names of numbered attributes of OpenInference, and of older versions of OpenLLMetry."""
CALLS = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
COLUMN = "attributes."
SCHEMA = re.compile(r"llm\.tools\.\d+\.tool\.json_schema")


def recognizes_spans(row: Foreign) -> bool:
    """Return whether a row is a span, or a batch of spans as OTLP exports it."""
    is_call = "op_name" in row and "inputs" in row  # Weave
    is_span = (isinstance(row.get("attributes"), dict | list) and not is_call) or any(
        name.startswith(COLUMN) for name in row
    )
    return "resourceSpans" in row or (is_span and bool(_trace_id(row)))


def span_runs(row: object) -> Iterator[TraceRun]:
    """Yield a run for each span in a row."""
    if not isinstance(row, dict):
        return
    batches = row.get("resourceSpans")
    scopes = [scope for batch in batches or [] for scope in batch.get("scopeSpans") or []]
    spans = [row] if batches is None else [span for scope in scopes for span in scope.get("spans") or []]
    for span in spans:
        attributes = span.get("attributes") or {}
        if not attributes:  # a table has one column for each attribute
            attributes = {name.removeprefix(COLUMN): span[name] for name in span if name.startswith(COLUMN)}
        if isinstance(attributes, list):  # in OTLP: a list of keys and typed values
            attributes = {entry["key"]: next(iter((entry.get("value") or {}).values()), None) for entry in attributes}
        model = attributes.get("gen_ai.request.model") or attributes.get("llm.model_name")
        definitions = loaded(attributes.get("gen_ai.tool.definitions"))
        tools = definitions if isinstance(definitions, list) else []
        tools = [*tools, *(loaded(value) for name, value in attributes.items() if SCHEMA.fullmatch(name))]
        model = model or attributes.get("ai.model.id")
        messages = _gen_ai(attributes) or _in_columns(attributes) or _numbered(attributes) or _vercel(attributes)
        yield TraceRun(_trace_id(span), messages, model, [*tools, *_listed(attributes.get("ai.prompt.tools"))])


def _listed(value: object) -> list[object]:
    """Return the values of a list. The list and its elements may be JSON text. [] for any other value."""
    value = loaded(value)
    return [loaded(element) for element in value] if isinstance(value, list) else []


def _vercel(attributes: Foreign) -> list[object]:
    """Return the messages of the request and the answer in Vercel's AI SDK."""
    prompt = loaded(attributes.get("ai.prompt"))
    messages = _listed(attributes.get("ai.prompt.messages"))
    if not messages and isinstance(prompt, dict):
        system = [{"role": "system", "content": prompt["system"]}] if prompt.get("system") else []
        asked = [{"role": "user", "content": prompt["prompt"]}] if prompt.get("prompt") else []
        messages = [*system, *_listed(prompt.get("messages")), *asked]
    text = attributes.get("ai.response.text") or attributes.get("ai.response.object") or ""
    calls = [call for entry in _listed(attributes.get("ai.response.toolCalls")) if (call := call_of(entry))]
    answer = {"role": "assistant", "content": text, "tool_calls": calls}
    return [*messages, answer] if messages and (text or calls) else []


def _trace_id(span: Foreign) -> str:
    contexts = [span[name] for name in ("context", "spanContext") if isinstance(span.get(name), dict)]
    ids = [place.get(name) for place in (span, *contexts) for name in ("traceId", "trace_id", "context.trace_id")]
    return str(next((name for name in ids if name), ""))


def _gen_ai(attributes: Foreign) -> list[object]:
    """Return the messages in the attributes `gen_ai.*`, whose contents are typed parts."""
    messages: list[object] = []
    if instructions := loaded(attributes.get("gen_ai.system_instructions")):
        messages.append({"role": "system", "content": _words(instructions)})
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        entries = loaded(attributes.get(name))
        if isinstance(entries, list):
            messages += [message for entry in entries for message in _of_parts(entry)]
    return messages


def _of_parts(message: Foreign) -> list[Message]:
    """Convert a message of parts. Text and calls become one message, each tool response its own message."""
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


def _in_columns(attributes: Foreign) -> list[object]:
    """Return the messages in the cells of a table, with OpenInference's names."""
    cells = [loaded(attributes.get(f"llm.{side}_messages")) for side in ("input", "output")]
    entries = [entry for cell in cells if isinstance(cell, list) for entry in cell if isinstance(entry, dict)]
    messages: list[object] = []
    for entry in entries:
        fields = {name.removeprefix("message."): value for name, value in entry.items()}
        calls = [call for call in fields.get("tool_calls") or [] if isinstance(call, dict)]
        named = [{name.rpartition(".")[2]: value for name, value in call.items()} for call in calls]
        read = [call_entry(call.get("name"), call.get("arguments"), call.get("id")) for call in named]
        messages.append({**fields, "content": fields.get("content") or "", "tool_calls": read})
    return messages


def _words(parts: object) -> str:
    if isinstance(parts, list):
        return "".join(str(part.get("content") or "") for part in parts if isinstance(part, dict))
    return text_of(parts)


def _numbered(attributes: Foreign) -> list[object]:
    """Return the messages that are spread over numbered attributes, inputs before outputs."""
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
