"""The families of divergence: in which ways a rollout can go wrong beside its reference, each a candidate capability.

Each family yields one finding for each occasion on which a rollout exercised it. A mismatch is charged to one family:
a wrong record says nothing against completion or argument values, another operation on the right record is a wrong
decision, a write that was never begun is no write left out of several. One write may show two lacks at once only where
it really does, such as a write on the wrong record that was not read either. Where the reference offers no occasion, as
benchmarks' references often have no closing words, a family has nothing to say.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from captrain.capabilities.alignment import Finding, Story
from captrain.capabilities.conversation import (
    clarification,
    closing,
    escalation,
    information,
    initial_lookup,
    reply_wording,
    valid_calls,
)
from captrain.capabilities.milestones import call_arguments, needed_calls, reached_state, told_outcome, withheld_acts
from captrain.capabilities.operations import (
    argument_precision,
    carrying_out,
    declining_requests,
    derived_arguments,
    multi_step_completion,
    named_record,
    no_extra_writes,
    operation_choice,
    precondition_verification,
    record_selection,
)
from captrain.capabilities.vocabulary import Vocabulary

Finder = Callable[[Story, Vocabulary], Iterator[Finding]]


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
        Family(
            "Named record",
            "Acts on the record that the user names.",
            "no write on a record that the user names",
            named_record,
        ),
        Family(
            "Operation choice",
            "Chooses the operation that a request calls for.",
            "no write on the right record that the reference does not read first",
            operation_choice,
        ),
        Family(
            "Carrying out",
            "Makes a change that is asked for and allowed, and does not refuse, give up or hand over instead.",
            "the reference changes nothing",
            carrying_out,
        ),
        Family(
            "Derived arguments",
            "Works out from records and policy the values that the user does not say.",
            "no write with a value that the user has not said",
            derived_arguments,
        ),
        Family(
            "Declining requests",
            "Leaves undone what policy or records do not allow, even when the user asks for it.",
            "nothing to decline is known",
            declining_requests,
        ),
        Family("Needed calls", "Calls the tools that a task needs.", "no milestone asks for a call", needed_calls),
        Family(
            "Call arguments",
            "Gives a needed call the right arguments.",
            "no call that a milestone asks for",
            call_arguments,
        ),
        Family(
            "Reached state",
            "Brings the records into the state asked for.",
            "no milestone asks for a state",
            reached_state,
        ),
        Family("Told outcome", "Tells the user the outcome.", "no milestone asks for words to the user", told_outcome),
        Family(
            "Withheld acts", "Does not act where a task cannot be done.", "nothing is to be left out", withheld_acts
        ),
        Family("Valid calls", "Calls tools in a form that they accept.", "no call was made", valid_calls),
        Family(
            "Closing",
            "Ends the conversation when all is done.",
            "the reference shows no other ending than a hand-over",
            closing,
        ),
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
