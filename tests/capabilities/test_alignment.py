"""Alignment of a rollout's writes with its reference's."""

from collections.abc import Sequence

from captrain.capabilities.alignment import Story, Toolbox
from captrain.records import JsonObject, Message, Rollout, Task

SCHEMAS: list[JsonObject] = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": dict.fromkeys(names, {})}}}
    for name, names in {
        "get_order": ("order_id",),
        "list_items": ("order_id", "user_id"),
        "set_note": ("order_id", "text", "day", "tags", "sizes"),
        "ship_order": ("order_id", "user_id", "text"),
        "close": ("text",),
    }.items()
]
TOOLBOX = Toolbox(SCHEMAS, keys={"order_id": "order_id", "user_id": "user_id"})

Turns = Sequence[Sequence[tuple[str, JsonObject, set[str] | None]]]


def recorded(turns: Turns) -> list[Message]:
    """Assistant messages that make these calls, each answered."""
    messages: list[Message] = []
    for turn in turns:
        calls = [
            {"function": {"name": name, "arguments": arguments}} | ({"compare": sorted(compared)} if compared else {})
            for name, arguments, compared in turn
        ]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            *[{"role": "tool", "content": "ok"}] * len(calls),
        ]
    return messages


def story_of(turns: list[Message], reference: list[Message]) -> Story:
    task = Task(id="e/1", split="discovery", data={})
    return Story(
        Rollout(
            id="r", task=task, environment="e", trial=0, purpose="diagnosis", policy="p", outcome="failed",
            messages=[{"role": "user", "content": "Order a, please."}, *turns], reference=reference,
        ),
        TOOLBOX,
    )  # fmt: skip


def test_a_record_that_had_to_be_derived_is_picked_wrongly_where_another_is_treated_twice() -> None:
    first, second, twice = (
        [("set_note", {"order_id": order, "text": text, "day": 1, "tags": [], "sizes": []}, None)]
        for order, text in (("a", "a"), ("b", "b"), ("a", "b"))
    )
    story = story_of(recorded([first, twice]), recorded([first, second]))
    assert [pair.write and pair.write.message for pair in story.pairs] == [1, 3] and not story.extras
    assert [pair.write for pair in story_of(recorded([second, second]), recorded([first, second])).pairs][0] is None


def test_thousands_of_writes_are_aligned_by_tool_and_record_alone() -> None:
    turns, reference = (
        [[("set_note", {"order_id": f"{n + shift}", "text": f"{n}", "day": n % 7, "tags": [], "sizes": []}, None)]
         for n in range(1000)]
        for shift in (700, 0)
    )  # fmt: skip
    story = story_of(recorded(turns), recorded(reference))
    assert sum(pair.write is not None for pair in story.pairs) == 300 and len(story.extras) == 700
