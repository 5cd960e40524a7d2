"""A further diagnosis: the trained agent on discovery tasks that nobody has seen, and what it still lacks.

What the fresh rollouts alone select is lacking now: new where it has no environment, and lacking again where the agent
was taught it. Its coverage is held against as many failures as the base had: of an agent that seldom fails, a tenth of
the failures is a rollout or two, and no reason for another round.

Labels of all diagnoses are pooled, by labelling run, for those candidates alone that were undecided
before, because too few rollouts exercised them: agents differ in more than one thing, so that a contrast over rollouts
of two of them would select whatever else has changed with what was taught. Environments for what is new are calibrated
on the trained agent: at its present edge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from captrain.benchmarks import load_benchmark, open_worlds
from captrain.capabilities import Analyst, SelectionAccount, fault_of, label_runs, pooled, select, undecided
from captrain.comparison.rounds.arms import GENERALIST
from captrain.comparison.rounds.evidence import Evidence
from captrain.config import Spec, build
from captrain.contract import Target
from captrain.environments import (
    NoTemplate,
    PairEnvironments,
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
from captrain.records import Capability, JsonObject, Rollout, RolloutLabels
from captrain.rollouts import PolicySource, RolloutBatch, collect_batch
from captrain.training import training_environments


@dataclass(frozen=True)
class Diagnosis:
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
    evidence: Evidence

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
        return ledger_entry(self.rollouts, stage=GENERALIST, method=GENERALIST, item=f"diagnosis {self.number}")


def diagnose_agent(spec: Spec, base: Path, agent: Adapter, evidence: Evidence, number: int) -> Diagnosis | None:
    """Diagnose the trained agent; None where the discovery split has no fresh tasks.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that acts.
        evidence: of the diagnoses before.
        number: of the round, from 1 on.

    Raises:
        As `captrain.rollouts.collect_batch` and the analyst.
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
        return Diagnosis(number, rollouts, None, [], [], [], evidence)
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
    evidence: Evidence,
) -> Diagnosis:
    """Contrast fresh rollouts by their labels, alone and pooled with those of the diagnoses before."""
    pool = pooled([candidates, [*evidence.candidates.values()]])
    labels_of_all = [*evidence.labels, *labels]
    alone = select(labels, candidates, spec.selection, len(pool), spec.seed)
    lacking = [item for item in alone.capabilities if _covers(alone.report, item.id, spec, evidence)]
    together = select(labels_of_all, [*pool.values()], spec.selection, len(pool), spec.seed)
    before = select(evidence.labels, [*evidence.candidates.values()], spec.selection, len(pool), spec.seed)
    trained, open_before = {*evidence.trained}, {*undecided(before.report)}
    decided = [item for item in together.capabilities if item.id in open_before]
    selected = {item.id: item for item in (*lacking, *decided)}
    return Diagnosis(
        number,
        rollouts,
        alone.report,
        [pool[name] for name in selected if name not in trained][: spec.capabilities.count],
        [item.id for item in lacking if item.id in trained],
        [name for name in undecided(together.report) if name not in trained],
        replace(evidence, rollouts=[*evidence.rollouts, *rollouts], labels=labels_of_all, candidates=pool),
    )


def _covers(account: SelectionAccount, name: str, spec: Spec, evidence: Evidence) -> bool:
    """Return whether a capability is lacking in as large a share of rollouts as the threshold asks of the base's."""
    [coverage] = [row["coverage"] or 0.0 for row in account["candidates"] if row["id"] == name]
    passed, failed = account["rollouts"]["passed"], account["rollouts"]["failed"]
    return coverage * failed / (passed + failed) >= spec.selection.coverage * evidence.failing


@dataclass(frozen=True)
class Extension:
    """Environments for what is new: evidence that has them, what calibration has cost, and why some have none."""

    evidence: Evidence
    ledger: Sequence[LedgerEntry]
    without: Mapping[str, str]


def extend_environments(
    spec: Spec, base: Path, agent: Adapter, diagnosis: Diagnosis, results: Path, artifacts: Path
) -> Extension:
    """Synthesize environments for the new capabilities and for the pairs that now fail together most often.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        agent: the adapter that environments are calibrated with.
        diagnosis: what is new.
        results: folder of the stage's small outputs.
        artifacts: folder of its large ones.

    Raises:
        UserError: the synthesizer cannot be asked, or the sandbox is weaker than asked for.
    """
    evidence, machine = diagnosis.evidence, spec.machine
    target = load_benchmark(spec.benchmark, machine)
    standard = make_standard(target, spec.evaluation.tasks, spec.environments)
    synthesizer = build(spec.synthesizer, Synthesizer, access=machine.asking)
    policy = PolicySource(spec.exploring(), base, machine)
    syntheses, without = list[SynthesisResult](), dict[str, str]()
    for capability in diagnosis.new:
        brief = make_brief(capability, target.tools, evidence.rollouts, spec.benchmark)
        try:
            syntheses.append(synthesize(brief, synthesizer, policy, standard, machine, spec.seed, agent))
            if not syntheses[-1].passed:
                without[capability.id] = syntheses[-1].best.passport.complaints()
        except NoTemplate as lack:
            without[capability.id] = lack.problem
    folder = Path("rounds") / str(diagnosis.number)
    publish_environments(syntheses, results / folder, artifacts / folder, required=False)
    lacking = {name: evidence.lacking.get(name, 0) + (name in diagnosis.lacking) for name in evidence.trained}
    capabilities = {item.id: item for item in (*evidence.capabilities, *diagnosis.new) if item.id not in without}
    extended = replace(
        evidence,
        capabilities=[*capabilities.values()],
        environments=(*evidence.environments, *training_environments(results / folder)),
        lacking=lacking,
    )
    ledger = [entry for result in syntheses for entry in result.ledger]
    charged = [entry.model_copy(update={"stage": GENERALIST, "method": GENERALIST}) for entry in ledger]
    if not diagnosis.new:
        return Extension(extended, charged, without)
    pairs = _new_pairs(spec, target, extended, synthesizer)
    publish_environments(pairs.results, results / folder / "pairs", artifacts / folder / "pairs", required=False)
    environments = (*extended.environments, *training_environments(results / folder / "pairs"))
    return Extension(replace(extended, environments=environments), charged, without)


def _new_pairs(spec: Spec, target: Target, evidence: Evidence, synthesizer: Synthesizer) -> PairEnvironments:
    """Synthesize environments for the most frequent pairs of all labels that have none yet."""
    standard = make_standard(target, spec.evaluation.tasks, spec.environments)
    pairs = synthesize_pairs(
        evidence.labels,
        evidence.capabilities,
        evidence.rollouts,
        spec.pairs.count,
        synthesizer,
        standard,
        spec.machine,
        spec.seed,
    )
    names = {environment.name for environment in evidence.environments}
    return PairEnvironments([result for result in pairs.results if result.capability.id not in names], pairs.account)
