"""Passes exceptions between processes in JSON files. JSON is used because reading it runs no code."""

import traceback
from pathlib import Path
from typing import Self

from captrain.errors import EnvironmentFault, InfrastructureError, UserError
from captrain.records import Record, json_without_secrets, publish_bytes, read_json


class Failure(Record):
    """An exception: the name of its type, its message and remedy, and its traceback as text."""

    type: str
    message: str
    remedy: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Describe an exception. The traceback is kept for errors that the user cannot fix."""
        name = type(error).__name__
        if isinstance(error, UserError):
            return cls(type=name, message=error.problem, remedy=error.remedy)
        account = "" if isinstance(error, InfrastructureError) else "".join(traceback.format_exception(error))
        return cls(type=name, message=str(error), traceback=account)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a file of `write`; None if it is missing or damaged."""
        try:
            return read_json(path, cls)
        except UserError:
            return None

    def write(self, path: Path) -> None:
        """Write to a file, atomically and through to the disk."""
        content = json_without_secrets(self.model_dump_json(indent=1)).encode(errors="backslashreplace")
        publish_bytes(path, content, flush=True)

    def exception(self) -> Exception:
        """Return an exception to raise here. A type that captrain does not handle becomes a RuntimeError."""
        match self.type:
            case "UserError":
                return UserError(self.message, self.remedy)
            case "EnvironmentFault":
                return EnvironmentFault(self.message, self.remedy)
            case "InfrastructureError":
                return InfrastructureError(self.message)
            case "MemoryError":
                return MemoryError(self.message)
        error = RuntimeError(f"{self.type}: {self.message}")
        error.add_note(self.traceback)
        return error
