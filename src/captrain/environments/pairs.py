"""Pair environments: two capabilities in every task, for the pairs that failed rollouts lack together most often.

A pair is asked for as a capability of its own, "<a>+<b>" with a < b, whose evidence is the failed rollouts that lack
both. Its passport holds all checks but those on the base, so that it costs no rollout: what is taught in it are
its solutions. A pair without an environment is left out, with what was found;
nothing rests on any one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.capabilities import EXAMPLES, count_pairs
from captrain.capabilities import needs as lacking_sets
from captrain.config import Component, Machine
from captrain.environments.publication import publish_environments
from captrain.environments.subject import Standard
from captrain.environments.synthesis import SynthesisResult, make_brief, synthesize
from captrain.environments.synthesizer import NoTemplate, Synthesizer
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels, publish_json


@dataclass(frozen=True)
class PairEnvironments:
    """Outcomes of pairs: those that an environment was written for, and for every pair that failed rollouts lack
    together, by name, in how many and what became of it."""

    results: list[SynthesisResult]
    account: dict[str, JsonObject]


def pair_name(pair: tuple[str, str]) -> str:
    """The name of a pair's environment."""
    return "+".join(sorted(pair))


def combine(first: Capability, second: Capability, needs: Mapping[str, frozenset[str]]) -> Capability:
    """Two capabilities as one to be trained: `details` are those of both, `examples` failed rollouts that lack both."""
    first, second = sorted((first, second), key=lambda capability: capability.id)
    return Capability(
        id=pair_name((first.id, second.id)),
        name=f"{first.name} and {second.name[:1].lower()}{second.name[1:]}",
        description=f"Both in the same task. {first.description} {second.description}",
        details={first.id: first.details, second.id: second.details},
        examples=[rollout for rollout, lacking in needs.items() if {first.id, second.id} <= lacking][:EXAMPLES],
    )


def synthesize_pairs(
    labels: Sequence[RolloutLabels],
    selected: Sequence[Capability],
    rollouts: Sequence[Rollout],
    count: int,
    synthesizer: Synthesizer,
    standard: Standard,
    machine: Machine,
    seed: int,
    benchmark: Component | None = None,
) -> PairEnvironments:
    """Environments for at most `count` pairs of the selected capabilities.

    Args:
        labels: of the diagnostic rollouts.
        selected: capabilities that TRACE trains.
        rollouts: the diagnostic rollouts.
        count: of pairs, the most frequent first.
        synthesizer: who writes them.
        standard: the target, its test tasks, the bounds.
        machine: how well what a synthesizer of others wrote must be confined.
        seed: run seed.
        benchmark: the target, where environments may be derived from it.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than asked for.
    """
    capabilities: Mapping[str, Capability] = {capability.id: capability for capability in selected}
    needs, pairs = lacking_sets(labels, capabilities), PairEnvironments([], {})
    for rank, (pair, lacking) in enumerate(count_pairs(needs).items(), start=1):
        reason = f"it ranks {rank}, and {count} are wanted"
        if rank <= count:
            capability = combine(capabilities[pair[0]], capabilities[pair[1]], needs)
            brief = make_brief(capability, standard.tools, rollouts, benchmark)
            try:
                pairs.results.append(synthesize(brief, synthesizer, None, standard, machine, seed))
                reason = pairs.results[-1].best.passport.complaints()
            except NoTemplate as fault:
                reason = fault.problem
        pairs.account[pair_name(pair)] = {"lacking": lacking, "environment": not reason, "reason": reason}
    return pairs


def publish_pairs(pairs: PairEnvironments, results: Path, artifacts: Path) -> None:
    """Write the environments, of which none need have passed, and pairs.json, the account."""
    publish_environments(pairs.results, results, artifacts, required=False)
    publish_json(results / "pairs.json", pairs.account)
