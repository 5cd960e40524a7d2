"""Scoring of finished plays, several at once: a grader may take seconds, and its score depends on the record alone."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from captrain.contract import Target
from captrain.errors import InfrastructureError
from captrain.policies import Play
from captrain.records import Score, Task

AT_ONCE = 16
"""Plays that are scored at the same time."""


def score_of(target: Target, task: Task, play: Play) -> Score | None:
    """Score a play; None when infrastructure failed it, or now its grader, which is then its error.

    Raises:
        EnvironmentFault: the environment raised, or gave no score.
    """
    if play.error:
        return None
    try:
        return target.score(task, play.messages)
    except InfrastructureError as fault:
        play.error = str(fault)
        return None


def scored(plays: Iterable[Play], score: Callable[[Play], Score | None]) -> Iterator[tuple[Play, Score | None]]:
    """Score plays as they come, each as soon as it is over; yields them in the order in which they came.

    Raises:
        Whatever playing or a score raises first, when what is whole by then has been yielded.
    """
    queue: deque[tuple[Play, Future[Score | None]]] = deque()
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
