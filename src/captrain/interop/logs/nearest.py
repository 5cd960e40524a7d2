"""The known format nearest to a file of none, and what the file lacks."""

from collections.abc import Collection
from difflib import get_close_matches

from captrain.records import plain

SHAPES: dict[str, tuple[str, ...]] = {
    "chats": ("messages", "reward"),
    "ShareGPT": ("conversations", "reward"),
    "OpenAI Responses items": ("input", "output", "reward"),
    "runs of LangSmith": ("id", "trace_id", "run_type", "inputs", "outputs", "feedback_stats"),
    "observations of Langfuse": ("id", "traceId", "type", "input", "output"),
    "spans of OpenTelemetry": ("trace_id", "attributes"),
    "tau-bench": ("task_id", "traj", "info", "reward"),
    "tau2": ("tasks", "simulations"),
    "ToolSandbox": ("per_scenario_results",),
    "Inspect": ("eval", "samples"),
    "verifiers": ("task", "traces"),
    "NeMo Gym": ("responses_create_params", "response", "reward"),
    "AgentDojo": ("suite_name", "user_task_id", "messages", "utility"),
    "ATIF": ("schema_version", "agent", "steps"),
    "BFCL": ("id", "result", "inference_log"),
    "captrain's rollouts": ("task", "policy", "messages", "outcome"),
}
"""The members by which each is known, the simplest first: it is named where nothing speaks for another."""
RARITY = {name: 1 / sum(name in shape for shape in SHAPES.values()) for shape in SHAPES.values() for name in shape}
"""Weigh how much a member says of the format that it is in."""
LIKE = 0.75
MOST = 8


def nearest_shape(members: Collection[str]) -> str:
    """Name the known format that has the most of these members, what of it is missing, and what is there instead."""
    names = sorted(plain(str(name)[:80]) for name in members)
    if {"role", "content"} <= {*names} or {"from", "value"} <= {*names}:
        return "it looks nearest to chats: a message is a row of its own, where a row holds a list of `messages`"
    lacks = {shape: [name for name in keys if name not in names] for shape, keys in SHAPES.items()}
    close = {shape: [get_close_matches(name, names, 1, LIKE) for name in missing] for shape, missing in lacks.items()}
    support = {
        shape: sum(RARITY[name] for name in {*keys} - {*lacks[shape]})
        + sum(RARITY[name] for name, match in zip(lacks[shape], close[shape], strict=True) if match) / 2
        for shape, keys in SHAPES.items()
    }
    best = max(SHAPES, key=lambda name: (support[name], -len(lacks[name])))
    shape = best if support[best] else next(iter(SHAPES))
    like = [f" (it has {match[0]})" if match else "" for match in close[shape]]
    missing = [f"{name}{hint}" for name, hint in zip(lacks[shape], like, strict=True)]
    if not missing:
        return f"it looks nearest to {shape}: its {SHAPES[shape][0]} is of another form"
    holds = f"; it holds {', '.join(names[:MOST])}{' ...' if len(names) > MOST else ''}" if names else ""
    return f"it looks nearest to {shape}: lacks {', '.join(missing)}{holds}"
