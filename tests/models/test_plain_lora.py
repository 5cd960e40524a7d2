"""Adapters that are not plain LoRA, W + (alpha / r) B A, are refused by the name of the setting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.adapters import lora

from captrain.agents.local import LocalPolicy, with_adapter
from captrain.errors import UserError
from captrain.models.lora import Adapter, compose, read_plain_lora
from captrain.serving.endpoint import ChatServer

VARIATIONS: dict[str, dict[str, Any]] = {
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "bias": {"bias": "all"},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
}


@pytest.fixture(scope="module")
def policy(tiny: Path) -> LocalPolicy:
    return LocalPolicy(tiny, temperature=1.0, max_turns=3, max_tokens=8)


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return lora(tiny, tmp_path_factory.mktemp("plain") / "plain", 0)


@pytest.mark.parametrize("setting", VARIATIONS)
def test_variations_of_lora_are_refused_everywhere(
    tiny: Path, policy: LocalPolicy, plain: Adapter, tmp_path: Path, setting: str
) -> None:
    special = lora(tiny, tmp_path / "special", 1, **VARIATIONS[setting])
    readers: list[Callable[[], object]] = [
        lambda: with_adapter(policy.state, special.folder),
        lambda: compose({"a": plain, "b": special}, {"a": 1.0, "b": 1.0}, tmp_path / "compositions"),
        lambda: ChatServer(policy, "base", {"special": Path(special.folder)}),
    ]
    for reader in readers:
        with pytest.raises(UserError, match=rf"not a plain LoRA adapter \({setting}\)") as error:
            reader()
        assert str(tmp_path / "special") in error.value.problem


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_settings_of_training_are_harmless(tiny: Path, tmp_path: Path, init: bool | str) -> None:
    adapter = lora(tiny, tmp_path / "a", 1, init_lora_weights=init, lora_dropout=0.1, layers_to_transform=[0])
    assert read_plain_lora(Path(adapter.folder)).scale == 3.0


def test_an_unknown_setting_of_peft_is_refused(plain: Adapter, tiny: Path, tmp_path: Path) -> None:
    folder = Path(lora(tiny, tmp_path / "later", 1).folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_newlora": True, "newlora_config": None}))
    with pytest.raises(UserError, match=r"\(use_newlora\)"):
        read_plain_lora(folder)


def test_a_rank_that_differs_from_the_tensors_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = Path(lora(tiny, tmp_path / "other", 1).folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 8}))
    with pytest.raises(UserError, match="says r = 8, and its tensors are of rank 4"):
        read_plain_lora(folder)
