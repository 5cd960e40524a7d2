"""`captrain check-benchmark`: a contract test of a benchmark before anything is spent on it.

The benchmark is played behind `CheckedEnvironment`, as in the pipeline: with reference solutions, an agent that does
nothing, random calls, calls that break their schema, and every call twice. Everything is repeated, and another process
must list the same tasks. The test runs in a process of its own, so that nothing of the benchmark survives it.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import TypeVar, cast, get_args

from captrain.contract import IDLE, CheckedEnvironment, calls_of
from captrain.environments import FLAWS, flawed, in_other_words, random_call, structure
from captrain.errors import EnvironmentFault, UserError
from captrain.projects.examination import (
    ENDING,
    LIMIT,
    BenchmarkReport,
    ExaminedBenchmark,
    Problem,
    load_environment_class,
)
from captrain.records import Message, Score, Split, Task

T = TypeVar("T")
SPLITS: tuple[Split, ...] = get_args(Split)
TASKS = 20
"""Tasks of each split; fewer if the benchmark has fewer."""
RANDOM_CALLS = 30
"""Random calls in one task."""
FOREIGN = """
import json, sys
from captrain.projects.benchmark import task_listing
print(task_listing(*json.loads(sys.argv[1])))
"""
"""Program of another process that lists the tasks."""
UNTOLD = (
    "lose reward if their words change and their calls stay: no environment derived from such a task earns a "
    "passport. State the words in the policy, or do not score them"
)
NO_REFERENCES = (
    "the programmatic analyst finds only what correlates with failure, and no environment can be derived. To use a "
    "language model: analyst=openai analyst.name=MODEL synthesizer=openai synthesizer.name=MODEL"
)
START = 120.0
"""Seconds that another process may take to start on a busy machine."""


def check_benchmark(
    target: str, settings: Mapping[str, object] | None = None, *, tasks: int = TASKS, limit: float = LIMIT
) -> BenchmarkReport:
    """Test a benchmark against the contract, in a process that ends with everything that it started.

    Args:
        target: module:Class.
        settings: of its constructor.
        tasks: of each split.
        limit: seconds for one call of one method.

    Raises:
        UserError: it cannot be built, or lacks a member of the contract.
    """
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(far, target, settings or {}, tasks, limit))
    process.start()
    far.close()
    report, call, patience = BenchmarkReport(), None, 2 * LIMIT + 8 * limit
    try:
        with suppress(EOFError, OSError):  # the process ended; the latter amid a message
            while near.poll(patience):
                match near.recv():
                    case "call", Problem() as call:
                        pass
                    case "problem", Problem() as problem:
                        report.add(problem)
                    case UserError() as error:
                        raise error
                    case facts:
                        report.facts = facts
                        return report
        for _ in range(20):  # `join` would wait for what the process started
            time.sleep(0.05 if process.exitcode is None else 0)
        loss, status = f"did not return within {patience:g} s, and let nobody interrupt it", process.exitcode
        if status is not None:
            loss = f"ended the process ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        if call is None:
            raise UserError(f"{target} cannot be built: it {loss}", ENDING)
        report.add(replace(call, text=f"{call.text} {loss}"))
        return report
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.kill()
        process.join()
        near.close()


def _examine(connection: Connection, target: str, settings: Mapping[str, object], count: int, limit: float) -> None:
    """Run all tests, and send each call before it is made, each problem, and at the end the facts or the error."""
    os.setsid()
    os.register_at_fork(after_in_child=connection.close)  # else a cut-off message would never end
    try:
        environment = load_environment_class(target, settings)
        benchmark = ExaminedBenchmark(environment, type(environment).__name__, limit, connection.send)
        facts = {"name": str(benchmark.name)}
        with benchmark.noting():
            _test_members(benchmark, facts)
        tasks: dict[Split, list[Task]] = {split: [] for split in SPLITS}
        for split in SPLITS:
            with benchmark.noting():
                tasks[split] = _test_tasks(benchmark, split, count, facts)
        with benchmark.noting():
            _test_splits(tasks)
            if any(tasks.values()):
                _test_other_process(target, settings, tasks, START + 6 * limit)
        _test_plays(benchmark, [task for split in SPLITS for task in tasks[split]], facts)
        connection.send(facts)
    except UserError as error:
        connection.send(error)


def _plain(value: T, what: str) -> T:
    """Return a value as it comes back from a JSON file, or refuse it."""
    copy: object = None
    with suppress(TypeError, ValueError, RecursionError):
        copy = json.loads(json.dumps(value, allow_nan=False))
    if copy != value:
        raise EnvironmentFault(f"{what} is not plain JSON: {str(value)[:60]!r}", "use texts, numbers, lists and dicts")
    return cast(T, copy)


def _test_members(benchmark: ExaminedBenchmark, facts: dict[str, str]) -> None:
    """Test the name, the facts about itself, and the tool schemas."""
    if not isinstance(benchmark.name, str):
        raise EnvironmentFault(f"name is {benchmark.name!r}", "set name to a string")
    _plain(benchmark.about, "about")
    names: list[str] = []
    for tool in _plain(benchmark.tools, "tools"):
        match tool:
            case {"function": {"name": str(name), "parameters": {"type": "object"}}} if name not in names:
                names.append(name)
            case _:
                raise EnvironmentFault(
                    f"tools: {str(tool)[:60]!r} is not a function schema, or repeats a name",
                    'write {"type": "function", "function": {"name", "description", "parameters": {"type": "object"}}}',
                )
    facts["tools"] = ", ".join(names)


def _test_tasks(benchmark: ExaminedBenchmark, split: Split, count: int, facts: dict[str, str]) -> list[Task]:
    """Test that a split lists valid tasks, the same again, and those of a shorter list first; return them."""
    size = benchmark.size(split)
    if size is not None and (type(size) is not int or size < 0):
        raise EnvironmentFault(f"size on split {split} is {str(size)[:60]!r}", "return a whole number, 0 or more")
    facts[f"tasks of {split}"] = "unlimited" if size is None else str(size)
    count = count if size is None else min(count, size)
    tasks, again, fewer = (benchmark.tasks(split, number) for number in (count, count, count // 2))
    for task in tasks:
        _plain(task.data, f"the data of task {task.id}")
    if tasks != again or fewer != tasks[: count // 2]:
        raise EnvironmentFault(
            f"tasks on split {split} change when they are listed again, or when fewer are listed",
            "make each task depend only on its split and number: create a new random.Random(seed) for each",
        )
    return tasks


def _test_splits(tasks: Mapping[Split, Sequence[Task]]) -> None:
    """Test that splits share no id, and hardly any content."""
    pairs: list[tuple[Split, Split]] = [("discovery", "test"), ("training", "test"), ("discovery", "training")]
    for first, second in pairs:
        ids = [{task.id for task in tasks[split]} for split in (first, second)]
        contents = [{json.dumps(task.data, sort_keys=True) for task in tasks[split]} for split in (first, second)]
        shared, least = contents[0] & contents[1], min(map(len, contents))
        if ids[0] & ids[1] or (least and len(shared) > least / 2):
            raise EnvironmentFault(
                f"tasks: {len(shared)} of {least} in {second} are also in {first}, and {len(ids[0] & ids[1])} ids",
                "make the tasks of each split different: a test must not measure what was trained on",
            )


def task_listing(target: str, settings: Mapping[str, object], counts: Mapping[Split, int]) -> str:
    """List the first tasks of splits as JSON, for a comparison between processes."""
    benchmark = CheckedEnvironment(load_environment_class(target, settings), target, "")
    return _listing({split: benchmark.tasks(split, count) for split, count in counts.items()})


def _listing(tasks: Mapping[Split, Sequence[Task]]) -> str:
    return json.dumps({split: [task.model_dump() for task in listed] for split, listed in tasks.items()})


def _test_other_process(
    target: str, settings: Mapping[str, object], tasks: Mapping[Split, Sequence[Task]], seconds: float
) -> None:
    """Test that another process, in which texts have other hashes, lists the same tasks."""
    arguments = (target, dict(settings), {split: len(listed) for split, listed in tasks.items()})
    command = [sys.executable, "-c", FOREIGN, json.dumps(arguments)]
    try:
        process = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        text = f"tasks do not come in another process within {seconds:.0f} s"
        raise EnvironmentFault(text, "make tasks() faster, or raise --limit") from None
    if process.returncode or process.stdout.strip().splitlines()[-1:] != [_listing(tasks)]:
        last = "".join(process.stderr.strip().splitlines()[-1:])
        raise EnvironmentFault(
            f"tasks fail in another process: {last}" if process.returncode else "tasks are others in another process",
            "make each task depend only on settings, split and number: no hash(), set order, clock or file",
        )


def _test_plays(benchmark: ExaminedBenchmark, tasks: Sequence[Task], facts: dict[str, str]) -> None:
    """Test that references score 1, and that every task can be played by any agent."""
    structures: set[str] = set()
    rewards: dict[str, list[float]] = {}
    without = demanding = 0
    for task in tasks:
        agents: dict[str, Sequence[Message]] = {"nothing": [IDLE]}
        with benchmark.noting():
            reference = _solution(benchmark, task)
            without += not reference
            agents |= _agents(benchmark, task, reference)
        for agent, actions in agents.items():
            with benchmark.noting():
                record, score = _play(benchmark, task, actions)
                rewards.setdefault(agent, []).append(score.reward)
                if agent == "reference":
                    structures.add(structure(record))
                    if score.reward != 1 or not score.success:
                        raise EnvironmentFault(
                            f"reference on {task.id} scores {score.reward}, success {score.success}",
                            "make reference and score agree: the reference, played in order, must score 1",
                        )
                    # Does it lose by words that nobody told the agent?
                    words = in_other_words(actions, record, random.Random(task.id))
                    demanding += _play(benchmark, task, words)[1].reward < 1
    for agent, earned in rewards.items():
        facts[f"mean reward of {agent}"] = f"{sum(earned) / len(earned):.2f} of {len(earned)}"
    references = len(rewards.get("reference", []))
    if references:
        few = " (all tasks differ in names and numbers only)" if len(structures) == 1 else ""
        facts["structures of tasks"] = f"{len(structures)} in {references} references{few}"
    if demanding:
        facts["words that nobody told"] = f"{demanding} of {references} references {UNTOLD}"
    if without:
        facts["references"] = f"{without} of {len(tasks)} tasks have none: {NO_REFERENCES}"


def _solution(benchmark: ExaminedBenchmark, task: Task) -> list[Message]:
    """Return a reference of assistant messages."""
    reference = _plain(benchmark.reference(task), f"reference on {task.id}")
    if not isinstance(reference, list) or any(message["role"] != "assistant" for message in reference):
        raise EnvironmentFault(
            f"reference on {task.id} is {str(reference)[:60]!r}",
            "return the assistant messages of a solution, or [] if none is known",
        )
    return reference


def _agents(benchmark: ExaminedBenchmark, task: Task, reference: Sequence[Message]) -> dict[str, Sequence[Message]]:
    """Make the messages of agents that need tools or a reference."""
    rng, seen = random.Random(task.id), benchmark.play(task, reference)
    functions = [tool["function"] for tool in benchmark.tools]
    calls = [random_call(rng.choice(functions), seen, rng) for _ in range(RANDOM_CALLS * bool(functions))]
    flaws: list[Message | None] = []
    for kind in FLAWS:
        for function in functions:
            [(name, arguments)] = calls_of(random_call(function, seen, rng))
            flaws.append(flawed(kind, name, arguments, function["parameters"], rng))
    agents = {
        "reference": reference,
        "random calls": calls,
        "calls that fit no schema": [call for call in flaws if call is not None],
        "every call twice": [action for action in reference for _ in range(1 + bool(calls_of(action)))],
    }
    return {agent: actions for agent, actions in agents.items() if actions}


def _play(benchmark: ExaminedBenchmark, task: Task, actions: Sequence[Message]) -> tuple[list[Message], Score]:
    """Play and score, each twice, and return the record and its score."""
    record, again = (_plain(benchmark.play(task, actions), f"step on {task.id}: an answer") for _ in range(2))
    if record != again:
        raise EnvironmentFault(
            f"step on {task.id} answers differently when the same messages are played again",
            "draw from the task or from open's `key`, not from a clock or from shared state",
        )
    if any(first["role"] == second["role"] == "assistant" for first, second in pairwise(record)):
        raise EnvironmentFault(
            f"step on {task.id} returned no message and did not end the episode", "answer each message, or return True"
        )
    score, again = (benchmark.score(task, record) for _ in range(2))
    if score != again:
        raise EnvironmentFault(f"score on {task.id} differs when computed again", "use only the task and the messages")
    return record, score
