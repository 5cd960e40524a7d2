"""Further diagnoses in TRACE from solutions: the trained agent on discovery tasks that nobody has seen.

What the fresh rollouts alone select is lacking now: new where it has no environment, and lacking again where the agent
was taught it. Its coverage is held against as many failures as the base had: of an agent that seldom fails, a tenth of
the failures is a rollout or two, and no reason for another round.

Labels of all diagnoses are pooled, by labelling run, for those candidates alone that were undecided
before, because too few rollouts exercised them: agents differ in more than one thing, so that a contrast over rollouts
of two of them would select whatever else has changed with what was taught. Environments for what is new are calibrated
on the trained agent: at its present edge.

The evidence begins with what the stages before have left of the base, and grows by a round at a time. Nothing in it is
of the test split.
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
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels, load
from captrain.run import Spec, build
from captrain.training import TrainingEnvironment, training_environments

REDISCOVERY_COLUMNS = [
    *("round", "capability", "selected", "gap", "gap_low", "gap_high", "coverage", "lacking", "passed", "failed")
]


@dataclass(frozen=True)
class RoundState:
    """Findings of all diagnoses so far.

    Args:
        rollouts: of the discovery split, by every agent that was diagnosed.
        labels: of these, in every labelling run.
        candidates: what labels were asked for, by id.
        capabilities: what has been selected, in the order of its selection.
        environments: single and pair, with a passport.
        failing: share of the base's rollouts that failed, of those that count.
        lacking: capability -> in how many diagnoses of an agent that was taught it, it was selected again.
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
        """Load what the stages from `rollouts` to `pairs` left of the base.

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
        """The environments of one capability each."""
        return [environment for environment in self.environments if "+" not in environment.name]

    @property
    def trained(self) -> list[str]:
        """The capabilities that have an environment."""
        return [environment.name for environment in self.specialised]

    def doses(self, demonstrations: int) -> tuple[tuple[TrainingEnvironment, int], ...]:
        """Share so many demonstrations among all environments: evenly, but for those of a capability that was found
        lacking again, which count once more each time."""
        weights = [
            1 + max(self.lacking.get(name, 0) for name in environment.name.split("+"))
            for environment in self.environments
        ]
        total, before, doses = sum(weights), 0, list[int]()
        for weight in weights:
            # Rounded up, so that what does not divide goes to the first.
            doses.append(-(-demonstrations * (before + weight) // total) - -(-demonstrations * before // total))
            before += weight
        return tuple(zip(self.environments, doses, strict=True))


@dataclass(frozen=True)
class Rediagnosis:
    """Findings of one diagnosis of the trained agent.

    Args:
        number: of the round, from 1 on; 0 is the base's.
        rollouts: of the agent on fresh tasks.
        account: of the selection by these rollouts alone; None where all passed or all failed.
        new: capabilities without an environment that these rollouts select or, of those that were undecided before,
            the labels of all diagnoses.
        lacking: capabilities that were taught and are selected again.
        undecided: candidates that the labels of all diagnoses leave undecided.
        evidence: with these rollouts and labels.
    """

    number: int
    rollouts: Sequence[Rollout]
    account: SelectionAccount | None
    new: Sequence[Capability]
    lacking: Sequence[str]
    undecided: Sequence[str]
    evidence: RoundState

    def row(self, agent: str) -> JsonObject:
        """Format the diagnosis as its row of results/solutions/rounds.json."""
        passed = sum(rollout.outcome == "passed" for rollout in self.rollouts)
        return {
            "round": self.number,
            "agent": agent,
            "rollouts": len(self.rollouts),
            "passed": passed,
            "new": [capability.id for capability in self.new],
            "lacking": [*self.lacking],
            "undecided": [*self.undecided],
        }

    @property
    def ledger(self) -> LedgerEntry:
        """Enter the rollouts that the diagnosis spent."""
        return ledger_entry(
            self.rollouts, stage=SOLUTIONS_ADAPTER, method=SOLUTIONS_ADAPTER, item=f"diagnosis {self.number}"
        )


def diagnose_agent(spec: Spec, base: Path, agent: Adapter, evidence: RoundState, number: int) -> Rediagnosis | None:
    """Diagnose the trained agent; None where the discovery split has no fresh tasks.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that acts.
        evidence: of the diagnoses before.
        number: of the round, from 1 on.

    Raises:
        As `captrain.agents.collect_batch` and the analyst.
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
        return Rediagnosis(number, rollouts, None, [], [], [], evidence)
    analyst = build(spec.analyst, Analyst, access=spec.machine.asking)
    with open_worlds(target=target, machine=spec.machine) as worlds:
        candidates, labels = label_runs(
            analyst, rollouts, target.declared_tools, spec.labels.runs, spec.seed, worlds=worlds
        )
    return contrast(spec, number, rollouts, candidates, labels, evidence)


def contrast(
    spec: Spec,
    number: int,
    rollouts: Sequence[Rollout],
    candidates: Sequence[Capability],
    labels: Sequence[RolloutLabels],
    evidence: RoundState,
) -> Rediagnosis:
    """Contrast fresh rollouts by their labels, alone and pooled with those of the diagnoses before."""
    pool = pooled([candidates, [*evidence.candidates.values()]])
    labels_of_all = [*evidence.labels, *labels]
    alone = select(labels, candidates, spec.selection, len(pool), spec.seed)
    # Lacking are those in as large a share of rollouts as the threshold asks of the base's.
    counts, least = alone.report["rollouts"], spec.selection.coverage * evidence.failing
    coverage = {row["id"]: row["coverage"] or 0.0 for row in alone.report["candidates"]}
    lacking = [
        item
        for item in alone.capabilities
        if coverage[item.id] * counts["failed"] / (counts["passed"] + counts["failed"]) >= least
    ]
    together = select(labels_of_all, [*pool.values()], spec.selection, len(pool), spec.seed)
    before = select(evidence.labels, [*evidence.candidates.values()], spec.selection, len(pool), spec.seed)
    trained, open_before = {*evidence.trained}, {*undecided(before.report)}
    decided = [item for item in together.capabilities if item.id in open_before]
    selected = {item.id: item for item in (*lacking, *decided)}
    return Rediagnosis(
        number,
        rollouts,
        alone.report,
        [pool[name] for name in selected if name not in trained][: spec.capabilities.count],
        [item.id for item in lacking if item.id in trained],
        [name for name in undecided(together.report) if name not in trained],
        replace(evidence, rollouts=[*evidence.rollouts, *rollouts], labels=labels_of_all, candidates=pool),
    )


def extend_environments(
    spec: Spec, base: Path, agent: Adapter, diagnosis: Rediagnosis, results: Path, artifacts: Path
) -> tuple[RoundState, Sequence[LedgerEntry], Mapping[str, str]]:
    """Synthesize environments for the new capabilities and for the pairs that now fail together most often.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that environments are calibrated with.
        diagnosis: what is new.
        results: folder of the stage's small outputs.
        artifacts: folder of its large ones.

    Returns:
        Evidence that has them, what calibration has cost, and why some have none.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than asked for.
    """
    evidence, machine, seed = diagnosis.evidence, spec.machine, spec.seed
    target = load_benchmark(spec.benchmark, machine)
    standard = make_standard(target, spec.evaluation.tasks, spec.environments)
    synthesizer = build(spec.synthesizer, Synthesizer, access=machine.asking)
    policy = PolicySource(spec.exploring(), base, machine)
    # 1. An environment for each new capability.
    syntheses, without = list[SynthesisResult](), dict[str, str]()
    for capability in diagnosis.new:
        brief = make_brief(capability, target.tools, evidence.rollouts, spec.benchmark)
        try:
            syntheses.append(synthesize(brief, synthesizer, policy, standard, machine, seed, agent))
            if not syntheses[-1].passed:
                without[capability.id] = syntheses[-1].best.passport.complaints()
        except NoTemplate as lack:
            without[capability.id] = lack.problem
    folder = Path("rounds") / str(diagnosis.number)
    publish_environments(syntheses, results / folder, artifacts / folder, required=False)
    capabilities = {item.id: item for item in (*evidence.capabilities, *diagnosis.new) if item.id not in without}
    extended = replace(
        evidence,
        capabilities=[*capabilities.values()],
        environments=(*evidence.environments, *training_environments(results / folder)),
        lacking={name: evidence.lacking.get(name, 0) + (name in diagnosis.lacking) for name in evidence.trained},
    )
    ledger = [entry for result in syntheses for entry in result.ledger]
    charged = [entry.model_copy(update={"stage": SOLUTIONS_ADAPTER, "method": SOLUTIONS_ADAPTER}) for entry in ledger]
    if not diagnosis.new:
        return extended, charged, without
    # 2. Environments for the most frequent pairs of all labels that have none yet.
    observed = extended.labels, extended.capabilities, extended.rollouts
    pairs = synthesize_pairs(*observed, spec.pairs.count, synthesizer, standard, machine, seed)
    names = {environment.name for environment in extended.environments}
    further = [result for result in pairs.results if result.capability.id not in names]
    publish_environments(further, results / folder / "pairs", artifacts / folder / "pairs", required=False)
    environments = (*extended.environments, *training_environments(results / folder / "pairs"))
    return replace(extended, environments=environments), charged, without


def rediscovery_table(base: SelectionAccount, diagnoses: Sequence[Rediagnosis]) -> pd.DataFrame:
    """Tabulate gap and coverage of every capability before and after teaching, always on tasks that neither the agent
    nor an earlier diagnosis has seen.

    A capability is repaired where its coverage and the share of rollouts that lack it fall; gap and coverage are shares
    of failures, which become few, so that the share of all rollouts stands beside them.

    Returns:
        Columns round (0: the base), capability, selected, gap, gap_low, gap_high, coverage (of the failed rollouts),
        lacking (share of all rollouts that failed and lack it), passed, failed (rollouts). Empty where undefined.
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
