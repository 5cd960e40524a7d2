"""Why a rollout failed: one primary cause, the secondary ones apart, or nothing that the log proves.

The finders do not know the outcome: those of a passed rollout find lapses that cost nothing, and the contrast between
failed and passed rollouts needs them. The primary cause is the earliest in the dialogue; what follows from an earlier
one is secondary. With a suspect reference only what holds by itself is charged to the agent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from captrain.capabilities import KINDS, SIMULATOR, SUSPECT, slip_of
from captrain.diagnosis.case import Case
from captrain.diagnosis.cause import Cause
from captrain.diagnosis.conduct import (
    fabricated_facts,
    invalid_calls,
    is_asked_for,
    loops,
    miscopied_identifiers,
    missing_lookup,
    over_escalation,
    undue_compliance,
    unread_needs,
    unverified_claims,
    wholes_for_parts,
)
from captrain.diagnosis.deviations import milestones, wrong_writes
from captrain.diagnosis.omissions import (
    abandoned,
    endings,
    hollow_reports,
    missing_information,
    undone_writes,
    withheld,
)
from captrain.diagnosis.searches import searches
from captrain.diagnosis.surplus import extra_writes
from captrain.diagnosis.suspects import is_foreign, is_reference_alone, suspicions
from captrain.diagnosis.user_tools import unasked_steps

Finder = Callable[[Case], Iterator[Cause]]
FINDERS: tuple[Finder, ...] = (
    loops,
    undue_compliance,
    wholes_for_parts,
    unverified_claims,
    missing_lookup,
    fabricated_facts,
    miscopied_identifiers,
    searches,
    over_escalation,
    wrong_writes,
    extra_writes,
    undone_writes,
    unasked_steps,
    hollow_reports,
    missing_information,
    invalid_calls,
    endings,
    milestones,
)
UNREAD = ("missing_lookup", "unverified_claim", "incomplete_search")
"""What may come of an identifier that the user does not give."""
UNREFERENCED = ("loop", "undue_compliance", "fabricated_fact")
"""What is told without looking at the reference."""
SEQUELS = ("extra_write", "partial_refusal", "fabricated_fact", "missing_escalation")
"""What an agent that has gone wrong does next, more often than not because of it: told only where it comes first."""
OMISSIONS = ("missing_write", "missing_information", "premature_stop")
"""What was left undone shows at the end alone: anything before it may be why."""


@dataclass(frozen=True)
class Explanation:
    """What explains a rollout: its causes, the primary one first; and what speaks against its reference."""

    causes: tuple[Cause, ...]
    suspicions: tuple[str, ...]

    @property
    def primary(self) -> Cause | None:
        """The cause that came first, None where nothing explains the rollout."""
        return self.causes[0] if self.causes else None

    @property
    def of_agent(self) -> tuple[Cause, ...]:
        """The causes that are the agent's."""
        return tuple(cause for cause in self.causes if cause.of_agent)

    @property
    def spoilt(self) -> Cause | None:
        """The primary cause, where it is not the agent's: the rollout says nothing of it."""
        return self.primary if self.primary and not self.primary.of_agent else None


def _is_of_loop(cause: Cause, repeated: set[str]) -> bool:
    """Whether a cause says no more than that a call was repeated without end."""
    return cause.kind == "premature_stop" or (cause.kind == "extra_write" and {*cause.tools} <= repeated)


def _unburdened(case: Case, causes: list[Cause]) -> list[Cause]:
    """Without what the agent could not do, where the simulated user kept from it what its script gives."""
    denial = withheld(case)
    if denial is None:
        return causes
    return [cause for cause in causes if cause.kind not in (*OMISSIONS, *UNREAD)] + [denial]


def explain(case: Case) -> Explanation:
    """Find what explains a rollout."""
    against = tuple(dict.fromkeys(suspicions(case)))
    causes = [cause for finder in FINDERS for cause in finder(case) if cause.inherent or not against]
    if is_foreign(case):
        causes = [cause for cause in causes if cause.kind in UNREFERENCED]
    if any(cause.kind == "loop" for cause in causes):
        repeated = {tool for cause in causes if cause.kind == "loop" for tool in cause.tools}
        causes = [cause for cause in causes if not _is_of_loop(cause, repeated)]
    slip = slip_of(case.rollout)
    end = abandoned(case) if slip is None else Cause(SIMULATOR, slip[0], slip[1], inherent=False)
    if end is not None:
        causes.append(end)
        if all(cause.kind in OMISSIONS or not cause.of_agent for cause in causes):
            causes = [cause for cause in causes if cause.kind not in OMISSIONS]
    elif not against:
        # Who leaves early may leave before the look-up.
        causes.extend(unread_needs(case))
    causes = _unburdened(case, causes)
    earliest: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda cause: (cause.kind in OMISSIONS, cause.message)):
        earliest.setdefault(cause.kind, cause)
    of_agent = {kind for kind in earliest if KINDS[kind].of_agent}
    handover = earliest.get("over_escalation")
    if handover and any(earliest[kind].message < handover.message for kind in of_agent) and is_asked_for(case):
        earliest.pop("over_escalation")
    if of_agent and next(iter(earliest)) in of_agent - {*OMISSIONS}:
        # A user who gives up on an agent that has gone wrong says nothing more.
        earliest.pop(SIMULATOR, None)
    first = next((kind for kind in earliest if kind in of_agent), None)
    for kind in SEQUELS:
        if first and kind in earliest and earliest[kind].message > earliest[first].message:
            earliest.pop(kind)
    if against and SIMULATOR not in earliest and (not of_agent or is_reference_alone(case, of_agent)):
        reference = Cause(SUSPECT, case.story.last, against[0])
        earliest.pop("over_escalation", None)
        return Explanation((reference, *earliest.values()), against)
    return Explanation(tuple(earliest.values()), against)
