"""Where agents act: benchmarks under the one environment contract (`captrain.contract`)."""

import inspect
from pathlib import Path
from pydoc import locate
from typing import Any

from captrain.contract import Environment, Target
from captrain.records import digest, file_digest
from captrain.spec import Component, Machine, build


def load_benchmark(component: Component, machine: Machine | None = None) -> Target:
    """Build the configured benchmark and wrap it in its contract; its fingerprint covers parameters and code.

    Args:
        component: the `benchmark` section.
        machine: where installations of benchmarks lie; given to those benchmarks alone that take it.
    """
    constructor: Any = locate(component.target)
    takes = constructor is not None and "machine" in inspect.signature(constructor).parameters
    environment: Environment = build(component, **({"machine": machine} if takes else {}))
    source = Path(inspect.getfile(type(environment)))
    return Target(environment, component.target, digest(component.model_dump(by_alias=True), file_digest(source)))
