# pyright: reportMissingImports=false
"""The tasks that tau2 has."""

import inspect

from tau2.registry import registry
from worker_loop import BadRequest

TASKS = {}


def tasks_of(domain):
    """All tasks of a domain, by id."""
    if domain not in TASKS:
        loader = registry.get_tasks_loader(domain)
        # Since tau2 has splits, loading without one gives the tasks of the default split alone.
        all_splits = [None] if "task_split_name" in inspect.signature(loader).parameters else []
        TASKS[domain] = {task.id: task for task in loader(*all_splits)}
    return TASKS[domain]


def task_of(domain, task):
    """A task by its id."""
    if task not in tasks_of(domain):
        raise BadRequest(f"{domain} has no task {task!r}")
    return TASKS[domain][task]
