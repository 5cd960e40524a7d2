"""Overrides of settings that conf/ does not list."""

from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.run import Spec, compose_spec

CONF = Path(__file__).parents[2] / "conf"


def compose(*overrides: str) -> Spec:
    return compose_spec("default", 0, overrides, CONF)


@pytest.mark.parametrize("override", ["delta=0.1", "selektion.delta=0.1"])
def test_a_setting_without_its_section_is_told_by_its_whole_name(override: str) -> None:
    with pytest.raises(UserError, match="there is no setting") as refused:
        compose(override)
    assert refused.value.remedy == "did you mean selection.delta?"


def test_a_misspelt_section_is_not_begun_and_one_that_is_added_is() -> None:
    with pytest.raises(UserError) as refused:
        compose("machine.benchmarks.tua2.python=/x")
    assert "did you mean machine.benchmarks.tau2.python?" in refused.value.remedy
    assert compose("+machine.benchmarks.new.python=/x").machine.benchmarks["new"].python == "/x"


def test_settings_that_conf_does_not_list_need_no_sign() -> None:
    composed = compose("machine.launcher=local", "policy.chat_template_kwargs.enable_thinking=false", "policy.top_k=5")
    assert composed.policy.settings()["chat_template_kwargs"] == {"enable_thinking": False}
    assert composed.policy.settings()["top_k"] == 5
