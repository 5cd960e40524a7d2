"""Reads ToolSandbox results: result_summary.json, and trajectories/<scenario>/conversation.json beside it.

The conversation says which milestones were met and what they check. Milestones are the benchmark's own reference. A
scenario that ended in an exception is an error, not a failure. A scenario that lacks the key of an external service is
skipped.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from captrain.interop.logs.chat import chat_message
from captrain.interop.logs.document import JsonDocument
from captrain.interop.logs.source import MALFORMED, Entry, Foreign, Read, Source, entries_of, json_of, reason_of
from captrain.records import JsonObject, file_digest

CATEGORIES = ("insufficient_information", "multiple_user_turn", "multiple_tool_call", "single_tool_call")
NO_KEY = "RAPID_API_KEY"
SCENARIOS = "per_scenario_results"
KINDS = ("milestone", "minefield")


def read_toolsandbox(document: JsonDocument) -> Source:
    """Read the scenarios of a result folder."""
    file = file_digest(document.path)
    about = {"format": "ToolSandbox", "commit": document.members.get("git_sha")}
    results = (result if isinstance(result, dict) else {} for result in document.elements(SCENARIOS))
    places = ((f"scenario {result.get('name') or number}", result) for number, result in enumerate(results))
    return Source(file, about, entries_of(places, partial(_read, document.path), first=0))


def _read(path: Path, index: int, result: Foreign) -> Read:
    name, fault = result.get("name"), ""
    if not isinstance(name, str) or not name:
        return "it has no name"
    if result.get("exception_type"):
        if NO_KEY in str(result.get("traceback")):
            return "it needs an external key"
        fault = f"the scenario ended in {result['exception_type']}"
    if {"/", "\\", "\0"} & {*name} or name in (".", ".."):
        return "its name leads out of the folder of trajectories"
    conversation = path.parent / "trajectories" / name / "conversation.json"
    if not conversation.is_file():
        return f"trajectories/{name}/conversation.json is missing" + (f" ({fault})" if fault else "")
    try:
        turns = json_of(conversation)
        messages = [chat_message(turn) for turn in turns]
    except MALFORMED as error:
        return f"trajectories/{name}/conversation.json cannot be read: {reason_of(error)}"
    for message in messages:
        # The last line of a tool's exception is `SomeError: ...`.
        error, colon, _ = message["content"].strip().rpartition("\n")[2].partition(":")
        if message["role"] == "tool" and colon and error.isidentifier() and error.endswith(("Error", "Exception")):
            message["error"] = True
    milestones, parts = _milestones(turns, result)
    kinds = [str(category).lower() for category in result.get("categories") or []]
    return Entry(
        index,
        "toolsandbox",
        name,
        messages,
        result.get("similarity"),
        "unknown",
        data={"kind": next((kind for kind in CATEGORIES if kind in kinds), ""), "milestones": milestones},
        parts=parts,
        fault=fault,
    )


def _milestones(turns: Sequence[Foreign], result: Foreign) -> tuple[list[JsonObject], dict[str, float]]:
    """Return the checks of each milestone and minefield, and the score of each.

    The score is 1 for a met milestone and for a minefield that was avoided. Scores are in the summary. The checks are
    in the conversation, at the message that matched best. They are empty if no message matched.
    """
    found: dict[tuple[str, int], Foreign] = {}
    for turn in turns:
        details = turn.get(f"{turn.get('role')}_details") or {}
        for kind in KINDS:
            for match in details.get(f"{kind}_matches") or []:
                found[kind, int(match[f"{kind}_index"])] = match[kind]
    descriptions: list[JsonObject] = []
    parts: dict[str, float] = {}
    for kind in KINDS:
        mapping = result.get(f"{kind}_mapping") or {}
        for index, place in sorted((int(k), v) for k, v in mapping.items()):
            score = float(place[1])
            descriptions.append(milestone_checks(found.get((kind, index), {}), kind == "minefield"))
            parts[f"milestone {len(descriptions)}"] = 1 - score if kind == "minefield" else score
    return descriptions, parts


def milestone_checks(milestone: Foreign, minefield: bool) -> JsonObject:
    """Return the checks of a milestone as plain values: a call, a message to the user, or a state of the records."""
    checks: list[JsonObject] = []
    for constraint in milestone.get("snapshot_constraints") or []:
        namespace = str(constraint.get("database_namespace"))
        for row in constraint.get("target_dataframe") or []:
            if row.get("tool_trace") is not None:
                trace = json.loads(row["tool_trace"])
                calls = trace if isinstance(trace, list) else [trace]
                checks += [{"tool": call["tool_name"], "arguments": call["arguments"]} for call in calls]
            elif namespace == "SANDBOX":
                checks.append({"message": row.get("content")})
            else:
                change = str(constraint.get("snapshot_constraint")).removesuffix("_similarity")
                checks.append({"namespace": namespace, "change": change, "values": row})
    first: JsonObject = dict(checks[0]) if checks else {"namespace": "state"}
    if len(checks) > 1:
        first["also"] = checks[1:]
    return {**first, "minefield": True} if minefield else first
