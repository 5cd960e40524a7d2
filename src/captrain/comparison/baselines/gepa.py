"""Row `gepa`: GEPA, which evolves the system prompt by reflection on rollouts (Agrawal et al., 2025).

The `gepa` library searches. Rollouts, feedback, proposals and the ledger are ours. A candidate is one text, "guidance":
lines at the end of the system prompt, after the policy's own. The first candidate has no lines. Tasks are of the
training split: the first `validation` tasks choose among candidates, and about as many after them, a multiple of the
minibatch, are learnt from.

The search spends exactly the budget:

- It ends after all but the share `CHOICE`, or earlier if another step with all its retries could exceed the budget.
- The rest is spent on the choice. The best candidates replay the validation tasks in turns, without retries, until
  nothing is left. The best pass rate over all validation rollouts of a candidate wins.
- An error is spent but has no score. In GEPA's lists it has the mean of its batch, which changes no mean.

Comparisons are fair: parent and child play a minibatch with the same draw, so their difference is paired. Each
candidate is validated once, in draw 0. Draws from 1 on belong to the choice. Validated lines are not proposed again;
rejected lines may be. Every batch has a journal (`captrain.agents`), so an interrupted run starts again, reuses what it
played, and gives the same result. The library's own way to resume does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from captrain.agents import collect, load_policy
from captrain.benchmarks import load_benchmark
from captrain.capabilities import line_of
from captrain.comparison.baselines.baseline import Baseline, Supervision, trace_ledger
from captrain.comparison.baselines.reflection import Lines, Model, Reflection, Walk
from captrain.contract import CheckedEnvironment
from captrain.errors import InfrastructureError, UserError
from captrain.ledger import LedgerEntry, budget, ledger_entry
from captrain.records import (
    JsonObject,
    ProgressBar,
    Purpose,
    Rollout,
    Task,
    counted,
    digest,
    publish,
    publish_json,
    publish_text,
)
from captrain.run import Spec, takes
from captrain.training import GUIDANCE as KNOWN

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch
    from gepa.core.callbacks import CandidateAcceptedEvent, CandidateRejectedEvent, IterationStartEvent

NAME = "gepa"
GUIDANCE = "guidance"
"""The component of a candidate, and the setting of a policy."""
CHOICE = 0.25
"""Share of the budget kept for the final choice.

After a single validation each, the best of dozens of candidates is mostly the luckiest one.
"""
FINALISTS = 4
"""Number of candidates in the final choice."""

ReflectiveDataset = Mapping[str, Sequence[Mapping[str, Rollout]]]
"""The library's records by component of a candidate: rollouts to reflect on."""


class GepaExample(NamedTuple):
    """A task and the purpose of its rollouts."""

    purpose: Purpose
    task: Task


@dataclass
class Candidate:
    """Lines proposed in one step, and their scores.

    Args:
        minibatch: pass rates of the parent and of the candidate.
        search: passed or failed, for each validation rollout of the search without an error.
        choice: likewise, of the choice.
    """

    number: int
    parent: int | None
    step: int
    lines: Lines
    rollouts: int = 0
    minibatch: list[float] = field(default_factory=list)
    accepted: bool = False
    search: list[bool] = field(default_factory=list)
    choice: list[bool] = field(default_factory=list)

    @property
    def validation(self) -> float | None:
        """Validation pass rate in the search."""
        return sum(self.search) / len(self.search) if self.search else None

    @property
    def pass_rate(self) -> float:
        """Pass rate over all validation rollouts."""
        rollouts = self.search + self.choice
        return sum(rollouts) / len(rollouts)

    def row(self, selected: bool) -> JsonObject:
        """Format the candidate as a line of candidates.jsonl."""
        return {
            "candidate": self.number,
            "parent": self.parent,
            "step": self.step,
            "lines": list(self.lines),
            "rollouts": self.rollouts,
            "minibatch": [round(mean, 6) for mean in self.minibatch],
            "accepted": self.accepted,
            "validation": {"scored": len(self.search), "passed": sum(self.search)},
            "choice": {"scored": len(self.choice), "passed": sum(self.choice)},
            "chosen": selected,
        }


@dataclass(frozen=True)
class GEPAResult:
    """Result of the search: the chosen candidate, all candidates in the order of proposal, and the ledger.

    Also has the token usage of the reflecting model; {} if there is none.
    """

    best: Candidate
    candidates: list[Candidate]
    ledger: list[LedgerEntry]
    usage: Mapping[str, str | int]


def optimise(spec: Spec, base: Path, budget: int) -> GEPAResult:
    """Search for lines of guidance with exactly `budget` rollouts.

    Args:
        spec: the whole specification. The policy acts as in the evaluation.
        base: folder of the base model.
        budget: total of rollouts, errors included.

    Raises:
        UserError: the policy takes no guidance, the budget is smaller than one validation, the benchmark has too few
            training tasks, or the reflecting model cannot be asked.
        InfrastructureError: all rollouts of a batch ended in errors, or the reflecting model's server failed.
        EnvironmentFault: the environment broke its contract; finished rollouts are kept.
    """
    from gepa.api import optimize

    if not takes(spec.policy, GUIDANCE):
        raise UserError(
            f"baselines.gepa.run is true, but policy {spec.policy.target} takes no guidance",
            "choose policy=local, openai or vllm, or set baselines.gepa.run to false",
        )
    settings = spec.baselines.gepa
    if budget < settings.validation:
        raise UserError(
            f"baselines.gepa.validation = {settings.validation} is more than the {counted(budget, 'rollout')} of TRACE",
            f"set it to {budget // 4} or less",
        )
    learning = -(-settings.validation // settings.minibatch) * settings.minibatch
    target = load_benchmark(spec.benchmark, spec.machine)
    tasks = target.tasks("training", settings.validation + learning)
    validation = [GepaExample("validation", task) for task in tasks[: settings.validation]]
    model = settings.model
    proposer = Walk([*KNOWN], spec.seed) if model is None else Model(spec.machine.asking, model, target.tools)
    search = Search(spec, base, budget, target, proposer, validation)
    with ProgressBar(what=NAME, total=budget, unit="rollout") as search.bar:
        # `Search` has only the called members of the library's protocols. The library's own logger is too verbose.
        adapter: Any = search
        silent: Any = SimpleNamespace(log=lambda message: None)
        optimize(
            {GUIDANCE: ""},
            trainset=[GepaExample("training", task) for task in tasks[settings.validation :]],
            valset=validation,
            adapter=adapter,
            reflection_minibatch_size=settings.minibatch,
            stop_callbacks=[lambda gepa_state: search.over],
            callbacks=[adapter],
            logger=silent,
            seed=spec.seed,
            track_best_outputs=False,
        )
        # The library swallows a proposer's exception and goes on.
        if search.fault is not None:
            raise search.fault
        best = search.choose()
    assert search.total == budget
    return GEPAResult(best, search.candidates, search.ledger(), search.proposer.usage)


class Search:
    """The library's adapter and callback: plays batches, counts rollouts, and keeps the candidates.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        budget: total of rollouts.
        target: the benchmark.
        proposer: reflects and proposes lines.
        validation: the tasks set aside.
    """

    bar: ProgressBar

    def __init__(
        self,
        spec: Spec,
        base: Path,
        budget: int,
        target: CheckedEnvironment,
        proposer: Walk | Model,
        validation: Sequence[GepaExample],
    ) -> None:
        self.spec, self.base, self.budget = spec, base, budget
        self.target, self.proposer, self.validation = target, proposer, validation
        self.total = 0
        self.fault: Exception | None = None
        self.candidates = [Candidate(0, None, 0, (), accepted=True)]
        self._pool: dict[Lines, Candidate] = {(): self.candidates[0]}
        self._step = 0
        self._minibatch: list[float] = []
        self._entries: list[LedgerEntry] = []

    @property
    def over(self) -> bool:
        """True if another step could exceed the budget, the pool is full, or the proposer failed."""
        step = (2 * self.spec.baselines.gepa.minibatch + len(self.validation)) * (1 + self.spec.rollouts.retries)
        prompts = self.spec.baselines.gepa.prompts
        if prompts is not None and len(self._pool) > prompts:
            return True
        return self.fault is not None or self.total + step > self.budget or self.total >= (1 - CHOICE) * self.budget

    def play(
        self, lines: Lines, cases: Sequence[GepaExample], draw: int, retries: int, trials: int = 1
    ) -> list[Rollout]:
        """Play cases of one purpose with the randomness of a draw, and add them to the ledger."""
        configured = self.spec.policy.settings().get(GUIDANCE, [])
        guided = self.spec.policy.model_copy(update={GUIDANCE: [*configured, *lines]})
        policy = load_policy(guided, self.base, self.spec.machine, batch=self.spec.machine.batch)
        # Each call counts trials from 0, so a later draw needs its own seed.
        seed = int(digest(self.spec.seed, draw)[:8], 16) if draw else self.spec.seed
        rollouts = collect(
            policy,
            self.target,
            [case.task for case in cases],
            purpose=cases[0].purpose,
            seed=seed,
            trials=trials,
            retries=retries,
            quiet=True,
        )
        self._entries.append(ledger_entry(rollouts, stage=NAME, method=NAME, item=NAME))
        self.total += self._entries[-1].rollouts
        self.bar.update(self._entries[-1].rollouts)
        return rollouts

    def evaluate(
        self, batch: list[GepaExample], candidate: dict[str, str], capture_traces: bool = False
    ) -> "EvaluationBatch[Rollout, None]":
        """See `gepa.core.adapter.GEPAAdapter`. A pass scores 1 and a failure 0.

        Raises:
            InfrastructureError: all rollouts ended in errors.
        """
        from gepa.core.adapter import EvaluationBatch

        lines = _lines(candidate)
        validating = batch[0].purpose == "validation"
        # `over` keeps enough budget for all retries, except those of the first validation.
        retries = min(self.spec.rollouts.retries, (self.budget - self.total) // len(batch) - 1)
        rollouts = self.play(lines, batch, 0 if validating else self._step, retries)
        passed = [rollout.outcome == "passed" for rollout in rollouts if rollout.outcome != "error"]
        if not passed:
            message = rollouts[-1].error
            raise InfrastructureError(
                f"gepa: all {len(batch)} rollouts of a batch ended in errors, the last: {message}"
            )
        mean = sum(passed) / len(passed)
        if not validating:
            self._minibatch.append(mean)
        else:
            validated = self._pool.setdefault(lines, self.candidates[-1])
            validated.search, validated.rollouts = passed, self.total
        scores = [mean if rollout.outcome == "error" else float(rollout.outcome == "passed") for rollout in rollouts]
        return EvaluationBatch(outputs=[None] * len(rollouts), scores=scores, trajectories=rollouts)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: "EvaluationBatch[Rollout, None]", components_to_update: list[str]
    ) -> ReflectiveDataset:
        """See `gepa.core.adapter.GEPAAdapter`: the rollouts without errors."""
        whole = [rollout for rollout in eval_batch.trajectories or [] if rollout.outcome != "error"]
        return {GUIDANCE: [{"rollout": rollout} for rollout in whole]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: ReflectiveDataset,
        components_to_update: list[str],
    ) -> dict[str, str]:
        """See `gepa.core.adapter.GEPAAdapter`. Keeps the proposer's exception, because the library swallows it."""
        if self.fault is not None:  # the library asks a second time
            raise self.fault
        parent = self._pool[_lines(candidate)]
        rollouts = [example["rollout"] for example in reflective_dataset[GUIDANCE]]
        try:
            lines = self.proposer.propose(Reflection(parent.lines, rollouts, frozenset(self._pool), self._step))
        except Exception as error:
            self.fault = error
            raise
        if lines is None or lines in self._pool:
            return {}
        self.candidates.append(Candidate(len(self.candidates), parent.number, self._step, lines))
        return {GUIDANCE: "\n".join(lines)}

    def on_iteration_start(self, event: "IterationStartEvent") -> None:
        """Begin a step."""
        self._step, self._minibatch = event["iteration"], []

    def on_candidate_rejected(self, event: "CandidateRejectedEvent") -> None:
        """Record a candidate that is not better than its parent."""
        candidate = self.candidates[-1]
        candidate.minibatch, candidate.rollouts = self._minibatch, self.total

    def on_candidate_accepted(self, event: "CandidateAcceptedEvent") -> None:
        """Record a candidate that is better than its parent and was validated."""
        candidate = self.candidates[-1]
        candidate.minibatch, candidate.rollouts, candidate.accepted = self._minibatch, self.total, True

    def choose(self) -> Candidate:
        """Spend the rest of the budget on the best candidates, and return the best one.

        Of equal ones the one with fewer lines wins, then the earlier one.
        """
        ranked = sorted(self._pool.values(), key=lambda candidate: (-(candidate.validation or 0.0), candidate.number))
        finalists = ranked[:FINALISTS]
        turns = [(case, candidate) for case in self.validation for candidate in finalists]
        rounds, remainder = divmod(self.budget - self.total, len(turns))
        for draw, (trials, part) in enumerate([(rounds, turns), (1, turns[:remainder])], start=1):
            for candidate in finalists:
                cases = [case for case, player in part if player is candidate]
                if cases and trials:
                    rollouts = self.play(candidate.lines, cases, draw, retries=0, trials=trials)
                    whole = [rollout for rollout in rollouts if rollout.outcome != "error"]
                    candidate.choice += [rollout.outcome == "passed" for rollout in whole]
        return min(finalists, key=lambda candidate: (-candidate.pass_rate, len(candidate.lines), candidate.number))

    def ledger(self) -> list[LedgerEntry]:
        """Sum the rollouts spent, one entry per purpose."""
        counts = ("rollouts", "discarded", "errors", "prompt_tokens", "completion_tokens")
        summed: list[LedgerEntry] = []
        for purpose in sorted({entry.purpose for entry in self._entries}):
            entries = [entry for entry in self._entries if entry.purpose == purpose]
            totals = {key: sum(getattr(entry, key) for entry in entries) for key in counts}
            summed.append(entries[-1].model_copy(update=totals))
        return summed


def _lines(candidate: Mapping[str, str]) -> Lines:
    return tuple(line for line in candidate[GUIDANCE].split("\n") if line)


def publish_gepa(result: GEPAResult | None, results: Path) -> None:
    """Write index, ledger, history and candidates. They are empty if GEPA was not run (`result` is None).

    history.csv has one row a candidate: step, rollouts so far, validation pass rate in the search ("" for a rejected
    candidate, which is not validated), number of lines, and whether it was accepted (1) or not (0).
    """
    candidates = result.candidates if result else []
    index = {}
    if result:
        lines = list(result.best.lines)
        total = sum(entry.rollouts for entry in result.ledger)
        index[NAME] = {"digest": digest(lines), "path": "", "guidance": lines, "rollouts": total, "discarded": 0}
    rows = [
        (
            candidate.step,
            candidate.rollouts,
            "" if candidate.validation is None else round(candidate.validation, 6),
            len(candidate.lines),
            int(candidate.accepted),
        )
        for candidate in candidates
    ]
    table = [("step", "rollouts", "validation", "lines", "accepted"), *rows]
    publish_text(results / "history.csv", "".join(",".join(map(str, row)) + "\n" for row in table))
    records = [line_of(candidate.row(result is not None and candidate is result.best)) for candidate in candidates]
    publish_text(results / "candidates.jsonl", "".join(f"{line}\n" for line in records))
    if result and result.usage:
        publish_json(results / "asked.json", result.usage)
    publish(results / "ledger.jsonl", result.ledger if result else [])
    publish_json(results / "index.json", index)


@dataclass(frozen=True, kw_only=True)
class GEPABaseline(Baseline):
    """The row `gepa`. It acts with lines of guidance and without an adapter."""

    learns_from: Supervision = "reflection"

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        result = optimise(spec, Path("artifacts/base"), budget(trace_ledger()))
        self._publish(result)
        return "\n".join([f"{counted(len(result.best.lines), 'line')} of guidance", *result.best.lines])

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        self._publish(None)

    def _publish(self, result: GEPAResult | None) -> None:
        publish_gepa(result, Path("results") / self.name)
        # Every row has a folder of adapters; this one has no adapter.
        Path("artifacts", self.name).mkdir(parents=True, exist_ok=True)


BASELINE = GEPABaseline(name=NAME, label="GEPA", order=2, on_target=True)
