"""Commands that list rollouts, capabilities, environments and adapters, or show one by its id."""

from typing import Annotated, Literal

import typer

from captrain.cli.console import print_all, project_root

show = typer.Typer(help="Rollouts, capabilities, environments and adapters, as lists or one by its id.")
Id = Annotated[str | None, typer.Argument(metavar="ID", help="Show this one in full.")]


@show.command()
def rollouts(
    id: Id = None,
    outcome: Annotated[Literal["passed", "failed", "error"] | None, typer.Option(help="List these only.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most so many.")] = 20,
) -> None:
    """List rollouts of diagnosis and evaluation; one in full, with the point where it leaves its reference marked."""
    from captrain.reporting import show as views

    print_all(views.rollout(project_root(), id) if id else views.rollouts(project_root(), outcome, limit))


@show.command()
def capabilities(id: Id = None) -> None:
    """List candidate capabilities with gap, coverage and the reason why each was selected or rejected."""
    from captrain.reporting import show as views

    print_all(views.capability(project_root(), id) if id else views.capabilities(project_root()))


@show.command()
def environments(id: Id = None) -> None:
    """List synthesized environments; one with every check of its passport."""
    from captrain.reporting import show as views

    print_all(views.environment(project_root(), id) if id else views.environments(project_root()))


@show.command()
def adapters(id: Id = None) -> None:
    """List trained adapters by content hash; one with its model card."""
    from captrain.reporting import show as views

    print_all(views.adapter(project_root(), id) if id else views.adapters(project_root()))
