"""Commands that concern benchmarks of others."""

from typing import Annotated

import typer

from captrain.cli.console import print_all, project_root

benchmark = typer.Typer(help="Benchmarks of others: install.", no_args_is_help=True)


@benchmark.callback()
def group() -> None:
    """Install benchmarks of others, each in an environment of its own."""


@benchmark.command()
def install(
    name: Annotated[str, typer.Argument(help="bfcl, tau2, agentdojo, openenv, or verifiers.")],
    packages: Annotated[list[str] | None, typer.Argument(help="What else goes into it, as pip names it.")] = None,
) -> None:
    """Make the environment of a benchmark below .cache/installations, where its workers find it."""
    from captrain.benchmarks import install_benchmark

    print_all(f"{name}: {install_benchmark(name, project_root(), packages or [])}; choose it with benchmark={name}")
