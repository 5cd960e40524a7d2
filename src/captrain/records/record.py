"""Every record that crosses a stage, field by field.

Records are frozen and JSON through and through. None holds a time or a duration: equal runs give equal bytes.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from captrain.records.text import FileName

JsonObject = dict[str, Any]
"""A JSON object as a file, a server or a library gives it: what is in it is checked where it is read."""
Message = JsonObject
"""An OpenAI-style chat message: role, content, and where it applies tool_calls or name."""
Split = Literal["discovery", "training", "test"]
Purpose = Literal["diagnosis", "calibration", "training", "validation", "evaluation"]
Verdict = Literal["NA", "PRESENT", "LACKING"]


class Record(BaseModel):
    """Base of all records: immutable, unknown fields and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class UserCall:
    """A tool call that the simulated user was to make."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True)
class Milestone:
    """Something that must have happened by the end of a task, as ToolSandbox has it.

    A milestone asks for a call (`tool`, `arguments`), for words to the user (`message`), or for a state (`namespace`,
    `values`). A minefield is an act that must not happen. The score's part "milestone N" says how far it was reached,
    from 0 to 1.
    """

    part: str
    tool: str | None
    arguments: JsonObject
    message: object
    namespace: object
    values: object
    is_minefield: bool


@dataclass(frozen=True)
class TaskFacts:
    """What a log says of a task beside its messages.

    Attributes:
        script: what the simulated user was told.
        ending: why the dialogue ended.
        graded: what the benchmark compares, such as "db".
        user_calls: calls that the simulated user was to make.
        milestones: see `Milestone`.
    """

    script: str = ""
    ending: str = ""
    graded: tuple[str, ...] = ()
    user_calls: tuple[UserCall, ...] = ()
    milestones: tuple[Milestone, ...] = ()

    @property
    def compares_state(self) -> bool:
        """The benchmark compares all that was changed, so that a change too many fails."""
        return not self.graded or "db" in self.graded

    @classmethod
    def read(cls, data: JsonObject) -> "TaskFacts":
        """Read the facts in the data of a task; a field of another form is another benchmark's and ignored."""
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
        )


def _is_milestone(entry: JsonObject) -> bool:
    return isinstance(entry.get("tool", ""), str) and isinstance(entry.get("arguments") or {}, dict)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""


class Task(Record):
    """One task of an environment. `data` is all the environment needs to open it again, anywhere."""

    id: str
    split: Split
    data: JsonObject

    @property
    def facts(self) -> TaskFacts:
        """What a log says of the task beside its messages."""
        return TaskFacts.read(self.data)


class Score(Record):
    """Score of a finished episode: reward in [0, 1], success, and named parts."""

    reward: float
    success: bool
    parts: dict[str, float] = {}


class Usage(Record):
    """Tokens of one rollout: read (prompt, tool results, user replies) and written by the model."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Rollout(Record):
    """One episode of one policy on one task, token-exact.

    `token_ids`, `mask` (1 = written by the model) and `logprobs` (the sampler's, 0.0 where mask is 0) have equal
    length and cover prompt and episode; they are empty for policies that do not show their tokens. `reference` is
    the environment's own solution (assistant messages). `outcome` is `error` when infrastructure failed: `score`
    is then None, and the rollout counts as spent but never as failed. `retries` counts earlier attempts that
    ended in an infrastructure error (each one was a rollout spent, too). `truncated` says why a dialogue that has
    outgrown the model ended before its time; it is scored as it is, and one that never began has failed. `rerendered`
    counts turns of a served model that would have read other tokens, had the dialogue been rendered anew for them.
    """

    id: str
    environment: str
    task: Task
    trial: int
    purpose: Purpose
    policy: str
    adapter: str | None = None
    messages: list[Message]
    reference: list[Message] = []
    token_ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    usage: Usage = Usage()
    score: Score | None = None
    outcome: Literal["passed", "failed", "error"]
    error: str | None = None
    truncated: str = ""
    rerendered: int = 0
    retries: int = 0


class Capability(Record):
    """A capability an agent may lack: domain-general name, description, and the evidence it was proposed from.

    `id` is a snake_case slug; `examples` are ids of failed rollouts that lack it; `details` is what the analyst
    found out about it in this target (tool names, argument names) for the synthesizer.
    """

    id: FileName
    name: str
    description: str
    details: JsonObject = {}
    examples: list[str] = []


class Label(Record):
    """One verdict on one (rollout, capability) pair; `evidence` says why, `message` is the index it points at."""

    verdict: Verdict
    evidence: str = ""
    message: int | None = None


class RolloutLabels(Record):
    """Labels of one rollout in one labelling run. `count`: how often the run's resample drew this rollout
    (0: not drawn, but labelled all the same). A capability absent from `labels` was not a candidate of the run.
    `task`: what it is a rollout of, where there are several of one task; "" where it is the only one of its task."""

    run: int
    rollout: str
    task: str = ""
    outcome: Literal["passed", "failed"]
    count: int
    labels: dict[str, Label]


class CheckResult(Record):
    """One proof that an environment gave or failed to give: what was measured, the bound it was held against, and for
    a failure what to know about it and the `task` (its seed) that shows it."""

    name: str
    passed: bool
    measured: float | None
    bound: str
    detail: str = ""
    task: str = ""


class Passport(Record):
    """All checks of one environment. `environment` is the fingerprint of the file that was checked, `attempt` the
    synthesizer's, `calibration_tasks` the training tasks spent, from the first on. `trusted`: its text is our own, and
    it may run outside of the sandbox."""

    capability: FileName
    environment: str
    attempt: int
    passed: bool
    trusted: bool
    calibration_tasks: int
    checks: list[CheckResult]

    def complaints(self) -> str:
        """List the failed checks in one line."""
        return "; ".join(
            f"{check.name} is {check.measured}, asked is {check.bound}{f' ({check.detail})' if check.detail else ''}"
            for check in self.checks
            if not check.passed
        )


class IndexEntry(Record):
    """Entry of a stage's `index.json`: something to act with.

    An adapter has the digest of its content and its folder; "" where there is none and `guidance`, lines of the system
    prompt, is all. Of its making there stand the rollouts it has spent, those discarded among them, what it was at
    `checkpoints` (digests, by the rollouts spent till then), and what else its stage says.
    """

    model_config = ConfigDict(extra="allow")

    digest: str
    path: str
    guidance: list[str] = []
    rollouts: int = 0
    discarded: int = 0
    checkpoints: dict[Annotated[str, Field(pattern=r"^\d+$")], str] = {}
