"""A language model as analyst, behind any OpenAI-compatible endpoint.

It sees messages and tool schemas, never a task's data or a reference solution. To discover, it reads a few failed and a
few passed rollouts of each run's sample, with their outcomes, and proposes what makes the difference. One more question
merges the proposals of all runs, so that every run labels the same pool and runs can be compared. To label, it reads
one rollout at a time, once in each run, and is *not* told the outcome: a verdict that follows the outcome would make
every candidate look like the cause.

Answers are checked against the question (`Question.check`). An answer that omits a capability, invents one or points
outside the rollout is asked for again, so that no label is lost, doubled or made up.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from string import Template
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.compaction import compact, fenced, line_of, rendered
from captrain.contract import calls_of
from captrain.models import Question, StructuredAnswers
from captrain.records import Capability, JsonObject, Label, Rollout, Verdict
from captrain.run import Count, ModelAccess, row_names

SLUG = re.compile(r"[a-z][a-z0-9_]{1,59}")
RESERVED = {"base", "idle", "trace", "target", *row_names()}
"""Names of other arms of the evaluation: a capability's id names an arm, too."""
LONGEST = 500
"""Most characters of a description: every labelling question quotes it."""


class Answer(BaseModel):
    """Base of what the model answers with; docstrings and fields are told to it in the schema."""

    model_config = ConfigDict(extra="forbid")


class Place(Answer):
    """One message of one rollout."""

    rollout: int
    message: int


class Proposal(Answer):
    """A capability that the agent lacks."""

    name: str
    description: str
    evidence: list[Place]


class Discovery(Answer):
    """Capabilities that the agent lacks, those that explain the most failures first."""

    capabilities: list[Proposal]


class Group(Answer):
    """Proposals of the same capability, by their numbers."""

    members: list[int]
    name: str
    description: str


class Merging(Answer):
    """Groups that hold every proposal exactly once."""

    groups: list[Group]


class Judgement(Answer):
    """The label of one capability. The reason comes before the verdict that follows from it."""

    capability: str
    evidence: str
    message: int | None
    verdict: Verdict


class Labelling(Answer):
    """One label for each capability."""

    labels: list[Judgement]


class OpenAIAnalyst:
    """Asks a language model for the capabilities that an agent lacks, and for every label.

    Args:
        access: where and how fast to ask the model; None allows only cached answers.
        name: of the model at its endpoint; in name@revision the revision only identifies it.
        temperature: sampling temperature; at 0 the runs say little about how certain a label is.
        max_tokens: of one answer.
        failed: failed rollouts in a discovery question.
        passed: passed rollouts in a discovery question.
        proposals: most capabilities in a discovery answer.
        characters: of one rollout; longer texts are shortened.
        discovery_characters: the same in a discovery question, which shows many rollouts; null: as many.
    """

    deterministic = False

    def __init__(
        self,
        access: ModelAccess | None = None,
        *,
        name: Annotated[str, Field(min_length=1)],
        temperature: Annotated[float, Field(ge=0)],
        max_tokens: Count,
        failed: Count = 4,
        passed: Count = 4,
        proposals: Count = 8,
        characters: Count = 16000,
        discovery_characters: Count | None = None,
    ) -> None:
        self._answers = StructuredAnswers(access, name=name, temperature=temperature, max_tokens=max_tokens)
        self.failed, self.passed, self.proposals, self.characters = failed, passed, proposals, characters
        self.discovery_characters = discovery_characters or characters

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of answers and tokens used so far, cached or not. They are the same when a run is replayed."""
        tally = self._answers.usage
        return {name: getattr(tally, name) for name in ("answers", "prompt_tokens", "completion_tokens")}

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """Propose from each sample, and merge to one list for all. `details` has the tools in the evidence."""
        offered = {tool["function"]["name"] for tool in tools}
        excerpts: list[list[Rollout]] = []
        questions: list[Question[Discovery]] = []
        for run, sample in enumerate(samples):
            # The first distinct rollouts of each outcome, in the order drawn.
            distinct = {rollout.id: rollout for rollout in sample}.values()
            failed = [rollout for rollout in distinct if rollout.outcome == "failed"][: self.failed]
            excerpts.append(failed + [rollout for rollout in distinct if rollout.outcome == "passed"][: self.passed])
            texts = [
                fenced("rollout", _read(rollout, self.discovery_characters), number=number, outcome=rollout.outcome)
                for number, rollout in enumerate(excerpts[-1], start=1)
            ]
            lengths = [len(rollout.messages) for rollout in excerpts[-1]]
            check = partial(_wrong_proposals, lengths, self.proposals)
            system = _prompt("discovery", tools, most=self.proposals)
            questions.append(Question(system, "\n\n".join(texts), Discovery, draw=run, check=check))
        proposals: list[tuple[Proposal, set[str]]] = []
        for rollouts, answer in zip(excerpts, self._answers.ask(questions, "discovery"), strict=True):
            for proposal in answer.capabilities:
                # The target's tools that the evidence calls or that answer in it.
                messages = [rollouts[place.rollout - 1].messages[place.message] for place in proposal.evidence]
                names = {name for message in messages for name, _ in calls_of(message)}
                names |= {message.get("name", "") for message in messages if message["role"] == "tool"}
                proposals.append((proposal, names & offered))
        return [self._merged(proposals)] * len(samples)

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """See `Analyst.label`: one question for each rollout in each run, over all its capabilities."""
        texts = {request.rollout.id: request.rollout for request in requests}
        texts = {name: fenced("rollout", _read(rollout, self.characters)) for name, rollout in texts.items()}
        questions: list[Question[Labelling]] = []
        systems: dict[tuple[str, ...], str] = {}
        for request in requests:
            ids = tuple(capability.id for capability in request.capabilities)
            if ids and ids not in systems:
                lines = [f"- {entry.id} ({entry.name}): {entry.description}" for entry in request.capabilities]
                listing = fenced("capabilities", "\n".join(lines))
                systems[ids] = _prompt("labelling", tools, capabilities=listing)
            if ids:
                text, check = texts[request.rollout.id], partial(_wrong_labels, ids, len(request.rollout.messages))
                questions.append(Question(systems[ids], text, Labelling, draw=request.run, check=check))
        answers = iter(self._answers.ask(questions, "labels"))
        judgements = [next(answers).labels if request.capabilities else [] for request in requests]
        labels = [
            {
                row.capability: Label(verdict=row.verdict, evidence=row.evidence.strip(), message=row.message)
                for row in rows
            }
            for rows in judgements
        ]
        return [
            {capability.id: row[capability.id] for capability in request.capabilities}
            for request, row in zip(requests, labels, strict=True)
        ]

    def _merged(self, proposals: Sequence[tuple[Proposal, set[str]]]) -> list[Capability]:
        """Merge the proposals of all runs to distinct capabilities, by one question."""
        if not proposals:
            return []
        lines = [
            line_of({"number": number, "name": proposal.name, "description": proposal.description})
            for number, (proposal, _) in enumerate(proposals, start=1)
        ]
        check = partial(_wrong_groups, len(proposals))
        question = Question(_prompt("merging"), fenced("proposals", "\n".join(lines)), Merging, check=check)
        (merging,) = self._answers.ask([question], "merging")
        return [
            Capability(
                id=slug_of(group.name),
                name=_line(group.name),
                description=_line(group.description),
                details={"tools": sorted({tool for member in group.members for tool in proposals[member - 1][1]})},
            )
            for group in merging.groups
        ]


def _read(rollout: Rollout, characters: int) -> str:
    return rendered(compact(rollout.messages, characters))


def slug_of(name: str) -> str:
    """Return the id of a capability with this name; "" if the name cannot be an id."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return slug if SLUG.fullmatch(slug) and slug not in RESERVED else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def _is_named(candidate: Proposal | Group) -> bool:
    return bool(slug_of(candidate.name)) and 0 < len(_line(candidate.description)) <= LONGEST


def _prompt(name: str, tools: Sequence[JsonObject] = (), **values: object) -> str:
    text = files("captrain").joinpath(f"capabilities/prompts/{name}.md").read_text(encoding="utf-8")
    schemas = "\n".join(line_of(tool["function"]) for tool in tools)
    return Template(text).substitute(values, tools=fenced("tools", schemas))


# The model reads these refusals among its instructions. They must not quote its answer: a rollout may have put words
# into it.


def _wrong_proposals(lengths: Sequence[int], most: int, answer: Discovery) -> str | None:
    """Return why proposals from rollouts of these lengths are invalid; None if they are valid."""
    if len(answer.capabilities) > most:
        return f"{len(answer.capabilities)} capabilities are proposed, at most {most} were asked for"
    for number, proposal in enumerate(answer.capabilities, start=1):
        if not _is_named(proposal):
            return f"capability {number} needs a name of a few plain English words and a short description"
        if not proposal.evidence:
            return f"capability {number} has no evidence"
        for place in proposal.evidence:
            if not 1 <= place.rollout <= len(lengths):
                return f"evidence of capability {number}: there is no rollout {place.rollout}"
            if not 0 <= place.message < lengths[place.rollout - 1]:
                return f"evidence of capability {number}: rollout {place.rollout} has no message {place.message}"
    return None


def _wrong_groups(count: int, answer: Merging) -> str | None:
    """Return why groups do not divide the proposals 1 to `count` into distinct capabilities; None if they do."""
    members = Counter(number for group in answer.groups for number in group.members)
    if unknown := sorted({*members} - {*range(1, count + 1)}):
        return f"there is no proposal {unknown[0]}"
    if missing := sorted({*range(1, count + 1)} - {*members}):
        return f"proposal {missing[0]} is in no group"
    if twice := sorted(number for number, times in members.items() if times > 1):
        return f"proposal {twice[0]} is in a group more than once"
    first: dict[str, int] = {}
    for number, group in enumerate(answer.groups, start=1):
        if not group.members:
            return f"group {number} has no members"
        if not _is_named(group):
            return f"group {number} needs a name of a few plain English words and a short description"
        if first.setdefault(slug_of(group.name), number) != number:
            return f"groups {first[slug_of(group.name)]} and {number} have the same name"
    return None


def _wrong_labels(slugs: Sequence[str], messages: int, answer: Labelling) -> str | None:
    """Return why the labels of a rollout with this number of messages are invalid; None if they are valid."""
    counts = Counter(label.capability for label in answer.labels)
    if not {*counts} <= {*slugs}:
        return f"a label is of a capability that was not asked for; asked for are {', '.join(slugs)}"
    if missing := [slug for slug in slugs if slug not in counts]:
        return f"capability {missing[0]} has no label"
    if twice := [slug for slug in slugs if counts[slug] > 1]:
        return f"capability {twice[0]} has {counts[twice[0]]} labels"
    for label in answer.labels:
        if label.message is not None and not 0 <= label.message < messages:
            return f"label of {label.capability}: there is no message {label.message}, the last is {messages - 1}"
        if label.verdict != "NA" and (label.message is None or not label.evidence.strip()):
            return f"label of {label.capability}: {label.verdict} needs evidence, and the message that shows it"
    return None
