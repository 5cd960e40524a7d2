"""Where agents act: benchmarks under the one environment contract (`captrain.contract`)."""

import inspect
from pathlib import Path

from captrain.contract import Environment, Target
from captrain.records import digest, file_digest
from captrain.spec import Component, build


def load_benchmark(component: Component) -> Target:
    """Build the configured benchmark and wrap it in its contract; its fingerprint covers parameters and code."""
    environment: Environment = build(component)
    source = Path(inspect.getfile(type(environment)))
    return Target(environment, component.target, digest(component.model_dump(by_alias=True), file_digest(source)))
