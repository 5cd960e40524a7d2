"""The registry of causes: why rollouts fail, and so which capabilities an agent may lack.

One entry a cause, by the id that labels, printed causes, environments, adapters, tables and figures all use. An entry
stands before those that it may bring about: what was not looked up before what was changed wrongly, and that before how
the dialogue ended; a change that is not allowed before its values, which do not matter then. Of two causes at one
message the one that stands first is the root. A mismatch is charged to one cause: a wrong record says nothing against
completion or argument values, another operation on the right record is a wrong decision. Finders are blind to the
outcome; where a rollout gives no occasion for a cause, they find nothing, and the label is NA.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from captrain.capabilities.alignment import Finding, Story
from captrain.capabilities.finders import (
    BY_MILESTONES,
    Vocabulary,
    declined_requests,
    escalation,
    extra_writes,
    first_question,
    hand_over,
    invalid_calls,
    last_words,
    missing_lookups,
    missing_writes,
    operations,
    records,
    reply_wording,
    told_values,
    values_of_writes,
)

Finder = Callable[[Story, Vocabulary], Iterator[Finding]]
SIMULATOR, SUSPECT, INFRASTRUCTURE = "user_simulator_fault", "suspect_reference", "infrastructure"


class Step(NamedTuple):
    """Steps of a reference that a cause is about, so that an environment can be derived: which calls, and of arguments
    whether the user says them."""

    kind: Literal["several", "order", "look-up", "write", "argument"]
    by_user: bool | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of cause.

    name: for a reader. description: one sentence of what an agent must do instead. absent: the evidence of the label
    NA. finders: together they find the occasions of a story, lacking or present. step: see `Step`; None where no call
    of a reference shows the cause. line: what a line in the prompt can say against it, "" where words are not what is
    missing. of_agent: the agent's own. by_values: findings depend on the values that references tell users.
    """

    name: str
    description: str
    absent: str = "no program finds it beside a reference"
    finders: Sequence[Finder] = ()
    step: Step | None = None
    line: str = ""
    of_agent: bool = True
    by_values: bool = False

    def find(self, story: Story, values: Vocabulary) -> list[Finding]:
        """All occasions of a story."""
        return [finding for finder in self.finders for finding in finder(story, values)]


KINDS = {
    INFRASTRUCTURE: Kind("Infrastructure", "What the agent runs on failed.", of_agent=False),
    SUSPECT: Kind("Suspect reference", "The reference contradicts policy, records or itself.", of_agent=False),
    SIMULATOR: Kind(
        "Simulated user", "The simulated user left its script, or stopped before its time.", of_agent=False
    ),
    "missing_lookup": Kind(
        "Missing look-up",
        "Makes the look-ups that a decision needs, and decides by what they show.",
        "no write on a record that the reference reads first",
        (missing_lookups, *BY_MILESTONES["missing_lookup"]),
        Step("order"),
        "Before you say that something cannot be looked up, or act on it, try every tool that might show it.",
    ),
    "incomplete_search": Kind(
        "Incomplete search",
        "Looks at all records that a request may mean, not only at the first.",
        line="When a request may concern any of several records, open all of them before you answer.",
    ),
    "unverified_claim": Kind(
        "Unverified claim",
        "Checks what the user says against the records before acting on it.",
        line="Never act on what the user says of a record: read it first, and correct the user where it differs.",
    ),
    "missing_confirmation": Kind(
        "Missing confirmation",
        "Asks the user for what is missing, and for consent, before acting.",
        "the reference asks nothing first",
        (first_question,),
        line="Before any change, list it with all its details and wait for the user's yes.",
    ),
    "wrong_record": Kind(
        "Wrong record",
        "Acts on the record that the request means.",
        "no write on a record",
        (records,),
        Step("argument"),
    ),
    "undue_compliance": Kind(
        "Undue compliance",
        "Declines what the policy forbids, even when the user asks for it.",
        "nothing to decline is known",
        (declined_requests, *BY_MILESTONES["undue_compliance"]),
        line="Before any change, name the rule that allows it and the record that meets it; if there is none, decline.",
    ),
    "wrong_operation": Kind(
        "Wrong operation",
        "Chooses the operation that the request and the record call for.",
        "no write on the right record that the reference does not read first",
        (operations,),
        Step("write"),
    ),
    "wrong_computation": Kind(
        "Wrong computation", "Works out sums, counts and choices rightly.", step=Step("argument", by_user=False)
    ),
    "wrong_argument": Kind(
        "Wrong argument",
        "Gives a call the values that the request, the records and the policy ask for.",
        "no write by the right tool, and no call that a milestone asks for",
        (values_of_writes, *BY_MILESTONES["wrong_argument"]),
        Step("argument"),
    ),
    "fabricated_fact": Kind(
        "Fabricated fact",
        "Names only what the user or a tool has said.",
        line="Use only identifiers and facts that stand in a tool's result or in the user's words.",
    ),
    "extra_write": Kind(
        "Unneeded operation",
        "Changes nothing beyond what was asked for, and nothing twice.",
        "nothing was written",
        (extra_writes,),
        Step("write"),
        "Make each change once, and only those that the user asked for.",
    ),
    "invalid_call": Kind(
        "Invalid call",
        "Calls tools in a form that they accept, and repairs a call that was refused.",
        "no call was made",
        (invalid_calls,),
        Step("argument"),
    ),
    "partial_refusal": Kind(
        "Undue refusal",
        "Does what is asked for and allowed, and does not refuse it.",
        step=Step("write"),
        line="Before you refuse a request, name the rule that forbids it; if there is none, carry the request out.",
    ),
    "missing_write": Kind(
        "Omitted operation",
        "Carries out every operation of a request before closing.",
        "the reference changes nothing",
        (missing_writes, *BY_MILESTONES["missing_write"]),
        Step("several"),
        "List the operations of a request, and do not close before each is done.",
    ),
    "missing_information": Kind(
        "Missing information",
        "Tells the user what was asked for, as the tools return it.",
        "the reference tells no value that tools return",
        (told_values, *BY_MILESTONES["missing_information"]),
        line="Before you close, answer every question of the user with the value that the tools returned.",
        by_values=True,
    ),
    "loop": Kind(
        "Loop",
        "Goes on when a call has done its work, instead of repeating it.",
        line="When a call has succeeded, report the outcome; never repeat a call with the same arguments.",
    ),
    "over_escalation": Kind(
        "Undue hand-over",
        "Handles what it can handle itself, and says no where the answer is no, instead of handing over.",
        "nothing is handed over, or that is due",
        (hand_over,),
        line="Hand over only what no tool of yours can do; where the policy says no, say no yourself.",
    ),
    "missing_escalation": Kind(
        "Missing hand-over",
        "Hands over what it cannot handle.",
        "the reference hands nothing over",
        (escalation,),
        line="Hand over when the policy says so, by the tool that does it.",
    ),
    "premature_stop": Kind(
        "Premature stop",
        "Ends the conversation when all is done, with a message to the user.",
        "it ends with a hand-over",
        (last_words,),
    ),
    "reply_wording": Kind(
        "Reply wording",
        "Words the last message as the reference does, courtesy included.",
        "no last message, or one that lacks the information asked for",
        (reply_wording,),
        by_values=True,
    ),
}
"""By id, roots before what they bring about."""
