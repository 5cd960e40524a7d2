"""The programmatic analyst: finds where rollouts diverge from reference solutions, and names the cause.

It needs no model. It sees what any reader of the logs sees (messages, reference solutions, outcomes, tool schemas), and
never the task's data (but for a benchmark's own milestones) or how the agent was made. A rollout lacks the capability
of a cause (see `registry`) when one occasion went wrong, and without an occasion the label is NA. Rollouts without a
reference are held against what nearly all that passed have in common (see `learnt_needs`).
"""

from collections.abc import Sequence
from functools import cache

from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.learning import learn_toolbox
from captrain.capabilities.learnt_needs import learn_needs
from captrain.capabilities.occasions import Occasion, Vocabulary
from captrain.capabilities.rules import KINDS
from captrain.capabilities.text import reports_error, result_of
from captrain.capabilities.view import bare_view
from captrain.records import Capability, JsonObject, Label, Rollout, leaves
from captrain.run import ModelAccess


class ProgrammaticAnalyst:
    """Proposes each cause that a sample of rollouts shows, and labels rollouts by its findings.

    Args:
        access: unused; every analyst is built with how models are asked.
    """

    deterministic = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """The causes that at least one rollout of a sample shows; `details` are the tools and arguments
        that occasions of the cause involve, and the values that references tell users (`values`)."""
        rollouts = {rollout.id: rollout for sample in samples for rollout in sample}
        toolbox = learn_toolbox([*rollouts.values()], tools)
        needs = learn_needs([*rollouts.values()], toolbox)
        stories = {name: bare_view(rollout, toolbox) for name, rollout in rollouts.items()}
        by_contrast = {name: needs.found(rollout) if needs else {} for name, rollout in rollouts.items()}
        informed: dict[str, list[str]] = {}
        for name, story in stories.items():
            results = [result_of(m) for m in story.messages if m["role"] == "tool" and not reports_error(m)]
            informed[name] = story.informed(dict.fromkeys(leaf for result in results for leaf in leaves(result)))
        vocabulary_of = cache(Vocabulary)

        @cache  # runs that drew the same values have the same findings, and most do
        def findings(name: str, slug: str, vocabulary: Vocabulary) -> list[Occasion]:
            more = [by_contrast[name][slug]] if slug in by_contrast[name] else []
            return KINDS[slug].find(stories[name], vocabulary) + more

        proposals: list[list[Capability]] = []
        for sample in samples:
            names, candidates = dict.fromkeys(rollout.id for rollout in sample), list[Capability]()
            distinct = tuple(sorted({value for name in names for value in informed[name]}))
            for slug, kind in KINDS.items():
                vocabulary = vocabulary_of(distinct if kind.by_values else ())
                occasions = [finding for name in names for finding in findings(name, slug, vocabulary)]
                if any(finding.lacking for finding in occasions):
                    details = {
                        "tools": sorted({tool for finding in occasions for tool in finding.tools}),
                        "arguments": sorted({name for finding in occasions for name in finding.arguments}),
                        "values": [*vocabulary.values],
                    }
                    candidate = Capability(id=slug, name=kind.name, description=kind.description, details=details)
                    candidates.append(candidate)
            proposals.append(candidates)
        return proposals

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """LACKING at the first occasion that went wrong, PRESENT when none did, NA without an occasion."""
        rollouts = [*{request.rollout.id: request.rollout for request in requests}.values()]
        toolbox = learn_toolbox(rollouts, tools)
        needs = learn_needs(rollouts, toolbox)
        pools = {id(request.capabilities): request.capabilities for request in requests}
        values = {
            key: {candidate.id: Vocabulary(candidate.details.get("values", [])) for candidate in pool}
            for key, pool in pools.items()
        }
        rows: list[dict[str, Label]] = []
        for request in requests:
            story, row = bare_view(request.rollout, toolbox), dict[str, Label]()
            by_contrast = needs.found(request.rollout) if needs else {}
            for slug, vocabulary in values[id(request.capabilities)].items():
                findings = KINDS[slug].find(story, vocabulary)
                findings += [by_contrast[slug]] if slug in by_contrast else []
                row[slug] = Label(verdict="NA", evidence=KINDS[slug].absent)
                if findings:
                    first = min(findings, key=lambda finding: not finding.lacking)
                    verdict = "LACKING" if first.lacking else "PRESENT"
                    row[slug] = Label(verdict=verdict, evidence=first.evidence, message=first.message)
            rows.append(row)
        return rows
