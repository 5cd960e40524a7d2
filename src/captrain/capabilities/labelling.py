"""Labelling runs: every rollout labelled with every candidate, several times over.

Each run proposes on its own bootstrap resample of the tasks, so that a candidate which hangs on a few of them shows as
unstable; or, as in the paper, on all rollouts in an order of its own: an analyst that samples differs from run to run
by itself. What the runs propose is pooled by id before anything is labelled: a run labels the candidates that
it proposed itself, as the pool defines them. Labels are cached by the stage; thresholds are applied later.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from captrain.benchmarks import Worlds
from captrain.capabilities.analyst import Analyst, LabelRequest
from captrain.capabilities.faults import fault_of
from captrain.capabilities.learning import learn_toolbox
from captrain.capabilities.selection import Places
from captrain.errors import UserError
from captrain.ledger import guard_split
from captrain.records import Capability, JsonObject, Label, Rollout, RolloutLabels

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
        analyst: who proposes and labels.
        rollouts: diagnostic rollouts; those that infrastructure or the simulated user spoilt (`faults.fault_of`) say
            nothing of the agent and are left out.
        tools: the tool schemas of the environment.
        runs: number of runs.
        seed: of the resamples.
        resample: whether each run has its own resample of the tasks, in which a task brings all of its rollouts; or all
            rollouts once.
        worlds: in which replays of references show what tools do, whatever they are called.

    Returns:
        The candidates of all runs, by id, each with up to five failed rollouts that lack it, and with what tools do
        (`kinds` in its details) where their names say something else; and one row for every run and rollout, with how
        often the run's resample drew the rollout.

    Raises:
        InfrastructureError: the worker of a world failed.
        UserError: a rollout of another split than discovery, or no passed or no failed rollout to contrast.
    """
    guard_split([rollout.task for rollout in rollouts], "diagnosis")
    scored = _scored(rollouts)
    toolbox = learn_toolbox(scored, tools, worlds)
    tools = [{**tool, "annotations": {"kind": toolbox.kind(tool["function"]["name"])}} for tool in tools]
    tasks = task_numbers(scored)
    groups: list[list[Rollout]] = [[] for _ in {*tasks.tolist()}]
    for rollout, task in zip(scored, tasks, strict=True):
        groups[task].append(rollout)
    draws = [draw_tasks(len(groups), [seed, run], resample) for run in range(runs)]
    proposals = analyst.propose([[rollout for task in draw for rollout in groups[task]] for draw in draws], tools)
    unnamed: JsonObject = {"kinds": toolbox.unnamed} if toolbox.unnamed else {}
    pool = {
        slug: candidate.model_copy(update={"details": {**candidate.details, **unnamed}})
        for slug, candidate in pooled(proposals).items()
    }
    requests = []
    for run, proposal in enumerate(proposals):
        slugs = {candidate.id for candidate in proposal}
        candidates = [candidate for candidate in pool.values() if candidate.id in slugs]
        requests += [LabelRequest(run, rollout, candidates) for rollout in scored]
    labels = _labels(analyst, requests, [*pool.values()], tools)
    counts = [count for draw in draws for count in np.bincount(draw, minlength=len(groups))[tasks]]
    repeated = {rollout.task.id for group in groups if len(group) > 1 for rollout in group}
    rows = [
        _row(
            request, int(count), {candidate.id: verdicts[candidate.id] for candidate in request.capabilities}, repeated
        )
        for request, count, verdicts in zip(requests, counts, labels, strict=True)
    ]
    return _with_examples(pool, rows), rows


def task_numbers(rollouts: Iterable[Rollout]) -> Places:
    """The number of each rollout's task, (rollouts,), from 0 on in the order of their first rollouts."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(rollout.task.id, len(numbers)) for rollout in rollouts], np.intp)


def draw_tasks(tasks: int, seed: Sequence[int], resample: bool) -> list[int]:
    """The numbers of the tasks that a labelling run sees, in its order: drawn with replacement, or each once."""
    generator = np.random.default_rng(seed)
    return (generator.integers(tasks, size=tasks) if resample else generator.permutation(tasks)).tolist()


def _scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    scored = [rollout for rollout in rollouts if fault_of(rollout) is None]
    passed = sum(rollout.outcome == "passed" for rollout in scored)
    failed = len(scored) - passed
    if not passed or not failed:
        raise UserError(
            f"of {len(rollouts)} diagnostic rollouts {passed} passed, {failed} failed and "
            f"{len(rollouts) - len(scored)} ended in an error or a fault of the simulated user: capabilities are found "
            "by contrasting passed with failed rollouts",
            "where none passes, set another base.model, or base.demonstrations to those of the benchmark; where one "
            "outcome is rare, raise rollouts.tasks",
        )
    return scored


def pooled(proposals: Sequence[Sequence[Capability]]) -> dict[str, Capability]:
    """The candidates of all runs by id, in the order of ids: text as first proposed, lists in details united."""
    pool: dict[str, Capability] = {}
    for candidate in (candidate for proposal in proposals for candidate in proposal):
        earlier = pool.setdefault(candidate.id, candidate)
        pool[candidate.id] = earlier.model_copy(update={"details": _united(earlier.details, candidate.details)})
    return dict(sorted(pool.items()))


def _united(first: JsonObject, second: JsonObject) -> JsonObject:
    details = {**second, **first}
    for name, value in first.items():
        if isinstance(value, list) and isinstance(second.get(name), list):
            details[name] = sorted({*value, *second[name]})
    return details


def _labels(
    analyst: Analyst, requests: Sequence[LabelRequest], pool: Sequence[Capability], tools: list[JsonObject]
) -> list[dict[str, Label]]:
    if not analyst.deterministic:
        return analyst.label(requests, tools)
    rollouts = {request.rollout.id: request.rollout for request in requests}
    single = [LabelRequest(0, rollout, pool) for rollout in rollouts.values()]
    labels = dict(zip(rollouts, analyst.label(single, tools), strict=True))
    return [labels[request.rollout.id] for request in requests]


def _row(request: LabelRequest, count: int, labels: dict[str, Label], repeated: Collection[str]) -> RolloutLabels:
    rollout = request.rollout
    assert rollout.outcome != "error"
    task = rollout.task.id if rollout.task.id in repeated else ""
    return RolloutLabels(
        run=request.run, rollout=rollout.id, task=task, outcome=rollout.outcome, count=count, labels=labels
    )


def _with_examples(pool: Mapping[str, Capability], rows: Sequence[RolloutLabels]) -> list[Capability]:
    """Each candidate with the failed rollouts that most runs found lacking, first ones first among equals."""
    lacking: dict[str, Counter[str]] = {slug: Counter() for slug in pool}
    for row in rows:
        if row.outcome == "failed":
            for slug, label in row.labels.items():
                lacking[slug][row.rollout] += label.verdict == "LACKING"
    examples = {
        slug: [rollout for rollout, runs in counts.most_common(EXAMPLES) if runs] for slug, counts in lacking.items()
    }
    return [capability.model_copy(update={"examples": examples[slug]}) for slug, capability in pool.items()]
