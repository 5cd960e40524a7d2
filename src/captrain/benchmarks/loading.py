"""Loading of benchmarks, and the tasks of an evaluation."""

import inspect
from pathlib import Path

from captrain.contract import CheckedEnvironment, Environment
from captrain.errors import UserError
from captrain.records import Split, Task, digest, file_digest
from captrain.run import Component, EvaluationSettings, Machine, build, component_class, nested, takes

LOOKED_AT = 10
"""Tasks that are checked for a reference."""
OTHER_SPLITS: tuple[Split, ...] = ("discovery", "training")


def load_benchmark(component: Component, machine: Machine | None = None) -> CheckedEnvironment:
    """Build the configured benchmark and wrap it in its contract; its fingerprint covers settings and code.

    Args:
        component: the `benchmark` section.
        machine: names the installations of benchmarks; passed to benchmarks that take it.
    """
    runtime = {"machine": machine} if takes(component, "machine") else {}
    environment = build(component, Environment, **runtime)
    source = Path(inspect.getfile(type(environment)))
    package = Path(__file__).parents[1]
    # A user's own benchmark usually imports files beside it.
    code = [source] if source.is_relative_to(package) else sorted(source.parent.glob("*.py"))
    # Skip components such as a simulated user: `about` has its digest, and where it is served is no part of it.
    settings = {name: value for name, value in component.settings().items() if nested(name, value) is None}
    return CheckedEnvironment(environment, component.target, digest(component.target, settings, file_digest(*code)))


def absences(component: Component) -> dict[str, str]:
    """What a benchmark lacks -> the consequence.

    This is what its class declares (see `captrain.contract.Environment`), and references if none of its first training
    tasks has one. For a benchmark in workers nothing is started: only the declaration counts.

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
    """Return whether a benchmark runs in workers, whose package may be missing."""
    return takes(component, "machine")


def evaluation_tasks(benchmark: CheckedEnvironment, evaluation: EvaluationSettings) -> list[Task]:
    """The tasks that methods are compared on.

    These are tasks of the test split, and with `evaluation.splits=all` every task of the other splits, as a test task.

    Raises:
        UserError: all splits are wanted, and one is endless.
        EnvironmentFault: the test split has fewer tasks than wanted.
    """
    further = overlapping_tasks(benchmark) if evaluation.splits == "all" else []
    return benchmark.tasks("test", evaluation.tasks) + [task.model_copy(update={"split": "test"}) for task in further]


def overlapping_tasks(benchmark: CheckedEnvironment) -> list[Task]:
    """All tasks of the discovery and training splits: those that some method may have seen.

    Raises:
        UserError: a split is endless.
    """
    tasks: list[Task] = []
    for split in OTHER_SPLITS:
        size = benchmark.size(split)
        if size is None:
            raise UserError(
                f"evaluation.splits = all, and split {split} of {benchmark.name} is endless",
                "set evaluation.splits=test",
            )
        tasks += benchmark.tasks(split, size)
    return tasks
