"""The template synthesizer: environments for the embedded benchmark, one template per capability or pair of them.

A written file is self-contained: the service desk's own source, whole, and after it the template's tasks and reward.
So tools, policy and result shapes are the target's by construction, and the other capabilities' rules stay binding: no
template pays for skipping them. Attempts step through a ladder of difficulty, for a passport that found the spread of
rewards on the base out of bounds; pairs, which are not played on the base, have no such ladder.

Some capabilities can be asked for with any operation, and their templates ask for one. Where the evidence failed at
steps of others, so that the passport found too few of these in the tasks, further attempts ask for them as well.

For another benchmark there are no templates: its environments are derived from itself (`derived`).
"""

from collections.abc import Sequence
from importlib.resources import files
from itertools import combinations

from captrain.config import ModelAccess
from captrain.environments.derived import derive, missing_tools
from captrain.environments.loading import WORLD
from captrain.environments.synthesizer import Attempt, Brief, NoTemplate
from captrain.records import plain

DEFICITS = ("missing_lookup", "wrong_record", "missing_write", "wrong_argument")
"""Capabilities that the embedded base lacks."""
CONTROLS = ("extra_write", "reply_wording", "invalid_call")
"""Capabilities that a diagnosis may propose and reject: controls train them all the same."""
PAIRS = tuple("+".join(pair) for pair in combinations(sorted(DEFICITS), 2))
"""Two capabilities in every task."""
PARTS = {
    **{name: ("frame", name) for name in DEFICITS},
    **{name: ("frame", "named", name) for name in CONTROLS},
    **{name: ("frame", "pair", name) for name in PAIRS},
}
"""The templates that a file is made of, by capability."""
ANY_OPERATION = ("wrong_record", "missing_write")
"""Capabilities that every operation can ask for."""
OPERATIONS_OF = {
    "wrap_order": ("wrap",),
    "update_zip": ("zip",),
    **dict.fromkeys(("get_order", "cancel_order", "return_order", "deny_request"), ("cancel", "return")),
}
"""The operations that a step belongs to."""
EMBEDDED = "captrain.benchmarks.servicedesk.ServiceDesk"
EASIEST = 2
"""The ladder of difficulty runs from 0 to this."""


class TemplateSynthesizer:
    """Writes environments from templates.

    Args:
        access: unused; every synthesizer is built with how a language model is asked.
    """

    trusted = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            NoTemplate: there is none for this capability.
            UserError: the target is another than the embedded one, and no environment can be derived from it.
        """
        capability = brief.capability
        if brief.benchmark is not None and brief.benchmark.target != EMBEDDED:
            return derive(brief, brief.benchmark, attempts)
        if capability.id not in PARTS:
            raise NoTemplate(
                f"no template trains the capability {capability.id}",
                f"the templates know {', '.join(PARTS)}; tighten selection, or let a language model write it "
                "(synthesizer=openai, or --model)",
            )
        package = files("captrain")
        _, _, world = package.joinpath(WORLD).read_text().partition('\n"""\n')
        templates = package.joinpath("environments/templates")
        operations = _operations(brief, attempts)
        names = [*PARTS[capability.id], *(["operations"] if operations else [])]
        parts = [templates.joinpath(f"{name}.py.txt").read_text() for name in names]
        title = _title(f"{capability.name}: {capability.description}")
        header = f'"""{title}\n\nWritten by the template synthesizer; do not edit.\n"""\n'
        # The attempt that brought the evidence's operations is not one that was too hard.
        settings = f"DIFFICULTY = {min(len(attempts) - bool(operations), EASIEST)}\n"
        settings += f"OPERATIONS = {operations}\n" if operations else ""
        return f"{header}{world}\n\n{settings}\n\n{''.join(parts)}"


def _title(text: str) -> str:
    """Return a text that cannot end the docstring it stands in: an analyst may have proposed the words, and the file
    is run."""
    return plain(text).replace("\\", "/").replace('"', "'")


def _operations(brief: Brief, attempts: Sequence[Attempt]) -> list[str]:
    """The operations to ask for besides the template's own, where a passport found too little of the evidence's steps:
    those of these steps."""
    failed = missing_tools(brief, attempts) if brief.capability.id in ANY_OPERATION else []
    return [*dict.fromkeys(verb for tool, asked_as in OPERATIONS_OF.items() if tool in failed for verb in asked_as)]
