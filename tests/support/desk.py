"""The service desk where an experiment names another benchmark and another analyst, with whose settings it is built."""

from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.config.machine import ModelAccess


class SimulatedDesk(ServiceDesk):
    """The desk; its users are its own."""

    def __init__(self, **_: object) -> None:
        super().__init__(mix="single")


class FamilyAnalyst(ProgrammaticAnalyst):
    """The programmatic analyst."""

    def __init__(self, access: ModelAccess | None = None, **_: object) -> None:
        super().__init__(access)
