"""Pair environments: two capabilities in every task, for the pairs that failed rollouts lack together most often.

A pair is asked for as a capability of its own, "<a>+<b>" with a < b, whose evidence is the failed rollouts that lack
both. Its passport holds all checks but those on the base, so that it costs no rollout: what trains in it (the
curriculum) measures the spread of rewards itself. A pair without an environment is left out, with what was found;
nothing rests on any one of them.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captrain.capabilities import EXAMPLES, cooccurrence
from captrain.config import Machine
from captrain.environments.publication import publish_all
from captrain.environments.subject import Standard
from captrain.environments.synthesis import Synthesized, brief, synthesize
from captrain.environments.synthesized import Synthesizer
from captrain.environments.templates import NoTemplate
from captrain.errors import UserError
from captrain.records import Capability, Rollout, RolloutLabels, publish_json


@dataclass(frozen=True)
class Pairs:
    """What came of the pairs: those that an environment was written for, and for every pair that failed rollouts lack
    together, by name, in how many and what became of it."""

    made: list[Synthesized]
    account: dict[str, dict[str, Any]]


def name_of(pair: tuple[str, str]) -> str:
    """The name of a pair's environment."""
    return "+".join(sorted(pair))


def combined(first: Capability, second: Capability, needs: cooccurrence.Sets) -> Capability:
    """Two capabilities as one to be trained: `details` are those of both, `examples` failed rollouts that lack both."""
    one, other = sorted((first, second), key=lambda capability: capability.id)
    return Capability(
        id=name_of((one.id, other.id)),
        name=f"{one.name} and {other.name[:1].lower()}{other.name[1:]}",
        description=f"Both in the same task. {one.description} {other.description}",
        details={one.id: one.details, other.id: other.details},
        examples=[rollout for rollout, held in needs.items() if {one.id, other.id} <= held][:EXAMPLES],
    )


def synthesize_pairs(
    labels: Sequence[RolloutLabels], selected: Sequence[Capability], rollouts: Sequence[Rollout], count: int,
    synthesizer: Synthesizer, against: Standard, machine: Machine, seed: int,
) -> Pairs:  # fmt: skip
    """Environments for at most `count` pairs of the selected capabilities.

    Args:
        labels: of the diagnostic rollouts.
        selected: capabilities that TRACE trains.
        rollouts: the diagnostic rollouts.
        count: of pairs, the most frequent first.
        synthesizer: who writes them.
        against: the target, its test tasks, the bounds.
        machine: how well what a synthesizer of others wrote must be confined.
        seed: run seed.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than asked for.
    """
    known: Mapping[str, Capability] = {capability.id: capability for capability in selected}
    needs = cooccurrence.needs(labels, known)
    frequent, found = cooccurrence.count_pairs(needs), Pairs([], {})
    for place, pair in enumerate(cooccurrence.frequent_pairs(needs, len(frequent)), start=1):
        said = f"it ranks {place}, and {count} are wanted"
        if place <= count:
            wanted = brief(combined(known[pair[0]], known[pair[1]], needs), against.tools, rollouts)
            try:
                found.made.append(synthesize(wanted, synthesizer, None, against, machine, seed))
                said = found.made[-1].best.passport.complaints()
            except NoTemplate as lack:
                said = lack.problem
        found.account[name_of(pair)] = {"lacking": frequent[pair], "environment": not said, "reason": said}
    return found


def publish_pairs(pairs: Pairs, results: Path, artifacts: Path) -> None:
    """Write the environments as `publish_some` does, and pairs.json, the account."""
    publish_some(pairs.made, results, artifacts)
    publish_json(results / "pairs.json", pairs.account)


def publish_some(made: Sequence[Synthesized], results: Path, artifacts: Path) -> None:
    """Write what `captrain.environments.publication.publish_all` writes, where it is no error that none passed."""
    with nullcontext() if any(one.passed for one in made) else suppress(UserError):
        publish_all(made, results, artifacts)
