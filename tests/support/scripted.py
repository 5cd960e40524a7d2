"""Benchmarks in workers, and checks that their tests share."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from support.installations import data_beside, interpreter

from captrain.benchmarks.loading import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.records import Message, Split, Task
from captrain.run import Spec, compose_spec

CONF = Path(__file__).parents[2] / "conf"
SPLITS: tuple[Split, ...] = get_args(Split)
HOSTILE = (
    "__class__", "__init__", "_load_scenario", "eval", "exec", "exit", "kill", "os.system", "open", "", "cd; ls",
    "__import__('os').system('true')",
)  # fmt: skip
Make = Callable[..., CheckedEnvironment]
CALLS = 25
"""Hostile calls per task."""


def maker(request: pytest.FixtureRequest, name: str, *own: str) -> Make:
    """Make benchmarks with settings of their own, whose workers end with the fixture."""

    def make(*overrides: str, processes: int = 1) -> CheckedEnvironment:
        target = make_benchmark(name, *own, *overrides, processes=processes)
        request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
        return target

    return make


def composed_on(name: str, *overrides: str, processes: int = 1) -> Spec:
    """Settings with a benchmark on its installation, and with the data beside it."""
    python = interpreter(name)
    data = os.environ.get(f"CAPTRAIN_{name.upper()}_DATA", data_beside(python, name))
    own = f"++machine.benchmarks.{name}={{python: '{python}', data: '{data}', processes: {processes}, timeout: 300.0}}"
    return compose_spec("default", 0, [f"benchmark={name}", own, *overrides], CONF)


def make_benchmark(name: str, *overrides: str, processes: int = 1) -> CheckedEnvironment:
    composed = composed_on(name, *overrides, processes=processes)
    return load_benchmark(composed.benchmark, composed.machine)


def every(target: CheckedEnvironment, split: Split) -> list[Task]:
    return target.tasks(split, target.size(split) or 0)


def interleaved(
    target: CheckedEnvironment, tasks: Sequence[Task], actions: Sequence[Sequence[Message]]
) -> list[list[Message]]:
    """Play all tasks at once, in random order one message at a time; return their records."""
    episodes = [target.open(task) for task in tasks]
    records = [list(episode.messages) for episode in episodes]
    rng, pending = random.Random(0), {place: iter(messages) for place, messages in enumerate(actions)}
    while pending:
        place = rng.choice([*pending])
        action = next(pending[place], None)
        replies, over = ([], True) if action is None else episodes[place].step(action)
        records[place] += [*([action] if action else []), *replies]
        if over:
            del pending[place]
            episodes[place].close()
    return records


def play_hostile_calls(target: CheckedEnvironment, tasks: Sequence[Task], mark: Path, answered: int) -> int:
    """Play 25 random calls in each task, check that they score like doing nothing, and return how many were answered.

    Args:
        target: the benchmark.
        tasks: the tasks to play.
        mark: a file that exists if the text of a call was executed.
        answered: fewest messages with calls that an episode must answer.
    """
    rng, seen = random.Random(0), 0
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    values: Sequence[Any] = (
        None, [], "{", "[]", "1", "x" * 200_000, "[" * 5000, {"a": deep}, deep, 10**400, float("1e300"), {"": 1},
        {"self": 1}, {"path": touch}, {"file_name": "../../etc/passwd"}, {"a": {}}, {"url": f"[{touch}]"},
        {"user": {"function": "get_channels", "args": {}}}, {"file_path": "/etc/passwd"}, {"query": "[" * 9_000},
        {"expression": touch}, {"expression": "(lambda: 0)()"}, {"user_id": {}}, {"order_id": touch},
    )  # fmt: skip
    for task in tasks:
        episode = target.open(task)
        messages = list(episode.messages)
        names = [tool["function"]["name"] for tool in episode.tools]
        for number in range(CALLS):
            name: Any = rng.choice([*names, *HOSTILE, None, 7, ["cd"], {"cd": 1}])
            call: Any = {"id": rng.choice(["a", 5, None]), "function": {"name": name, "arguments": rng.choice(values)}}
            action: Message = {"role": "assistant", "content": rng.choice(["", None]), "tool_calls": [call]}
            replies, over = episode.step(action)
            messages += [action, *replies]
            seen += 1
            if over:
                assert number >= answered - 1
                episode.close()
                episode = target.open(task)
        episode.close()
        assert target.score(task, messages).reward == target.floor(task).reward
    assert not mark.exists()
    return seen
