"""The two kinds of error that captrain handles.

A `UserError` is one that the user can fix: it says what is wrong, where, and the remedy. Entry points print it without
a traceback. An `InfrastructureError` comes from the machinery around a rollout (a worker, a server, a grader): the
rollout is retried, then recorded as `error`, and never scored. Any other exception is a bug and propagates to the entry
point (`captrain.run.boundary`).
"""


class UserError(Exception):
    """An error that the user can fix.

    Args:
        problem: what is wrong, naming the file, key or value.
        remedy: what the reader can do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  remedy: {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Pickle both arguments, so that the error survives a process boundary."""
        return type(self), (self.problem, self.remedy)


class EnvironmentFault(UserError):
    """An environment broke its contract: it raised, or returned a value that the contract does not allow."""


class InfrastructureError(Exception):
    """A fault of the machinery, not of the agent; it is never scored as a failure."""
