"""The programmatic analyst: finds where rollouts diverge from reference solutions, and names the kind of divergence.

It needs no model. It sees what any reader of the logs sees (messages, reference solutions, outcomes, tool schemas),
and never the task's data or how the agent was made. Each family below yields one finding for each occasion on which
a rollout exercised a capability; a rollout lacks the capability when one occasion went wrong, and without an occasion
the label is NA. A mismatch is charged to one family: a wrong record says nothing against completion or argument
values, another operation on the right record is a wrong decision. One write may show two lacks at once only where it
really does, such as a write on the wrong record that was not read either.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from captrain.capabilities.alignment import (
    Act,
    Story,
    Toolbox,
    is_malformed,
    is_reply,
    leaves,
    reports_error,
    result_of,
    says,
    text_of,
)
from captrain.records import Capability, Label, Message, Rollout


class Finding(NamedTuple):
    """One occasion: whether it went wrong, why, at which message, and the tools and arguments in question."""

    lacking: bool
    evidence: str
    at: int
    tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


Values = Sequence[str]
Finder = Callable[[Story, Values], Iterator[Finding]]


def precondition_verification(story: Story, values: Values) -> Iterator[Finding]:
    """The reference reads a record, then decides on a write on it."""
    for pair in story.pairs:
        if not pair.guards or pair.write is None:
            continue
        sanctioned = {other.goal.tool for other in story.pairs if other.goal.record == pair.goal.record}
        repeats = [extra for extra in story.extras if extra.record == pair.goal.record]
        for act in (pair.write, *repeats):
            names = [name for name in pair.guards if name in act.record]
            if not names:
                continue
            lacking = not story.read_before(act, names)
            evidence = f"{act} without reading the record first" if lacking else f"{act} after reading the record"
            # On another record than the reference's only the reading can be judged, not the decision.
            if not lacking and act.record == pair.goal.record and act.tool not in sanctioned:
                lacking, evidence = True, f"{evidence}, where {pair.goal} was the right decision"
            yield Finding(lacking, evidence, act.at, (*pair.guard_tools, pair.goal.tool), pair.guards)


def record_selection(story: Story, values: Values) -> Iterator[Finding]:
    """The reference writes on a record that no user message names."""
    for pair in story.pairs:
        if pair.derived and pair.write is not None:
            wrong = any(pair.write.record.get(name) != pair.goal.record[name] for name in pair.derived)
            meant = f"where {pair.goal} was meant" if wrong else "on the record that was meant"
            yield Finding(wrong, f"{pair.write} {meant}", pair.write.at, (pair.goal.tool,), pair.derived)


def multi_step_completion(story: Story, values: Values) -> Iterator[Finding]:
    """The reference makes several writes."""
    if len(story.pairs) > 1:
        missing = [pair.goal for pair in story.pairs if pair.write is None]
        evidence = f"{len(story.pairs) - len(missing)} of {len(story.pairs)} operations carried out"
        evidence += f", {missing[0]} left out" if missing else ""
        yield Finding(bool(missing), evidence, story.last, tuple(pair.goal.tool for pair in story.pairs))


def argument_precision(story: Story, values: Values) -> Iterator[Finding]:
    """The reference copies a content argument of a write from the user's words."""
    for pair in story.pairs:
        if pair.write is None or pair.write.tool != pair.goal.tool:
            continue
        for name, value in pair.goal.content.items():
            if says(story.user, value):
                wrong = pair.write.content.get(name) != value
                evidence = f"{pair.write}: {name} {'should be' if wrong else 'is'} {text_of(value)}, as the user said"
                yield Finding(wrong, evidence, pair.write.at, (pair.write.tool,), (name,))


def initial_lookup(story: Story, values: Values) -> Iterator[Finding]:
    """The reference's first look-up takes arguments that the user states."""
    wanted = next((act for act in story.expected if act.kind == "read"), None)
    if wanted is None or not says(story.user, wanted.arguments):
        return
    first = next((act for act in story.acts if act.kind == "read"), None)
    wrong = first is None or (first.tool, first.arguments) != (wanted.tool, wanted.arguments)
    evidence = f"first look-up {first or 'missing'}" + (f", expected {wanted}" if wrong else "")
    yield Finding(wrong, evidence, first.at if first else story.last, (wanted.tool,), tuple(wanted.arguments))


def valid_calls(story: Story, values: Values) -> Iterator[Finding]:
    """The rollout calls tools, or tries to."""
    for at, message in enumerate(story.messages):
        if is_malformed(message):
            yield Finding(True, "a call that is not well formed, left as text", at)
    for act in story.acts:
        yield Finding(act.failed, f"{act} was {'refused' if act.failed else 'accepted'}", act.at, (act.tool,))


def _handover(acts: Sequence[Act]) -> Act | None:
    return next((act for act in acts if act.kind == "handover"), None)


def closing(story: Story, values: Values) -> Iterator[Finding]:
    """Every rollout comes to an end. A hand-over that is missing is the matter of `escalation`; one that is not due
    is no closing."""
    made, due = _handover(story.acts), _handover(story.expected)
    if made is not None:
        yield Finding(due is None, f"ends with {made}" + ("" if due else ", which was not due"), made.at, (made.tool,))
    else:
        cut = story.final is None
        yield Finding(cut, "is cut off without a last message" if cut else "ends with a message", story.last)


def escalation(story: Story, values: Values) -> Iterator[Finding]:
    """The reference hands over."""
    made, due = _handover(story.acts), _handover(story.expected)
    if due is not None:
        evidence = f"{due} {'was made' if made else 'is missing'}"
        yield Finding(made is None, evidence, made.at if made else story.last, (due.tool,))


def information(story: Story, values: Values) -> Iterator[Finding]:
    """The reference tells the user values that tools return."""
    replies = {at: message["content"] for at, message in enumerate(story.messages) if is_reply(message)}
    for value in story.informed(values):
        told = [at for at, content in replies.items() if says(content, value)]
        evidence = f"{value} was {'told' if told else 'not told'}"
        yield Finding(not told, evidence, told[0] if told else story.last)


def clarification(story: Story, values: Values) -> Iterator[Finding]:
    """The reference asks the user something before it acts."""
    if len(story.reference) < 2 or not is_reply(story.reference[0]):
        return
    roles = [message["role"] for message in story.messages]
    # An assistant may greet before the user has spoken: that is no question.
    turns = [at for at, role in enumerate(roles) if role == "assistant" and "user" in roles[:at]]
    start = turns[0] if turns else story.last
    asked = is_reply(story.messages[start]) and roles[start + 1 : start + 2] == ["user"]
    yield Finding(not asked, "asked the user first" if asked else "acted or closed without asking first", start)


def no_extra_writes(story: Story, values: Values) -> Iterator[Finding]:
    """The rollout writes."""
    for act in story.extras:
        yield Finding(True, f"{act} was not asked for, or was done twice", act.at, (act.tool,), tuple(act.arguments))
    for pair in story.pairs:
        if pair.write is not None:
            yield Finding(False, f"{pair.write} was asked for", pair.write.at, (pair.write.tool,))


def reply_wording(story: Story, values: Values) -> Iterator[Finding]:
    """Both close with a message; one that lacks the information asked for is not judged on its wording."""
    if story.final is None or story.expected_final is None or any(one.lacking for one in information(story, values)):
        return
    told = {word for value in values for word in _words(value)}
    missing = sorted(_words(story.expected_final) - _words(story.final) - told)
    evidence = f"last message lacks {', '.join(missing)}" if missing else "last message has all words of the reference"
    yield Finding(bool(missing), evidence, story.last)


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.lower())}


@dataclass(frozen=True)
class Family:
    """A kind of divergence as a candidate capability; `absent` is the evidence of the label NA."""

    name: str
    description: str
    absent: str
    find: Finder


FAMILIES = {
    family.find.__name__: family
    for family in (
        Family(
            "Precondition verification",
            "Reads a record before acting on it, and decides by what it reads.",
            "no write on a record that the reference reads first",
            precondition_verification,
        ),
        Family(
            "Record selection",
            "Finds out which record a request means when the user does not name it, from what the tools return.",
            "no write for a record that the user left unnamed",
            record_selection,
        ),
        Family(
            "Multi-step completion",
            "Carries out every operation of a request before closing.",
            "the reference makes fewer than two writes",
            multi_step_completion,
        ),
        Family(
            "Argument precision",
            "Copies values from the user's words into arguments exactly.",
            "no write with a value from the user's words",
            argument_precision,
        ),
        Family(
            "Initial look-up",
            "Begins with the right look-up, with what the user has said.",
            "the reference begins with no look-up of what the user has said",
            initial_lookup,
        ),
        Family("Valid calls", "Calls tools in a form that they accept.", "no call was made", valid_calls),
        Family("Closing", "Ends the conversation when all is done.", "", closing),
        Family("Escalation", "Hands over when that is due.", "the reference hands nothing over", escalation),
        Family(
            "Information",
            "Tells the user what was asked for, as the tools return it.",
            "the reference tells no value that tools return",
            information,
        ),
        Family(
            "Clarification",
            "Asks the user for what is missing before acting.",
            "the reference asks nothing first",
            clarification,
        ),
        Family("No extra writes", "Changes nothing beyond what was asked for.", "nothing was written", no_extra_writes),
        Family(
            "Reply wording",
            "Words the last message as the reference does, courtesy included.",
            "no last message, or one that lacks the information asked for",
            reply_wording,
        ),
    )
}


class ProgrammaticAnalyst:
    """Proposes each family that a sample of rollouts gives cause for, and labels rollouts by the families' findings."""

    deterministic = True

    def propose(self, rollouts: Sequence[Rollout], tools: list[dict[str, Any]], *, run: int = 0) -> list[Capability]:
        """The families of which at least one rollout shows a lack; `details` are the tools and arguments that
        occasions of the family involve, and the values that references tell users (`values`)."""
        toolbox = Toolbox(tools)
        stories = [Story(rollout, toolbox) for rollout in {rollout.id: rollout for rollout in rollouts}.values()]
        values = sorted({value for story in stories for value in story.informed(_returned(story.messages))})
        proposed = []
        for slug, family in FAMILIES.items():
            findings = [finding for story in stories for finding in family.find(story, values)]
            if any(finding.lacking for finding in findings):
                details = {
                    "tools": sorted({tool for finding in findings for tool in finding.tools}),
                    "arguments": sorted({name for finding in findings for name in finding.arguments}),
                    "values": values if family.find in (information, reply_wording) else [],
                }
                proposed.append(Capability(id=slug, name=family.name, description=family.description, details=details))
        return proposed

    def label(
        self, rollout: Rollout, capabilities: Sequence[Capability], tools: list[dict[str, Any]], *, run: int = 0
    ) -> dict[str, Label]:
        """LACKING at the first occasion that went wrong, PRESENT when none did, NA without an occasion."""
        story = Story(rollout, Toolbox(tools))
        return {
            capability.id: _verdict(FAMILIES[capability.id], story, capability.details.get("values", []))
            for capability in capabilities
        }


def _verdict(family: Family, story: Story, values: Values) -> Label:
    findings = sorted(family.find(story, values), key=lambda finding: not finding.lacking)
    if not findings:
        return Label(verdict="NA", evidence=family.absent)
    first = findings[0]
    return Label(verdict="LACKING" if first.lacking else "PRESENT", evidence=first.evidence, message=first.at)


def _returned(messages: Sequence[Message]) -> list[str]:
    """The distinct values in the tool results of a rollout, in order."""
    results = [result_of(m) for m in messages if m["role"] == "tool" and not reports_error(m)]
    return [*dict.fromkeys(leaf for result in results for leaf in leaves(result))]
