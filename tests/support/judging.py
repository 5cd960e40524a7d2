"""A fake model that judges rollouts of the service desk by their calls.

It proposes three capabilities: read an order before changing it, finish all steps, and close with thanks. The last one
is a habit, not a capability.
"""

import json
import re
from typing import Any

from support.answering import Body

READS = ("list_orders", "get_order")
PROPOSALS = {
    "Reading before acting": "Reads a record before it changes it.",
    "Carrying out everything": "Carries out every operation that the user asked for.",
    "Closing with thanks": "Thanks the user at the end.",
}


def judge(body: Body) -> dict[str, Any]:
    """Answer an analyst's question."""
    schema, text = body["response_format"]["json_schema"]["name"], body["messages"][-1]["content"]
    if schema == "Discovery":
        places = [{"rollout": 1, "message": 2}]
        return {
            "capabilities": [
                {"name": name, "description": description, "evidence": places}
                for name, description in PROPOSALS.items()
            ]
        }
    if schema == "Merging":
        lines = [json.loads(line) for line in re.findall(r'^\{"number".*\}$', text, re.MULTILINE)]
        return {
            "groups": [
                {
                    "members": [line["number"] for line in lines if line["name"] == name],
                    "name": name,
                    "description": description,
                }
                for name, description in PROPOSALS.items()
            ]
        }
    lines = [json.loads(line) for line in re.findall(r'^\{"index".*\}$', text, re.MULTILINE)]
    return {"labels": [_label(name, *finding) for name, finding in zip(PROPOSALS, _findings(lines), strict=True)]}


def _findings(lines: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Return verdict, evidence and message for each proposal."""
    calls = [(line["index"], call) for line in lines for call in line.get("calls", [])]
    read = {call["arguments"].get("order_id") for _, call in calls if call["name"] == "get_order"}
    writes = [(index, call) for index, call in calls if call["name"] not in READS]
    guarded = [
        (index, call) for index, call in writes if call["name"] in ("cancel_order", "return_order", "deny_request")
    ]
    blind = [(index, call) for index, call in guarded if call["arguments"].get("order_id") not in read]
    asked = lines[1]["content"].count("#")
    last = lines[-1]["index"]
    thanks = "hank" in lines[-1].get("content", "")
    return [
        ("LACKING" if blind else "PRESENT", str((blind or guarded)[0][1]), (blind or guarded)[0][0])
        if guarded
        else ("NA", "nothing had to be read first", -1),
        ("LACKING" if len(writes) < asked else "PRESENT", f"{len(writes)} of {asked} operations", last),
        ("PRESENT" if thanks else "LACKING", lines[-1].get("content", "") or "no words", last),
    ]


def _label(name: str, verdict: str, evidence: str, message: int) -> dict[str, Any]:
    slug = name.lower().replace(" ", "_")
    return {"capability": slug, "evidence": evidence, "message": None if message < 0 else message, "verdict": verdict}
