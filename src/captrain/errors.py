"""The two kinds of failure captrain tells apart from a failed rollout.

A `UserError` is something the person at the keyboard can mend: it says what is wrong, where, and the remedy, and
entry points print it without a traceback. An `InfrastructureError` is a fault of the machinery around a rollout
(a worker, a server, a grader): the rollout becomes an `error`, is retried and reported, and is never scored.
Everything else is a bug and propagates, up to the entry point (`captrain.run.boundary`).
"""


class UserError(Exception):
    """Error that the user can mend: what is wrong, where, and the remedy.

    Args:
        problem: what is wrong, naming the file, key or value.
        remedy: what the reader can do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  remedy: {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Keep both arguments, so that the error crosses a process boundary whole."""
        return type(self), (self.problem, self.remedy)


class EnvironmentFault(UserError):
    """An environment broke its contract: it raised, or returned something that is not of the contract."""


class InfrastructureError(Exception):
    """A fault around the rollout, not of the agent: never scored as a failed task."""
