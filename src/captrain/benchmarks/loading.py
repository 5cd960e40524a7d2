"""Where agents act: benchmarks under the one environment contract (`captrain.contract`)."""

import inspect
from pathlib import Path

from captrain.config import Component, Machine, build, nested, takes
from captrain.contract import Environment, Target
from captrain.records import digest, file_digest


def load_benchmark(component: Component, machine: Machine | None = None) -> Target:
    """Build the configured benchmark and wrap it in its contract; its fingerprint covers parameters and code.

    Args:
        component: the `benchmark` section.
        machine: where installations of benchmarks lie; given to those benchmarks alone that take it.
    """
    runtime = {"machine": machine} if takes(component, "machine") else {}
    environment = build(component, Environment, **runtime)
    source = Path(inspect.getfile(type(environment)))
    # A simulated user tells of itself in `about`, by its digest: where it is served is no part of the identity.
    settings = {name: value for name, value in component.settings().items() if nested(name, value) is None}
    return Target(environment, component.target, digest(component.target, settings, file_digest(source)))
