# pyright: reportMissingImports=false
"""Has the libraries of tracing and messages write logs of a scripted model; runs in an environment that has them.

pip install langchain-core langfuse langgraph langsmith openai; argument: the folder that gets the files. Each library's
own calls trace and its own types serialize. What only a service would do in between is done here by a server on the
loopback interface or by hand, and said where it is: LangSmith's answers to a query, Langfuse's observations of spans.
"""

import json
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypedDict

OUT = Path(sys.argv[1])
QUESTION, ARGUMENTS = "Read A1.", '{"id": "A1"}'
ANSWERS = {"good": "It is red.", "bad": "It is blue."}
PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
FUNCTION = {"name": "read", "description": "Reads a record.", "parameters": PARAMETERS}
RUNS: dict[str, dict] = {}
"""Requests that LangSmith's client has posted, by run."""


def chat_answer(body: dict) -> dict:
    """A completion of the chat API: a call, then words."""
    has_result = body["messages"][-1]["role"] == "tool"
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": ANSWERS[body["model"]] if has_result else None}
    choice = {"index": 0, "message": message if has_result else {**message, "tool_calls": [call]}}
    return {
        "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
        "choices": [{**choice, "finish_reason": "stop" if has_result else "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip


def response(body: dict) -> dict:
    """A response of the Responses API: reasoning and a call, then words."""
    has_result = any(item.get("type") == "function_call_output" for item in body["input"])
    text = {"type": "output_text", "text": ANSWERS[body["model"]], "annotations": []}
    words = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}]
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "read", "arguments": ARGUMENTS}
    return {
        "id": "r", "object": "response", "created_at": 0, "model": body["model"], "instructions": body["instructions"],
        "output": words if has_result else [{"type": "reasoning", "id": "s", "summary": []}, call],
        "tools": body["tools"], "parallel_tool_calls": True, "tool_choice": "auto", "status": "completed",
    }  # fmt: skip


def query(_: dict) -> dict:
    """LangSmith's runs of a query, roots with what their feedback amounts to, without what they say of the machine."""
    runs = [
        {name: value for name, value in run.items() if name not in ("attachments", "serialized", "events")}
        | {"extra": {"invocation_params": run.get("extra", {}).get("invocation_params")}}
        | {"status": "success", "session_id": str(uuid.UUID(int=1)), "app_path": None}
        | ({} if run.get("parent_run_id") else {"feedback_stats": {"correctness": feedback(run)}})
        for run in RUNS.values()
    ]
    return {"runs": runs, "cursors": {"next": None}}


def feedback(run: dict) -> dict:
    score = float("red" in json.dumps(run["outputs"]).rpartition("It is ")[2])
    return {"n": 1, "avg": score, "stdev": 0.0, "values": {}}


def keep(run: dict) -> dict:
    RUNS.setdefault(run["id"], {}).update({name: value for name, value in run.items() if value is not None})
    return {}


ANSWERED = {
    "/v1/chat/completions": chat_answer, "/v1/responses": response, "/smith/runs": keep, "/smith/runs/query": query,
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def do_POST(self) -> None:
        self.answer(ANSWERED[self.path](self.body()))

    def do_PATCH(self) -> None:
        self.answer(keep({"id": self.path.rpartition("/")[2], **self.body()}))


def write(name: str, package: str, rows: Iterator[str] | list[str]) -> None:
    lines = [f"{row}\n" for row in rows]
    (OUT / f"{name}-{version(package)}.jsonl").write_text("".join(lines))


def converse(client: object, model: str, **options: object) -> str:
    """An agent of the chat API: asks, calls, answers."""
    messages: list[dict] = [{"role": "system", "content": "You read records."}, {"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        reply = client.chat.completions.create(model=model, messages=messages, tools=tools, **options)  # pyright: ignore
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "c", "content": "red"}]


def write_responses(url: str) -> None:
    """Items of a dialogue and the last response, as the client's own types dump them."""
    from openai import OpenAI

    client, rows = OpenAI(base_url=f"{url}/v1", api_key="none"), []
    for model in ANSWERS:
        items: list = [{"role": "user", "content": QUESTION}]
        options = {"model": model, "instructions": "You read records.", "tools": [{"type": "function", **FUNCTION}]}
        first = client.responses.create(input=items, **options)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": "c", "output": "red"})
        last = client.responses.create(input=items, **options)
        row = {"input": items, "response": last.model_dump(mode="json"), "task_id": "a1", "reward": model == "good"}
        rows.append(json.dumps(row))
    write("openai-responses", "openai", rows)


def write_langsmith(url: str) -> None:
    """A run a line, as `Client.list_runs` gives them."""
    from langchain_core.tracers import LangChainTracer
    from langsmith import Client, traceable, tracing_context
    from langsmith.wrappers import wrap_openai
    from openai import OpenAI

    tracer = Client(api_url=f"{url}/smith", api_key="none", auto_batch_tracing=False)
    client = wrap_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), tracing_extra={"client": tracer})

    @traceable(client=tracer)
    def agent(question: str, model: str) -> str:
        return converse(client, model)

    with tracing_context(enabled=True):
        for model, answer in ANSWERS.items():
            agent(QUESTION, model)
            graph_of(answer).invoke(opening(), {"callbacks": [LangChainTracer(client=tracer)], "run_name": model})
    runs = tracer.list_runs(project_id=uuid.UUID(int=1))
    write("langsmith", "langsmith", (run.model_dump_json() for run in runs))


def write_langfuse(url: str) -> None:
    """An observation a line, with scores between, in the types of Langfuse's API. The service makes observations of
    spans; here that is done by hand, from the attributes that the library gave them."""
    from langfuse import Langfuse, observe
    from langfuse.api import ObservationV2, ScoreSubjectV3_Trace, ScoreV3_Numeric
    from langfuse.openai import OpenAI
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    langfuse = Langfuse(public_key="none", secret_key="none", base_url=url, span_exporter=exporter)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    @observe(name="agent")
    def agent(question: str, model: str) -> str:
        return converse(client, model)

    for model in ANSWERS:
        agent(QUESTION, model=model)
    langfuse.flush()
    rows, now = [], datetime(2026, 1, 1, tzinfo=UTC)
    for span in exporter.get_finished_spans():
        values = {name.removeprefix("langfuse.observation."): value for name, value in (span.attributes or {}).items()}
        trace = f"{span.context.trace_id:032x}"
        observation = ObservationV2(
            id=f"{span.context.span_id:016x}", trace_id=trace, start_time=now, project_id="p",
            type=str(values["type"]).upper(), name=span.name, input=values.get("input"), output=values.get("output"),
            provided_model_name=values.get("model.name"),
            parent_observation_id=f"{span.parent.span_id:016x}" if span.parent else None,
        )  # fmt: skip
        rows.append(observation.json())
        if span.parent is None:
            score = ScoreV3_Numeric(
                id=uuid.uuid4().hex, project_id="p", name="correct", value=float("red" in str(values["output"])),
                source="API", timestamp=now, environment="default", created_at=now, updated_at=now,
                subject=ScoreSubjectV3_Trace(id=trace),
            )  # fmt: skip
            rows.append(score.json())
    write("langfuse", "langfuse", rows)


def graph_of(answer: str) -> Any:
    """A graph of LangGraph whose model calls a tool and then says so."""
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage, AnyMessage
    from langchain_core.tools import tool
    from langgraph.graph import END, StateGraph
    from langgraph.graph.message import add_messages
    from langgraph.prebuilt import ToolNode

    class State(TypedDict):
        messages: Annotated[list[AnyMessage], add_messages]

    @tool
    def read(id: str) -> str:
        """Reads a record."""
        return "red"

    call = {"name": "read", "args": {"id": "A1"}, "id": "c"}
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[call]), AIMessage(answer)]))
    graph = StateGraph(State)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([read]))
    graph.set_entry_point("model")
    graph.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    return graph.compile()


def opening() -> dict:
    from langchain_core.messages import HumanMessage, SystemMessage

    return {"messages": [SystemMessage("You read records."), HumanMessage(QUESTION)]}


def write_langchain() -> None:
    """Messages as a graph leaves them in its state, in each of the forms that the libraries give them."""
    from langchain_core.load import dumpd
    from langchain_core.messages import messages_to_dict

    rows: dict[str, list[dict]] = {"langchain-core": [], "langgraph": []}
    for name, answer in ANSWERS.items():
        graded = {"reward": name == "good", "task_id": "a1", "model": name}
        state = graph_of(answer).invoke(opening())
        rows["langchain-core"] += [
            {"messages": messages_to_dict(state["messages"]), **graded},
            {"messages": dumpd(state["messages"]), **graded},
        ]
        dumped = [message.model_dump(mode="json") for message in state["messages"]]
        rows["langgraph"] += [{**dumpd(state), **graded}, {"messages": dumped, **graded}]
    for package, entries in rows.items():
        write(package, package, [json.dumps(entry) for entry in entries])


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    write_langchain()
    write_responses(address)
    write_langsmith(address)
    write_langfuse(address)
    server.shutdown()
