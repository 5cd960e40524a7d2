"""Batches of rollouts: in this process, and in shards with the same result."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from captrain.agents import collection
from captrain.agents.collection import SHARDS, PolicySource, RolloutBatch, collect, collect_batch, collect_shard
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.loading import load_benchmark
from captrain.errors import UserError
from captrain.records import Rollout
from captrain.run import launch
from captrain.run.components import Component
from captrain.run.machine import Machine, Slurm

DESK = Component.model_validate({"_target_": "captrain.benchmarks.servicedesk.ServiceDesk", "mix": "mixed"})
SCRIPTED = Component.model_validate({"_target_": "captrain.agents.scripted.ScriptedPolicy", "skill": 0.5})
HERE = Machine(workers=1, batch=4)
CLUSTER = Machine(workers=1, batch=4, launcher="slurm", slurm=Slurm())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put journals into a working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def part(machine: Machine = HERE, count: int = 10, **changes: Any) -> RolloutBatch:
    tasks = load_benchmark(DESK).tasks("discovery", count)
    settings = {"trials": 2, **changes}
    return RolloutBatch(
        "discovery", PolicySource(SCRIPTED, Path("base"), machine), DESK, tasks, "diagnosis", 3, **settings
    )


def journals() -> list[Path]:
    return sorted(Path(".cache/rollouts").glob("*.jsonl"))


def test_locally_a_batch_is_collected_with_a_journal_and_a_progress_bar(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.records.progress.PAUSE", 0.0)
    one, target = part(), load_benchmark(DESK)
    found = collect_batch(one, target, "rollouts")
    total = len(found)
    assert f"servicedesk-mixed: 0 of {total} rollouts" in capfd.readouterr().err
    assert found == collect(ScriptedPolicy(skill=0.5), target, one.tasks, purpose="diagnosis", seed=3, trials=2)
    # It resumed from the same journal, so its name has not changed.
    assert len(journals()) == 1


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_shards_give_the_same_rollouts_in_the_same_order(count: int) -> None:
    whole, shards = part(count=count), part(count=count).shards(SHARDS)
    assert [task for shard in shards for task in shard.tasks] == whole.tasks and 1 <= len(shards) <= SHARDS
    assert all(shard.tasks for shard in shards)
    assert shards[-1].name == f"discovery {len(shards)} of {len(shards)}"
    assert [rollout for shard in shards for rollout in collect_shard(shard)] == collect_batch(
        whole, load_benchmark(DESK), "rollouts"
    )


def test_on_a_cluster_each_shard_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RolloutBatch] = []

    def run(function: Any, items: Sequence[RolloutBatch], machine: Machine, label: str) -> list[list[Rollout]]:
        assert (function, machine, label) == (collect_shard, CLUSTER, "rollouts")
        sent.extend(items)
        return [function(pickle.loads(pickle.dumps(item))) for item in items]

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(RolloutBatch, "collect", counted := Counting(RolloutBatch.collect))
    away = part(CLUSTER)
    found = collect_batch(away, load_benchmark(DESK), "rollouts")
    assert [len(one.tasks) for one in sent] == [3, 3, 3, 1] and counted.calls == len(sent)
    # The sent batch holds no policy, and none was built.
    assert isinstance(away.policy, PolicySource) and "policy" not in vars(away.policy)
    assert found == collect_batch(part(), load_benchmark(DESK), "rollouts")


class Counting:
    """A method that counts its calls."""

    def __init__(self, method: Any) -> None:
        self.method, self.calls = method, 0

    def __get__(self, one: Any, _: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.calls += 1
            return self.method(one, *arguments, **settings)

        return call


def test_a_built_policy_plays_in_this_process_even_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection.launch, "run", lambda *_: pytest.fail("nothing is sent"))
    one = part(CLUSTER)
    built = RolloutBatch(one.name, ScriptedPolicy(skill=0.5), DESK, one.tasks, "diagnosis", 3, trials=2)
    assert collect_batch(built, load_benchmark(DESK), "rollouts") == collect_batch(
        part(), load_benchmark(DESK), "rollouts"
    )


def test_a_shard_refuses_tasks_of_another_split() -> None:
    tasks = load_benchmark(DESK).tasks("test", 2)
    wrong = RolloutBatch("discovery", PolicySource(SCRIPTED, Path("base"), HERE), DESK, tasks, "diagnosis", 3)
    with pytest.raises(UserError, match="split"):
        collect_shard(wrong)
