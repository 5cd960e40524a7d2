"""Advantages within a group."""

import random

import pytest

from captrain.training.groups import group_advantages


def test_advantages_are_standardized_rewards() -> None:
    assert group_advantages([0.0, 1.0]) == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])
    assert group_advantages([1.0, 2.0, 6.0]) == pytest.approx([value / (7**0.5 + 1e-4) for value in (-2, -1, 3)])


@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 7])
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards) == pytest.approx([0.0] * len(rewards), abs=1e-10)


def test_advantages_do_not_depend_on_the_order_of_the_group_to_the_last_bit() -> None:
    rng = random.Random(0)
    rewards = [rng.random() for _ in range(16)]
    by_reward = dict(zip(rewards, group_advantages(rewards), strict=True))
    rng.shuffle(rewards)
    assert group_advantages(rewards) == [by_reward[reward] for reward in rewards]
