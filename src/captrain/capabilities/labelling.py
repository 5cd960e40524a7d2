"""Labelling runs: every rollout labelled with every candidate, several times.

Each run proposes candidates on its own bootstrap resample of the tasks, so a candidate that depends on few tasks varies
between runs. Alternatively, as in the paper, each run sees all rollouts in its own order; an analyst that samples still
varies between runs. Proposals are pooled by id before anything is labelled. A run labels its own candidates with the
definitions of the pool. The stage stores labels; thresholds are applied later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from captrain.benchmarks import Worlds
from captrain.capabilities.analyst import Analyst, LabelRequest
from captrain.capabilities.faults import fault_of
from captrain.capabilities.learning import learn_toolbox
from captrain.errors import UserError
from captrain.ledger import guard_split
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels

EXAMPLES = 5


def label_runs(
    analyst: Analyst,
    rollouts: Sequence[Rollout],
    tools: list[JsonObject],
    runs: int,
    seed: int,
    resample: bool = True,
    worlds: Worlds | None = None,
) -> tuple[list[Capability], list[RolloutLabels]]:
    """Propose and label in `runs` runs.

    Args:
        analyst: proposes and labels.
        rollouts: diagnostic rollouts. Those spoilt by infrastructure or the simulated user are left out.
        tools: the tool schemas of the environment.
        runs: number of runs.
        seed: seed of the resamples.
        resample: whether each run draws its own resample of the tasks, with all rollouts of a drawn task. Otherwise
            each run has all rollouts once.
        worlds: worlds in which references are replayed, to learn what tools do even if their names mislead.

    Returns:
        The candidates of all runs, by id. Each has up to five failed rollouts that lack it and, for tools with
        misleading names, what they do (`kinds` in its details). And a row for each run and rollout, with how often the
        run's resample drew the rollout.

    Raises:
        InfrastructureError: the worker of a world failed.
        UserError: a rollout is of another split than discovery, or none passed or none failed.
    """
    guard_split([rollout.task for rollout in rollouts], "diagnosis")
    scored = _scored(rollouts)
    toolbox = learn_toolbox(scored, tools, worlds)
    tools = [{**tool, "annotations": {"kind": toolbox.kind(tool["function"]["name"])}} for tool in tools]
    # Draw tasks for each run, with replacement or each once in random order. A task brings all of its rollouts.
    numbers: dict[str, int] = {}
    tasks = np.array([numbers.setdefault(rollout.task.id, len(numbers)) for rollout in scored], np.intp)
    groups: list[list[Rollout]] = [[] for _ in numbers]
    for rollout, task in zip(scored, tasks, strict=True):
        groups[task].append(rollout)
    draws: list[list[int]] = []
    for run in range(runs):
        generator = np.random.default_rng([seed, run])
        size = len(groups)
        draws.append((generator.integers(size, size=size) if resample else generator.permutation(size)).tolist())
    proposals = analyst.propose([[rollout for task in draw for rollout in groups[task]] for draw in draws], tools)
    pool = pooled(proposals)
    if unnamed := toolbox.unnamed:
        for slug, candidate in pool.items():
            pool[slug] = candidate.model_copy(update={"details": {**candidate.details, "kinds": unnamed}})
    # Each run labels what it proposed. A deterministic analyst labels each rollout once, with all candidates.
    ids = [{candidate.id for candidate in proposal} for proposal in proposals]
    candidates = [[candidate for candidate in pool.values() if candidate.id in slugs] for slugs in ids]
    if analyst.deterministic:
        labels = analyst.label([LabelRequest(0, rollout, [*pool.values()]) for rollout in scored], tools) * runs
    else:
        requests = [LabelRequest(run, rollout, candidates[run]) for run in range(runs) for rollout in scored]
        labels = analyst.label(requests, tools)
    rows: list[RolloutLabels] = []
    for run, draw in enumerate(draws):
        counts = np.bincount(draw, minlength=len(groups))[tasks].tolist()
        for rollout, task, count in zip(scored, tasks, counts, strict=True):
            verdicts = labels[len(rows)]
            assert rollout.outcome != "error"
            row = RolloutLabels(
                run=run,
                rollout=rollout.id,
                task=rollout.task.id if len(groups[task]) > 1 else "",
                outcome=rollout.outcome,
                count=count,
                labels={candidate.id: verdicts[candidate.id] for candidate in candidates[run]},
            )
            rows.append(row)
    return _with_examples(pool, rows), rows


def _scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    scored = [rollout for rollout in rollouts if fault_of(rollout) is None]
    passed = sum(rollout.outcome == "passed" for rollout in scored)
    if not 0 < passed < len(scored):
        raise UserError(
            f"of {len(rollouts)} diagnostic rollouts {passed} passed, {len(scored) - passed} failed and "
            f"{len(rollouts) - len(scored)} ended in an error or a fault of the simulated user: capabilities are found "
            "by contrasting passed with failed rollouts",
            "where none passes, set another base.model, or base.demonstrations to those of the benchmark; where one "
            "outcome is rare, raise rollouts.tasks",
        )
    return scored


def pooled(proposals: Sequence[Sequence[Capability]]) -> dict[str, Capability]:
    """Merge the candidates of all runs by id, sorted. The first proposal's text counts; lists in details are united."""
    pool: dict[str, Capability] = {}
    for candidate in (candidate for proposal in proposals for candidate in proposal):
        earlier = pool.setdefault(candidate.id, candidate)
        details = {**candidate.details, **earlier.details}
        for name, value in earlier.details.items():
            if isinstance(value, list) and isinstance(candidate.details.get(name), list):
                details[name] = sorted({*value, *candidate.details[name]})
        pool[candidate.id] = earlier.model_copy(update={"details": details})
    return dict(sorted(pool.items()))


def _with_examples(pool: Mapping[str, Capability], rows: Sequence[RolloutLabels]) -> list[Capability]:
    """Add to each candidate the failed rollouts that most runs found lacking it; ties in the order of rollouts."""
    lacking: dict[str, Counter[str]] = {slug: Counter() for slug in pool}
    for row in rows:
        if row.outcome == "failed":
            for slug, label in row.labels.items():
                lacking[slug][row.rollout] += label.verdict == "LACKING"
    examples = {
        slug: [rollout for rollout, times in counts.most_common(EXAMPLES) if times] for slug, counts in lacking.items()
    }
    return [capability.model_copy(update={"examples": examples[slug]}) for slug, capability in pool.items()]
