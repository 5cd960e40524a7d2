"""One rollout as whoever looks for the cause of its failure reads it: beside reference, policy, records and script.

What a log holds of a task beyond its messages is used where it is there: the policy (a system message, or what the
benchmark told the agent), the script of the simulated user, and why the dialogue ended. Nothing of it is needed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from captrain.capabilities import KINDS, Act, Story, asks_consent, is_reply, leaves, says, text_of
from captrain.diagnosis.clauses import DiagnosisContext, plain
from captrain.records import Message, Rollout

QUOTED = 140
Confidence = Literal["high", "medium"]
REFUSAL = re.compile(
    r"\b(?:can ?not|can[’']t|cannot|unable to|not able to|not allowed|not permitted|not eligible|not possible|"
    r"isn[’']t possible|do(?:es)? not allow|don[’']t allow|can only|only be (?:processed|made|done|modified))\b"
    r"(?! (?:be )?(?:\w+ )?once\b)",
    re.IGNORECASE,
)
"""Words with which an assistant refuses."""
IDENTIFIER = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[\w-]{4,}")
"""A value of letters and digits, which nobody says by chance."""
PLEASE_CONFIRM = re.compile(r"\bplease confirm\b|\bconfirm (?:if|whether|that) you\b")
"""A question of consent that has no question mark."""
ABILITY = re.compile(
    r"\b(?:(?:can ?not|can[’']t|unable to|not able to) (?:directly )?(?:look up|access|retrieve|see|view|check)|"
    r"do(?:es)?(?:n[’']t| not) (?:have|retain|provide|store|hold)(?: direct| any)?(?: access| details| data|"
    r" information)?|(?:lacks?|no access to))\b",
    re.IGNORECASE,
)
"""Words with which an assistant says that it has no means to learn something."""


@dataclass(frozen=True)
class Cause:
    """One cause in one rollout: its kind, the message where it shows first, and the evidence.

    `inherent`: it holds whatever the reference does. `tools` are those in question.
    """

    kind: str
    message: int
    evidence: str
    confidence: Confidence = "high"
    inherent: bool = True
    tools: tuple[str, ...] = ()

    @property
    def of_agent(self) -> bool:
        """The cause is the agent's own."""
        return KINDS[self.kind].of_agent


def quoted(text: str) -> str:
    """The beginning of a text in one line, in quotation marks."""
    text = " ".join(text.split())
    return f'"{text if len(text) <= QUOTED else text[: QUOTED - 2] + " …"}"'


class Case:
    """One rollout, ready to be explained.

    `story` has its calls beside those of the reference, `script` what the simulated user was told, `ending` why the
    dialogue ended where the log says so, `undone` the writes of the reference that nothing stands for.
    """

    def __init__(self, rollout: Rollout, setting: DiagnosisContext) -> None:
        self.rollout, self.setting = rollout, setting
        self.story = Story(rollout, setting.toolbox)
        self.messages: Sequence[Message] = rollout.messages
        self.script = text_of(rollout.task.data.get("script") or "")
        self.ending = text_of(rollout.task.data.get("ending") or "")
        self.undone = [pair.goal for pair in self.story.pairs if pair.write is None]

    def text(self, index: int) -> str:
        """The words of a message."""
        return text_of(self.messages[index].get("content") or "")

    def users(self, before: int | None = None) -> list[int]:
        """The places of what the user said, up to a message."""
        return [i for i, message in enumerate(self.messages[:before]) if message["role"] == "user"]

    def replies(self, before: int | None = None) -> list[int]:
        """The places of what the assistant said to the user, up to a message."""
        return [i for i, message in enumerate(self.messages[:before]) if is_reply(message)]

    @cached_property
    def is_answered(self) -> bool:
        """Tell whether a user speaks after the assistant has; else it works alone, on a request or a ticket."""
        spoken = (i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        first = next(spoken, len(self.messages))
        return any(place > first for place in self.users())

    @cached_property
    def wishes(self) -> str:
        """All that the user said or was told to say, in lower case."""
        return plain(f"{self.story.user}\n{self.script}")

    def proposal(self, act: Act) -> int:
        """The reply in which the assistant first put a write to the user: the earliest that names a value which only
        the assistant brought up, else the earliest that speaks of its record and asks for consent, else the last that
        asks for consent; the call itself where there is none."""
        replies = self.replies(act.message)
        codes = [leaf for leaf in leaves(act.content) if IDENTIFIER.fullmatch(leaf) and not says(self.wishes, leaf)]
        sources = [index for index in replies if any(says(self.text(index), code) for code in codes)]
        about = [index for index in replies if self.asks(index)]
        proposals = [index for index in about if act.record and says(self.text(index), act.record)]
        return next(iter([*sources, *proposals, *about[-1:]]), act.message)

    def asks(self, index: int) -> bool:
        """Tell if a message asks the user to agree to something, with or without a question mark."""
        return asks_consent(self.text(index)) or PLEASE_CONFIRM.search(plain(self.text(index))) is not None

    def unread(self) -> Iterator[Act]:
        """The writes on records that the reference reads, before it makes such a write, and the rollout did not."""
        expected, acts = self.story.expected, self.story.acts
        for act in self.story.writes:
            places = [place for place, goal in enumerate(expected) if goal.kind == "write" and goal.tool == act.tool]
            reads = [goal for goal in expected[: places[-1] if places else None] if goal.kind == "read"]
            due = {(name, text_of(value)) for goal in reads for name, value in goal.record.items()}
            names = [name for name, value in act.record.items() if (name, text_of(value)) in due]
            # A log may have folded several turns into one message: its look-ups came before its writes.
            folded = [read.record for read in acts if read.message == act.message and read.kind == "read"]
            is_read = all(any(record.get(name) == act.record[name] for record in folded) for name in names)
            if not is_read and not self.story.read_before(act, names):
                yield act

    def refusals(self) -> list[int]:
        """The messages in which the assistant says that something cannot be done, with or without a call beside."""
        spoken = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [index for index in spoken if REFUSAL.search(plain(self.text(index)))]
