"""The causes by which a rollout fails, each with what it says of the agent, and one finding of it in a rollout."""

from dataclasses import dataclass
from typing import Literal

QUOTED = 140
Confidence = Literal["high", "medium"]


@dataclass(frozen=True)
class Cause:
    """One cause in one rollout: its kind, the message where it shows first, and the evidence.

    `inherent`: it holds whatever the reference does. `tools` and `arguments` are those in question.
    """

    kind: str
    message: int
    evidence: str
    confidence: Confidence = "high"
    inherent: bool = True
    tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of cause: its name, what an agent without it can do, whether it is the agent's at all, and what a line in
    the prompt can say against it ("" where words are not what is missing)."""

    name: str
    description: str
    of_agent: bool = True
    line: str = ""


def quoted(text: str) -> str:
    """The beginning of a text in one line, in quotation marks."""
    text = " ".join(text.split())
    return f'"{text if len(text) <= QUOTED else text[: QUOTED - 2] + " …"}"'


SIMULATOR, SUSPECT = "user_simulator_fault", "suspect_reference"
KINDS = {
    "loop": Kind(
        "Loop",
        "Goes on when a call has done its work, instead of repeating it.",
        line="When a call has succeeded, report the outcome; never repeat a call with the same arguments.",
    ),
    "undue_compliance": Kind(
        "Undue compliance",
        "Declines what the policy forbids, even when the user asks for it.",
        line="Before any change, name the rule that allows it and the record that meets it; if there is none, decline.",
    ),
    "unverified_claim": Kind(
        "Unverified claim",
        "Checks what the user says against the records before acting on it.",
        line="Never act on what the user says of a record: read it first, and correct the user where it differs.",
    ),
    "fabricated_fact": Kind(
        "Fabricated fact",
        "Names only what the user or a tool has said.",
        line="Use only identifiers and facts that stand in a tool's result or in the user's words.",
    ),
    "missing_lookup": Kind(
        "Missing look-up",
        "Makes the look-ups that a decision needs.",
        line="Before you say that something cannot be looked up, or act on it, try every tool that might show it.",
    ),
    "incomplete_search": Kind(
        "Incomplete search",
        "Looks at all records that a request may mean, not only at the first.",
        line="When a request may concern any of several records, open all of them before you answer.",
    ),
    "wrong_record": Kind(
        "Wrong record",
        "Acts on the record that the request means.",
    ),
    "wrong_operation": Kind(
        "Wrong operation",
        "Chooses the operation that the request and the record call for.",
    ),
    "wrong_argument": Kind(
        "Wrong argument",
        "Gives a call the values that the request, the records and the policy ask for.",
    ),
    "partial_refusal": Kind(
        "Undue refusal",
        "Does what is asked for and allowed, and does not refuse it.",
        line="Before you refuse a request, name the rule that forbids it; if there is none, carry the request out.",
    ),
    "over_escalation": Kind(
        "Undue hand-over",
        "Handles what it can handle itself, and says no where the answer is no, instead of handing over.",
        line="Hand over only what no tool of yours can do; where the policy says no, say no yourself.",
    ),
    "missing_escalation": Kind(
        "Missing hand-over",
        "Hands over what it cannot handle.",
        line="Hand over when the policy says so, by the tool that does it.",
    ),
    "missing_write": Kind(
        "Omitted operation",
        "Carries out every operation of a request before closing.",
        line="List the operations of a request, and do not close before each is done.",
    ),
    "extra_write": Kind(
        "Unneeded operation",
        "Changes nothing beyond what was asked for, and nothing twice.",
        line="Make each change once, and only those that the user asked for.",
    ),
    "missing_information": Kind(
        "Missing information",
        "Tells the user what was asked for, as the tools return it.",
        line="Before you close, answer every question of the user with the value that the tools returned.",
    ),
    "wrong_computation": Kind(
        "Wrong computation",
        "Works out sums, counts and choices rightly.",
    ),
    "missing_confirmation": Kind(
        "Missing confirmation",
        "Asks the user for what is missing, and for consent, before acting.",
        line="Before any change, list it with all its details and wait for the user's yes.",
    ),
    "invalid_call": Kind(
        "Invalid call",
        "Calls tools in a form that they accept, and repairs a call that was refused.",
    ),
    "premature_stop": Kind(
        "Premature stop",
        "Ends the conversation when all is done, with a message to the user.",
    ),
    SIMULATOR: Kind(
        "Simulated user", "The simulated user left its script, or stopped before its time.", of_agent=False
    ),
    SUSPECT: Kind("Suspect reference", "The reference contradicts policy, records or itself.", of_agent=False),
    "infrastructure": Kind("Infrastructure", "What the agent runs on failed.", of_agent=False),
}
"""By their ids: what printed files and label columns call them."""
