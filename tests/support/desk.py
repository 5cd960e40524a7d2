"""The service desk in the roles of another benchmark, analyst and synthesizer; other settings are ignored."""

from collections.abc import Sequence
from dataclasses import replace

from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.environments.synthesizer import Attempt, Brief
from captrain.environments.templates import TemplateSynthesizer
from captrain.run.machine import ModelAccess


class SimulatedDesk(ServiceDesk):
    """The desk with its own simulated users."""

    def __init__(self, **_: object) -> None:
        super().__init__(mix="single")


class FamilyAnalyst(ProgrammaticAnalyst):
    """The programmatic analyst."""

    def __init__(self, access: ModelAccess | None = None, **_: object) -> None:
        super().__init__(access)


class DeskTemplates(TemplateSynthesizer):
    """The desk's templates, for a desk under another name."""

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        return super().synthesize(replace(brief, benchmark=None), attempts)
