"""The template synthesizer: environments for the embedded benchmark, one template per capability or pair of them.

A written file is self-contained: the service desk's own source, whole, and after it the template's tasks and reward.
So tools, policy and result shapes are the target's by construction, and the other capabilities' rules stay binding: no
template pays for skipping them. Attempts step through a ladder of difficulty, for a passport that found the spread of
rewards on the base out of bounds; pairs, which are not played on the base, have no such ladder.
"""

from collections.abc import Sequence
from importlib.resources import files
from itertools import combinations

from captrain.environments import Attempt, Brief
from captrain.errors import UserError
from captrain.machine import Asking

FAMILIES = ("precondition_verification", "record_selection", "multi_step_completion", "argument_precision")
"""What the embedded base lacks."""
OTHERS = ("carrying_out", "named_record", "no_extra_writes", "reply_wording", "valid_calls")
"""What a diagnosis may propose and reject: controls train it all the same."""
PAIRS = tuple("+".join(pair) for pair in combinations(sorted(FAMILIES), 2))
"""Two capabilities in every task."""
PARTS = {
    **{name: ("frame", name) for name in FAMILIES},
    **{name: ("frame", "named", name) for name in OTHERS},
    **{name: ("frame", "pair", name) for name in PAIRS},
}
"""The templates that a file is made of, by capability."""
WORLD = "benchmarks/servicedesk.py"
EASIEST = 2
"""The ladder of difficulty runs from 0 to this."""


class NoTemplate(UserError):
    """A capability that no template trains."""


class TemplateSynthesizer:
    """Writes environments from templates.

    Args:
        asking: unused; every synthesizer is built with how a language model is asked.
    """

    trusted = True

    def __init__(self, asking: Asking | None = None) -> None:
        pass

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            NoTemplate: there is none for this capability.
        """
        capability = brief.capability
        if capability.id not in PARTS:
            raise NoTemplate(
                f"no template trains the capability {capability.id}",
                f"the templates know {', '.join(PARTS)}; tighten selection, or choose another synthesizer",
            )
        package = files("captrain")
        _, _, world = package.joinpath(WORLD).read_text().partition('\n"""\n')
        templates = package.joinpath("environments/templates")
        parts = [templates.joinpath(f"{name}.py.txt").read_text() for name in PARTS[capability.id]]
        title = f"{capability.name}: {capability.description}"
        header = f'"""{title}\n\nWritten by the template synthesizer; do not edit.\n"""\n'
        return f"{header}{world}\n\nDIFFICULTY = {min(len(attempts), EASIEST)}\n\n\n{''.join(parts)}"
