"""tau2-bench results: one JSON with tasks and simulations, or (1.0) results.json beside a folder of simulations.

Some files lack task ids, `info` or the reason of termination. A task is then found by the gold actions that the reward
was computed from, where they fit one embedded task only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captrain.interop.logs.source import Source, cleaned, models, parsed, record, text_of
from captrain.records import Message, Rollout

NO_VERDICT = ("user_error", "infrastructure_error", "unexpected_error", "timeout")
"""Terminations that say nothing of the agent."""


def read(path: Path, data: Mapping[str, Any]) -> Source:
    """The simulations of a result file, 0.x or 1.0."""
    info = data.get("info") if isinstance(data.get("info"), Mapping) else {}
    assert isinstance(info, Mapping)
    tasks = {str(one["id"]): one for one in data.get("tasks") or [] if isinstance(one, Mapping) and "id" in one}
    agent, user = models(info.get("agent_info")), models(info.get("user_info"))
    world = info.get("environment_info")
    named = world.get("domain_name") if isinstance(world, Mapping) else None
    domain = str(named or _domain(tasks) or "unknown")
    entries: list[tuple[str, Rollout | str]] = []
    for at, (where, simulation) in enumerate(_simulations(path, data)):
        entries.append((where, _imported(path, at, simulation, tasks, domain, str(agent["model"] or "unknown"))))
    split = "simulations" not in data or not data["simulations"]
    about = {
        "format": "tau2 1.0, a file for each simulation" if split and _folder(path).is_dir() else "tau2",
        "commit": info.get("git_commit"),
        "domain": domain,
        "agent": agent,
        "user": user,
    }
    return Source(about, entries, [])


def _folder(path: Path) -> Path:
    return path.parent / "simulations"


def _simulations(path: Path, data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each simulation with its place: in the file, or in files of their own, in the order of the index."""
    inside = data.get("simulations")
    if isinstance(inside, list) and inside:
        return [(f"simulation {at}", one) for at, one in enumerate(inside)]
    index = [str(entry["id"]) for entry in data.get("simulation_index") or []]
    files = {one.stem: one for one in sorted(_folder(path).glob("*.json"))}
    names = [*index, *(name for name in files if name not in index)]
    return [(f"simulations/{name}.json", _loaded(files.get(name))) for name in names]


def _loaded(path: Path | None) -> Any:
    if path is None:
        return "the file is missing"
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        return f"it is not JSON: {error}"


def _domain(tasks: Mapping[str, Any]) -> str | None:
    for task in tasks.values():
        scenario = task.get("user_scenario")
        instructions = scenario.get("instructions") if isinstance(scenario, Mapping) else None
        if isinstance(instructions, Mapping) and instructions.get("domain"):
            return str(instructions["domain"])
    return None


def _imported(
    path: Path, at: int, simulation: Any, tasks: Mapping[str, Any], domain: str, policy: str
) -> Rollout | str:
    if not isinstance(simulation, Mapping):
        return simulation if isinstance(simulation, str) else "it is no object"
    reward_info = simulation.get("reward_info")
    reward_info = reward_info if isinstance(reward_info, Mapping) else {}
    name = simulation.get("task_id")
    if name is None:
        name = _task_by_actions(reward_info, tasks)
        if name is None:
            return "it names no task, and its gold actions do not tell which it is"
    reason = str(simulation.get("termination_reason") or "")
    breakdown = reward_info.get("reward_breakdown") or {}
    return record(
        path, at,
        environment=f"tau2/{domain}",
        task=str(name),
        data={"kind": domain},
        messages=[_message(one) for one in simulation.get("messages") or []],
        reward=reward_info.get("reward"),
        policy=policy,
        trial=simulation.get("trial") or 0,
        parts={str(part).lower(): float(value) for part, value in breakdown.items()},
        reference=_reference(tasks[str(name)]) if str(name) in tasks else None,
        fault=f"the simulation ended with {reason}" if reason in NO_VERDICT else None,
    )  # fmt: skip


def _task_by_actions(reward_info: Mapping[str, Any], tasks: Mapping[str, Any]) -> str | None:
    """The one task whose gold actions are those that were checked."""
    checked = [check.get("action") or {} for check in reward_info.get("action_checks") or []]
    wanted = [(one.get("name"), json.dumps(one.get("arguments"), sort_keys=True)) for one in checked]
    found = [
        name
        for name, task in tasks.items()
        if wanted
        and wanted
        == [(one["name"], json.dumps(one["arguments"], sort_keys=True)) for one in _criteria(task).get("actions") or []]
    ]
    return found[0] if len(found) == 1 else None


def _criteria(task: Mapping[str, Any]) -> Mapping[str, Any]:
    return task.get("evaluation_criteria") or {}


def _reference(task: Mapping[str, Any]) -> list[Message]:
    """The gold actions of the agent, and at the end the values to be told, if any; arguments that alone are compared
    are named."""
    messages: list[Message] = []
    for action in _criteria(task).get("actions") or []:
        if action.get("requestor", "assistant") == "assistant":
            function = {"name": action["name"], "arguments": cleaned(action["arguments"])}
            call: dict[str, Any] = {"type": "function", "function": function}
            if action.get("compare_args") is not None:
                call["compare"] = action["compare_args"]
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    told = [text_of(one) for one in _criteria(task).get("communicate_info") or []]
    return [*messages, {"role": "assistant", "content": ", ".join(told), "informs": told}]


def _message(message: Mapping[str, Any]) -> Message:
    """One of tau2's messages as a chat message."""
    role = str(message.get("role"))
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
