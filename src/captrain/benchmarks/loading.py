"""Loading of benchmarks under the one environment contract (`captrain.contract`), and the tasks of an evaluation."""

import inspect
from pathlib import Path

from captrain.contract import CheckedEnvironment, Environment
from captrain.errors import UserError
from captrain.records import Split, Task, digest, file_digest
from captrain.run import Component, EvaluationSettings, Machine, build, component_class, nested, takes

LOOKED_AT = 10
"""Tasks that are looked at for a reference."""
OTHER_SPLITS: tuple[Split, ...] = ("discovery", "training")


def load_benchmark(component: Component, machine: Machine | None = None) -> CheckedEnvironment:
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
    return CheckedEnvironment(environment, component.target, digest(component.target, settings, file_digest(*code)))


def absences(component: Component) -> dict[str, str]:
    """Return what a benchmark does not have: what -> what follows.

    It is what its class says (see `captrain.contract.Environment`), and references where none of its first training
    tasks has one; a benchmark in workers is taken at its word, and nothing is started.

    Raises:
        UserError: the benchmark cannot be built, or breaks its contract.
    """
    declared = dict(getattr(component_class(component), "absences", {}))
    if "reference" in declared or in_workers(component):
        return declared
    target = load_benchmark(component)
    size = target.size("training")
    tasks = target.tasks("training", LOOKED_AT if size is None else min(size, LOOKED_AT))
    if any(target.reference(task) for task in tasks):
        return declared
    return declared | {"reference": f"no references: reference() of {component.target} returns [] for its first tasks"}


def in_workers(component: Component) -> bool:
    """Return whether a benchmark runs in workers, whose packages may not be installed."""
    return takes(component, "machine")


def evaluation_tasks(benchmark: CheckedEnvironment, evaluation: EvaluationSettings) -> list[Task]:
    """The tasks that methods are compared on: of the test split, and where `evaluation.splits` says all every task of
    the other splits, which is played as a test task then.

    Raises:
        UserError: all splits are asked for, and one has no end.
        EnvironmentFault: the test split has fewer tasks than are asked for.
    """
    further = overlapping_tasks(benchmark) if evaluation.splits == "all" else []
    return benchmark.tasks("test", evaluation.tasks) + [task.model_copy(update={"split": "test"}) for task in further]


def overlapping_tasks(benchmark: CheckedEnvironment) -> list[Task]:
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
