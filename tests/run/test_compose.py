"""Overrides of settings that conf/ does not list."""

from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.run import Spec, compose_spec

CONF = Path(__file__).parents[2] / "conf"


def compose(*overrides: str) -> Spec:
    return compose_spec("default", 0, overrides, CONF)


@pytest.mark.parametrize("override", ["delta=0.1", "selektion.delta=0.1"])
def test_a_setting_without_its_section_gets_its_full_name(override: str) -> None:
    with pytest.raises(UserError, match="there is no setting") as refused:
        compose(override)
    assert refused.value.remedy == "did you mean selection.delta?"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("machine.benchmarks.tua2.python", "machine.benchmarks.tau2.python"),
        ("machine.vlm.python", "machine.vllm.python"),
        ("baselines.grpo_targt.groups_per_step", "baselines.grpo_target.groups_per_step"),
    ],
)
def test_a_misspelt_section_gets_the_nearest_name_and_a_hint(key: str, meant: str) -> None:
    with pytest.raises(UserError) as refused:
        compose(f"{key}=2")
    assert refused.value.remedy.startswith(f"did you mean {meant}?")
    assert refused.value.remedy.endswith(f" (to begin a section, write +{key}=...)")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("machine.slurm.minuts=3", "minutes"),
        ("machine.benchmarks.tau2.pyton=/x", "python"),
        ("baselines.grpo_target.group_per_step=2", "groups_per_step"),
    ],
)
def test_a_misspelt_setting_gets_the_nearest_name(override: str, meant: str) -> None:
    with pytest.raises(UserError, match="there is no setting") as refused:
        compose("machine=slurm", override)
    assert refused.value.remedy.startswith(f"did you mean {meant}?")


def test_a_plus_adds_a_section() -> None:
    assert compose("+machine.benchmarks.new.python=/x").machine.benchmarks["new"].python == "/x"


def test_unlisted_settings_of_components_need_no_plus() -> None:
    composed = compose("machine.launcher=local", "policy.chat_template_kwargs.enable_thinking=false", "policy.top_k=5")
    assert composed.policy.settings()["chat_template_kwargs"] == {"enable_thinking": False}
    assert composed.policy.settings()["top_k"] == 5
