"""Facts of a task that a log may hold beside its messages, for whoever looks for the cause of a failure.

They are part of `Task.data`, whose other fields belong to the benchmark. All of them are optional.
"""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UserCall:
    """A tool call that the simulated user was to make."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Milestone:
    """Something that must have happened by the end of a task, as ToolSandbox has it.

    A milestone asks for a call (`tool`, `arguments`), for words to the user (`message`), or for a state (`namespace`,
    `values`). A minefield is an act that must not happen. The score's part "milestone N" says how far it was reached,
    from 0 to 1.
    """

    part: str
    tool: str | None
    arguments: dict[str, Any]
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
    milestones: tuple[Milestone, ...] = field(default=())

    @property
    def compares_state(self) -> bool:
        """The benchmark compares all that was changed, so that a change too many fails."""
        return not self.graded or "db" in self.graded

    @classmethod
    def read(cls, data: dict[str, Any]) -> "TaskFacts":
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


def _is_milestone(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("tool", ""), str) and isinstance(entry.get("arguments") or {}, dict)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""
