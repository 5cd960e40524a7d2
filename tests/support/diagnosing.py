"""`captrain diagnose`, run in this process."""

from typing import Any

from typer.testing import CliRunner

from captrain.cli.app import app


def diagnose(*arguments: Any) -> str:
    """Run `captrain diagnose ARGUMENTS` and return its output. Its exceptions propagate."""
    result = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout
