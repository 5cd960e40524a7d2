"""Why rollouts fail: the table of causes, and the table of rules that name them.

Words used here: an *edit* is one change to a rollout, such as inserting a missing call. A *repair* is a set of edits
that makes a failed rollout pass. A *world* is the task's environment, opened again to replay a rollout with its edits.
A *sign* is a function that finds evidence in one edit or in the whole rollout. An *occasion* is a point where a rollout
could show a cause. A *root* comes before the symptoms that follow from it.

For each edit, captrain tries the rules for that kind of edit (`Edit.step`) in the order of their ranks. The first rule
whose sign matches names the cause. The last rule of each kind always matches. Rules without `steps` look at the whole
rollout. With a world, the edits are those that replay proved necessary. With only a reference, they are all differences
from it. Without either, features of passed rollouts take their place (`FEATURES`,
`captrain.capabilities.learnt_needs`).

To add a cause:
1. Write its entry in `CAUSES`. Its id is used in labels, reports, environments, adapters, tables and figures.
2. Write a sign in `edit_signs.py` or `log_signs.py`, and a `Rule` in `RULES` with a free rank at its place.
3. Add a case to `tests/diagnosis/test_causes.py` and the id with its title to `docs/concepts.md`.
4. To train it, add a template (see `docs/architecture.md`), or set `step` so that an environment can be derived.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal, NamedTuple

import captrain.capabilities.edit_signs as signs
import captrain.capabilities.log_signs as logs
import captrain.capabilities.occasions as occasions
from captrain.capabilities.edit_signs import Sign
from captrain.capabilities.log_signs import LogSign
from captrain.capabilities.occasions import NO_VALUES, Occasion, Vocabulary
from captrain.capabilities.view import Edit, RolloutView

SIMULATOR, SUSPECT, INFRASTRUCTURE = "user_simulator_fault", "suspect_reference", "infrastructure"
LIMIT = "harness_limit"
Occasions = Callable[[RolloutView, Vocabulary], Iterator[Occasion]]
STAGE = 100


class GoalPattern(NamedTuple):
    """Kind of the reference calls that a cause is about; environments for the cause are derived from them.

    `by_user` restricts it to arguments that the user states (True) or does not state (False).
    """

    kind: Literal["several", "order", "look-up", "write", "argument"]
    by_user: bool | None = None


@dataclass(frozen=True)
class Cause:
    """A cause of failure.

    Attributes:
        name: title in reports.
        description: one sentence on what an agent must do instead.
        na_evidence: evidence of the label NA.
        occasions: functions that find the occasions in a rollout. They also decide its label: LACKING if one
            went wrong.
        step: see `GoalPattern`; None if no reference call shows the cause.
        prompt_line: a line for the prompt that warns of the cause; "" if a warning does not help.
        of_agent: whether the agent is to blame.
        needs_values: whether the functions need the values that references tell users.
        further_occasions: functions that only find occasions, for causes whose label a rule decides.
        mistake: what an agent with this cause does.
        is_unreferenced: whether the occasions are found without a reference. Such an occasion alone shows a lapse, not
            the cause.
    """

    name: str
    description: str
    na_evidence: str = "a program cannot tell it from the reference"
    occasions: Sequence[Occasions] = ()
    step: GoalPattern | None = None
    prompt_line: str = ""
    of_agent: bool = True
    needs_values: bool = False
    further_occasions: Sequence[Occasions] = ()
    mistake: str = ""
    is_unreferenced: bool = False

    def find(self, view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
        """Return all occasions of a rollout."""
        return (occasion for find in self.occasions for occasion in find(view, values))

    def lapse(self, view: RolloutView, values: Vocabulary) -> Occasion | None:
        """Return the first occasion that went wrong; None if all went right."""
        return next((occasion for occasion in self.find(view, values) if occasion.lacking), None)


CAUSES = {
    INFRASTRUCTURE: Cause("Infrastructure", "What the agent runs on failed.", of_agent=False),
    SUSPECT: Cause("Suspect reference", "The reference contradicts policy, records or itself.", of_agent=False),
    SIMULATOR: Cause(
        "Simulated user", "The simulated user left its script, or stopped before its time.", of_agent=False
    ),
    LIMIT: Cause(
        "Limit of steps, time or tokens",
        "The rollout was stopped at a limit before the agent was done.",
        of_agent=False,
    ),
    "missing_lookup": Cause(
        "Missing look-up",
        "Makes the look-ups that a decision needs, and decides by what they show.",
        "no write on a record that the reference reads first",
        (occasions.missing_lookups, occasions.milestone_reads),
        GoalPattern("order"),
        "Before you say that something cannot be looked up, or act on it, try every tool that might show it.",
        mistake="acts without a look-up that it needs first",
    ),
    "incomplete_search": Cause(
        "Incomplete search",
        "Looks at all records that a request may mean, not only at the first.",
        prompt_line="When a request may concern any of several records, open all of them before you answer.",
        further_occasions=(occasions.reads_due,),
        mistake="looks at some records and misses the right one",
    ),
    "unverified_claim": Cause(
        "Unverified claim",
        "Checks what the user says against the records before acting on it.",
        prompt_line="Never act on what the user says of a record: read it first. Correct the user where it differs.",
        further_occasions=(occasions.missing_lookups,),
        mistake="acts on what the user says without checking it",
    ),
    "missing_confirmation": Cause(
        "Missing confirmation",
        "Asks the user for what is missing, and for consent, before acting.",
        "the reference asks nothing first",
        (occasions.first_question,),
        prompt_line="Before any change, list it with all its details and wait for the user's yes.",
        mistake="acts without asking the user first",
    ),
    "wrong_record": Cause(
        "Wrong record",
        "Acts on the record that the request means.",
        "no write on a record",
        (occasions.records,),
        GoalPattern("argument"),
        mistake="acts on the wrong record",
    ),
    "undue_compliance": Cause(
        "Undue compliance",
        "Declines what the policy forbids, even when the user asks for it.",
        "nothing to decline is known",
        (occasions.declined_requests, occasions.minefields),
        prompt_line="Before a change, name the rule that allows it and the record that meets it; decline if none does.",
        mistake="does something that the policy forbids",
    ),
    "wrong_operation": Cause(
        "Wrong operation",
        "Chooses the operation that the request and the record call for.",
        "no write on the right record that the reference does not read first",
        (occasions.operations,),
        GoalPattern("write"),
        mistake="chooses the wrong operation",
    ),
    "wrong_computation": Cause(
        "Wrong computation",
        "Works out sums, counts and choices rightly.",
        further_occasions=(occasions.values_of_writes,),
        step=GoalPattern("argument", by_user=False),
        mistake="computes a value wrongly",
    ),
    "wrong_argument": Cause(
        "Wrong argument",
        "Gives a call the values that the request, the records and the policy ask for.",
        "no write by the right tool, and no call that a milestone asks for",
        (occasions.values_of_writes, occasions.milestone_arguments),
        GoalPattern("argument"),
        mistake="gives a call the wrong value",
    ),
    "fabricated_fact": Cause(
        "Fabricated fact",
        "Names only what the user or a tool has said.",
        prompt_line="Use only identifiers and facts from a tool's result or from the user's words.",
        further_occasions=(occasions.calls,),
        mistake="uses a value that it made up",
    ),
    "extra_write": Cause(
        "Unneeded operation",
        "Changes nothing beyond what was asked for, and nothing twice.",
        "nothing was written",
        (occasions.extra_writes,),
        GoalPattern("write"),
        "Make each change once, and only those that the user asked for.",
        mistake="changes something that was not asked for",
    ),
    "invalid_call": Cause(
        "Invalid call",
        "Calls tools in a form that they accept, and repairs a call that was refused.",
        "no call was made",
        (occasions.invalid_calls,),
        GoalPattern("argument"),
        mistake="makes an invalid call and does not correct it",
        is_unreferenced=True,
    ),
    "partial_refusal": Cause(
        "Undue refusal",
        "Does what is asked for and allowed, and does not refuse it.",
        step=GoalPattern("write"),
        prompt_line="Before you refuse a request, name the rule that forbids it; if none does, do what was asked.",
        further_occasions=(occasions.writes_due,),
        mistake="refuses what it should do",
    ),
    "missing_write": Cause(
        "Omitted operation",
        "Carries out every operation of a request before closing.",
        "the reference changes nothing",
        (occasions.missing_writes, occasions.milestone_writes, occasions.milestone_states),
        GoalPattern("several"),
        "List the operations of a request, and do not close before each is done.",
        mistake="leaves out an operation",
    ),
    "missing_information": Cause(
        "Missing information",
        "Tells the user what was asked for, as the tools return it.",
        "the reference tells no value that tools return",
        (occasions.told_values, occasions.milestone_words),
        prompt_line="Before you close, answer every question of the user with the value that the tools returned.",
        needs_values=True,
        mistake="does not tell what was asked for",
    ),
    "loop": Cause(
        "Loop",
        "Goes on when a call has done its work, instead of repeating it.",
        prompt_line="When a call has succeeded, report the outcome; never repeat a call with the same arguments.",
        further_occasions=(occasions.calls,),
        mistake="repeats itself until it is cut off",
    ),
    "over_escalation": Cause(
        "Unneeded transfer",
        "Handles what it can handle itself, and says no where the answer is no, instead of transferring to a human.",
        "no transfer to a human, or the reference makes one, too",
        (occasions.hand_over,),
        prompt_line="Transfer to a human only what no tool of yours can do; where the policy says no, say no yourself.",
        mistake="transfers to a human what it could do itself",
    ),
    "missing_escalation": Cause(
        "Missing transfer",
        "Transfers to a human what it cannot handle.",
        "the reference makes no transfer to a human",
        (occasions.escalation,),
        prompt_line="Transfer to a human when the policy says so, with the tool for it.",
        mistake="does not transfer to a human when it should",
    ),
    "premature_stop": Cause(
        "Premature stop",
        "Ends the conversation when all is done, with a message to the user.",
        "it ends with a transfer to a human",
        (occasions.last_words,),
        mistake="stops before all is done",
        is_unreferenced=True,
    ),
    "reply_wording": Cause(
        "Reply wording",
        "Words the last message as the reference does, courtesy included.",
        "no last message, or one that lacks the information asked for",
        (occasions.reply_wording,),
        needs_values=True,
        mistake="words its last message differently from the reference",
    ),
}
"""Cause by id. Roots come before the symptoms that follow from them."""


def titled(name: str) -> str:
    """Return the id and the title of a cause; only the id if it is not in the registry."""
    return f"{name} ({CAUSES[name].name})" if name in CAUSES else name


class Grade(StrEnum):
    """How sure a verdict is, the surest first. A verdict of grade `OBSERVED` is not counted as a cause, only listed."""

    PROVEN = "proven"
    """A replay passes with the repair and fails without it."""
    TRACED = "traced"
    """A difference from the reference, a milestone or a policy clause. The log shows the record and the value."""
    CONTRAST = "contrast"
    """Passed rollouts do it significantly more often than failed ones, after Holm's correction."""
    RECORDED = "recorded"
    """The log states it: an error, a limit, or a mark of the simulated user."""
    OBSERVED = "observed"
    """It happened, but nothing shows that it cost the reward."""


@dataclass(frozen=True)
class Verdict:
    """A cause in one rollout, with the index of the first message that shows it, the evidence, and its grade.

    `rank` is the rank of the rule that named it. `is_inherent` says that the verdict does not rely on the reference, so
    it stays if the reference is suspect. `tools` are the tools concerned.
    """

    cause: str
    message: int
    evidence: str
    grade: Grade = Grade.TRACED
    rank: int = 0
    is_inherent: bool = True
    tools: tuple[str, ...] = ()

    @property
    def stage(self) -> int:
        """0 for roots, higher for causes that show only at the end of a rollout and may follow from earlier ones."""
        return self.rank // STAGE

    @property
    def of_agent(self) -> bool:
        """Whether the agent is to blame."""
        return CAUSES[self.cause].of_agent


@dataclass(frozen=True)
class Rule:
    """A way to recognise a cause.

    Attributes:
        cause: id of the cause.
        rank: the only precedence. Among an edit's rules, the lowest rank names the cause. Among a rollout's verdicts,
            lower stages (the hundreds of the rank) come first, then earlier messages, then lower ranks.
        steps: the kinds of edits that the rule is for (`Edit.step`).
        sign: finds evidence in an edit.
        log_sign: finds evidence in the whole rollout, for rules without steps.
        is_inherent: whether its verdicts hold without the reference.
        grade: grade of its verdicts that no replay proves.
        is_traced: whether the sign itself checks where the values come from.
    """

    cause: str
    rank: int
    steps: tuple[str, ...] = ()
    sign: Callable[[RolloutView, Edit], Sign] | None = None
    log_sign: Callable[[RolloutView], Iterator[LogSign]] | None = None
    is_inherent: bool = False
    grade: Grade = Grade.TRACED
    is_traced: bool = False

    def applies(self, view: RolloutView, edit: Edit | None) -> Verdict | None:
        """The verdict on an edit of the rule's steps, or with None on the whole rollout."""
        found: LogSign | None = None
        if edit is None:
            found = min(self.log_sign(view), default=None) if self.log_sign else None
        elif self.sign is not None and (shown := self.sign(view, edit)) is not None:
            found = *shown, edit.tools
        if found is None:
            return None
        message, evidence, tools = found
        message = min(message, max(0, len(view.messages) - 1))
        grade = self._grade(view, edit, tools)
        return Verdict(self.cause, message, evidence, grade, self.rank, self.is_inherent, tools)

    def _grade(self, view: RolloutView, edit: Edit | None, tools: tuple[str, ...]) -> Grade:
        """Return the grade of a verdict of this rule. It is `OBSERVED` if it is unknown what one of its tools does."""
        if edit is not None and view.repair.proven:
            return Grade.PROVEN
        is_known = all(view.toolbox.kind(tool) != "unknown" for tool in tools)
        is_sure = is_known and (edit is None or self.is_traced or view.is_traced(edit))
        return self.grade if is_sure else Grade.OBSERVED


def unmet(find: Occasions) -> Callable[[RolloutView], Iterator[LogSign]]:
    """Return a sign that yields the first unmet milestone among the occasions of `find`."""

    def sign(view: RolloutView) -> Iterator[LogSign]:
        for occasion in find(view, NO_VALUES):
            if occasion.lacking:
                yield occasion.message, occasion.evidence, occasion.tools
                return

    return sign


WRITE, READ, USER, TRANSFER = ("insert write",), ("insert read",), ("insert step of user",), ("insert handover",)
REPLACE, DROP, DROP_TRANSFER, SAY, END = ("replace",), ("drop",), ("drop handover",), ("say",), ("end",)
ALL = (*WRITE, *READ, *USER, *TRANSFER, *REPLACE, *DROP, *DROP_TRANSFER, *SAY, *END)
RULES = (
    # 0: roots
    Rule(SIMULATOR, 1, ALL, signs.left_at_once),
    Rule("missing_lookup", 2, WRITE + READ + USER + TRANSFER + SAY + END, signs.did_nothing, is_traced=True),
    Rule("invalid_call", 3, WRITE, signs.left_as_text),
    Rule("over_escalation", 4, WRITE, signs.handed_over_blind),
    Rule("wrong_argument", 5, WRITE, signs.record_mistyped),
    Rule("missing_lookup", 6, WRITE, signs.record_never_opened),
    Rule("wrong_record", 7, WRITE, signs.record_mistaken),
    Rule("incomplete_search", 8, WRITE, signs.records_left_out),
    Rule("extra_write", 9, DROP, signs.made_again),
    Rule("missing_lookup", 10, DROP, signs.changed_unread),
    Rule("fabricated_fact", 11, REPLACE, signs.record_invented, is_traced=True),
    Rule("wrong_record", 12, REPLACE, signs.record_confused),
    Rule("extra_write", 13, REPLACE, signs.items_added),
    Rule("missing_write", 14, REPLACE, signs.items_left_out),
    Rule("fabricated_fact", 15, REPLACE, signs.value_invented, is_traced=True),
    Rule("missing_lookup", 16, WRITE + REPLACE + DROP + SAY, partial(signs.value_not_shown, is_alike=False)),
    Rule("incomplete_search", 17, WRITE + REPLACE + DROP + SAY, partial(signs.value_not_shown, is_alike=True)),
    Rule("wrong_computation", 20, SAY, signs.number_miscalculated),
    Rule(SIMULATOR, 21, WRITE + REPLACE + SAY, signs.left_early),
    Rule("missing_lookup", 23, READ, partial(signs.lookup_skipped, is_alike=False)),
    Rule("incomplete_search", 24, READ, partial(signs.lookup_skipped, is_alike=True)),
    Rule("wrong_operation", 25, DROP, signs.operation_swapped),
    Rule("wrong_operation", 27, WRITE, signs.operation_mistaken),
    Rule("wrong_record", 28, WRITE, signs.record_treated_twice),
    Rule("wrong_operation", 29, WRITE, signs.record_locked),
    Rule("invalid_call", 30, WRITE, signs.attempt_refused),
    Rule("undue_compliance", 31, DROP, signs.breaks_policy),
    Rule("wrong_argument", 32, REPLACE, signs.breaks_policy),
    Rule("undue_compliance", 33, DROP, signs.asked_by_user),
    Rule("missing_lookup", 39, REPLACE, signs.changed_unread, is_traced=True),
    Rule("undue_compliance", 40, DROP, signs.proposed_to_user),
    Rule("wrong_argument", 42, REPLACE, signs.value_wrong),
    Rule("extra_write", 43, DROP, signs.not_in_reference),
    Rule(SIMULATOR, 50, log_sign=logs.slipped, is_inherent=True, grade=Grade.RECORDED),
    Rule("missing_lookup", 54, log_sign=logs.means_denied, is_inherent=True),
    Rule("missing_lookup", 55, log_sign=unmet(occasions.milestone_reads)),
    Rule("unverified_claim", 56, log_sign=logs.written_on_claim, is_inherent=True),
    Rule("unverified_claim", 57, log_sign=logs.unproven, is_inherent=True),
    Rule("unverified_claim", 59, log_sign=logs.standing_repeated, is_inherent=True),
    Rule("undue_compliance", 60, log_sign=logs.forbidden_writes, is_inherent=True),
    Rule("undue_compliance", 62, log_sign=unmet(occasions.minefields)),
    Rule("wrong_argument", 63, log_sign=logs.forbidden_values, is_inherent=True),
    Rule("wrong_argument", 64, log_sign=unmet(occasions.milestone_arguments)),
    # 1: loops
    Rule("loop", 100, END, signs.called_again, is_inherent=True),
    Rule("loop", 101, log_sign=logs.looped_to_the_end, is_inherent=True),
    # 2: what was not done by the end
    Rule("partial_refusal", 200, WRITE, signs.refused_by_agent),
    Rule("missing_write", 201, WRITE, signs.left_out),
    Rule("missing_write", 202, log_sign=unmet(occasions.milestone_writes)),
    Rule("missing_write", 203, log_sign=unmet(occasions.milestone_states)),
    Rule("missing_information", 204, SAY, signs.not_told),
    Rule("missing_information", 205, log_sign=unmet(occasions.milestone_words)),
    Rule("missing_escalation", 206, TRANSFER, signs.never_made),
    Rule("missing_write", 207, USER, signs.never_made),
    Rule(LIMIT, 208, END, signs.limited, grade=Grade.RECORDED),
    Rule("premature_stop", 209, END, signs.cut_off, grade=Grade.OBSERVED),
    # 3: handed over
    Rule("over_escalation", 300, WRITE + SAY, signs.handed_over_instead),
    Rule("over_escalation", 301, DROP_TRANSFER, signs.transfer_undue),
    Rule("over_escalation", 302, log_sign=logs.transfer_not_due, is_inherent=True),
)
"""All rules, in the order of their ranks."""
FINDERS = tuple(
    dict.fromkeys(find for cause in CAUSES.values() for find in (*cause.occasions, *cause.further_occasions))
)
"""All functions that find occasions. Several causes share some."""
LOG_RULES = tuple(rule for rule in RULES if rule.log_sign)
"""The rules for whole rollouts."""
RULES_OF_STEP = {step: tuple(rule for rule in RULES if step in rule.steps) for step in ALL}
"""Those that look at an edit, by its kind of step."""
FEATURES: dict[tuple[str, ...], str] = {
    ("after", "write", "read"): "missing_lookup",
    ("same", "write", "read"): "missing_lookup",
    ("before", "read"): "missing_lookup",
    ("asked", "write"): "missing_write",
    ("followed", "write"): "missing_write",
    ("called", "write"): "missing_write",
    ("asked", "handover"): "missing_escalation",
    ("followed", "handover"): "missing_escalation",
    ("described",): "wrong_record",
    ("sourced",): "fabricated_fact",
    ("once", "write"): "extra_write",
    ("once",): "loop",
    ("repaired",): "invalid_call",
}
"""For rollouts without a reference: feature that passed rollouts have -> cause of a failed rollout that lacks it. A key
has the kind of the feature and the kinds of its tools."""
EXCESSES: dict[tuple[str, ...], str] = {
    ("called", "write"): "extra_write",
    ("called", "handover"): "over_escalation",
    ("sourced", "write"): "wrong_computation",
}
"""Feature that passed rollouts lack -> cause of a failed rollout that has it. For example, passed rollouts compute a
value, and the failed one copies it from an earlier message: the value is computed wrongly."""


def possible_causes(view: RolloutView) -> set[str]:
    """The causes that a rollout could show: those with an occasion in it."""
    arising = {find for find in FINDERS if next(find(view, NO_VALUES), None) is not None}
    return {
        slug for slug, cause in CAUSES.items() if not arising.isdisjoint((*cause.occasions, *cause.further_occasions))
    }
