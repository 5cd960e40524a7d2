"""Row `solutions`: TRACE from solutions, the method that captrain recommends. The paper's method learns from rewards.

Each round trains, diagnoses the trained agent, and makes environments for capabilities that it lacks. Routing comes
last. These steps are TRACE's. Training on the environments' solutions and the rounds are captrain's own additions.

- The generalist is fine-tuned on the solutions of all environments, of single capabilities and of pairs. Every round
  starts again from the base. It is the row's arm.
- A specialist is fine-tuned on the solutions of one environment.
- The row `solutions_routed` (`captrain.comparison.rows`) routes each task to the base, a specialist or, if it looks
  like a pair, to the adapter over all environments.

Fine-tuning costs no rollouts. The rollouts of every diagnosis and calibration are counted.

The comparison with methods that learn from rewards is unequal: this row sees solutions. Every table says so. The value
of the solutions depends on the author of the environments. The embedded templates have faultless solutions; the setting
`faults` shows the value of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from captrain.records import counted, publish, publish_json, publish_text
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
    """Outcome of all rounds.

    Args:
        general: the generalist, trained on all environments.
        specialists: adapters trained on one environment each.
        state: the state after the last round.
        diagnoses: diagnoses of the trained agent, one per round.
        ledger: rollouts spent on diagnoses and calibrations.
    """

    general: FineTuned
    specialists: Sequence[FineTuned]
    state: RoundState
    diagnoses: Sequence[Rediagnosis]
    ledger: Sequence[LedgerEntry]

    @property
    def adapters(self) -> list[FineTuned]:
        """All adapters, the generalist first."""
        return [self.general, *self.specialists]


def generalist_lesson(spec: Spec, base: Path, state: RoundState) -> SolutionLesson:
    """Return the training job of the generalist, which learns from all environments."""
    settings = spec.baselines.solutions
    tasks = settings.rollouts if settings.source == "rollouts" else settings.demonstrations
    return _lesson(spec, base, SOLUTIONS_ADAPTER, state.doses(tasks), settings.demonstrations)


def specialist_lessons(spec: Spec, base: Path, state: RoundState) -> list[SolutionLesson]:
    """Return the training job of each specialist."""
    settings = spec.baselines.solutions
    # The agent's own rollouts are shared with the adapter over all environments, so they are played once.
    tasks = {environment.name: settings.specialist for environment in state.specialised}
    if settings.source == "rollouts":
        tasks = {environment.name: count for environment, count in state.doses(settings.rollouts)}
    return [
        _lesson(
            spec,
            base,
            specialist_name(environment.name),
            ((environment, tasks[environment.name]),),
            settings.specialist,
        )
        for environment in state.specialised
    ]


def _lesson(
    spec: Spec, base: Path, name: str, counts: tuple[tuple[TrainingEnvironment, int], ...], dose: int
) -> SolutionLesson:
    section = spec.baselines.solutions
    return SolutionLesson(
        name,
        SOLUTIONS_ADAPTER,
        base,
        spec.exploring(),
        fine_tuning_settings(spec, section.epochs, section.learning_rate),
        counts,
        dose,
        section.source,
        section.faults,
        spec.machine,
    )


def teach_in_rounds(spec: Spec, project: Path) -> Teaching | None:
    """Teach the base in rounds; None if no environment has a passport.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Raises:
        UserError: an input is missing or damaged, or there is nothing to train on.
    """
    if not training_environments(project / "results/environments"):
        return None
    base, state = project / "artifacts/base", RoundState.of_project(project)
    results, artifacts = project / "results" / SOLUTIONS_ADAPTER, project / "artifacts" / SOLUTIONS_ADAPTER
    diagnoses, ledger = list[Rediagnosis](), list[LedgerEntry]()
    lessons = [generalist_lesson(spec, base, state), *specialist_lessons(spec, base, state)]
    general, *specialists = launch.run(teach_solutions, lessons, spec.machine, SOLUTIONS_ADAPTER, LIBRARIES)
    rounds, open_candidates = spec.baselines.solutions.rounds, undecided(read_selection(project / "results"))
    for number in range(1, rounds.count + 1):
        if rounds.condition == "undecided" and not open_candidates:
            break
        agent = Adapter(str(general.folder), general.digest)
        diagnosis = diagnose_agent(spec, base, agent, state, number)
        if diagnosis is None:
            break
        diagnoses.append(diagnosis)
        ledger.append(diagnosis.ledger)
        previous, state, open_candidates = diagnosis.state, diagnosis.state, diagnosis.undecided
        if not diagnosis.new and not diagnosis.lacking:
            break
        state, calibration, without = extend_environments(spec, base, agent, diagnosis, results, artifacts)
        ledger += calibration
        diagnoses[-1] = replace(diagnosis, without_environment=without)
        lessons = [generalist_lesson(spec, base, state)]
        if state.trained != previous.trained:
            lessons += specialist_lessons(spec, base, state)[len(previous.trained) :]
        general, *further = launch.run(teach_solutions, lessons, spec.machine, SOLUTIONS_ADAPTER, LIBRARIES)
        specialists += further
    return Teaching(general, specialists, state, diagnoses, ledger)


def routed(spec: Spec, base: Path, state: RoundState) -> pd.DataFrame:
    """Route every test task to an arm. Returns a frame with the columns task and `ROUTED`.

    The router learns from openings of the environments, which belong to their specialist or, for a pair, to the
    generalist. It also learns from discovery tasks that the base passed.
    """
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    targets = {environment.name: environment.target(spec.machine) for environment in state.environments}
    rollouts = [rollout for rollout in state.rollouts if rollout.adapter is None]
    arms = {name: SOLUTIONS_ADAPTER if "+" in name else specialist_name(name) for name in targets} | {BASE: BASE}
    solved = [Example(example.text, arms[example.route]) for example in examples(targets, OPENINGS, rollouts)]
    router = build(spec.router, Router, model=AskedModel.of(spec, base))
    routes = router.route(solved, openings(benchmark, tasks))
    return pd.DataFrame({"task": [task.id for task in tasks], ROUTED: routes})


def publish_teaching(spec: Spec, project: Path, teaching: Teaching) -> None:
    """Write adapters, ledger, rounds, re-discovery, routes, and the rollouts of every diagnosis."""
    results, artifacts = project / "results" / SOLUTIONS_ADAPTER, project / "artifacts" / SOLUTIONS_ADAPTER
    entries = {entry.item: entry for adapter in teaching.adapters for entry in adapter.costs}
    ledger = [*teaching.ledger, *entries.values()]
    publish_adapters(teaching.adapters, SOLUTIONS_ADAPTER, SOLUTIONS_ADAPTER, columns=SFT_COLUMNS, calibration=ledger)
    publish_json(results / "rounds.json", [diagnosis.row() for diagnosis in teaching.diagnoses])
    table = rediscovery_table(read_selection(project / "results"), teaching.diagnoses)
    publish_text(results / "rediscovery.csv", table.to_csv(index=False, float_format="%.6f"))
    routes = routed(spec, project / "artifacts/base", teaching.state)
    publish_text(results / "routes.csv", routes.to_csv(index=False))
    rollouts = [rollout for diagnosis in teaching.diagnoses for rollout in diagnosis.rollouts]
    publish(artifacts / "discovery.jsonl", rollouts)


@dataclass(frozen=True, kw_only=True)
class SolutionsBaseline(Baseline):
    """The row `solutions`."""

    learns_from: Supervision = "demonstrations"

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`."""
        section = spec.baselines.solutions
        specialists = section.specialist * spec.capabilities.count
        return (section.demonstrations + specialists, section.epochs) if section.run else (0, 0)

    def diagnosing_rollouts(self, spec: Spec, attempts: float) -> float:
        """See `Baseline.diagnosing_rollouts`.

        The low estimate is one diagnosis that finds nothing new. The high one, with the most attempts, has all rounds
        and a new environment in each.
        """
        rounds, environments = spec.baselines.solutions.rounds, spec.environments
        if not rounds.count or not spec.baselines.solutions.run:
            return 0
        if attempts < environments.rounds:
            return rounds.tasks_before(2)
        return rounds.tasks + rounds.count * attempts * environments.groups * environments.group_size

    def arms(self, spec: Spec, capabilities: int) -> int:
        """See `Baseline.arms`: the adapter over all environments, and each specialist."""
        return 1 + capabilities

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        self.publish_nothing()
        teaching = teach_in_rounds(spec, Path())
        if teaching is None:
            return "no environment has a passport"
        publish_teaching(spec, Path(), teaching)
        count = teaching.general.demonstrations
        discarded = sum(sum(item.left_out.values()) for item in teaching.adapters)
        return (
            f"{counted(count, 'demonstration')} kept and {discarded} left out, "
            f"{counted(len(teaching.specialists), 'specialist')}, repeated diagnoses: {len(teaching.diagnoses)}"
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
