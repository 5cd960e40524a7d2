"""TRACE from solutions: what captrain recommends, beside the paper's own method, which learns from rewards.

The rounds: teach, diagnose the trained agent, make environments for what it lacks, teach again; then route. TRACE gives
the steps; that the solutions of its environments are taught in place of their rewards is captrain's own, and so are the
rounds. The generalist is one adapter, fine-tuned from the base on the solutions of all environments, single and pair,
in every round anew; a specialist is fine-tuned on those of one environment. A task is routed among base, specialists
and, for what looks like a pair, the generalist. Fine-tuning costs no rollout; those of every diagnosis and calibration
are counted. The row is the generalist; its routes are the row `solutions_routed` (`captrain.comparison.rows`).

Beside methods that learn from rewards this has a supervision that they have not: every table says so. How good it is
rests on who wrote the environments. The embedded templates' solutions are without a fault; `faults` says what others
would be worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.capabilities import read_selection, undecided
from captrain.comparison.baselines.baseline import (
    CALIBRATION,
    DIAGNOSIS,
    ROUTED,
    SOLUTIONS_ADAPTER,
    Baseline,
    Supervision,
    specialist_name,
)
from captrain.comparison.baselines.rounds import (
    REDISCOVERY_COLUMNS,
    Rediagnosis,
    RoundState,
    diagnose_agent,
    extend_environments,
    rediscovery_table,
)
from captrain.ledger import LedgerEntry
from captrain.models import Adapter
from captrain.records import JsonObject, publish, publish_json, publish_text
from captrain.routing import BASE, OPENINGS, AskedModel, Example, Router, examples, openings
from captrain.run import Spec, build, launch
from captrain.training import (
    LIBRARIES,
    SFT_COLUMNS,
    FineTuned,
    SolutionLesson,
    TrainingEnvironment,
    fine_tuning_settings,
    publish_adapters,
    teach_solutions,
    training_environments,
)


@dataclass(frozen=True)
class Teaching:
    """Outcome of all rounds: the generalist and the specialists, each diagnosis with its row of the account, and the
    rollouts that diagnoses and calibrations spent."""

    generalist: FineTuned
    specialists: Sequence[FineTuned]
    evidence: RoundState
    diagnoses: Sequence[Rediagnosis]
    account: Sequence[JsonObject]
    ledger: Sequence[LedgerEntry]


def generalist_lesson(spec: Spec, base: Path, evidence: RoundState) -> SolutionLesson:
    """Plan the demonstrations of the adapter over all environments."""
    settings = spec.baselines.solutions
    tasks = settings.rollouts if settings.source == "rollouts" else settings.demonstrations
    return _lesson(spec, base, SOLUTIONS_ADAPTER, evidence.doses(tasks), settings.demonstrations)


def specialist_lessons(spec: Spec, base: Path, evidence: RoundState) -> list[SolutionLesson]:
    """Plan the demonstrations of each adapter of one environment."""
    settings = spec.baselines.solutions
    shares = {environment.name: count for environment, count in evidence.doses(settings.rollouts)}
    return [
        _lesson(
            spec,
            base,
            specialist_name(environment.name),
            # The agent's own rollouts are those that the generalist has been taught by: they are played once.
            ((environment, shares[environment.name] if settings.source == "rollouts" else settings.specialist),),
            settings.specialist,
        )
        for environment in evidence.specialised
    ]


def _lesson(
    spec: Spec, base: Path, name: str, counts: tuple[tuple[TrainingEnvironment, int], ...], dose: int
) -> SolutionLesson:
    section = spec.baselines.solutions
    settings = fine_tuning_settings(spec, section.epochs, section.learning_rate)
    return SolutionLesson(
        name,
        SOLUTIONS_ADAPTER,
        base,
        spec.exploring(),
        settings,
        counts,
        dose,
        section.source,
        section.faults,
        spec.machine,
    )


def teach_in_rounds(spec: Spec, project: Path) -> Teaching | None:
    """Teach the base in rounds; None where no environment has a passport.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Raises:
        UserError: an input is missing or damaged, or nothing can be taught.
    """
    if not training_environments(project / "results/environments"):
        return None
    base, evidence = project / "artifacts/base", RoundState.of_project(project)
    results, artifacts = project / "results" / SOLUTIONS_ADAPTER, project / "artifacts" / SOLUTIONS_ADAPTER
    diagnoses, account, ledger = list[Rediagnosis](), list[JsonObject](), list[LedgerEntry]()
    lessons = [generalist_lesson(spec, base, evidence), *specialist_lessons(spec, base, evidence)]
    generalist, *specialists = launch.run(teach_solutions, lessons, spec.machine, SOLUTIONS_ADAPTER, LIBRARIES)
    rounds, open_candidates = spec.baselines.solutions.rounds, undecided(read_selection(project / "results"))
    for number in range(1, rounds.count + 1):
        if rounds.condition == "undecided" and not open_candidates:
            break
        agent = Adapter(str(generalist.folder), generalist.digest)
        if (diagnosis := diagnose_agent(spec, base, agent, evidence, number)) is None:
            break
        diagnoses.append(diagnosis)
        account.append(diagnosis.row(agent.digest))
        ledger.append(diagnosis.ledger)
        previous, evidence, open_candidates = diagnosis.evidence, diagnosis.evidence, diagnosis.undecided
        if not diagnosis.new and not diagnosis.lacking:
            break
        evidence, calibration, without = extend_environments(spec, base, agent, diagnosis, results, artifacts)
        ledger += calibration
        account[-1]["without_environment"] = dict(without)
        lessons = [generalist_lesson(spec, base, evidence)]
        if evidence.trained != previous.trained:
            lessons += specialist_lessons(spec, base, evidence)[len(previous.trained) :]
        generalist, *further = launch.run(teach_solutions, lessons, spec.machine, SOLUTIONS_ADAPTER, LIBRARIES)
        specialists += further
    return Teaching(generalist, specialists, evidence, diagnoses, account, ledger)


def routed(spec: Spec, base: Path, evidence: RoundState) -> pd.DataFrame:
    """Route every test task among base, specialists and generalist: columns task and `ROUTED`.

    The configured router goes by openings of the environments, whose route is their specialist, or for a pair the
    generalist, and by discovery tasks that the base passed.
    """
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    targets = {environment.name: environment.target(spec.machine) for environment in evidence.environments}
    rollouts = [rollout for rollout in evidence.rollouts if rollout.adapter is None]
    arms = {name: SOLUTIONS_ADAPTER if "+" in name else specialist_name(name) for name in targets} | {BASE: BASE}
    solved = [Example(example.text, arms[example.route]) for example in examples(targets, OPENINGS, rollouts)]
    router = build(spec.router, Router, model=AskedModel.of(spec, base))
    routes = router.route(solved, openings(benchmark, tasks))
    return pd.DataFrame({"task": [task.id for task in tasks], ROUTED: routes})


def publish_teaching(spec: Spec, project: Path, teaching: Teaching) -> None:
    """Write adapters, ledger, account, re-discovery, routes, and the rollouts of every diagnosis."""
    results, artifacts = project / "results" / SOLUTIONS_ADAPTER, project / "artifacts" / SOLUTIONS_ADAPTER
    adapters = [teaching.generalist, *teaching.specialists]
    entries = {entry.item: entry for adapter in adapters for entry in adapter.costs}
    ledger = [*teaching.ledger, *entries.values()]
    publish_adapters(adapters, SOLUTIONS_ADAPTER, SOLUTIONS_ADAPTER, columns=SFT_COLUMNS, calibration=ledger)
    publish_json(results / "rounds.json", [*teaching.account])
    table = rediscovery_table(read_selection(project / "results"), teaching.diagnoses)
    publish_text(results / "rediscovery.csv", table.to_csv(index=False, float_format="%.6f"))
    routes = routed(spec, project / "artifacts/base", teaching.evidence)
    publish_text(results / "routes.csv", routes.to_csv(index=False))
    rollouts = [rollout for diagnosis in teaching.diagnoses for rollout in diagnosis.rollouts]
    publish(artifacts / "discovery.jsonl", rollouts)


@dataclass(frozen=True, kw_only=True)
class SolutionsBaseline(Baseline):
    """The row that is taught in rounds."""

    learns_from: Supervision = "demonstrations"

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`."""
        section = spec.baselines.solutions
        specialists = section.specialist * spec.capabilities.count
        return (section.demonstrations + specialists, section.epochs) if section.run else (0, 0)

    def diagnosing_rollouts(self, spec: Spec, attempts: float) -> float:
        """See `Baseline.diagnosing_rollouts`: of one diagnosis that finds nothing new or, where environments take all
        attempts there are, of all, each with a new environment."""
        rounds, environments = spec.baselines.solutions.rounds, spec.environments
        if not rounds.count or not spec.baselines.solutions.run:
            return 0
        if attempts < environments.rounds:
            return rounds.tasks_before(2)
        return rounds.tasks + rounds.count * attempts * environments.groups * environments.group_size

    def arms(self, capabilities: int) -> int:
        """See `Baseline.arms`: the adapter over all environments, and one for each."""
        return 1 + capabilities

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        self.publish_nothing()
        teaching = teach_in_rounds(spec, Path())
        if teaching is None:
            return "no environment has a passport"
        publish_teaching(spec, Path(), teaching)
        adapters = [teaching.generalist, *teaching.specialists]
        count, discarded = teaching.generalist.demonstrations, sum(sum(item.left_out.values()) for item in adapters)
        return (
            f"{count} demonstrations, {len(teaching.specialists)} specialists, left out {discarded}, "
            f"{len(teaching.diagnoses)} further diagnoses"
        )

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name, columns=SFT_COLUMNS)
        publish_json(Path("results/solutions/rounds.json"), [])
        publish_text(Path("results/solutions/rediscovery.csv"), ",".join(REDISCOVERY_COLUMNS) + "\n")
        publish_text(Path("results/solutions/routes.csv"), "task\n")
        publish(Path("artifacts/solutions/discovery.jsonl"), [])


BASELINE = SolutionsBaseline(
    name="solutions",
    label="TRACE, solutions",
    order=8,
    rests_on=(DIAGNOSIS, CALIBRATION),
    unequal="is taught the environments' own solutions, for which it plays no rollout of training",
    compared_with=("grpo_target", "rejection_sft", "adp"),
)
