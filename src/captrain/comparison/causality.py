"""Causal test of capabilities: does an adapter repair the failures labelled with its capability, and only those?

A diagnosis claims that a number of failures lack a capability. To test this, the capability's adapter plays every test
task. The analyst labels the base's failed rollouts of the test split. The effect of an adapter is its pass rate minus
the base's on the tasks of these failures, by stratum: failures that lack the capability, those that lack no other
selected one, failures without the label, and passed rollouts.

Three controls keep the answer honest:

- Regression to the mean: a failed trial is followed by better ones anyway. So labels come from one trial and both pass
  rates from all others, each in turn.
- An adapter may help a little everywhere. So the change is compared with that on failures without the label (difference
  in differences).
- Any training may help. So the change is compared with a placebo: the adapters of the other selected capabilities, on
  failures that lack this capability and not theirs. Rejected candidates are no placebo, because their labels may be
  true.

Only this table uses labels of test rollouts. Nothing is trained, tuned or routed by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from captrain.capabilities import Analyst, LabelRequest, fault_of
from captrain.comparison.arms import COMPOSED, Outcome
from captrain.comparison.baselines.baseline import SOLUTIONS_ADAPTER, specialist_name
from captrain.comparison.baselines.registry import baselines
from captrain.comparison.evaluation import PLAYED, evaluation_rows, played
from captrain.comparison.rows import ADAPTERS, BASE
from captrain.comparison.tables import OUTCOMES
from captrain.ledger import guard_split
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels, load, publish_text
from captrain.run import Spec
from captrain.statistics import Bootstrap, Floats, Ratio

LACKING, SOLE, REMAINDER, PASSED = STRATA = ("lacking", "sole", "other", "passed")
"""Strata of the base's rollouts, for one capability.

lacking: failed, with its label. sole: failed, with its label and no other selected one. other: failed, without its
label. passed: passed.
"""
EFFECT_COLUMNS = ["capability", "stratum", "arm", "stage", "tasks", "base", "rate", "change", "low", "high"]
QUANTITIES = ("claimed", "efficacy", "sole_efficacy", "repaired", "difference", "placebo", "specificity")
FAMILIES = ((ADAPTERS, str, "{}"), (SOLUTIONS_ADAPTER, specialist_name, "{} (solutions)"))
"""Families of single-capability adapters: the stage, capability -> arm, and a template for the row's name."""
CAPABILITY_COLUMNS = [
    *("capability", "adapter", "name", "failures", "lacking", "sole", "tasks"),
    *(column for name in QUANTITIES for column in (name, f"{name}_low", f"{name}_high")),
]


@dataclass(frozen=True)
class Causality:
    """Tables of the test, with bootstrap intervals over tasks in the columns `*_low` and `*_high`. Undefined: NaN.

    `capabilities` has one row per capability and adapter of its own, those trained by rewards first:

    - capability, adapter (its arm), name.
    - failures: failed rollouts of the base. lacking: those with the label. sole: those with no other selected label.
      tasks: tasks with a labelled failure.
    - claimed: lacking / failures.
    - efficacy: share of the labelled failures, as they recur in other trials, that the adapter repairs.
      sole_efficacy: the same for failures with no other label. repaired: the same as a share of all failures.
    - difference: change on labelled failures minus change on other failures.
    - placebo: mean change by adapters of other capabilities on failures that lack this one and not theirs.
      specificity: this adapter's change minus the placebo, on the same failures.

    `effects` has one row per capability, stratum and arm that played all tasks: capability ("" for passed rollouts),
    stratum, arm, stage, tasks, base and rate (pass rates), change, low, high.
    """

    capabilities: pd.DataFrame
    effects: pd.DataFrame


class Outcomes(NamedTuple):
    """Outcomes on the test split.

    Args:
        passes: arm -> (tasks, trials): 1.0 passed, 0.0 failed, NaN error.
        lacks: (task, trial) of each labelled failure of the base -> the capabilities that it lacks.
        stages: arm -> stage.
    """

    passes: Mapping[str, Floats]
    lacks: Mapping[tuple[int, int], frozenset[str]]
    stages: Mapping[str, str]


def measure_causality(
    analyst: Analyst, tools: list[JsonObject], spec: Spec, project: Path = Path()
) -> tuple[list[RolloutLabels], Causality]:
    """Label the base's failed rollouts of the test split, and compare the labels with the effects of the adapters.

    Args:
        analyst: of the diagnosis.
        tools: schemas of the benchmark.
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Returns:
        The labels and the tables. They are empty if nothing was selected, `causality.run` is off, or there is one
        trial: the test needs at least two.

    Raises:
        UserError: a file is missing or corrupt, or a rollout is of another split.
    """
    capabilities = load(project / "results/capabilities/capabilities.jsonl", Capability)
    if not (spec.causality.run and capabilities and spec.evaluation.trials > 1):
        return [], Causality(pd.DataFrame(columns=CAPABILITY_COLUMNS), pd.DataFrame(columns=EFFECT_COLUMNS))
    prompted = [name for name, baseline in baselines().items() if baseline.learns_from == "reflection"]
    places, stages = dict[str, dict[tuple[str, int], float]](), dict[str, str]()
    for row in evaluation_rows():
        for outcome in load(project / PLAYED / row / "outcomes.jsonl", Outcome):
            places.setdefault(outcome.arm, {})[outcome.task, outcome.trial] = OUTCOMES[outcome.outcome]
            if outcome.stage not in ("", COMPOSED, *prompted):
                stages[outcome.arm] = outcome.stage
    plays = (play.rollout for play in played(project, [BASE]))
    failures = [rollout for rollout in plays if rollout.outcome == "failed" and fault_of(rollout) is None]
    guard_split([rollout.task for rollout in failures], "evaluation")
    verdicts = analyst.label([LabelRequest(0, rollout, capabilities) for rollout in failures], tools)
    labels = [
        RolloutLabels(run=0, rollout=rollout.id, outcome="failed", count=1, labels=verdict)
        for rollout, verdict in zip(failures, verdicts, strict=True)
    ]
    outcomes = _arranged(places, failures, labels, stages)
    settings = spec.evaluation
    intervals = Bootstrap(len(outcomes.passes[BASE]), settings.resamples, settings.confidence, spec.seed)
    return labels, causal_tables(outcomes, capabilities, intervals)


def _arranged(
    places: Mapping[str, Mapping[tuple[str, int], float]],
    failures: Sequence[Rollout],
    labels: Sequence[RolloutLabels],
    stages: Mapping[str, str],
) -> Outcomes:
    """Arrange the outcomes of the base and of every adapter that played all of the base's tasks."""
    base = places[BASE]
    tasks = {task: row for row, task in enumerate(sorted({task for task, _ in base}))}
    trials = {trial: column for column, trial in enumerate(sorted({trial for _, trial in base}))}
    passes = {}
    for arm in (BASE, *(arm for arm in stages if places.get(arm, {}).keys() == base.keys())):
        passes[arm] = np.full((len(tasks), len(trials)), np.nan)
        for (task, trial), passed in places[arm].items():
            passes[arm][tasks[task], trials[trial]] = passed
    lacks = {
        (tasks[rollout.task.id], trials[rollout.trial]): frozenset(
            slug for slug, label in row.labels.items() if label.verdict == "LACKING"
        )
        for rollout, row in zip(failures, labels, strict=True)
    }
    return Outcomes(passes, lacks, stages)


def causal_tables(outcomes: Outcomes, capabilities: Sequence[Capability], intervals: Bootstrap) -> Causality:
    """Compute the tables from outcomes and labels.

    Args:
        outcomes: of the base and of adapters.
        capabilities: the selected ones, best first.
        intervals: over the tasks of `outcomes`.
    """
    slugs = [capability.id for capability in capabilities]
    contrasts = _Contrasts(outcomes, slugs)
    rows = []
    for stage, arm_of, name in FAMILIES:
        arms = {slug: arm_of(slug) for slug in slugs}
        arms = {slug: arm for slug, arm in arms.items() if outcomes.stages.get(arm) == stage and arm in outcomes.passes}
        rows += [
            {"capability": capability.id, "adapter": arms[capability.id], "name": name.format(capability.name)}
            | _capability_row(contrasts, capability.id, arms, intervals)
            for capability in capabilities
            if capability.id in arms
        ]
    table = pd.DataFrame(rows, columns=CAPABILITY_COLUMNS)
    return Causality(table, _effects(contrasts, slugs, intervals))


class _Contrasts:
    """Sums over pairs of different trials of a task.

    The first trial places the task in a stratum, and the second one measures the arm. So no outcome is used both to
    select tasks and to measure.
    """

    def __init__(self, outcomes: Outcomes, slugs: Sequence[str]) -> None:
        self.passes, self.stages = outcomes.passes, outcomes.stages
        self.base = outcomes.passes[BASE]
        self.failed = np.zeros(self.base.shape)
        self.lacking = {slug: np.zeros(self.base.shape) for slug in slugs}
        for place, lacks in outcomes.lacks.items():
            self.failed[place] = 1.0
            for slug in lacks & {*slugs}:
                self.lacking[slug][place] = 1.0

    def stratum(self, name: str, slug: str) -> Floats:
        """Return the mask (tasks, trials) of the base's rollouts in a stratum of a capability."""
        lacking = self.lacking.get(slug, np.zeros(self.base.shape))
        alone = sum(self.lacking.values(), np.zeros(self.base.shape)) == 1
        strata = {LACKING: lacking, SOLE: lacking * alone, REMAINDER: self.failed * (1 - lacking)}
        return strata[name] if name in strata else (self.base == 1.0).astype(float)

    def mean(self, stratum: Floats, arm: str, values: Floats) -> Ratio:
        """Average `values` over the other trials of each rollout in a stratum. Trials need scores of arm and base."""
        valid = ~np.isnan(self.base) & ~np.isnan(self.passes[arm])
        return Ratio(_paired(stratum, np.where(valid, values, 0.0)), _paired(stratum, valid.astype(float)))

    def change(self, stratum: Floats, arm: str) -> Ratio:
        """Estimate how an arm changes the pass rate of a stratum."""
        return self.mean(stratum, arm, self.passes[arm] - self.base)

    def repair(self, stratum: Floats, whole: Floats, arm: str) -> Ratio:
        """Return the passes that an arm gains in a stratum, divided by the base's failures in `whole`."""
        failures = self.mean(whole, arm, 1.0 - self.base).numerators
        return Ratio(self.change(stratum, arm).numerators, failures)

    def placebo(self, slug: str, arms: Mapping[str, str]) -> tuple[Ratio, Ratio]:
        """Estimate the placebo effect for a capability.

        The failures are those that lack this capability and not the other adapter's. `arms` is capability -> adapter.

        Returns:
            The change by the other capabilities' adapters, and the change by this capability's adapter, on the same
            failures.
        """
        strata = {arm: self.lacking[slug] * (1 - self.lacking[name]) for name, arm in arms.items() if name != slug}
        return (
            _pooled([self.change(stratum, arm) for arm, stratum in strata.items()], len(self.base)),
            _pooled([self.change(stratum, arms[slug]) for stratum in strata.values()], len(self.base)),
        )


def _paired(first: Floats, second: Floats) -> Floats:
    """For each task, sum first[i] * second[j] over all pairs of trials i != j: (tasks, trials) -> (tasks,)."""
    return first.sum(axis=1) * second.sum(axis=1) - (first * second).sum(axis=1)


def _pooled(ratios: Sequence[Ratio], tasks: int) -> Ratio:
    numerators, denominators = np.zeros(tasks), np.zeros(tasks)
    for ratio in ratios:
        numerators, denominators = numerators + ratio.numerators, denominators + ratio.denominators
    return Ratio(numerators, denominators)


def _capability_row(
    contrasts: _Contrasts, slug: str, arms: Mapping[str, str], intervals: Bootstrap
) -> dict[str, object]:
    """See `Causality.capabilities`."""
    lacking, sole, remainder = (contrasts.stratum(name, slug) for name in (LACKING, SOLE, REMAINDER))
    placebo, matched = contrasts.placebo(slug, arms)
    adapter = arms[slug]
    ratios = {
        "claimed": Ratio(lacking.sum(axis=1), contrasts.failed.sum(axis=1)),
        "efficacy": contrasts.repair(lacking, lacking, adapter),
        "sole_efficacy": contrasts.repair(sole, sole, adapter),
        "repaired": contrasts.repair(lacking, contrasts.failed, adapter),
        "placebo": placebo,
        "matched": matched,
        "lacking": contrasts.change(lacking, adapter),
        "other": contrasts.change(remainder, adapter),
    }
    resampled = dict(zip(ratios, intervals.resampled([*ratios.values()]), strict=True))
    values = {name: ratio.value for name, ratio in ratios.items()}
    for name, first, second in (("difference", "lacking", "other"), ("specificity", "matched", "placebo")):
        values[name], resampled[name] = values[first] - values[second], resampled[first] - resampled[second]
    row: dict[str, object] = {"failures": int(contrasts.failed.sum())}
    row |= {"lacking": int(lacking.sum()), "sole": int(sole.sum()), "tasks": int(lacking.any(axis=1).sum())}
    for name in QUANTITIES:
        low, high = intervals.percentiles(resampled[name])
        row |= {name: values[name], f"{name}_low": low, f"{name}_high": high}
    return row


def _effects(contrasts: _Contrasts, slugs: Sequence[str], intervals: Bootstrap) -> pd.DataFrame:
    """See `Causality.effects`."""
    rows, changes = [], []
    for slug, name in [*((slug, name) for slug in slugs for name in (LACKING, SOLE, REMAINDER)), ("", PASSED)]:
        stratum = contrasts.stratum(name, slug)
        for arm in (arm for arm in contrasts.passes if arm != BASE):
            base, rate = (contrasts.mean(stratum, arm, contrasts.passes[player]).value for player in (BASE, arm))
            changes.append(contrasts.change(stratum, arm))
            tasks = int((changes[-1].denominators > 0).sum())
            rows.append([slug, name, arm, contrasts.stages[arm], tasks, base, rate, changes[-1].value])
    bounds = [intervals.percentiles(values) for values in intervals.resampled(changes)]
    return pd.DataFrame([[*row, *bound] for row, bound in zip(rows, bounds, strict=True)], columns=EFFECT_COLUMNS)


def publish_causality(causality: Causality, folder: Path) -> None:
    """Write capabilities.csv and effects.csv."""
    for name, frame in (("capabilities", causality.capabilities), ("effects", causality.effects)):
        publish_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
