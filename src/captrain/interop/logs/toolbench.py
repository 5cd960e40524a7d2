"""ToolBench's answers: the tree of a search, or a converted answer whose steps are nested in each other's `next`.

`win` says that the search ended with an answer, not that the answer is right. ToolEval's file says the latter.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, call_of, calling, literal, loaded, text_of
from captrain.records import Message

SEARCH, ANSWER, STEPS = "answer_generation", "answer", "answer_details"
CUT = "its steps are cut off after 100 characters"


def _recognizes(row: Foreign) -> bool:
    answer = row.get(ANSWER)
    is_search = isinstance(row.get(SEARCH), Mapping) and "function" in row[SEARCH]
    return is_search or (isinstance(answer, Mapping) and isinstance(answer.get(STEPS), list))


def _chat_row(row: Foreign, path: Path) -> ChatRow | str:
    search, task = row.get(SEARCH), row.get("task_id", path.name.partition("_")[0])
    if search is None:
        answer = row[ANSWER]
        messages = _converted(answer[STEPS])
        return ChatRow(messages, None, task, model=answer.get("method", "unknown")) if messages else CUT
    # Each request repeats the one before it. A search that ended without an answer has no requests.
    requests = search.get("train_messages") or [[{"role": "user", "content": search.get("query")}, *_last_attempt(row)]]
    tools = [{"type": "function", "function": function} for function in search["function"]]
    return ChatRow(requests[-1], None, task, tools=tools)


def _last_attempt(row: Foreign) -> Iterator[Message]:
    """Yield the messages of the last path through the tree, or of the last try of a search without a tree."""
    attempts = row.get("trys") or []
    nodes = attempts[-1]["chain"] if attempts else []
    node = {} if attempts else row["tree"]["tree"]
    while node.get("children"):
        node = node["children"][-1]
        nodes = [*nodes, node]
    name = ""
    for node in nodes:
        if node["node_type"] == "Thought":
            yield {"role": "assistant", "content": node["description"]}
        elif node["node_type"] == "Action":
            name = node["description"]
        elif name:
            yield calling([call_entry(name, node["description"])])
            yield {"role": "tool", "content": text_of(node.get("observation"))}


def _converted(steps: object) -> list[Message]:
    """Return the messages of the first path through nested steps. [] if the call of a step is cut off."""
    messages: list[Message] = []
    while isinstance(steps, list) and steps:
        step, said = steps[0], steps[0].get("message")
        held = loaded(said) if isinstance(loaded(said), Mapping) else literal(text_of(said))
        if step["role"] != "tool":
            messages.append({"role": step["role"], "content": text_of(said)})
        elif isinstance(held, Mapping) and (call := call_of(held)):
            messages.append(calling([call]))
            if held.get("response"):
                messages.append({"role": "tool", "content": text_of(held["response"])})
        else:
            return []
        steps = step.get("next")
    return messages


TOOLBENCH = RowFormat("ToolBench answers", _recognizes, _chat_row)
