"""The programmatic analyst: finds where rollouts diverge from reference solutions, and names the cause.

It needs no model. It sees what any reader of the logs sees (messages, reference solutions, outcomes, tool schemas), and
never the task's data (but for a benchmark's own milestones) or how the agent was made. A rollout lacks the capability
of a cause (see `registry`) when one occasion went wrong, and without an occasion the label is NA. Rollouts without a
reference are held against what nearly all that passed have in common (see `learnt_needs`).
"""

from collections.abc import Sequence

from captrain.capabilities.alignment import Finding, Story, leaves, reports_error, result_of
from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.finders import Vocabulary
from captrain.capabilities.learning import learn_toolbox
from captrain.capabilities.learnt_needs import learn_needs
from captrain.capabilities.registry import KINDS, Kind
from captrain.config import ModelAccess
from captrain.records import Capability, JsonObject, Label, Rollout


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
        runs_of: dict[str, tuple[Rollout, list[int]]] = {}
        for run, sample in enumerate(samples):
            for name, rollout in {rollout.id: rollout for rollout in sample}.items():
                runs_of.setdefault(name, (rollout, []))[1].append(run)
        rollouts = [rollout for rollout, _ in runs_of.values()]
        toolbox = learn_toolbox(rollouts, tools)
        needs = learn_needs(rollouts, toolbox)
        values: list[set[str]] = [set() for _ in samples]
        for rollout, places in runs_of.values():
            story = Story(rollout, toolbox)
            results = [result_of(m) for m in story.messages if m["role"] == "tool" and not reports_error(m)]
            informed = story.informed(dict.fromkeys(leaf for result in results for leaf in leaves(result)))
            for run in places:
                values[run].update(informed)
        # Runs that drew the same values have the same findings, and most do.
        lists = [tuple(sorted(run_values)) for run_values in values]
        vocabularies = {entries: Vocabulary(entries) for entries in {*lists}}
        occasions = [_Occasions(vocabularies[entries]) for entries in lists]
        for rollout, places in runs_of.values():
            story, by_contrast = Story(rollout, toolbox), needs.findings(rollout) if needs else {}
            for slug, kind in KINDS.items():
                findings = {}
                for run in places:
                    key = id(occasions[run].values) if kind.by_values else 0
                    if key not in findings:
                        findings[key] = kind.find(story, occasions[run].values)
                        findings[key] += [by_contrast[slug]] if slug in by_contrast else []
                    if findings[key]:
                        occasions[run].add(slug, findings[key])
        return [run_occasions.candidates() for run_occasions in occasions]

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
        return [
            {
                slug: _verdict(KINDS[slug], story, entries, by_contrast.get(slug))
                for slug, entries in values[id(request.capabilities)].items()
            }
            for request in requests
            for story in [Story(request.rollout, toolbox)]
            for by_contrast in [needs.findings(request.rollout) if needs else {}]
        ]


class _Occasions:
    """Occasions of the rollouts of one run, cause by cause: whether any lacks it, and what occasions involve."""

    def __init__(self, values: Vocabulary) -> None:
        self.values = values
        self._lacking: set[str] = set()
        self._tools: dict[str, set[str]] = {}
        self._arguments: dict[str, set[str]] = {}

    def add(self, slug: str, findings: Sequence[Finding]) -> None:
        """Count the findings of one rollout in."""
        if any(finding.lacking for finding in findings):
            self._lacking.add(slug)
        self._tools.setdefault(slug, set()).update(tool for finding in findings for tool in finding.tools)
        self._arguments.setdefault(slug, set()).update(name for finding in findings for name in finding.arguments)

    def candidates(self) -> list[Capability]:
        """The causes that some rollout shows, in their order."""
        return [
            Capability(
                id=slug,
                name=kind.name,
                description=kind.description,
                details={
                    "tools": sorted(self._tools[slug]),
                    "arguments": sorted(self._arguments[slug]),
                    "values": [*self.values] if kind.by_values else [],
                },
            )
            for slug, kind in KINDS.items()
            if slug in self._lacking
        ]


def _verdict(kind: Kind, story: Story, values: Vocabulary, by_contrast: Finding | None) -> Label:
    findings = kind.find(story, values) + ([by_contrast] if by_contrast else [])
    findings.sort(key=lambda finding: not finding.lacking)
    if not findings:
        return Label(verdict="NA", evidence=kind.absent)
    first = findings[0]
    return Label(verdict="LACKING" if first.lacking else "PRESENT", evidence=first.evidence, message=first.message)
