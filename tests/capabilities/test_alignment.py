"""Alignment of a rollout's writes with its reference's: what an index finds is what comparing all pairs finds."""

import time
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from captrain.capabilities.alignment import Pair, _affinity
from captrain.capabilities.calls import Call
from captrain.capabilities.text import same, says
from captrain.capabilities.toolbox import Toolbox
from captrain.capabilities.view import RolloutView, bare_view
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
ODD = st.recursive(
    st.sampled_from([None, True, 1, 0, "1", "1.0", 1.0, "True", "", 10**30, 1e30, -0.0]),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=3,
)
PLAIN = st.sampled_from(["a", "b"])
VALUES = {
    "order_id": st.one_of(*[PLAIN] * 9, ODD),
    "user_id": PLAIN,
    "text": PLAIN | ODD,
    "day": st.sampled_from([1, "1", "1.0"]),
    "tags": st.lists(PLAIN, max_size=2),
    "sizes": st.lists(PLAIN, max_size=2),
}
CALLS = st.sampled_from([*SCHEMAS, *SCHEMAS[2:4] * 3]).flatmap(
    lambda schema: st.tuples(
        st.just(schema["function"]["name"]),
        st.fixed_dictionaries({name: VALUES[name] for name in schema["function"]["parameters"]["properties"]}),
        st.none() | st.sets(st.sampled_from(["text", "day", "order_id"])),
    )
)
MESSAGES = st.lists(st.lists(CALLS, min_size=1, max_size=2), max_size=8)

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


def goals_of(reference: list[Call], user: str) -> list[Pair]:
    """The writes of a reference, each held against all that comes before it."""
    goals: list[Pair] = []
    for act in (act for act in reference if act.kind == "write"):
        earlier = [peer for peer in reference if peer.message < act.message]
        shared = {id(peer): [n for n, v in act.record.items() if same(peer.record.get(n), v)] for peer in earlier}
        reads = [peer for peer in earlier if peer.kind == "read" and shared[id(peer)]]
        previous = max((peer.message for peer in earlier if peer.kind == "write"), default=-1)
        lookups = [lookup for lookup in reads if lookup.message > previous] or reads
        derived = tuple(name for name, value in act.record.items() if not says(user, value))
        guards = {name for lookup in lookups for name in shared[id(lookup)]}
        goals.append(Pair(act, derived, tuple(lookups), tuple(sorted(guards))))
    return goals


def align_all(goals: list[Pair], writes: list[Call]) -> tuple[list[Pair], list[Call]]:
    """Align by comparing each write with each goal."""
    records = [pair.goal.record for pair in goals]
    ranked = sorted(
        (affinity, len(write.differing(pair.goal)) - len(pair.goal.arguments), i, j)
        for i, pair in enumerate(goals)
        for j, write in enumerate(writes)
        if (affinity := _affinity(pair, write, elsewhere=write.record not in records)) is not None
    )
    assigned, matched = dict[int, int](), set[int]()
    for _, _, i, j in ranked:
        if i not in assigned and j not in matched:
            assigned[i] = j
            matched.add(j)
    pairs = [replace(pair, write=writes[assigned[i]] if i in assigned else None) for i, pair in enumerate(goals)]
    return pairs, [write for j, write in enumerate(writes) if j not in matched]


def view_of(turns: list[Message], reference: list[Message]) -> RolloutView:
    task = Task(id="e/1", split="discovery", data={})
    return bare_view(
        Rollout(
            id="r", task=task, environment="e", trial=0, purpose="diagnosis", policy="p", outcome="failed",
            messages=[{"role": "user", "content": "Order a, please."}, *turns], reference=reference,
        ),
        TOOLBOX,
    )  # fmt: skip


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(turns=MESSAGES, reference=MESSAGES.filter(bool))
def test_what_the_index_aligns_is_what_comparing_all_pairs_aligns(
    turns: Turns,
    reference: Turns,
) -> None:
    view = view_of(recorded(turns), recorded(reference))
    assert (view.pairs, view.extras) == align_all(goals_of(view.expected, view.user), view.writes)


def test_a_record_that_had_to_be_derived_is_picked_wrongly_where_another_is_treated_twice() -> None:
    first, second, twice = (
        [("set_note", {"order_id": order, "text": text, "day": 1, "tags": [], "sizes": []}, None)]
        for order, text in (("a", "a"), ("b", "b"), ("a", "b"))
    )
    view = view_of(recorded([first, twice]), recorded([first, second]))
    assert [pair.write and pair.write.message for pair in view.pairs] == [1, 3] and not view.extras
    assert [pair.write for pair in view_of(recorded([second, second]), recorded([first, second])).pairs][0] is None


def test_hundreds_of_writes_are_aligned_in_moments() -> None:
    turns, reference = (
        [[("set_note", {"order_id": f"{n + shift}", "text": f"{n}", "day": n % 7, "tags": [], "sizes": []}, None)]
         for n in range(300)]
        for shift in (200, 0)
    )  # fmt: skip
    view, begin = view_of(recorded(turns), recorded(reference)), time.process_time()
    assert sum(pair.write is not None for pair in view.pairs) == 300
    assert time.process_time() - begin < 10
