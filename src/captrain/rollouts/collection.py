"""Policy x tasks -> rollouts: token-exact, counted, resumable.

Every finished rollout is appended to a journal outside the pipeline's outputs, named by the fingerprint of all that
decides the result; a run that was cut off goes on from there and ends in the identical file. An infrastructure error
is retried, and if it stays, the rollout is an `error`, never a failure. Randomness is named by (seed, task, trial).
"""

import fcntl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Literal

from captrain.contract import GuardedEpisode, Target, closing_episodes
from captrain.errors import InfrastructureError
from captrain.execution import code_digest, dispatched
from captrain.ledger import guard_split
from captrain.models import Adapter
from captrain.policies import Play, Policy
from captrain.records import (
    JsonObject,
    Purpose,
    Rollout,
    Score,
    Task,
    Usage,
    digest,
    line_of,
    plain,
    publish_text,
    redacted,
    remains,
)
from captrain.rollouts.scoring import score_of, scored

JOURNALS = Path(".cache/rollouts")
OUTAGE = 32
"""Plays one after another that come to an infrastructure error: what they stand on is down, and no more are begun."""
SILENCE = 5.0
"""Seconds without a finished rollout after which the progress line says so."""
Sample = tuple[Task, int]
"""A rollout to be: its task and the number of its trial."""


def collect(
    policy: Policy,
    target: Target,
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
        policy: who acts.
        target: where.
        tasks: of the purpose's own split.
        purpose: what the rollouts are spent on.
        seed: run seed.
        trials: rollouts per task.
        adapter: None for the base.
        retries: new attempts at a rollout that ended in an infrastructure error.
        journals: where half-written runs are kept.
        quiet: no progress bar.

    Returns:
        Rollouts in the order (task, trial).

    Raises:
        UserError: a task of another split.
        EnvironmentFault: the environment broke its contract; what is whole is kept.
        InfrastructureError: most rollouts came to an error, which it quotes; what is whole is kept.
    """
    guard_split(tasks, purpose)
    collection = _Collection(policy, target, purpose, seed, adapter, retries)
    samples = [(task, trial) for task in tasks for trial in range(trials)]
    names = [(task.id, trial) for task, trial in samples]
    fingerprint = digest(code_digest(collect), *collection.identity, names)
    with journal(journals / f"{fingerprint}.jsonl") as (whole, file):
        rollouts = {(rollout.task.id, rollout.trial): rollout for rollout in whole}
        missing = [(task, trial) for task, trial in samples if (task.id, trial) not in rollouts]
        label = f"{target.name}{f' with {adapter.digest}' if adapter else ''}"
        with ProgressBar(label, len(samples), len(rollouts), quiet) as progress:
            for rollout in collection.attempts(missing):
                rollouts[rollout.task.id, rollout.trial] = rollout
                file.write(rollout.model_dump_json(exclude_defaults=True) + "\n")
                file.flush()
                progress.add(rollout)
    ordered = [rollouts[name] for name in names]
    errors = [rollout.error or "" for rollout in ordered if rollout.outcome == "error"]
    if 2 * len(errors) > len(ordered):
        raise outage(f"{label}: {len(errors)} of {len(ordered)} rollouts", errors)
    if truncated := [rollout for rollout in ordered if rollout.truncated]:
        print(
            f"{label}: {len(truncated)} of {len(ordered)} rollouts ended because the dialogue has outgrown the model, "
            f"such as {truncated[0].task.id} ({truncated[0].truncated})",
            file=sys.stderr,
        )
    return ordered


@dataclass(frozen=True)
class _Collection:
    """Settings that all rollouts of a collection share; tasks and trials vary (see `collect`)."""

    policy: Policy
    target: Target
    purpose: Purpose
    seed: int
    adapter: Adapter | None
    retries: int

    @property
    def identity(self) -> tuple[str, str, str, Purpose, int]:
        """Digests and settings that decide every rollout, and with them its name."""
        adapter = self.adapter.digest if self.adapter else ""
        return self.policy.digest, self.target.fingerprint, adapter, self.purpose, self.seed

    def attempts(self, samples: Sequence[Sample]) -> Iterator[Rollout]:
        """Yield rollouts as they end, in any order; what an infrastructure error ended is attempted again, as often as
        may be, the last time by itself. Raises InfrastructureError after `OUTAGE` such errors on end."""
        identity, plays = self.identity, dict[int, tuple[Play, GuardedEpisode, Task, int]]()
        row: list[str] = []

        def score(play: Play) -> Score | None:
            _, episode, task, _ = plays[id(play)]
            episode.close()
            return score_of(self.target, task, play)

        for attempt in range(self.retries + 1):
            retried: list[Sample] = []
            # One that dies takes with it what its worker holds: the last attempt has no neighbours.
            is_last = 0 < attempt == self.retries
            for together in [[sample] for sample in samples] if is_last else [samples]:
                plays.clear()
                for task, trial in together:
                    key = f"{self.seed}/{task.id}/{trial}"
                    episode = self.target.open(task, key)
                    play = Play(key, episode, self.adapter.folder if self.adapter else "")
                    plays[id(play)] = (play, episode, task, trial)
                # Others may be open while one is scored: whatever is raised then, all are closed.
                with closing_episodes([episode for _, episode, *_ in plays.values()]):
                    for play, verdict in scored(self.policy.play([play for play, *_ in plays.values()]), score):
                        _, _, task, trial = plays[id(play)]
                        row = [*row, play.error] if play.error else []
                        if len(row) >= OUTAGE:
                            raise outage(f"{self.target.name}: the last {len(row)} plays", row)
                        if play.error and attempt < self.retries:
                            retried.append((task, trial))
                            continue
                        name = digest(*identity, task.id, trial)[:12]
                        rollout = rollout_record(
                            play,
                            self.target,
                            task,
                            trial,
                            self.purpose,
                            self.policy.digest,
                            self.adapter,
                            verdict,
                            attempt,
                            name,
                        )
                        yield rollout
            if not retried:
                break
            samples = retried


def outage(subject: str, errors: Sequence[str]) -> InfrastructureError:
    """Word what most plays came to: no result, and none that a later stage may build on."""
    [(words, times)] = Counter(errors).most_common(1)
    often = "each time" if times == len(errors) else f"{times} times"
    return InfrastructureError(f"{subject} came to an error, {often}: {redacted(plain(words))}")


def rollout_record(
    play: Play,
    target: Target,
    task: Task,
    trial: int,
    purpose: Purpose,
    policy: str,
    adapter: Adapter | None,
    score: Score | None,
    attempt: int,
    name: str,
) -> Rollout:
    """Make the record of a finished play; `score` None means an infrastructure error."""
    return Rollout(
        id=name,
        environment=target.name,
        task=task,
        trial=trial,
        purpose=purpose,
        policy=policy,
        adapter=adapter.digest if adapter else None,
        messages=play.messages,
        reference=target.reference(task),
        token_ids=play.token_ids,
        mask=play.mask,
        logprobs=play.logprobs,
        usage=Usage(prompt_tokens=play.prompt_tokens, completion_tokens=play.completion_tokens),
        score=score,
        outcome=outcome_of(play, score),
        error=None if play.error is None else redacted(plain(play.error)),
        truncated=play.truncated,
        rerendered=play.rerendered,
        retries=attempt,
    )


def outcome_of(play: Play, score: Score | None) -> Literal["passed", "failed", "error"]:
    """Decide the outcome of a finished play.

    A model that has no room for the prompt has failed, even where an environment rewards an agent that does nothing: it
    was never asked.
    """
    if score is None:
        return "error"
    return "passed" if score.success and not (play.truncated and not play.turns) else "failed"


@contextmanager
def journal(path: Path) -> Iterator[tuple[list[Rollout], IO[str]]]:
    """Open a journal for one writer: the whole records in it, and the file to append to. A second process waits.

    A line that was cut off, or does not read, is redone, as is a rollout that ended in an infrastructure error: it is
    dropped from the file first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = remains(path, Rollout)
        whole = [rollout for rollout in lines if rollout is not None and rollout.outcome != "error"]
        if len(whole) < len(lines):
            again = len(lines) - len(whole)
            print(f"{path}: {again} of {len(lines)} lines are not whole, or are errors, and are played again")
            publish_text(path, "".join(map(line_of, whole)))
        with open(path, "a") as file:
            yield whole, file


class ProgressBar:
    """A progress bar over rollouts, some of which may be there already, with rate, ETA, the pass rate so far, errors,
    and for how long none has ended, where that is long."""

    def __init__(self, label: str, total: int, initial: int, quiet: bool) -> None:
        from tqdm import tqdm

        # The log of a job is read for its bars; elsewhere they are drawn on a terminal alone.
        hidden = False if dispatched() else quiet or None
        self._bar = tqdm(total=total, initial=initial, desc=label, unit="rollout", disable=hidden, mininterval=1.0)
        self._outcomes, self._truncated = Counter[str](), 0
        self._last, self._over = time.monotonic(), threading.Event()

    def __enter__(self) -> "ProgressBar":
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
        return ", ".join([*parts, f"{errors} errors"] if errors else parts)

    def _watch(self) -> None:
        """Say each second for how long no rollout has ended: a hang looks like work otherwise."""
        while not self._over.wait(1.0):
            if (seconds := time.monotonic() - self._last) >= SILENCE:
                silence = f"none has ended for {seconds:.0f} s"
                self._bar.set_postfix_str(", ".join(filter(None, [self._text(), silence])))


def pass_rate(rollouts: Sequence[Rollout]) -> float | None:
    """Compute passed / (passed + failed); None when there is neither. Errors count on no side."""
    scored = [rollout.outcome == "passed" for rollout in rollouts if rollout.outcome != "error"]
    return sum(scored) / len(scored) if scored else None


def summarise_rollouts(rollouts: Sequence[Rollout], target: Target) -> JsonObject:
    """Summarise rollouts: counts by outcome, pass rate and mean reward, over all and by task kind; what the target says
    of itself; and the floor: the score of an agent that does nothing on the same tasks."""
    tasks = {rollout.task.id: rollout.task for rollout in rollouts}
    idle = floor_scores(target, [*tasks.values()])
    kinds = sorted({_kind(task) for task in tasks.values()})
    rows = {}
    for kind in kinds:
        group = [rollout for rollout in rollouts if _kind(rollout.task) == kind]
        rows[kind] = {
            **_rates(group),
            "floor": _floor_rates([idle[name] for name in tasks if _kind(tasks[name]) == kind]),
        }
    return {
        "outcomes": {name: sum(r.outcome == name for r in rollouts) for name in ("passed", "failed", "error")},
        **({"truncated": truncated} if (truncated := sum(r.truncated != "" for r in rollouts)) else {}),
        **({"rerendered_turns": turns} if (turns := sum(r.rerendered for r in rollouts)) else {}),
        **{key: value for key, value in _rates(rollouts).items() if key != "rollouts"},
        "floor": _floor_rates([*idle.values()]),
        "kinds": rows,
        "benchmark": target.about,
    }


def count_outcomes(rollouts: Sequence[Rollout], limit: object) -> str:
    """Say how many rollouts passed, and how many have a turn of as many tokens as the policy allows (`limit`, None
    where it has none): there it has ended hardly where the model would have."""
    counts = f"{sum(rollout.outcome == 'passed' for rollout in rollouts)} of {len(rollouts)} passed"
    if not isinstance(limit, int):
        return counts
    cut = sum(any(flag and len([*tokens]) >= limit for flag, tokens in groupby(rollout.mask)) for rollout in rollouts)
    return (
        f"{counts}; {cut} have a turn that policy.max_tokens={limit} ended: raise it if that is many" if cut else counts
    )


def _kind(task: Task) -> str:
    return str(task.data.get("kind", ""))


def _rates(rollouts: Sequence[Rollout]) -> JsonObject:
    rewards = [rollout.score.reward for rollout in rollouts if rollout.score is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"rollouts": len(rollouts), "pass_rate": _rounded(pass_rate(rollouts)), "mean_reward": _rounded(mean)}


def floor_scores(target: Target, tasks: Sequence[Task]) -> dict[str, Score | None]:
    """Score an agent that does nothing on each task, by the task's id; None where infrastructure failed.

    The floor costs no rollout, and a pass rate means little without it.
    """
    scores: dict[str, Score | None] = {}
    for task in tasks:
        try:
            scores[task.id] = target.floor(task)
        except InfrastructureError as fault:
            print(f"the floor of {task.id} is not known: {fault}")
            scores[task.id] = None
    return scores


def _floor_rates(scores: Sequence[Score | None]) -> dict[str, float | None]:
    measured = [score for score in scores if score is not None]
    if not measured:
        return {"pass_rate": None, "mean_reward": None}
    return {
        "pass_rate": _rounded(sum(score.success for score in measured) / len(measured)),
        "mean_reward": _rounded(sum(score.reward for score in measured) / len(measured)),
    }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 6)
