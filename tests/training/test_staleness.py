"""Staleness: rollouts of the next step are played while this one trains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.letters import Letters
from support.servers import machine
from support.training import inside, job
from support.waiting import until
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from captrain.agents.vllm import VLLMPolicy
from captrain.contract import RunningEpisode
from captrain.errors import UserError
from captrain.training.jobs import Job
from captrain.training.runs import train


def served(base: Path, environment: Path, staleness: int, **changes: Any) -> Job:
    one = job(base, environment, trainer={"staleness": staleness, "epochs": 1}, policy={"max_tokens": 4}, **changes)
    acting = one.policy.model_copy(update={"target": "captrain.agents.vllm.VLLMPolicy"})
    return replace(one, policy=acting, machine=machine(replicas=1))


def test_a_slow_episode_does_not_delay_the_next_step(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted, began, updates = list[tuple[str, str]](), dict[int, int](), list[int]()
    """Adapters by task, updates before the slow episode of each step, updates."""
    answer = VLLMPolicy._answer

    def slow(self: VLLMPolicy, play: RunningEpisode) -> Any:
        task = int(play.key.split("/")[3])
        acted.append((str(task), play.adapter))
        if play.key.endswith("/0") and task % 2:
            step = (task - 2) // 2
            began[step] = len(updates)
            until(lambda: len(updates) >= step)  # it ends after the update that follows the step before
        return answer(self, play)

    def before(*_: Any) -> None:
        """Update once the slow episode of the next step has begun, if staleness allows it."""
        until(lambda: staleness == 0 or len(updates) == 3 or len(updates) + 1 in began)

    monkeypatch.setattr(VLLMPolicy, "_answer", slow)
    hooks = [register_optimizer_step_pre_hook(before)]
    hooks += [register_optimizer_step_post_hook(lambda *_: updates.append(len(updates)))]
    path = letters("letters")
    path.write_text(path.read_text().replace("1 + i % 3", "1"))
    trained = list[Any]()
    with inside(tmp_path / "work"):
        for staleness in (0, 1):
            for noted in (acted, began, updates):
                noted.clear()
            trained.append(train(served(tiny, path, staleness, rollouts=32)))
            assert began == {step: max(0, step - staleness) for step in range(4)}
            steps = [{adapter for task, adapter in acted if (int(task) - 2) // 2 == step} for step in range(4)]
            assert all(len(adapters) == 1 for adapters in steps)
            # With one, the first two steps are of the adapter as it began, and each later one of the step before.
            assert len(set.union(*steps)) == 4 - staleness and (steps[0] == steps[1]) == (staleness == 1)
    for hook in hooks:
        hook.remove()
    fresh, stale = trained
    assert (fresh.rollouts, stale.rollouts) == (32, 32) and fresh.digest != stale.digest
    assert [step.staleness for step in stale.history] == [0, 1, 1, 1]
    assert max(step.mismatch for step in stale.history) > 10 * max(step.mismatch for step in fresh.history)
    assert all(step.staleness is None for step in fresh.history)


def test_staleness_with_a_local_model_is_refused(tiny: Path, letters: Letters, tmp_path: Path) -> None:
    with inside(tmp_path / "work"), pytest.raises(UserError, match="trainer.staleness = 1") as refused:
        train(job(tiny, letters(), trainer={"staleness": 1}))
    assert "policy=vllm" in refused.value.remedy
