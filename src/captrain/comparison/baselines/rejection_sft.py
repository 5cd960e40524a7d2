"""Row `rejection_sft`: rejection fine-tuning on the target, from rewards, with TRACE's total.

Each round has an even share of the total:

1. Play fresh training tasks of the target with the last adapter (in round 1 with the base).
2. Keep the sampled tokens of passed rollouts, together with those of earlier rounds.
3. Fine-tune a new adapter from the base on all of them.

This is the simplest way to learn from rewards (STaR, arXiv 2203.14465; RAFT, arXiv 2304.06767). GRPO and TRACE must
beat it before anything is called ahead. Rollouts are journaled and each fine-tuning has its own workspace, so an
interrupted run resumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.agents import collect
from captrain.benchmarks import load_benchmark
from captrain.comparison.baselines.baseline import Baseline, trace_ledger
from captrain.comparison.baselines.sft import Lesson
from captrain.contract import CheckedEnvironment
from captrain.errors import UserError
from captrain.ledger import budget, ledger_entry
from captrain.models import Adapter
from captrain.records import Rollout, counted
from captrain.run import Spec, code_digest, launch
from captrain.training import (
    LIBRARIES,
    Demonstration,
    FineTuned,
    FineTuning,
    Learner,
    Trained,
    fine_tune,
    fine_tuning_settings,
    learner,
    publish_adapters,
)

NAME = "rejection_sft"
COLUMNS = ("adapter", "round", "rollouts", "success", "demonstrations", "epochs", "first_loss", "last_loss")
"""Columns of history.csv; rollouts and demonstrations are cumulative."""


@dataclass(frozen=True)
class Round:
    """One round: a row of history.csv."""

    round: int
    rollouts: int
    success: float
    demonstrations: int
    epochs: int
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Refined(Trained):
    """The adapter of the last round, and the record of all rounds."""

    rounds: Sequence[Round] = ()

    @property
    def rows(self) -> list[dict[str, object]]:
        """The rows of history.csv."""
        return [vars(one) for one in self.rounds]


def refine(lesson: Lesson) -> Refined:
    """Play and fine-tune in rounds, with exactly `lesson.rollouts` rollouts; return the last adapter.

    Raises:
        UserError: the base cannot be trained, or no rollout of the first round passed.
    """
    spec, settings = lesson.spec, lesson.spec.baselines.rejection_sft
    policy = learner(spec.exploring(), lesson.base, spec.machine, NAME, f"set baselines.{NAME}.run to false")
    target = load_benchmark(spec.benchmark, spec.machine)
    rollouts, rounds = list[Rollout](), list[Round]()
    adapter: FineTuned | None = None
    for number in range(settings.rounds):
        count = lesson.rollouts * (number + 1) // settings.rounds - len(rollouts)
        batch = play_round(spec, policy, target, len(rollouts), count, adapter)
        rollouts += batch
        passed = [rollout for rollout in rollouts if rollout.outcome == "passed"]
        demonstrations = [Demonstration(rollout.token_ids, rollout.mask) for rollout in passed]
        if not demonstrations:
            raise UserError(
                f"{NAME}: none of {len(rollouts)} rollouts passed, and there is nothing to learn from",
                f"set baselines.{NAME}.run to false, or baselines.{NAME}.rounds lower",
            )
        epochs = max(1, round(settings.rows / len(demonstrations)))
        recipe = fine_tuning_settings(spec, epochs, settings.learning_rate)
        card = f"| rollouts that passed, of its own on the target | {len(passed)} of {len(rollouts)} |\n"
        job = FineTuning(NAME, lesson.base, recipe, demonstrations, {}, card, spec.machine, [code_digest(refine)])
        adapter = fine_tune(job, policy)
        rounds.append(
            Round(
                round=number + 1,
                rollouts=len(rollouts),
                success=round(sum(rollout.outcome == "passed" for rollout in batch) / len(batch), 6),
                demonstrations=len(demonstrations),
                epochs=epochs,
                first_loss=adapter.losses[0],
                last_loss=adapter.losses[-1],
            )
        )
    assert adapter is not None
    cost = ledger_entry(rollouts, stage=NAME, method=NAME, item=NAME)
    return Refined(
        NAME,
        adapter.digest,
        adapter.folder,
        cost.rollouts - cost.errors,
        cost.discarded,
        cost.prompt_tokens,
        cost.completion_tokens,
        cost.errors,
        demonstrations=adapter.demonstrations,
        rounds=rounds,
    )


def play_round(
    spec: Spec, policy: Learner, target: CheckedEnvironment, before: int, count: int, adapter: FineTuned | None
) -> list[Rollout]:
    """Play exactly `count` rollouts on training tasks of the target, one per fresh task.

    A target with too few tasks repeats them evenly.

    Args:
        spec: the whole specification.
        policy: the policy that plays.
        target: the benchmark.
        before: number of rollouts in earlier rounds.
        count: number of rollouts in this round.
        adapter: the adapter to act with; None for the base.
    """
    size = target.size("training")
    if size is None:
        tasks = target.tasks("training", before + count)[before:]
    else:
        whole, first = target.tasks("training", size), before % size
        tasks = [*whole[first:], *whole[:first]]
    trials, once_more = divmod(count, len(tasks))
    acting = Adapter(str(adapter.folder), adapter.digest) if adapter else None
    rollouts: list[Rollout] = []
    for part, times in ((tasks[:once_more], trials + 1), (tasks[once_more:], trials)):
        if part and times:
            rollouts += collect(
                policy,
                target,
                part,
                purpose="training",
                seed=spec.seed,
                trials=times,
                adapter=acting,
                retries=spec.rollouts.retries,
                quiet=True,
            )
    return rollouts


@dataclass(frozen=True, kw_only=True)
class RejectionBaseline(Baseline):
    """The row of rejection fine-tuning."""

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`: rollouts that it sampled itself."""
        section = self.section(spec)
        return (section.rows, section.rounds) if section.run else (0, 0)

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        lesson = Lesson(NAME, spec, Path("artifacts/base"), rollouts=budget(trace_ledger()))
        adapters = launch.run(refine, [lesson], spec.machine, self.name, LIBRARIES)
        publish_adapters(adapters, self.name, self.name, columns=COLUMNS)
        return f"{counted(adapters[0].rollouts, 'rollout')}, {adapters[0].demonstrations} kept"

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name, columns=COLUMNS)


BASELINE = RejectionBaseline(
    name=NAME,
    label="rejection SFT on target",
    order=1,
    compared_with=("grpo_target",),
    on_target=True,
)
