"""The rounds: teach, diagnose the trained agent, make environments for what it lacks, teach again; then route.

Source: TRACE gives the steps; that the solutions of its environments are taught in place of their rewards is
captrain's own, and so are the rounds. The generalist is one adapter, fine-tuned from the base on the solutions of all
environments, single and pair, in every round anew; a specialist is fine-tuned on those of one environment. A task is
routed among base, specialists and, for what looks like a pair, the generalist. Fine-tuning costs no rollout; those of
every diagnosis and calibration are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.capabilities import read_selection, undecided
from captrain.comparison.rounds.arms import GENERALIST, ROUTED, specialist_name
from captrain.comparison.rounds.diagnosis import Diagnosis, diagnose_agent, extend_environments
from captrain.comparison.rounds.evidence import Evidence
from captrain.comparison.rounds.rediscovery import rediscovery_table
from captrain.config import Spec, build
from captrain.execution import launch
from captrain.ledger import LedgerEntry
from captrain.models import Adapter
from captrain.records import JsonObject, publish, publish_json, publish_text
from captrain.routing import BASE, OPENINGS, AskedModel, Example, Router, examples, openings
from captrain.training import (
    LIBRARIES,
    SFT_COLUMNS,
    Faults,
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
    evidence: Evidence
    diagnoses: Sequence[Diagnosis]
    account: Sequence[JsonObject]
    ledger: Sequence[LedgerEntry]


def generalist_lesson(spec: Spec, base: Path, evidence: Evidence) -> SolutionLesson:
    """Plan the demonstrations of the adapter over all environments."""
    settings = spec.baselines.solutions
    tasks = settings.rollouts if settings.source == "rollouts" else settings.demonstrations
    return _lesson(spec, base, GENERALIST, evidence.doses(tasks), settings.demonstrations)


def specialist_lessons(spec: Spec, base: Path, evidence: Evidence) -> list[SolutionLesson]:
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
    faults = Faults(section.faults.rate, section.faults.kind, section.faults.filtered)
    settings = fine_tuning_settings(spec, section.epochs, section.learning_rate)
    return SolutionLesson(
        name, GENERALIST, base, spec.exploring(), settings, counts, dose, section.source, faults, spec.machine
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
    base, evidence = project / "artifacts/base", Evidence.of_project(project)
    results, artifacts = project / "results" / GENERALIST, project / "artifacts" / GENERALIST
    diagnoses, account, ledger = list[Diagnosis](), list[JsonObject](), list[LedgerEntry]()
    lessons = [generalist_lesson(spec, base, evidence), *specialist_lessons(spec, base, evidence)]
    generalist, *specialists = launch.run(teach_solutions, lessons, spec.machine, GENERALIST, LIBRARIES)
    rounds = spec.baselines.solutions.rounds
    for number in range(1, rounds.count + 1):
        if rounds.condition == "undecided" and not _undecided(project, diagnoses):
            break
        agent = Adapter(str(generalist.folder), generalist.digest)
        if (diagnosis := diagnose_agent(spec, base, agent, evidence, number)) is None:
            break
        diagnoses.append(diagnosis)
        account.append(diagnosis.row(agent.digest))
        ledger.append(diagnosis.ledger)
        evidence = diagnosis.evidence
        if not diagnosis.new and not diagnosis.lacking:
            break
        extension = extend_environments(spec, base, agent, diagnosis, results, artifacts)
        evidence, previous = extension.evidence, evidence
        ledger += extension.ledger
        account[-1]["without_environment"] = dict(extension.without)
        lessons = [generalist_lesson(spec, base, evidence)]
        if evidence.trained != previous.trained:
            lessons += specialist_lessons(spec, base, evidence)[len(previous.trained) :]
        generalist, *further = launch.run(teach_solutions, lessons, spec.machine, GENERALIST, LIBRARIES)
        specialists += further
    return Teaching(generalist, specialists, evidence, diagnoses, account, ledger)


def _undecided(project: Path, diagnoses: Sequence[Diagnosis]) -> Sequence[str]:
    return diagnoses[-1].undecided if diagnoses else undecided(read_selection(project / "results"))


def routed(spec: Spec, base: Path, evidence: Evidence) -> pd.DataFrame:
    """Route every test task among base, specialists and generalist: columns task and `ROUTED`.

    The configured router goes by openings of the environments, whose route is their specialist, or for a pair the
    generalist, and by discovery tasks that the base passed.
    """
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    targets = {environment.name: environment.target(spec.machine) for environment in evidence.environments}
    environment_examples = examples(
        targets, OPENINGS, [rollout for rollout in evidence.rollouts if rollout.adapter is None]
    )
    solved = [Example(example.text, _arm(example.route)) for example in environment_examples]
    router = build(spec.router, Router, model=AskedModel.of(spec, base))
    routes = router.route(solved, openings(benchmark, tasks))
    return pd.DataFrame({"task": [task.id for task in tasks], ROUTED: routes})


def _arm(route: str) -> str:
    return BASE if route == BASE else GENERALIST if "+" in route else specialist_name(route)


def publish_teaching(spec: Spec, project: Path, teaching: Teaching) -> None:
    """Write adapters, ledger, account, re-discovery, routes, and the rollouts of every diagnosis."""
    results, artifacts = project / "results" / GENERALIST, project / "artifacts" / GENERALIST
    adapters = [teaching.generalist, *teaching.specialists]
    entries = {entry.item: entry for adapter in adapters for entry in adapter.costs}
    ledger = [*teaching.ledger, *entries.values()]
    publish_adapters(adapters, GENERALIST, GENERALIST, columns=SFT_COLUMNS, calibration=ledger)
    publish_json(results / "rounds.json", [*teaching.account])
    table = rediscovery_table(read_selection(project / "results"), teaching.diagnoses)
    publish_text(results / "rediscovery.csv", table.to_csv(index=False, float_format="%.6f"))
    routes = routed(spec, project / "artifacts/base", teaching.evidence)
    publish_text(results / "routes.csv", routes.to_csv(index=False))
    rollouts = [rollout for diagnosis in teaching.diagnoses for rollout in diagnosis.rollouts]
    publish(artifacts / "discovery.jsonl", rollouts)
