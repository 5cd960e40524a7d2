"""All records that stages exchange.

Records are frozen and consist of JSON values. None holds a time or a duration, so that equal runs give equal bytes.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from captrain.records.text import FileName

JsonObject = dict[str, Any]
"""A JSON object from a file, a server or a library; its reader checks it."""
Message = JsonObject
"""An OpenAI-style chat message: role, content, and optional tool_calls or name."""
Split = Literal["discovery", "training", "test"]
Purpose = Literal["diagnosis", "calibration", "training", "validation", "evaluation"]
Verdict = Literal["NA", "PRESENT", "LACKING"]


class Record(BaseModel):
    """Base of all records: immutable; unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class UserCall:
    """A tool call that the simulated user was supposed to make."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True)
class Milestone:
    """Something that must have happened by the end of a task, as ToolSandbox has it.

    A milestone requires a call (`tool`, `arguments`), a message to the user (`message`), or a state (`namespace`,
    `values`). A minefield is something that must not happen. "milestone N" in the score's parts is the degree to which
    it was reached, from 0 to 1.
    """

    part: str
    tool: str | None
    arguments: JsonObject
    message: object
    namespace: object
    values: object
    is_minefield: bool


@dataclass(frozen=True)
class Expected:
    """A part of the ground truth in a log, with the name of its field, such as "target" or "failing tests"."""

    name: str
    text: str


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task that a log holds in addition to the messages.

    Attributes:
        script: instructions of the simulated user.
        ending: why the dialogue ended.
        graded: what the benchmark compares, such as "db".
        user_calls: calls that the simulated user was supposed to make.
        milestones: see `Milestone`.
        limit: the limit of the harness that ended the rollout, such as "max_steps" or "token"; "" if there was none.
            Steps that are then missing are not the agent's fault.
        grading: the grader's comment on this rollout: its error type, its explanation or a failure's reason.
        expected: see `Expected`.
        submission: what the agent submitted outside its messages, such as a patch or an answer.
    """

    script: str = ""
    ending: str = ""
    graded: tuple[str, ...] = ()
    user_calls: tuple[UserCall, ...] = ()
    milestones: tuple[Milestone, ...] = ()
    limit: str = ""
    grading: str = ""
    expected: tuple[Expected, ...] = ()
    submission: str = ""

    @property
    def compares_state(self) -> bool:
        """Whether the benchmark compares the final state, so that an unwanted change fails the task."""
        return not self.graded or "db" in self.graded

    @classmethod
    def read(cls, data: JsonObject) -> "TaskFacts":
        """Read the facts in a task's data. A field of an unexpected form is another benchmark's and is ignored."""
        if data.keys().isdisjoint(cls.__dataclass_fields__):
            return NO_FACTS
        steps = [step for step in _list(data.get("user_calls")) if isinstance(step, dict)]
        return cls(
            script=_text(data.get("script")),
            ending=_text(data.get("ending")),
            graded=tuple(str(part) for part in _list(data.get("graded"))),
            user_calls=tuple(UserCall(step["name"], step["arguments"]) for step in steps),
            milestones=tuple(
                Milestone(
                    f"milestone {number}",
                    entry.get("tool"),
                    entry.get("arguments") or {},
                    entry.get("message"),
                    entry.get("namespace"),
                    entry.get("values"),
                    bool(entry.get("minefield")),
                )
                for number, entry in enumerate(_list(data.get("milestones")), start=1)
                if isinstance(entry, dict) and _is_milestone(entry)
            ),
            limit=_text(data.get("limit")),
            grading=_text(data.get("grading")),
            expected=tuple(Expected(name, _text(value)) for name, value in _object(data.get("expected")).items()),
            submission=_text(data.get("submission")),
        )


NO_FACTS = TaskFacts()


def _is_milestone(entry: JsonObject) -> bool:
    return isinstance(entry.get("tool", ""), str) and isinstance(entry.get("arguments") or {}, dict)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""


class Task(Record):
    """One task of an environment. `data` is all that the environment needs to open it again."""

    id: str
    split: Split
    data: JsonObject

    @property
    def facts(self) -> TaskFacts:
        """Facts about the task that a log holds in addition to the messages."""
        return TaskFacts.read(self.data)


class Score(Record):
    """Score of a finished episode: reward in [0, 1], success, and named parts."""

    reward: float
    success: bool
    # Here and below: pydantic would copy a default list or object deeply at each reading.
    parts: dict[str, float] = Field(default_factory=dict)


class Usage(Record):
    """Tokens of one rollout: prompt_tokens are read (prompt, tool results, user replies), the others written."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Rollout(Record):
    """One episode of one policy on one task, with its exact tokens.

    Attributes:
        reference: the environment's own solution (assistant messages).
        token_ids: of prompt and episode; empty for policies that do not show their tokens.
        mask: for each token, 1 if the model wrote it.
        logprobs: for each token, the sampler's log-probability; 0.0 where mask is 0.
        outcome: "error" if infrastructure failed: then `score` is None, and the rollout counts as spent, not as failed.
        truncated: why a dialogue that exceeded the model's length ended early. It is scored as it is; one that never
            began has failed.
        rerendered: turns of a served model that would have read other tokens if the dialogue had been rendered anew.
        retries: earlier attempts that ended in an infrastructure error; each counts as a spent rollout.
    """

    id: str
    environment: str
    task: Task
    trial: int
    purpose: Purpose
    policy: str
    adapter: str | None = None
    messages: list[Message]
    reference: list[Message] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    mask: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    usage: Usage = Usage()
    score: Score | None = None
    outcome: Literal["passed", "failed", "error"]
    error: str | None = None
    truncated: str = ""
    rerendered: int = 0
    retries: int = 0


class Capability(Record):
    """A capability that an agent may lack.

    Attributes:
        id: a snake_case slug.
        name: independent of the domain.
        details: what the analyst found about it in this target (tool names, argument names), for the synthesizer.
        examples: ids of failed rollouts that lack it.
    """

    id: FileName
    name: str
    description: str
    details: JsonObject = {}
    examples: list[str] = []


class Label(Record):
    """Verdict on a pair of rollout and capability; `message` is the index of the message that is the evidence."""

    verdict: Verdict
    evidence: str = ""
    message: int | None = None


class RolloutLabels(Record):
    """Labels of one rollout in one labelling run.

    Attributes:
        task: of the rollout if several rollouts share it, else "".
        count: how often the run's resample drew this rollout; 0 if it was labelled without being drawn.
        labels: by capability; a missing one was no candidate of the run.
    """

    run: int
    rollout: str
    task: str = ""
    outcome: Literal["passed", "failed"]
    count: int
    labels: dict[str, Label]


class CheckResult(Record):
    """One check of an environment: the measured value and its bound; for a failure its details, and the `task` (by its
    seed) that shows it.

    Attributes:
        deviation: standard deviation over the tasks, where the check measures a mean reward.
        script: calls and words of the play that earned most, where the check searches for one.
    """

    name: str
    passed: bool
    measured: float | None
    bound: str
    detail: str = ""
    task: str = ""
    deviation: float | None = None
    script: list[str] = []


class Passport(Record):
    """All checks of one environment.

    Attributes:
        environment: fingerprint of the checked file.
        attempt: number of the synthesizer's attempt.
        trusted: whether captrain wrote the file, so that it may run outside of the sandbox.
        calibration_tasks: training tasks that the checks used, from the first on.
    """

    capability: FileName
    environment: str
    attempt: int
    passed: bool
    trusted: bool
    calibration_tasks: int
    checks: list[CheckResult]

    def complaints(self) -> str:
        """Return the failed checks on one line."""
        return "; ".join(
            f"{check.name} is {check.measured}, asked is {check.bound}{f' ({check.detail})' if check.detail else ''}"
            for check in self.checks
            if not check.passed
        )


class IndexEntry(Record):
    """Entry of a stage's `index.json`: an adapter or a prompt. Stages add fields of their own.

    Attributes:
        digest: of the adapter's content; "" if there is only `guidance`.
        path: folder of the adapter, or "".
        guidance: lines of the system prompt.
        rollouts: spent on it.
        discarded: of these, rollouts without a signal.
        checkpoints: digests of the adapter on the way, by the rollouts spent until then.
    """

    model_config = ConfigDict(extra="allow")

    digest: str
    path: str
    guidance: list[str] = []
    rollouts: int = 0
    discarded: int = 0
    checkpoints: dict[Annotated[str, Field(pattern=r"^\d+$")], str] = {}
