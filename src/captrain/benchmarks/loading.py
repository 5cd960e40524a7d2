"""Loading of benchmarks under the one environment contract (`captrain.contract`), and the tasks of an evaluation."""

import inspect
from pathlib import Path

from captrain.config import Component, Evaluation, Machine, build, component_class, nested, takes
from captrain.contract import Environment, Target
from captrain.errors import UserError
from captrain.records import Split, Task, digest, file_digest

OTHER_SPLITS: tuple[Split, ...] = ("discovery", "training")


def load_benchmark(component: Component, machine: Machine | None = None) -> Target:
    """Build the configured benchmark and wrap it in its contract; its fingerprint covers parameters and code.

    Args:
        component: the `benchmark` section.
        machine: where installations of benchmarks lie; given to those benchmarks alone that take it.
    """
    runtime = {"machine": machine} if takes(component, "machine") else {}
    environment = build(component, Environment, **runtime)
    source = Path(inspect.getfile(type(environment)))
    package = Path(__file__).parents[1]
    # What a benchmark of the user's own imports lies beside it, as a rule.
    code = [source] if source.is_relative_to(package) else sorted(source.parent.glob("*.py"))
    # A simulated user tells of itself in `about`, by its digest: where it is served is no part of the identity.
    settings = {name: value for name, value in component.settings().items() if nested(name, value) is None}
    return Target(environment, component.target, digest(component.target, settings, file_digest(*code)))


def declared_absences(component: Component) -> dict[str, str]:
    """Return what the class of a benchmark says that it does not have (see `captrain.contract.Environment`): what ->
    what follows. Nothing is built or started."""
    return dict(getattr(component_class(component), "absences", {}))


def evaluation_tasks(benchmark: Target, evaluation: Evaluation) -> list[Task]:
    """The tasks that methods are compared on: of the test split, and where `evaluation.splits` says all every task of
    the other splits, which is played as a test task then.

    Raises:
        UserError: all splits are asked for, and one has no end.
        EnvironmentFault: the test split has fewer tasks than are asked for.
    """
    further = overlapping_tasks(benchmark) if evaluation.splits == "all" else []
    return benchmark.tasks("test", evaluation.tasks) + [task.model_copy(update={"split": "test"}) for task in further]


def overlapping_tasks(benchmark: Target) -> list[Task]:
    """All tasks of the splits for discovery and training: those that no row of the table was held out from.

    Raises:
        UserError: a split has no end.
    """
    tasks: list[Task] = []
    for split in OTHER_SPLITS:
        size = benchmark.size(split)
        if size is None:
            raise UserError(
                f"evaluation.splits = all, and split {split} of {benchmark.name} has no end",
                "set evaluation.splits=test",
            )
        tasks += benchmark.tasks(split, size)
    return tasks
