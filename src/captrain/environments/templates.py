"""The template synthesizer: environments for the embedded benchmark, one template per family of capability.

A written file is self-contained: the service desk's own source, whole, and after it the template's tasks and reward.
So tools, policy and result shapes are the target's by construction, and the other capabilities' rules stay binding: no
template pays for skipping them. Attempts step through a ladder of difficulty, for a passport that found the spread of
rewards on the base out of bounds.
"""

from importlib.resources import files
from typing import Any

from captrain.errors import UserError
from captrain.records import Capability

FAMILIES = ("precondition_verification", "record_selection", "multi_step_completion", "argument_precision")
WORLD = "benchmarks/servicedesk.py"
EASIEST = 2
"""The ladder of difficulty runs from 0 to this."""


class TemplateSynthesizer:
    """Writes environments from templates."""

    def synthesize(self, capability: Capability, tools: list[dict[str, Any]], attempt: int) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            UserError: there is no template for this capability.
        """
        if capability.id not in FAMILIES:
            raise UserError(
                f"no template trains the capability {capability.id}",
                f"the templates know {', '.join(FAMILIES)}; tighten selection, or choose another synthesizer",
            )
        package = files("captrain")
        _, _, world = package.joinpath(WORLD).read_text().partition('\n"""\n')
        templates = package.joinpath("environments/templates")
        parts = [templates.joinpath(f"{name}.py.txt").read_text() for name in ("frame", capability.id)]
        title = f"{capability.name}: {capability.description}"
        header = f'"""{title}\n\nWritten by the template synthesizer; do not edit.\n"""\n'
        return f"{header}{world}\n\nDIFFICULTY = {min(attempt, EASIEST)}\n\n\n{''.join(parts)}"
