"""Collects rollouts of a policy on tasks: token-exact, counted, resumable.

Every finished rollout is appended with its digest to a journal, whose name is the fingerprint of everything that
decides the result. An interrupted run resumes from it and ends in the identical file. An infrastructure error is
retried; if it persists, the rollout is an `error`, never a failure. Randomness is keyed by (seed, task, trial).

A stage collects in this process or, on a cluster, in jobs that take a shard of the tasks each. A `RolloutBatch`
describes rollouts so that they can be sent to a job: diagnosis, calibration and evaluation differ only in policy and
target. Rollouts do not depend on the number of shards.
"""

import fcntl
import inspect
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

from captrain.agents import load_policy
from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment, Environment, GuardedEpisode, Policy, RunningEpisode, closing_episodes
from captrain.errors import InfrastructureError
from captrain.ledger import guard_split
from captrain.models import Adapter
from captrain.records import (
    JsonObject,
    ProgressBar,
    Purpose,
    Rollout,
    Score,
    Split,
    Task,
    Usage,
    counted,
    digest,
    file_digest,
    plain,
    publish_bytes,
    redacted,
    remains,
    sealed,
)
from captrain.run import Component, Machine, code_digest, dispatched, launch

JOURNALS = Path(".cache/rollouts")
OUTAGE = 32
"""After this many infrastructure errors in a row, no more episodes start: a server or service is down."""
AT_ONCE = 16
"""Number of episodes that are scored in parallel, because a grader may take seconds."""
SILENCE = 5.0
"""Seconds without a finished rollout after which the progress bar reports it."""
PURPOSES: dict[Split, Purpose] = {"discovery": "diagnosis", "training": "training", "test": "evaluation"}
"""Purpose of a rollout, by the split of its task."""
SHARDS = 4
"""Cluster jobs per batch. With more jobs, starting them would take much of their time, and GPUs are seldom free."""
Sample = tuple[Task, int]
"""A rollout to collect: its task and trial number."""
Identity = tuple[str, str, str, Purpose, int]
"""Everything that identifies rollouts: the digests of policy, target and adapter, the purpose, and the seed."""


def play(
    benchmark: Environment | type[Environment],
    policy: Policy,
    *,
    tasks: int = 20,
    split: Split = "discovery",
    trials: int = 1,
    seed: int = 0,
) -> list[Rollout]:
    """Play the first tasks of a benchmark: `captrain.play(CalendarDesk(), policy, tasks=20)`.

    Args:
        benchmark: an `Environment`, or its class. A class is built with its default settings.
        policy: the agent.
        tasks: number of tasks.
        split: discovery, training or test.
        trials: rollouts per task.
        seed: seed of all randomness.

    Returns:
        Rollouts in the order (task, trial). Pass them to `captrain.diagnose`.

    Raises:
        EnvironmentFault: the benchmark broke its contract.
        InfrastructureError: most rollouts ended in an infrastructure error.
    """
    environment = benchmark() if isinstance(benchmark, type) else benchmark
    kind = type(environment)
    source = f"{kind.__module__}:{kind.__qualname__}"
    target = CheckedEnvironment(environment, source, digest(source, file_digest(Path(inspect.getfile(kind)))))
    purpose, sample = PURPOSES[split], target.tasks(split, tasks)
    # The digest covers only this one file, and other files may change the behaviour. So the journal is not reused.
    with TemporaryDirectory() as journals:
        return collect(policy, target, sample, purpose=purpose, seed=seed, trials=trials, journals=Path(journals))


def collect(
    policy: Policy,
    target: CheckedEnvironment,
    tasks: Sequence[Task],
    *,
    purpose: Purpose,
    seed: int,
    trials: int = 1,
    adapter: Adapter | None = None,
    retries: int = 2,
    journals: Path = JOURNALS,
    quiet: bool = False,
) -> list[Rollout]:
    """Roll out every task `trials` times.

    Args:
        policy: the agent.
        target: the environment.
        tasks: tasks of the split that belongs to `purpose`.
        purpose: what the rollouts are for.
        seed: run seed.
        trials: rollouts per task.
        adapter: the adapter to act with; None for the base model.
        retries: further attempts at a rollout that ended in an infrastructure error.
        journals: folder of the journals, from which an interrupted run resumes.
        quiet: show no progress bar.

    Returns:
        Rollouts in the order (task, trial).

    Raises:
        UserError: a task belongs to another split.
        EnvironmentFault: the environment broke its contract; finished rollouts are kept.
        InfrastructureError: most rollouts ended in an infrastructure error; finished rollouts are kept.
    """
    guard_split(tasks, purpose)
    identity: Identity = policy.digest, target.fingerprint, adapter.digest if adapter else "", purpose, seed
    samples = [(task, trial) for task in tasks for trial in range(trials)]
    names = [(task.id, trial) for task, trial in samples]
    with journal(journals / f"{digest(code_digest(collect), *identity, names)}.jsonl") as (whole, append):
        rollouts = {(rollout.task.id, rollout.trial): rollout for rollout in whole}
        missing = [(task, trial) for task, trial in samples if (task.id, trial) not in rollouts]
        label = f"{target.name}{' with an adapter' if adapter else ''}"
        with RolloutBar(label, len(samples), len(rollouts), quiet) as progress:
            for rollout in _attempts(policy, target, missing, identity, adapter, retries):
                rollouts[rollout.task.id, rollout.trial] = rollout
                append(rollout)
                progress.add(rollout)
    ordered = [rollouts[name] for name in names]
    errors = [rollout.error or "" for rollout in ordered if rollout.outcome == "error"]
    if 2 * len(errors) > len(ordered):
        raise outage(f"{label}: {len(errors)} of {counted(len(ordered), 'rollout')}", errors)
    if truncated := [rollout for rollout in ordered if rollout.truncated]:
        print(
            f"{label}: {len(truncated)} of {counted(len(ordered), 'rollout')} ended because the dialogue outgrew the "
            f"model, such as {truncated[0].task.id} ({truncated[0].truncated})",
            file=sys.stderr,
        )
    return ordered


def _attempts(
    policy: Policy,
    target: CheckedEnvironment,
    samples: Sequence[Sample],
    identity: Identity,
    adapter: Adapter | None,
    retries: int,
) -> Iterator[Rollout]:
    """Yield rollouts as they end, in any order.

    A rollout that ends in an infrastructure error is retried. In the last attempt each rollout is played alone.

    Raises:
        InfrastructureError: `OUTAGE` episodes in a row ended in such an error.
    """
    *_, seed = identity
    plays, row = dict[int, tuple[RunningEpisode, GuardedEpisode, Task, int]](), list[str]()

    def score(play: RunningEpisode) -> Score | None:
        _, episode, task, _ = plays[id(play)]
        episode.close()
        return score_of(target, task, play)

    for attempt in range(retries + 1):
        retried: list[Sample] = []
        # A crash also ends the other episodes of its worker, so the last attempt runs alone.
        is_last = 0 < attempt == retries
        groups = [[sample] for sample in samples] if is_last else [samples]
        for together in groups:
            plays.clear()
            for task, trial in together:
                key = f"{seed}/{task.id}/{trial}"
                episode = target.open(task, key)
                play = RunningEpisode(key, episode, adapter.folder if adapter else "")
                plays[id(play)] = (play, episode, task, trial)
            # If scoring raises, all episodes that are still open are closed.
            with closing_episodes([episode for _, episode, *_ in plays.values()]):
                for play, verdict in scored(policy.play([play for play, *_ in plays.values()]), score):
                    _, _, task, trial = plays[id(play)]
                    row = [*row, play.error] if play.error else []
                    if len(row) >= OUTAGE:
                        raise outage(f"{target.name}: the last {len(row)} plays", row)
                    if play.error and attempt < retries:
                        retried.append((task, trial))
                        continue
                    yield _record(policy, target, identity, adapter, (task, trial), play, verdict, attempt)
        if not retried:
            break
        samples = retried


def _record(
    policy: Policy,
    target: CheckedEnvironment,
    identity: Identity,
    adapter: Adapter | None,
    sample: Sample,
    play: RunningEpisode,
    score: Score | None,
    retries: int,
) -> Rollout:
    """Return the rollout record of a finished episode."""
    task, trial = sample
    outcome: Literal["passed", "failed", "error"] = "error"
    if score is not None:
        # If the prompt alone exceeds the context, the rollout failed, even if the environment rewards doing nothing.
        outcome = "passed" if score.success and (play.turns or not play.truncated) else "failed"
    return Rollout(
        id=digest(*identity, task.id, trial)[:12],
        environment=target.name,
        task=task,
        trial=trial,
        purpose=identity[3],
        policy=policy.digest,
        adapter=adapter.digest if adapter else None,
        messages=play.messages,
        reference=target.reference(task),
        token_ids=play.token_ids,
        mask=play.mask,
        logprobs=play.logprobs,
        usage=Usage(prompt_tokens=play.prompt_tokens, completion_tokens=play.completion_tokens),
        score=score,
        outcome=outcome,
        error=None if play.error is None else redacted(plain(play.error)),
        truncated=play.truncated,
        rerendered=play.rerendered,
        retries=retries,
    )


def score_of(target: CheckedEnvironment, task: Task, play: RunningEpisode) -> Score | None:
    """Score a finished episode. Return None if the infrastructure failed.

    If the grader itself fails, its error is stored in `play.error`.

    Raises:
        EnvironmentFault: the environment raised, or returned no score.
    """
    if play.error:
        return None
    try:
        return target.score(task, play.messages)
    except InfrastructureError as fault:
        play.error = str(fault)
        return None


def scored(
    plays: Iterable[RunningEpisode], score: Callable[[RunningEpisode], Score | None]
) -> Iterator[tuple[RunningEpisode, Score | None]]:
    """Score episodes in parallel, each as soon as it ends. Yield them in the order of `plays`.

    Raises:
        The first exception of playing or scoring, after all finished episodes have been yielded.
    """
    queue: deque[tuple[RunningEpisode, Future[Score | None]]] = deque()
    failure: BaseException | None = None
    coming, more = iter(plays), True
    with ThreadPoolExecutor(AT_ONCE) as threads:
        while more or queue:
            try:
                if more:
                    play = next(coming)
                    queue.append((play, threads.submit(score, play)))
            except StopIteration:
                more = False
            except BaseException as error:
                failure, more = error, False
            while queue and (not more or queue[0][1].done()):
                play, to_be = queue.popleft()
                if (error := to_be.exception()) is None:
                    yield play, to_be.result()
                else:
                    failure, more = failure or error, False
    if failure is not None:
        raise failure


def outage(subject: str, errors: Sequence[str]) -> InfrastructureError:
    """Return the error for a run in which most episodes had infrastructure errors. It quotes the most common error."""
    [(words, times)] = Counter(errors).most_common(1)
    often = "each time" if times == len(errors) else f"{times} times"
    return InfrastructureError(f"{subject} ended in an error, {often}: {redacted(plain(words))}")


@contextmanager
def journal(path: Path) -> Iterator[tuple[list[Rollout], Callable[[Rollout], None]]]:
    """Open a journal for one writer. Yield its valid rollouts, and a function that appends a rollout.

    A second process waits until the first has closed the journal. Opening removes damaged lines (cut off, or not
    matching their digest) and rollouts with an infrastructure error, so these rollouts are played again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = remains(path, Rollout)
        whole = [rollout for rollout in lines if rollout is not None and rollout.outcome != "error"]
        if len(whole) < len(lines):
            again = len(lines) - len(whole)
            print(f"replaying {again} of {counted(len(lines), 'rollout')} of an earlier run: damaged or errors")
            publish_bytes(path, b"".join(_journal_line(path, rollout) for rollout in whole))
        with open(path, "ab") as file:

            def append(rollout: Rollout) -> None:
                file.write(_journal_line(path, rollout))
                file.flush()

            yield whole, append


def _journal_line(path: Path, rollout: Rollout) -> bytes:
    return sealed(path, rollout.model_dump_json(exclude_defaults=True))


class RolloutBar:
    """Progress bar over rollouts, with pass rate and errors. It also shows when no rollout has ended for a while."""

    def __init__(self, label: str, total: int, initial: int, quiet: bool) -> None:
        # A job's log always shows progress.
        is_hidden = quiet and not dispatched()
        self._bar = ProgressBar(what=label, total=total, initial=initial, unit="rollout", quiet=is_hidden)
        self._outcomes, self._truncated = Counter[str](), 0
        self._last, self._over = time.monotonic(), threading.Event()

    def __enter__(self) -> "RolloutBar":
        if not self._bar.disable:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._bar.close()

    def add(self, rollout: Rollout) -> None:
        """Count one rollout."""
        self._last = time.monotonic()
        self._outcomes[rollout.outcome] += 1
        self._truncated += rollout.truncated != ""
        self._bar.update()
        self._bar.set_postfix_str(self._text(), refresh=False)

    def _text(self) -> str:
        passed, failed, errors = (self._outcomes[name] for name in ("passed", "failed", "error"))
        parts = [f"pass rate {passed / (passed + failed):.3f}"] if passed + failed else []
        parts += [f"{self._truncated} truncated"] if self._truncated else []
        return ", ".join([*parts, counted(errors, "error")] if errors else parts)

    def _watch(self) -> None:
        """Every second, show the time since the last rollout ended, so that a hang is visible."""
        while not self._over.wait(1.0):
            if (seconds := time.monotonic() - self._last) >= SILENCE:
                silence = f"none has ended for {seconds:.0f} s"
                self._bar.set_postfix_str(", ".join(filter(None, [self._text(), silence])))


def pass_rate(rollouts: Sequence[Rollout]) -> float | None:
    """Return passed / (passed + failed). Errors do not count. None if no rollout passed or failed."""
    scored = [rollout.outcome == "passed" for rollout in rollouts if rollout.outcome != "error"]
    return sum(scored) / len(scored) if scored else None


def summarise_rollouts(rollouts: Sequence[Rollout], target: CheckedEnvironment) -> JsonObject:
    """Summarise rollouts: counts by outcome, pass rate and mean reward, over all tasks and by kind of task.

    Each rate comes with its floor: the rate of an agent that does nothing on the same tasks. The summary also has the
    target's description of itself.
    """
    kinds: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        kinds.setdefault(str(rollout.task.data.get("kind", "")), []).append(rollout)
    idle = floor_scores(target, [*{rollout.task.id: rollout.task for rollout in rollouts}.values()])

    def rounded(values: Sequence[float]) -> float | None:
        return round(sum(values) / len(values), 6) if values else None

    def rates(group: Sequence[Rollout]) -> JsonObject:
        rewards = [rollout.score.reward for rollout in group if rollout.score is not None]
        floors = [floor for name in dict.fromkeys(r.task.id for r in group) if (floor := idle[name]) is not None]
        return {
            "pass_rate": rounded([rollout.outcome == "passed" for rollout in group if rollout.outcome != "error"]),
            "mean_reward": rounded(rewards),
            "floor": {
                "pass_rate": rounded([floor.success for floor in floors]),
                "mean_reward": rounded([floor.reward for floor in floors]),
            },
        }

    return {
        "outcomes": {name: sum(r.outcome == name for r in rollouts) for name in ("passed", "failed", "error")},
        **({"truncated": truncated} if (truncated := sum(r.truncated != "" for r in rollouts)) else {}),
        **({"rerendered_turns": turns} if (turns := sum(r.rerendered for r in rollouts)) else {}),
        **rates(rollouts),
        "kinds": {kind: {"rollouts": len(kinds[kind]), **rates(kinds[kind])} for kind in sorted(kinds)},
        "benchmark": target.about,
    }


def floor_scores(target: CheckedEnvironment, tasks: Sequence[Task]) -> dict[str, Score | None]:
    """Return task id -> score of an agent that does nothing, or None if the infrastructure failed. Costs no rollout."""
    scores: dict[str, Score | None] = {}
    for task in tasks:
        try:
            scores[task.id] = target.floor(task)
        except InfrastructureError as fault:
            print(f"the floor of {task.id} is unknown: {fault}")
            scores[task.id] = None
    return scores


def count_outcomes(rollouts: Sequence[Rollout], limit: object) -> str:
    """Return a sentence with the number of passed rollouts, and of rollouts with a turn cut off at `limit` tokens.

    If `limit` is not an integer, there is no limit.
    """
    counts = f"{sum(rollout.outcome == 'passed' for rollout in rollouts)} of {len(rollouts)} passed"
    if not isinstance(limit, int):
        return counts
    cut = sum(any(flag and len([*tokens]) >= limit for flag, tokens in groupby(rollout.mask)) for rollout in rollouts)
    return (
        f"{counts}; {cut} have a turn that policy.max_tokens={limit} ended: raise it if that is many" if cut else counts
    )


class TargetSource(Protocol):
    """Loader of a target that is not configured as a benchmark component."""

    def load(self) -> CheckedEnvironment:
        """Load the target."""
        ...

    def identity(self) -> object:
        """Return the fields that decide its behaviour (see `captrain.run.fingerprint.identity_of`)."""
        ...


@dataclass(frozen=True)
class PolicySource:
    """A policy that is built on first use, so that it can be sent to a job.

    Args:
        component: the `policy` section of the configuration.
        base: output folder of the base stage.
        machine: the machine that the policy runs on.
    """

    component: Component
    base: Path
    machine: Machine

    @cached_property
    def policy(self) -> Policy:
        """The policy, built on first use."""
        return load_policy(self.component, self.base, self.machine, batch=self.machine.batch)

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the policy's behaviour."""
        return self.component, self.base

    def __reduce__(self) -> tuple[type["PolicySource"], tuple[object, ...]]:
        # The built policy stays here: it may hold a model.
        return PolicySource, (self.component, self.base, self.machine)


@dataclass(frozen=True)
class RolloutBatch:
    """A batch of rollouts to collect, all for one purpose.

    Args:
        name: name of the batch in messages.
        policy: the agent. A policy that is already built can act only in this process.
        source: where the target comes from: a benchmark's component, or another loader.
        tasks: tasks of the split that belongs to `purpose`.
        purpose: what the rollouts are for.
        seed: run seed.
        trials: rollouts per task.
        adapter: the adapter to act with; None for the base model.
        retries: further attempts at a rollout that ended in an infrastructure error.
    """

    name: str
    policy: PolicySource | Policy
    source: Component | TargetSource
    tasks: list[Task]
    purpose: Purpose
    seed: int
    trials: int = 1
    adapter: Adapter | None = None
    retries: int = 2

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the rollouts."""
        adapter = self.adapter.digest if self.adapter else ""
        return self.policy, self.source, self.tasks, self.purpose, self.seed, self.trials, adapter, self.retries

    def collect(self, target: CheckedEnvironment, *, quiet: bool = False) -> list[Rollout]:
        """Collect the batch in this process (see `collect`)."""
        policy = self.policy.policy if isinstance(self.policy, PolicySource) else self.policy
        return collect(
            policy,
            target,
            self.tasks,
            purpose=self.purpose,
            seed=self.seed,
            trials=self.trials,
            adapter=self.adapter,
            retries=self.retries,
            quiet=quiet,
        )

    def shards(self, count: int) -> list["RolloutBatch"]:
        """Split into at most `count` batches, with the tasks in order."""
        size = max(1, -(-len(self.tasks) // count))
        slices = [self.tasks[start : start + size] for start in range(0, len(self.tasks), size)]
        return [
            replace(self, name=f"{self.name} {number} of {len(slices)}", tasks=tasks)
            for number, tasks in enumerate(slices, start=1)
        ]


def collect_shard(batch: RolloutBatch) -> list[Rollout]:
    """Load the target of a batch and collect its rollouts. Its policy must be a `PolicySource`.

    Progress is shown only in the log of a cluster job.

    Raises:
        UserError: a task belongs to another split, or the target cannot be loaded.
        EnvironmentFault: the environment broke its contract; finished rollouts are kept.
    """
    assert isinstance(batch.policy, PolicySource)
    source = batch.source
    target = load_benchmark(source, batch.policy.machine) if isinstance(source, Component) else source.load()
    return batch.collect(target, quiet=True)


def collect_batch(batch: RolloutBatch, target: CheckedEnvironment, label: str) -> list[Rollout]:
    """Collect a batch in this process or, on a cluster, as an array of jobs named `label`.

    Returns:
        Rollouts in the order (task, trial).

    Raises:
        As `collect_shard`, and as `captrain.run.launch.run`.
    """
    if not isinstance(batch.policy, PolicySource) or batch.policy.machine.launcher == "local":
        return batch.collect(target)
    shards = launch.run(collect_shard, batch.shards(SHARDS), batch.policy.machine, label)
    return [rollout for rollouts in shards for rollout in rollouts]
