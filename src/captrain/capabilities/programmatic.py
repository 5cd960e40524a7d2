"""The programmatic analyst: finds where rollouts diverge from reference solutions, and names the kind of divergence.

It needs no model. It sees what any reader of the logs sees (messages, reference solutions, outcomes, tool schemas), and
never the task's data (but for a benchmark's own milestones) or how the agent was made. A rollout lacks the capability
of a family (see `families`) when one occasion went wrong, and without an occasion the label is NA.
"""

from collections.abc import Sequence

from captrain.capabilities.alignment import Story, Toolbox, leaves, reports_error, result_of
from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.families import FAMILIES, Family, Values, information, reply_wording
from captrain.config import ModelAccess
from captrain.records import Capability, JsonObject, Label, Message, Rollout


class ProgrammaticAnalyst:
    """Proposes each family that a sample of rollouts gives cause for, and labels rollouts by the families' findings.

    Args:
        access: unused; every analyst is built with how models are asked.
    """

    deterministic = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """The families of which at least one rollout of a sample shows a lack; `details` are the tools and arguments
        that occasions of the family involve, and the values that references tell users (`values`)."""
        toolbox = Toolbox(tools)
        return [self._candidates(sample, toolbox) for sample in samples]

    def _candidates(self, rollouts: Sequence[Rollout], toolbox: Toolbox) -> list[Capability]:
        stories = [Story(rollout, toolbox) for rollout in {rollout.id: rollout for rollout in rollouts}.values()]
        values = sorted({value for story in stories for value in story.informed(_returned(story.messages))})
        candidates = []
        for slug, family in FAMILIES.items():
            findings = [finding for story in stories for finding in family.find(story, values)]
            if any(finding.lacking for finding in findings):
                details = {
                    "tools": sorted({tool for finding in findings for tool in finding.tools}),
                    "arguments": sorted({name for finding in findings for name in finding.arguments}),
                    "values": values if family.find in (information, reply_wording) else [],
                }
                candidate = Capability(id=slug, name=family.name, description=family.description, details=details)
                candidates.append(candidate)
        return candidates

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """LACKING at the first occasion that went wrong, PRESENT when none did, NA without an occasion."""
        toolbox = Toolbox(tools)
        return [_labels(Story(request.rollout, toolbox), request.capabilities) for request in requests]


def _labels(story: Story, capabilities: Sequence[Capability]) -> dict[str, Label]:
    return {
        capability.id: _verdict(FAMILIES[capability.id], story, capability.details.get("values", []))
        for capability in capabilities
    }


def _verdict(family: Family, story: Story, values: Values) -> Label:
    findings = sorted(family.find(story, values), key=lambda finding: not finding.lacking)
    if not findings:
        return Label(verdict="NA", evidence=family.absent)
    first = findings[0]
    return Label(verdict="LACKING" if first.lacking else "PRESENT", evidence=first.evidence, message=first.message)


def _returned(messages: Sequence[Message]) -> list[str]:
    """The distinct values in the tool results of a rollout, in order."""
    results = [result_of(m) for m in messages if m["role"] == "tool" and not reports_error(m)]
    return [*dict.fromkeys(leaf for result in results for leaf in leaves(result))]
