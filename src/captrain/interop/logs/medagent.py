"""MedAgentBench and AgentBench: a task's `history` of a user and an agent, with the grade beside it."""

from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign

LIMITS = ("task limit reached", "agent context limit")
FAULTS = ("agent validation failed", "agent invalid action", "task error", "unknown", "cancelled")


def _output(row: Foreign) -> Foreign:
    return row["output"] if isinstance(row.get("output"), dict) else row


def _recognizes(row: Foreign) -> bool:
    history = _output(row).get("history")
    roles = [item.get("role") for item in history if isinstance(item, dict)] if isinstance(history, list) else []
    return "agent" in roles and {*roles} <= {"user", "agent", "system"}


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    output = _output(row)
    grade = row["grade"] if isinstance(row.get("grade"), dict) else {}
    status = str(output.get("status") or "").replace("_", " ").lower()
    places = (row, output, grade)
    diagnostics, attempt = row.get("diagnostics"), row.get("attempt")
    provenance = diagnostics.get("provenance") if isinstance(diagnostics, dict) else None
    error = (row.get("infra_reason") or status) if row.get("infra_fail") else row.get("error")
    return ChatRow(
        output["history"],
        next((place[name] for place in places for name in ("correct", "is_correct", "reward") if name in place), None),
        task_id=next((row[name] for name in ("task_id", "index", "id") if row.get(name) is not None), path.stem),
        trial=attempt - 1 if isinstance(attempt, int) else None,
        model=row.get("model") or (provenance or {}).get("model") or "unknown",
        fault=str(error or (status if status in FAULTS[2:] else "")),
        limit=status if status in LIMITS else "",
        grading=grade.get("reason"),
        submission=output.get("result"),
        expected={"expected": grade.get("expected")},
    )


MEDAGENT = RowFormat("MedAgentBench tasks", _recognizes, _chat_row)
