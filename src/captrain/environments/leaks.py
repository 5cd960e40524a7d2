"""Moves that may reveal the step's value without the needed look-ups, because a careless tool or user tells it.

A tool that gets a wrong or unknown value may name the right one, a wildcard may list every record, and a user may
correct a wrong step. Each such move is made before the step, and the adversary's rules choose a value from what the
move showed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from captrain.contract import tool_call
from captrain.environments.adversary import WILDCARDS, Adversary, Script, look, with_key
from captrain.environments.guesses import Rule, fitted
from captrain.environments.probes import CLOSING, content, shape, shown, words
from captrain.environments.views import View, candidates_of, joined_records, records_of
from captrain.records import JsonObject, Message

TRIED, LEARNT = 3, 30
"""Number of tasks on which a move is tried, and on which a rule is fitted to what it shows."""
DEPTH = 1
"""Depth of the decision tree over rules."""
UNKNOWN = "none"
"""A value that no record has."""
LISTING = WILDCARDS[:5]
"""Values that may list every record."""

Move = Callable[[View], Sequence[Message]]
"""Makes the messages before the step; empty if the move does not apply to the task."""


def leaks(player: Adversary) -> dict[str, Script]:
    """Return scripts that choose a value from what a move has shown. Their names complete "choosing ..."."""
    scripts: dict[str, Script] = {}
    for name, move in _moves(player).items():
        tried = [shown for view in player.views[:TRIED] if (shown := _after(player, move, view))]
        if tried:
            views = tried + [shown for view in player.views[TRIED:LEARNT] if (shown := _after(player, move, view))]
            rule = fitted(views, depth=DEPTH)
            scripts[f"{rule.name}, after {name}"] = partial(_by_leak, player, move, rule)
    return scripts


def _moves(player: Adversary) -> dict[str, Move]:
    """Return the moves that are tried, by name."""
    moves: dict[str, Move] = {
        "the step with the first value, and words": lambda view: [*map(view.step, _first(view)), CLOSING],
        "a needed look-up of an unknown value": lambda view: look(view, UNKNOWN),
    }
    needed = {tool for view in player.views for tool in view.needed}
    for tool in (tool["function"] for tool in player.evidence.tools):
        name = tool["name"]
        if name not in needed:
            moves[f"{name} on the first value"] = partial(_keyed, tool)
            moves[f"{name} on an unknown value"] = lambda view, t=tool: with_key(view, t, UNKNOWN)
        for value in LISTING:
            moves[f"{name} on {value!r}"] = partial(_listing, tool, value)
    return moves


def _first(view: View) -> list[str]:
    return [one.value for one in view.candidates[:1]]


def _keyed(tool: JsonObject, view: View) -> list[Message]:
    return [message for value in _first(view) for message in with_key(view, tool, value)]


def _listing(tool: JsonObject, value: str, view: View) -> list[Message]:
    names = (tool.get("parameters") or {}).get("required") or []
    return [tool_call(tool["name"], dict.fromkeys(names, value))] if names and tool["name"] != view.tool else []


def _after(player: Adversary, move: Move, view: View) -> View | None:
    """View a task after a move; None if the move shows no value with the shape of the right one."""
    if view.key == "tool" or not (moves := move(view)):
        return None
    play = player.evidence.play(view.task, [*view.before, *moves])
    begun = [place for place, message in enumerate(play) if message["role"] == "assistant"][len(view.before) :]
    after = range(begun[0], len(play)) if begun else range(0)
    told, replies, records = list(view.told), list(view.replies), dict[str, tuple[str, ...]]()
    for place, message in enumerate(play):
        if message["role"] == "tool":
            replies += shown(message) if place in after else []
            records = joined_records(records, records_of(content(message)))
        elif message["role"] != "assistant" and place in after:
            told.append(content(message))
    new = [word for text in (*told[len(view.told) :], *replies[len(view.replies) :]) for word in words(text)]
    if not any(shape(word) == shape(view.right) for word in new):
        return None
    candidates = candidates_of(view.right, told, replies, records)
    return replace(view, before=[*view.before, *moves], told=told, replies=replies, candidates=candidates)


def _by_leak(player: Adversary, move: Move, rule: Rule, view: View, _: object) -> Sequence[Message] | None:
    shown = _after(player, move, view) if view.has_choice else None
    value = rule.pick(shown) if shown else None
    return shown.guess(value) if shown and value is not None else None
