"""tau2-bench results: one JSON with tasks and simulations, or (1.0) results.json beside a folder of simulations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from captrain.interop.logs.chat import ROLES
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.source import (
    Entry,
    Foreign,
    Read,
    Source,
    cleaned,
    entries_of,
    json_of,
    parsed,
    reason_of,
    text_of,
    trial_of,
)
from captrain.records import Message, file_digest

NO_VERDICT = ("user_error", "infrastructure_error", "unexpected_error", "timeout")
"""Termination reasons that are not the agent's fault."""
LIMITS = ("max_steps",)
"""Termination reasons that are a limit of the harness."""
SIMULATIONS = "simulations"
DEFINITION = ("initial_state", "evaluation_criteria")
"""Fields of an embedded task that define its world and its check."""


@dataclass(frozen=True)
class _Run:
    """What all simulations of a file share. tasks: embedded tasks by id; model, agent: name and implementation."""

    file: str
    tasks: Mapping[str, Foreign]
    domain: str = "unknown"
    model: str = "unknown"
    agent: str = ""

    def entry(self, index: int, simulation: Foreign) -> Read:
        """Make the entry of a simulation, or say why it is left out."""
        if simulation.get("task_id") is None:
            return "it names no task"
        name, reason = str(simulation["task_id"]), str(simulation.get("termination_reason") or "")
        reward_info, task = simulation.get("reward_info") or {}, self.tasks.get(name)
        breakdown, messages = reward_info.get("reward_breakdown") or {}, simulation.get("messages") or []
        # In solo mode there is no user: the agent gets a ticket and the user's tools, and makes the user's calls.
        is_solo = not any(message.get("role") == "user" for message in messages)
        criteria = (task or {}).get("evaluation_criteria") or {}
        graded = criteria.get("reward_basis") or reward_info.get("reward_basis") or []
        facts = {
            "script": _script(task or {}, is_solo),
            "user_calls": [
                {"name": str(action["name"]), "arguments": cleaned(action["arguments"])}
                for action in criteria.get("actions") or []
                if action.get("requestor") == "user" and not is_solo
            ],
            "ending": reason,
            "graded": [str(part).lower() for part in graded],
            "definition": {field: cleaned(task[field]) for field in DEFINITION if task and task.get(field) is not None},
            "limit": reason if reason in LIMITS else "",
            "grading": _unmet(reward_info.get("nl_assertions")),
            "expected": {"acceptable_outcomes": cleaned(criteria["acceptable_outcomes"])}
            if criteria.get("acceptable_outcomes")
            else {},
        }
        return Entry(
            index,
            f"tau2/{self.domain}",
            name,
            [*map(_message, messages)],
            reward_info.get("reward"),
            self.model,
            data={"kind": self.domain, **{field: value for field, value in facts.items() if value}},
            trial=trial_of(simulation.get("trial")),
            parts={str(part).lower(): float(value) for part, value in breakdown.items()},
            reference=_reference(criteria, is_solo) if task else [],
            fault=f"the simulation ended with {reason}" if reason in NO_VERDICT else "",
            agent=self.agent,
        )


def read_tau2(document: JsonDocument) -> Source:
    """Read the simulations of a result file, 0.x or 1.0."""
    data, file = document.members, file_digest(document.path)
    info = _object(data, "info")
    world, listing = _object(info, "environment_info"), data.get("tasks")
    entries = [task for task in listing if isinstance(task, dict) and "id" in task] if isinstance(listing, list) else []
    agent, policy = _model(info.get("agent_info")), world.get("policy")
    implementation = str(_object(info, "agent_info").get("implementation") or "")
    domain = str(world.get("domain_name") or "unknown")
    run = _Run(
        file, {str(task["id"]): task for task in entries}, domain, str(agent["model"] or "unknown"), implementation
    )
    folder = document.path.parent / "simulations"
    is_split = not document.counts.get(SIMULATIONS)
    simulations = _split(folder, data.get("simulation_index")) if is_split else _listed(document)
    about = {
        "format": "tau2 1.0, a file for each simulation" if is_split and folder.is_dir() else "tau2",
        "commit": info.get("git_commit"),
        "domain": domain,
        "agent": agent,
        "user": _model(info.get("user_info")),
    }
    policies = {f"tau2/{domain}": policy} if isinstance(policy, str) else {}
    return Source(file, about, entries_of(simulations, run.entry, first=0), {}, policies)


def _object(data: Mapping[str, object], name: str) -> Foreign:
    """Return a member that is an object; {} for anything else."""
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def is_simulation(row: Foreign) -> bool:
    """Return whether a row is a simulation in a bare list, without the tasks."""
    return "reward_info" in row and isinstance(row.get("messages"), list)


def read_simulations(path: Path, rows: Iterator[tuple[str, object]]) -> Source:
    """Read the simulations of a bare list."""
    run = _Run(file_digest(path), {})
    return Source(run.file, {"format": "tau2, a list of simulations"}, entries_of(rows, run.entry, first=0))


def _model(settings: object) -> dict[str, object]:
    """Pick model, temperature and seed from settings that may hold keys and hosts."""
    settings = settings if isinstance(settings, Mapping) else {}
    arguments = settings.get("llm_args") or {}
    sampling = {name: arguments[name] for name in ("temperature", "seed") if arguments.get(name) is not None}
    return {"model": settings.get("llm"), **sampling}


def _listed(document: JsonDocument) -> Iterator[tuple[str, object]]:
    for position, simulation in enumerate(document.elements(SIMULATIONS)):
        yield f"simulation {position}", simulation


def _split(folder: Path, listing: object) -> Iterator[tuple[str, object]]:
    """Yield each simulation of a folder with its place, in the order of the index."""
    entries = listing if isinstance(listing, list) else []
    index = dict.fromkeys(str(entry["id"]) for entry in entries if isinstance(entry, Mapping) and "id" in entry)
    files = {file.stem: file for file in sorted(folder.glob("*.json"))}
    for name in [*index, *(name for name in files if name not in index)]:
        simulation: object = "the file is missing"
        if name in files:
            try:
                simulation = json_of(files[name])
            except (ValueError, RecursionError) as error:
                simulation = f"it is not JSON: {reason_of(error)}"
        yield f"simulations/{name}.json", simulation


def _script(task: Foreign, is_solo: bool) -> str:
    """Return the instructions of the simulated user, with the ticket if the agent works in solo mode."""
    scenario = task.get("user_scenario")
    instructions = scenario.get("instructions") if isinstance(scenario, Mapping) else scenario
    texts = [*instructions.values()] if isinstance(instructions, Mapping) else [instructions]
    texts += [task.get("ticket")] if is_solo else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _reference(criteria: Foreign, is_solo: bool) -> list[Message]:
    """Return the solution: the agent's gold calls, and the information to be told at its end; [] if the task states
    neither, which is no solution that does nothing."""
    if criteria.get("actions") is None and not criteria.get("communicate_info"):
        return []
    reference: list[Message] = []
    for action in criteria.get("actions") or []:
        if is_solo or action.get("requestor", "assistant") == "assistant":
            function = {"name": action["name"], "arguments": cleaned(action["arguments"])}
            call: dict[str, object] = {"type": "function", "function": function}
            if action.get("compare_args") is not None:
                call["compare"] = action["compare_args"]
            reference.append({"role": "assistant", "content": "", "tool_calls": [call]})
    informs = [text_of(value) for value in criteria.get("communicate_info") or []]
    return [*reference, {"role": "assistant", "content": ", ".join(informs), "informs": informs}]


def _unmet(assertions: object) -> str:
    """List the assertions that a judge found unmet, with its reasons."""
    rows = assertions if isinstance(assertions, list) else []
    unmet = [row for row in rows if isinstance(row, dict) and row.get("met") is False]
    return "\n".join(f"{row.get('nl_assertion')}: {row.get('justification') or 'unmet'}" for row in unmet)


def _message(message: Foreign) -> Message:
    """Convert one of tau2's messages to a chat message."""
    role, text = str(message.get("role")), text_of(message.get("content"))
    if role not in ROLES:
        raise ValueError(f"a message has no role of {', '.join(sorted(ROLES))}")
    if role == "tool":
        result: Message = {"role": "tool", "tool_call_id": str(message.get("id") or ""), "content": text}
        return {**result, "error": True} if message.get("error") else result
    chat: Message = {"role": role, "content": text}
    if calls := message.get("tool_calls"):
        chat["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": str(call.get("name")), "arguments": parsed(call.get("arguments"))},
            }
            for call in calls
        ]
    return chat
