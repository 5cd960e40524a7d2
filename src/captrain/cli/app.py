"""The command line: `captrain init | run | results | verify | report | plan | jobs | ...`.

Each command reads and prints; `dvc repro` is what runs anything. The modules beside this one hold a group of commands
each. What a command needs is imported inside it, so that `captrain --help` answers at once and nothing here but `serve`
and `validate --calibrate` ever imports torch. A `UserError` ends in one message on stderr and exit status 2; `captrain
verify` and `validate` exit with 1 when something does not hold.
"""

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
from captrain.run import entry_point

app = typer.Typer(
    name="captrain",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Say which captrain this is.")] = False,
) -> None:
    """Find the capabilities an agent lacks, train a LoRA adapter for each, route tasks to them. The pipeline itself
    runs with `dvc repro`."""
    if version:
        print_all(f"captrain {__version__}")
        raise typer.Exit


# In the order in which `captrain --help` lists them.
for command in (
    init,
    run,
    upgrade,
    check_benchmark,
    results,
    compare,
    verify,
    diagnose,
    synthesize,
    plan,
    doctor,
    power,
    published,
    export,
    export_environment,
    push,
    report,
    jobs,
    validate,
    serve,
    route,
):
    app.command()(command)
app.add_typer(benchmark, name="benchmark")


@partial(entry_point, stage=False)
def main() -> None:
    """Run the `captrain` command."""
    app()


if __name__ == "__main__":
    main()
