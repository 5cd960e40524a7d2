"""The report of a diagnosis as one page that opens from a disk: each cause to its failures, beside the reference.

It looks as the pages of a run do, and holds no script. The first `LIST_LENGTH` failures are on it; equal diagnoses give
equal bytes.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

import jinja2
from markupsafe import Markup

from captrain.capabilities import KINDS
from captrain.contract import calls_of
from captrain.diagnosis.advice import Advice
from captrain.diagnosis.diagnosis import LIST_LENGTH, Diagnosis, counted_cause, shares
from captrain.diagnosis.explained import Explained
from captrain.diagnosis.tables import tables
from captrain.execution import DRAWING, has_package
from captrain.records import Message, Rollout, publish_text

UNEXPLAINED = "unexplained"
LONGEST = 4000
"""Characters of a message on the page."""


class PageMessage(TypedDict):
    """A message on the page: who speaks, words, calls one line each, and what went wrong there, "" for nothing."""

    role: str
    text: str
    calls: list[str]
    reason: str


class Failure(TypedDict):
    """A failed rollout on the page."""

    place: str
    evidence: str
    secondary: list[str]
    messages: list[PageMessage]
    reference: list[PageMessage]


def publish_page(diagnosis: Diagnosis, advice: Sequence[Advice], out: Path) -> Path:
    """Write report.html; returns its path."""
    style = Markup(files("captrain").joinpath("reporting/pages/static/style.css").read_text())
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("captrain").joinpath("diagnosis/page.html.j2").read_text())
    account = diagnosis.account
    groups, count = _groups(diagnosis)
    text = template.render(
        style=style,
        shortage=diagnosis.shortage,
        facts=[
            ("rollouts", len(diagnosis.logs.rollouts)),
            ("failed", account.failures),
            ("unexplained", f"{account.unexplained} of {account.failures}"),
            ("suspect references", account.standings["suspect"]),
            ("faults of simulator or infrastructure", account.standings["spoilt"] + account.standings["error"]),
        ],
        fixes=[entry for entry in advice if entry.facts],
        advice=[entry for entry in advice if not entry.facts],
        tables=tables(diagnosis),
        has_figure=diagnosis.report is not None and has_package(DRAWING),
        suspects=[(row.place, row.suspicions) for row in account.left_out.get("suspect", [])],
        groups=groups,
        more=max(0, count - LIST_LENGTH),
    )
    publish_text(out / "report.html", text)
    return out / "report.html"


def _groups(diagnosis: Diagnosis) -> tuple[list[tuple[str, str, list[Failure]]], int]:
    """The failures by the cause that they count under, the most frequent first, and how many there are."""
    failures: dict[str, list[Failure]] = {kind: [] for kind, _ in shares(diagnosis.account)} | {UNEXPLAINED: []}
    count = 0
    for row, rollout in zip(diagnosis.explanations.rollouts, diagnosis.logs.rollouts, strict=True):
        if row.outcome == "failed":
            count += 1
            if count <= LIST_LENGTH:
                kind = counted_cause(row, keep=diagnosis.keeps_suspects)
                failures[kind or UNEXPLAINED].append(_failure(row, rollout))
    names = {UNEXPLAINED: "Unexplained"} | {kind: entry.name for kind, entry in KINDS.items()}
    return [(kind, names[kind], entries) for kind, entries in failures.items() if entries], count


def _failure(row: Explained, rollout: Rollout) -> Failure:
    reasons: dict[int, list[str]] = {}
    for cause in row.causes:
        reasons.setdefault(cause.message, []).append(f"{KINDS[cause.cause].name}: {cause.evidence}")
    return {
        "place": row.place,
        "evidence": row.primary.evidence if row.primary else "",
        "secondary": [f"{cause.cause}, message {cause.message}: {cause.evidence}" for cause in row.secondary],
        "messages": [
            _message(message, "; ".join(reasons.get(index, [])), role)
            for index, (role, message) in enumerate(zip(_roles(rollout.messages), rollout.messages, strict=True))
        ],
        "reference": [
            _message(message, "")
            for message in (*rollout.reference, *_steps_of_user(rollout))
            if message.get("content") or message.get("tool_calls")
        ],
    }


def _roles(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the speaker of each message; a tool that answers the user is the user's own."""
    caller = ""
    for message in messages:
        role = str(message["role"])
        caller = caller if role == "tool" else role
        yield "tool of the user" if role == "tool" and caller == "user" else role


def _steps_of_user(rollout: Rollout) -> list[Message]:
    """Steps of the reference that are the user's, as one message."""
    calls = [{"function": step} for step in rollout.task.data.get("user_calls") or []]
    return [{"role": "user", "content": "By the user:", "tool_calls": calls}] if calls else []


def _message(message: Message, reason: str, role: str = "") -> PageMessage:
    text = str(message.get("content") or "")
    calls = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls_of(message)
    ]
    return {
        "role": role,
        "text": text if len(text) <= LONGEST else text[:LONGEST] + " …",
        "calls": calls,
        "reason": reason,
    }
