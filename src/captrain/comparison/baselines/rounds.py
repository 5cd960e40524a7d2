"""Diagnoses the trained agent of the row `solutions` on fresh discovery tasks.

- A capability that the fresh rollouts select is new if it has no environment. If the agent was taught it, it is lacking
  again. Its coverage is relative to the base's failures: for an agent that seldom fails, a tenth of its own failures
  would be one or two rollouts, and no reason for another round.
- Labels of all diagnoses are pooled by labelling run, but only for candidates that were undecided before because too
  few rollouts exercised them. Two agents differ in several capabilities at once, so comparing rollouts of both would
  also select everything else that the training changed.
- Environments for new capabilities are calibrated on the trained agent.

`RoundState` starts with the base's diagnosis and grows with each round. It has no data of the test split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from captrain.agents import PolicySource, RolloutBatch, collect_batch
from captrain.benchmarks import load_benchmark, open_worlds
from captrain.capabilities import Analyst, SelectionAccount, fault_of, label_runs, pooled, select, undecided
from captrain.comparison.baselines.baseline import SOLUTIONS_ADAPTER
from captrain.environments import (
    NoTemplate,
    SynthesisResult,
    Synthesizer,
    make_brief,
    make_standard,
    publish_environments,
    synthesize,
    synthesize_pairs,
)
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import Adapter
from captrain.records import Capability, Rollout, RolloutLabels, load
from captrain.run import Spec, build
from captrain.training import TrainingEnvironment, training_environments

REDISCOVERY_COLUMNS = [
    *("round", "capability", "selected", "gap", "gap_low", "gap_high", "coverage", "lacking", "passed", "failed")
]


@dataclass(frozen=True)
class RoundState:
    """Results of all diagnoses so far.

    Args:
        rollouts: discovery rollouts of every diagnosed agent.
        labels: labels of these rollouts, in every labelling run.
        candidates: labelled candidates, by id.
        capabilities: selected capabilities, in the order of their selection.
        environments: single and pair environments that have a passport.
        failing: share of the base's scored rollouts that failed.
        lacking: capability -> number of diagnoses that selected it again after it was taught.
    """

    rollouts: Sequence[Rollout]
    labels: Sequence[RolloutLabels]
    candidates: Mapping[str, Capability]
    capabilities: Sequence[Capability]
    environments: tuple[TrainingEnvironment, ...]
    failing: float = 1.0
    lacking: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_project(cls, project: Path) -> "RoundState":
        """Load the base's diagnosis from the outputs of the stages `rollouts` to `pairs`.

        Raises:
            UserError: a file is missing or corrupt.
        """
        results, artifacts = project / "results", project / "artifacts"
        candidates = load(results / "labels/candidates.jsonl", Capability)
        rollouts = load(artifacts / "rollouts/discovery.jsonl", Rollout)
        scored = [rollout.outcome for rollout in rollouts if fault_of(rollout) is None]
        return cls(
            rollouts,
            load(artifacts / "labels/labels.jsonl", RolloutLabels),
            {candidate.id: candidate for candidate in candidates},
            load(results / "capabilities/capabilities.jsonl", Capability),
            (*training_environments(results / "environments"), *training_environments(results / "pairs")),
            scored.count("failed") / len(scored),
        )

    @property
    def specialised(self) -> list[TrainingEnvironment]:
        """The environments of a single capability, without those of pairs."""
        return [environment for environment in self.environments if "+" not in environment.name]

    @property
    def trained(self) -> list[str]:
        """The capabilities that have an environment."""
        return [environment.name for environment in self.specialised]

    def doses(self, demonstrations: int) -> tuple[tuple[TrainingEnvironment, int], ...]:
        """Divide demonstrations among all environments.

        Environments get even shares. If a capability was found lacking again, its environments get one more share each
        time.
        """
        weights = [
            1 + max(self.lacking.get(name, 0) for name in environment.name.split("+"))
            for environment in self.environments
        ]
        total, before, doses = sum(weights), 0, list[int]()
        for weight in weights:
            # Round the running total up, so that the remainder goes to the first environments.
            doses.append(-(-demonstrations * (before + weight) // total) - -(-demonstrations * before // total))
            before += weight
        return tuple(zip(self.environments, doses, strict=True))


@dataclass(frozen=True)
class Rediagnosis:
    """One diagnosis of the trained agent.

    Args:
        number: number of the round, from 1.
        agent: digest of the adapter that acted.
        rollouts: rollouts of the agent on fresh tasks.
        account: result of the selection with only these rollouts; None if all passed or all failed.
        new: selected capabilities that have no environment. They are selected by these rollouts or, if they were
            undecided before, by the labels of all diagnoses.
        lacking: taught capabilities that were selected again.
        undecided: candidates that are undecided even with the labels of all diagnoses.
        state: the state including these rollouts and labels.
        without_environment: new capability -> why it got no environment; None if no environment was attempted.
    """

    number: int
    agent: str
    rollouts: Sequence[Rollout]
    account: SelectionAccount | None
    new: Sequence[Capability]
    lacking: Sequence[str]
    undecided: Sequence[str]
    state: RoundState
    without_environment: Mapping[str, str] | None = None

    def row(self) -> dict[str, object]:
        """Format the diagnosis as its row of results/solutions/rounds.json."""
        row: dict[str, object] = {
            "round": self.number,
            "agent": self.agent,
            "rollouts": len(self.rollouts),
            "passed": sum(rollout.outcome == "passed" for rollout in self.rollouts),
            "new": [capability.id for capability in self.new],
            "lacking": [*self.lacking],
            "undecided": [*self.undecided],
        }
        if self.without_environment is not None:
            row["without_environment"] = dict(self.without_environment)
        return row

    @property
    def ledger(self) -> LedgerEntry:
        """The ledger entry of the diagnosis's rollouts."""
        method = SOLUTIONS_ADAPTER
        return ledger_entry(self.rollouts, stage=method, method=method, item=f"diagnosis {self.number}")


def diagnose_agent(spec: Spec, base: Path, agent: Adapter, state: RoundState, number: int) -> Rediagnosis | None:
    """Diagnose the trained agent; None if the discovery split has no fresh tasks.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that acts.
        state: results of earlier diagnoses.
        number: number of the round, from 1.

    Raises: As `captrain.agents.collect_batch`, and as the analyst.
    """
    target, rounds = load_benchmark(spec.benchmark, spec.machine), spec.baselines.solutions.rounds
    first, last = (spec.rollouts.tasks + rounds.tasks_before(number + following) for following in (0, 1))
    if (size := target.size("discovery")) is not None:
        last = min(size, last)
    if last <= first:
        return None
    policy = PolicySource(spec.policy, base, spec.machine)
    tasks = target.tasks("discovery", last)[first:]
    batch = RolloutBatch(
        f"discovery {number}", policy, spec.benchmark, tasks, "diagnosis", spec.seed, 1, agent, spec.rollouts.retries
    )
    rollouts = collect_batch(batch, target, "solutions")
    if len({rollout.outcome for rollout in rollouts if fault_of(rollout) is None}) < 2:
        return Rediagnosis(number, agent.digest, rollouts, None, [], [], [], state)
    analyst = build(spec.analyst, Analyst, access=spec.machine.asking)
    with open_worlds(target=target, machine=spec.machine) as worlds:
        candidates, labels = label_runs(
            analyst, rollouts, target.declared_tools, spec.labels.runs, spec.seed, worlds=worlds
        )
    return replace(contrast(spec, number, rollouts, candidates, labels, state), agent=agent.digest)


def contrast(
    spec: Spec,
    number: int,
    rollouts: Sequence[Rollout],
    candidates: Sequence[Capability],
    labels: Sequence[RolloutLabels],
    state: RoundState,
) -> Rediagnosis:
    """Select capabilities by the labels of fresh rollouts, first alone and then pooled with earlier diagnoses."""
    pool = pooled([candidates, [*state.candidates.values()]])
    labels_of_all = [*state.labels, *labels]
    alone = select(labels, candidates, spec.selection, len(pool), spec.seed)
    # The threshold of coverage applies to the base's share of failures.
    counts, least = alone.report["rollouts"], spec.selection.coverage * state.failing
    coverage = {row["id"]: row["coverage"] or 0.0 for row in alone.report["candidates"]}
    lacking = [
        item
        for item in alone.capabilities
        if coverage[item.id] * counts["failed"] / (counts["passed"] + counts["failed"]) >= least
    ]
    together = select(labels_of_all, [*pool.values()], spec.selection, len(pool), spec.seed)
    before = select(state.labels, [*state.candidates.values()], spec.selection, len(pool), spec.seed)
    decided = [item for item in together.capabilities if item.id in undecided(before.report)]
    selected = {item.id: item for item in (*lacking, *decided)}
    return Rediagnosis(
        number,
        "",
        rollouts,
        alone.report,
        [pool[name] for name in selected if name not in state.trained][: spec.capabilities.count],
        [item.id for item in lacking if item.id in state.trained],
        [name for name in undecided(together.report) if name not in state.trained],
        replace(state, rollouts=[*state.rollouts, *rollouts], labels=labels_of_all, candidates=pool),
    )


def extend_environments(
    spec: Spec, base: Path, agent: Adapter, diagnosis: Rediagnosis, results: Path, artifacts: Path
) -> tuple[RoundState, Sequence[LedgerEntry], Mapping[str, str]]:
    """Synthesize environments for new capabilities, and for the pairs that are now lacking together most often.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that environments are calibrated with.
        diagnosis: the diagnosis that found the new capabilities.
        results: folder of the stage's small outputs.
        artifacts: folder of its large outputs.

    Returns:
        The state with the new environments, the ledger of calibration, and capability -> why it got no environment.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than the setting demands.
    """
    state, machine, seed = diagnosis.state, spec.machine, spec.seed
    target = load_benchmark(spec.benchmark, machine)
    standard = make_standard(target, spec.evaluation.tasks, spec.environments)
    synthesizer = build(spec.synthesizer, Synthesizer, access=machine.asking)
    policy = PolicySource(spec.exploring(), base, machine)
    # 1. An environment for each new capability.
    syntheses, without = list[SynthesisResult](), dict[str, str]()
    for capability in diagnosis.new:
        brief = make_brief(capability, target.tools, state.rollouts, spec.benchmark)
        try:
            syntheses.append(synthesize(brief, synthesizer, policy, standard, machine, seed, agent))
            if not syntheses[-1].passed:
                without[capability.id] = syntheses[-1].best.passport.complaints()
        except NoTemplate as lack:
            without[capability.id] = lack.problem
    folder = Path("rounds") / str(diagnosis.number)
    publish_environments(syntheses, results / folder, artifacts / folder, required=False)
    capabilities = {item.id: item for item in (*state.capabilities, *diagnosis.new) if item.id not in without}
    extended = replace(
        state,
        capabilities=[*capabilities.values()],
        environments=(*state.environments, *training_environments(results / folder)),
        lacking={name: state.lacking.get(name, 0) + (name in diagnosis.lacking) for name in state.trained},
    )
    owner = {"stage": SOLUTIONS_ADAPTER, "method": SOLUTIONS_ADAPTER}
    ledger = [entry.model_copy(update=owner) for result in syntheses for entry in result.ledger]
    if not diagnosis.new:
        return extended, ledger, without
    # 2. Environments for the most frequent pairs in all labels that have none yet.
    observed = extended.labels, extended.capabilities, extended.rollouts
    pairs = synthesize_pairs(*observed, spec.pairs.count, synthesizer, standard, machine, seed)
    names = {environment.name for environment in extended.environments}
    further = [result for result in pairs.results if result.capability.id not in names]
    publish_environments(further, results / folder / "pairs", artifacts / folder / "pairs", required=False)
    environments = (*extended.environments, *training_environments(results / folder / "pairs"))
    return replace(extended, environments=environments), ledger, without


def rediscovery_table(base: SelectionAccount, diagnoses: Sequence[Rediagnosis]) -> pd.DataFrame:
    """Tabulate the gap and the coverage of every capability before and after teaching, always on fresh tasks.

    A capability is repaired if its coverage and the share of rollouts that lack it both fall. Gap and coverage are
    shares of the failures, which become few, so the table also has the share of all rollouts.

    Returns:
        round (0: the base), capability, selected, gap, gap_low, gap_high, coverage (of the failed rollouts), lacking
        (share of all rollouts that failed and lack it), passed, failed (rollouts). Undefined numbers are empty.
    """
    rows = []
    for number, account in [(0, base), *((diagnosis.number, diagnosis.account) for diagnosis in diagnoses)]:
        if account is None:
            continue
        passed, failed = account["rollouts"]["passed"], account["rollouts"]["failed"]
        for row in sorted(account["candidates"], key=lambda row: row["id"]):
            lacking = None if row["coverage"] is None else row["coverage"] * failed / (passed + failed)
            numbers = row["gap"], row["gap_low"], row["gap_high"], row["coverage"], lacking, passed, failed
            rows.append((number, row["id"], row["selected"], *numbers))
    return pd.DataFrame(rows, columns=REDISCOVERY_COLUMNS)
