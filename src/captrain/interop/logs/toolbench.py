"""ToolBench's answers: the search of an agent for one query, a file each.

`win` says that the search ended with an answer, not that the answer is right. So no outcome is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, call_entry, calling, text_of
from captrain.records import Message, digest

SEARCH = "answer_generation"


def _recognizes(row: Foreign) -> bool:
    return isinstance(row.get(SEARCH), Mapping) and {"query", "function"} <= row[SEARCH].keys()


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    search = row[SEARCH]
    # Each request repeats the one before it. A search that ended without an answer has no requests.
    requests = search.get("train_messages") or [[{"role": "user", "content": search["query"]}, *_last_attempt(row)]]
    number = path.name.partition("_")[0]
    return ChatRow(
        requests[-1],
        None,
        # Different sets of queries use the same numbers.
        task_id=f"{number}-{digest(search['query'])[:6]}",
        tools=[{"type": "function", "function": function} for function in search["function"]],
        keys=(number,),
    )


def _last_attempt(row: Foreign) -> Iterator[Message]:
    """Yield the messages of the last path through the tree, or of the last attempt of a search without a tree."""
    nodes = row["trys"][-1]["chain"] if row.get("trys") else [*_last_path(row["tree"]["tree"])]
    name = ""
    for node in nodes:
        if node["node_type"] == "Thought":
            yield {"role": "assistant", "content": node["description"]}
        elif node["node_type"] == "Action":
            name = node["description"]
        else:
            yield calling([call_entry(name, node["description"])])
            yield {"role": "tool", "content": text_of(node.get("observation"))}


def _last_path(node: Foreign) -> Iterator[Foreign]:
    while node["children"]:
        node = node["children"][-1]
        yield node


TOOLBENCH = RowFormat("ToolBench answers", _recognizes, _chat_row)
