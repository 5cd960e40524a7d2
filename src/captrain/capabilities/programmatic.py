"""The programmatic analyst: labels rollouts by the occasions of `rules`, without a model and without a replay.

It sees only what a log contains: messages, reference solutions, outcomes, tool schemas, and facts about the task
(`TaskFacts`). It never sees other task data or how the agent was made. A rollout lacks the capability of a cause (see
`rules`) if one occasion went wrong. Without an occasion the label is NA. Rollouts without a reference are compared with
features that nearly all passed rollouts have (see `learnt_needs`).
"""

from collections.abc import Sequence
from functools import cache

from captrain.capabilities.analyst import LabelRequest
from captrain.capabilities.learning import learn_toolbox
from captrain.capabilities.learnt_needs import learn_needs
from captrain.capabilities.occasions import Occasion, Vocabulary
from captrain.capabilities.rules import CAUSES
from captrain.capabilities.text import reports_error, result_of
from captrain.capabilities.view import RolloutView, bare_view
from captrain.records import Capability, JsonObject, Label, Rollout, leaves
from captrain.run import ModelAccess


class _Reader:
    """Finds the occasions of rollouts.

    Args:
        rollouts: rollouts to read; tools and needs are learnt from them.
        tools: their schemas.
    """

    def __init__(self, rollouts: Sequence[Rollout], tools: list[JsonObject]) -> None:
        self._toolbox = learn_toolbox(rollouts, tools)
        self._needs = learn_needs(rollouts, self._toolbox)
        self.views = {rollout.id: bare_view(rollout, self._toolbox) for rollout in rollouts}
        self._by_contrast = cache(self._found)

    def _found(self, name: str) -> dict[str, Occasion]:
        return self._needs.found(self.views[name].rollout) if self._needs else {}

    def occasions(self, name: str, slug: str, vocabulary: Vocabulary) -> list[Occasion]:
        """Return the occasions on which a rollout could show a cause."""
        by_contrast = self._by_contrast(name)
        return [
            *CAUSES[slug].find(self.views[name], vocabulary),
            *([by_contrast[slug]] if slug in by_contrast else []),
        ]


class ProgrammaticAnalyst:
    """Proposes each cause that a sample of rollouts shows, and labels rollouts by occasions.

    Args:
        access: unused; every analyst is built with how models are asked.
    """

    deterministic = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """Return, for each sample, the causes that at least one of its rollouts shows.

        `details` are the tools and arguments that occasions of the cause involve, and the values that references tell
        users (`values`).
        """
        rollouts = {rollout.id: rollout for sample in samples for rollout in sample}
        reader = _Reader([*rollouts.values()], tools)
        informed = {name: _informed(view) for name, view in reader.views.items()}
        vocabulary_of = cache(Vocabulary)
        occasions_of = cache(reader.occasions)  # samples with the same values have the same occasions, and most do
        proposals: list[list[Capability]] = []
        for sample in samples:
            names, candidates = dict.fromkeys(rollout.id for rollout in sample), list[Capability]()
            distinct = tuple(sorted({value for name in names for value in informed[name]}))
            for slug, kind in CAUSES.items():
                vocabulary = vocabulary_of(distinct if kind.needs_values else ())
                occasions = [occasion for name in names for occasion in occasions_of(name, slug, vocabulary)]
                if any(occasion.lacking for occasion in occasions):
                    details = {
                        "tools": sorted({tool for occasion in occasions for tool in occasion.tools}),
                        "arguments": sorted({name for occasion in occasions for name in occasion.arguments}),
                        "values": [*vocabulary.values],
                    }
                    candidate = Capability(id=slug, name=kind.name, description=kind.description, details=details)
                    candidates.append(candidate)
            proposals.append(candidates)
        return proposals

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """Label each request: LACKING if an occasion went wrong, PRESENT if all went right, NA without an occasion."""
        reader = _Reader([*{request.rollout.id: request.rollout for request in requests}.values()], tools)
        pools = {id(request.capabilities): request.capabilities for request in requests}
        values = {
            key: {candidate.id: Vocabulary(candidate.details.get("values", [])) for candidate in pool}
            for key, pool in pools.items()
        }
        rows: list[dict[str, Label]] = []
        for request in requests:
            row = dict[str, Label]()
            for slug, vocabulary in values[id(request.capabilities)].items():
                occasions = reader.occasions(request.rollout.id, slug, vocabulary)
                row[slug] = Label(verdict="NA", evidence=CAUSES[slug].na_evidence)
                if occasions:
                    first = min(occasions, key=lambda occasion: not occasion.lacking)
                    verdict = "LACKING" if first.lacking else "PRESENT"
                    row[slug] = Label(verdict=verdict, evidence=first.evidence, message=first.message)
            rows.append(row)
        return rows


def _informed(view: RolloutView) -> list[str]:
    """Return the values in tool results that the reference's last message tells and the user did not say."""
    results = [result_of(m) for m in view.messages if m["role"] == "tool" and not reports_error(m)]
    return view.told_by_reference(dict.fromkeys(leaf for result in results for leaf in leaves(result)))
