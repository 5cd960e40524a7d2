"""The command line: `captrain init | run | results | verify | report | plan | jobs | ...`.

Most commands read and print; `captrain run` runs the pipeline. Each module beside this one holds a group of commands. A
command imports what it needs inside its function, so `captrain --help` answers at once, and only `serve` and `validate
--calibrate` import torch. A `UserError` ends in one message on stderr and exit status 2. Commands that check something,
such as `verify` and `validate`, exit with 1 if a check fails.
"""

import os
from functools import partial
from typing import Annotated

import typer

from captrain import __version__
from captrain.cli.console import print_all
from captrain.cli.environments import export_environment, push, synthesize, validate
from captrain.cli.logs import diagnose
from captrain.cli.plan import doctor, plan, power
from captrain.cli.project import benchmark, check_benchmark, init, run, upgrade
from captrain.cli.results import compare, export, jobs, published, report, results, verify
from captrain.cli.serve import route, serve
from captrain.run import INTERRUPTED, entry_point

app = typer.Typer(
    name="captrain",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the capabilities that an agent lacks, train a LoRA adapter for each, and route tasks to them."""
    if version:
        print_all(f"captrain {__version__}")
        raise typer.Exit


COMMANDS = {
    "Diagnose logs": (diagnose, synthesize),
    "Run TRACE and read its results": (plan, run, results, compare, report, published, power, jobs),
    "Bring your own benchmark": (init, check_benchmark, upgrade),
    "Serve and share": (serve, route, export, export_environment, push),
    "Check": (doctor, verify, validate),
}
"""The commands, as `captrain --help` groups them."""
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(benchmark, name="benchmark", rich_help_panel="Bring your own benchmark")


@partial(entry_point, stage=False)
def main() -> None:
    """Run the `captrain` command."""
    if os.environ.get("COLUMNS") == "0":  # the width is unknown; rich would print nothing
        del os.environ["COLUMNS"]
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer turns an interrupt into this exit
            raise KeyboardInterrupt from None
        raise


if __name__ == "__main__":
    main()
