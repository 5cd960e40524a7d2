"""tau2-bench results: one JSON with tasks and simulations, or (1.0) results.json beside a folder of simulations.

Some files lack task ids, `info` or the reason of termination. A task is then found by the gold actions that the reward
was computed from, where they fit one embedded task only.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from captrain.interop.logs.chat import ROLES
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.records import rows_of
from captrain.interop.logs.source import (
    MALFORMED,
    Source,
    cleaned,
    entry_of,
    json_of,
    models,
    parsed,
    reason_of,
    record_of_entry,
    text_of,
)
from captrain.records import JsonObject, Message, Rollout, file_digest

NO_VERDICT = ("user_error", "infrastructure_error", "unexpected_error", "timeout")
"""Terminations that say nothing of the agent."""
SIMULATIONS = "simulations"
DEFINITION = ("initial_state", "evaluation_criteria")
"""Fields of an embedded task that its world and its check are made of."""
Actions = tuple[tuple[str | None, str], ...]
"""Names of gold actions, with their arguments as text."""


class Tasks:
    """The embedded tasks, by name and by their gold actions."""

    def __init__(self, tasks: object) -> None:
        entries = tasks if isinstance(tasks, list) else []
        self.by_name: JsonObject = {
            str(task["id"]): task for task in entries if isinstance(task, dict) and "id" in task
        }

    @cached_property
    def _by_actions(self) -> dict[Actions, list[str]]:
        names: dict[Actions, list[str]] = {}
        for name, task in self.by_name.items():
            with suppress(*MALFORMED):  # One task that does not read keeps no other from being known.
                names.setdefault(_gold_actions(task), []).append(name)
        return names

    def name_of(self, reward_info: JsonObject) -> str | None:
        """Find the one task whose gold actions are those that were checked."""
        checked = [check.get("action") or {} for check in reward_info.get("action_checks") or []]
        expected: Actions = tuple(
            (action.get("name"), json.dumps(action.get("arguments"), sort_keys=True)) for action in checked
        )
        names = self._by_actions.get(expected, []) if expected else []
        return names[0] if len(names) == 1 else None


def read_tau2(document: JsonDocument) -> Source:
    """Read the simulations of a result file, 0.x or 1.0."""
    path, data, file = document.path, document.members, file_digest(document.path)
    info = data.get("info") if isinstance(data.get("info"), Mapping) else {}
    assert isinstance(info, Mapping)
    tasks = Tasks(data.get("tasks"))
    agent, user = models(info.get("agent_info")), models(info.get("user_info"))
    world = info.get("environment_info")
    domain_name = world.get("domain_name") if isinstance(world, Mapping) else None
    domain = str(domain_name or _domain(tasks.by_name) or "unknown")
    split, policy = not document.counts.get(SIMULATIONS), str(agent["model"] or "unknown")
    entries = (
        (place, entry_of(partial(_rollout, file, index, simulation, tasks, domain, policy)))
        for index, (place, simulation) in enumerate(_simulations(document))
    )
    about = {
        "format": "tau2 1.0, a file for each simulation" if split and _folder(path).is_dir() else "tau2",
        "commit": info.get("git_commit"),
        "domain": domain,
        "agent": agent,
        "user": user,
    }
    policy_text = world.get("policy") if isinstance(world, Mapping) else None
    return Source(file, about, entries, {}, {f"tau2/{domain}": policy_text} if isinstance(policy_text, str) else {})


def is_simulation(row: JsonObject) -> bool:
    """Return whether a row is a simulation that stands in a list of its own, without the tasks."""
    return "reward_info" in row and isinstance(row.get("messages"), list)


def read_simulations(path: Path) -> Source:
    """Read the simulations of a bare list."""
    file, tasks = file_digest(path), Tasks(None)
    entries = (
        (place, entry_of(partial(_rollout, file, index, simulation, tasks, "unknown", "unknown")))
        for index, (place, simulation) in enumerate(rows_of(path))
    )
    return Source(file, {"format": "tau2, a list of simulations"}, entries, {})


def _folder(path: Path) -> Path:
    return path.parent / "simulations"


def _simulations(document: JsonDocument) -> Iterator[tuple[str, object]]:
    """Yield each simulation with its place: in the file, or in files of their own, in the order of the index."""
    if document.counts.get(SIMULATIONS):
        for position, simulation in enumerate(document.elements(SIMULATIONS)):
            yield f"simulation {position}", simulation
        return
    listing = document.members.get("simulation_index")
    entries = listing if isinstance(listing, list) else []
    index = dict.fromkeys(str(entry["id"]) for entry in entries if isinstance(entry, Mapping) and "id" in entry)
    files = {file.stem: file for file in sorted(_folder(document.path).glob("*.json"))}
    for name in [*index, *(name for name in files if name not in index)]:
        yield f"simulations/{name}.json", _loaded(files.get(name))


def _loaded(path: Path | None) -> object:
    if path is None:
        return "the file is missing"
    try:
        return json_of(path)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {reason_of(error)}"


def _domain(tasks: JsonObject) -> str | None:
    for task in tasks.values():
        scenario = task.get("user_scenario")
        instructions = scenario.get("instructions") if isinstance(scenario, Mapping) else None
        if isinstance(instructions, Mapping) and instructions.get("domain"):
            return str(instructions["domain"])
    return None


def _rollout(file: str, index: int, simulation: object, tasks: Tasks, domain: str, policy: str) -> Rollout | str:
    if not isinstance(simulation, Mapping):
        return simulation if isinstance(simulation, str) else "it is not an object"
    reward_info = simulation.get("reward_info")
    reward_info = reward_info if isinstance(reward_info, dict) else {}
    name = simulation.get("task_id")
    if name is None:
        name = tasks.name_of(reward_info)
        if name is None:
            return "it names no task, and its gold actions do not tell which it is"
    reason = str(simulation.get("termination_reason") or "")
    breakdown = reward_info.get("reward_breakdown") or {}
    messages, task = simulation.get("messages") or [], tasks.by_name.get(str(name))
    is_solo = not any(message.get("role") == "user" for message in messages)
    return record_of_entry(
        file,
        index,
        environment=f"tau2/{domain}",
        task=str(name),
        data={"kind": domain, **_circumstances(task or {}, reason, reward_info, is_solo=is_solo)},
        messages=[*map(_message, messages)],
        reward=reward_info.get("reward"),
        policy=policy,
        trial=simulation.get("trial") or 0,
        parts={str(part).lower(): float(value) for part, value in breakdown.items()},
        reference=None if task is None else _reference(task, is_solo=is_solo),
        fault=f"the simulation ended with {reason}" if reason in NO_VERDICT else None,
    )


def _circumstances(task: JsonObject, reason: str, reward_info: JsonObject, *, is_solo: bool) -> JsonObject:
    """Collect, where it is known: the simulated user's script and the calls it was to make with tools of its own, why
    the dialogue ended, what the reward is made of, what its world is opened with; of an agent that works alone the
    ticket that it was given."""
    scenario = task.get("user_scenario")
    instructions = scenario.get("instructions") if isinstance(scenario, Mapping) else scenario
    parts = instructions.values() if isinstance(instructions, Mapping) else [instructions]
    texts = [*parts, task.get("ticket")] if is_solo else parts
    script = "\n".join(part for part in texts if isinstance(part, str))
    calls = [
        {"name": str(action["name"]), "arguments": cleaned(action["arguments"])}
        for action in _criteria(task).get("actions") or []
        if action.get("requestor") == "user" and not is_solo
    ]
    basis = _criteria(task).get("reward_basis") or reward_info.get("reward_basis") or []
    graded = [str(part).lower() for part in basis]
    definition = {name: cleaned(task[name]) for name in DEFINITION if task.get(name) is not None}
    circumstances = (("script", script), ("user_calls", calls), ("ending", reason), ("graded", graded))
    return {name: value for name, value in (*circumstances, ("definition", definition)) if value}


def _gold_actions(task: JsonObject) -> Actions:
    actions = _criteria(task).get("actions") or []
    return tuple((action["name"], json.dumps(action["arguments"], sort_keys=True)) for action in actions)


def _criteria(task: JsonObject) -> JsonObject:
    return task.get("evaluation_criteria") or {}


def _reference(task: JsonObject, *, is_solo: bool) -> list[Message]:
    """List the gold actions of the agent, and at the end the values to be told, if any; arguments that alone are
    compared are named. An agent that works alone has the tools of the user, and makes its calls."""
    messages: list[Message] = []
    for action in _criteria(task).get("actions") or []:
        if is_solo or action.get("requestor", "assistant") == "assistant":
            function = {"name": action["name"], "arguments": cleaned(action["arguments"])}
            call: JsonObject = {"type": "function", "function": function}
            if action.get("compare_args") is not None:
                call["compare"] = action["compare_args"]
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    informs = [text_of(value) for value in _criteria(task).get("communicate_info") or []]
    return [*messages, {"role": "assistant", "content": ", ".join(informs), "informs": informs}]


def _message(message: JsonObject) -> Message:
    """Convert one of tau2's messages to a chat message."""
    role = str(message.get("role"))
    if role not in ROLES:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    if role == "tool":
        result = {
            "role": "tool",
            "tool_call_id": str(message.get("id") or ""),
            "content": text_of(message.get("content")),
        }
        return {**result, "error": True} if message.get("error") else result
    chat: Message = {"role": role, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        chat["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": str(call.get("name")), "arguments": parsed(call.get("arguments"))},
            }
            for call in message["tool_calls"]
        ]
    return chat
