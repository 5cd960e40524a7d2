"""Composition: the exact weighted sum of adapters, as one plain adapter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.adapters import lora
from transformers import AutoModelForCausalLM

from captrain.agents.local import LocalPolicy
from captrain.contract import RunningEpisode, load_file
from captrain.errors import UserError
from captrain.models.lora import (
    Adapter,
    adapter_digest,
    compose,
    composition_name,
    lora_factors,
    normalised_weights,
    parse_composition,
)

SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_turns": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def members(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Three adapters of the tiny Qwen3 with different ranks and scales."""
    home = tmp_path_factory.mktemp("members")
    settings = {"a": {}, "b": {"r": 2, "lora_alpha": 2}, "c": {"r": 4, "lora_alpha": 8}}
    return {name: lora(tiny, home / name, at, **one) for at, (name, one) in enumerate(settings.items())}


def delta(adapter: Adapter) -> dict[str, Any]:
    """Return what an adapter adds to each module, in float64."""
    return {name: up.double() @ down.double() for name, (up, down) in lora_factors(adapter).items()}


def furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 0.6, "c": 0.4}, {"a": 0.5, "b": 0.2, "c": 0.3}])
def test_a_composition_is_the_weighted_sum_of_its_members(
    members: dict[str, Adapter], weights: dict[str, float], tmp_path: Path
) -> None:
    deltas = {name: delta(members[name]) for name in weights}
    wanted = {key: sum(weights[name] * one[key] for name, one in deltas.items()) for key in deltas["a"]}
    found = compose(members, weights, tmp_path)
    assert furthest(delta(found), wanted) < 1e-6
    config = json.loads((Path(found.folder) / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == sum({"a": 4, "b": 2, "c": 4}[name] for name in weights)


def test_a_composition_gives_the_logits_of_the_summed_weights(
    tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    weights = {"a": 0.6, "b": 0.4}
    composed = compose(members, weights, tmp_path)
    # One member at another weight than 1 is a concatenation too; PEFT acts with all of them in one batch.
    halves = {name: compose(members, {name: 0.5}, tmp_path) for name in ("a", "c")}
    ids = torch.randint(5, 300, (4, 20), generator=torch.Generator().manual_seed(0))
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    mixed: Any = PeftModel.from_pretrained(plain, members["a"].folder, adapter_name="a")
    mixed.load_adapter(members["b"].folder, "b")
    mixed.load_adapter(composed.folder, "composed")
    for name, half in halves.items():
        mixed.load_adapter(half.folder, f"half_{name}")
    mixed.eval()

    def alone(*parts: tuple[str, float]) -> Any:
        summed: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
        state = summed.state_dict()
        for name, weight in parts:
            for key, change in delta(members[name]).items():
                state[f"{key.removeprefix('base_model.model.')}.weight"] += weight * change
        summed.load_state_dict(state)
        return summed(input_ids=ids).logits

    with torch.no_grad():
        rows = mixed(input_ids=ids, adapter_names=["composed", "half_a", "half_c", "a"]).logits
        base = alone()
        expected = [alone(("a", 0.6), ("b", 0.4)), alone(("a", 0.5)), alone(("c", 0.5)), alone(("a", 1.0))]
    for row, one in enumerate(expected):
        assert (rows[row] - one[row]).abs().max() < 1e-5 < 0.1 < (one[row] - base[row]).abs().max()


def test_a_composition_equals_pefts_cat(tiny: Path, members: dict[str, Adapter], tmp_path: Path) -> None:
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny), members["a"].folder, adapter_name="a"
    )
    model.load_adapter(members["b"].folder, "b")
    model.add_weighted_adapter(["a", "b"], [0.3, 0.7], "both", combination_type="cat")
    found = delta(compose(members, {"a": 0.3, "b": 0.7}, tmp_path))
    for name, module in model.base_model.model.named_modules():
        if f"base_model.model.{name}" in found:
            both = module.get_delta_weight("both").double()
            assert (both - found[f"base_model.model.{name}"]).abs().max() < 1e-6


def test_a_policy_samples_with_a_composition_as_with_summed_weights(
    tiny: Path, members: dict[str, Adapter], letters: Callable[..., Path], tmp_path: Path
) -> None:
    summed: Any = AutoModelForCausalLM.from_pretrained(tiny)
    state = summed.state_dict()
    for name in ("a", "b"):
        for key, change in delta(members[name]).items():
            state[f"{key.removeprefix('base_model.model.')}.weight"] += change
    summed.load_state_dict(state)
    other = tmp_path / "summed"
    summed.save_pretrained(other)
    for path in tiny.glob("*token*"):
        (other / path.name).write_bytes(path.read_bytes())
    if (tiny / "chat_template.jinja").exists():
        (other / "chat_template.jinja").write_bytes((tiny / "chat_template.jinja").read_bytes())
    target = load_file(letters())
    tasks = target.tasks("training", 6)
    composed = compose(members, {"a": 1.0, "b": 1.0}, tmp_path / "compositions")

    def said(model: Path, adapter: str) -> dict[str, list[int]]:
        plays = [RunningEpisode(task.id, target.open(task), adapter) for task in tasks]
        return {play.key: play.token_ids for play in LocalPolicy(model, **SAMPLING).play(plays)}

    assert said(tiny, composed.folder) == said(other, "") != said(tiny, members["a"].folder)


def test_a_single_member_at_weight_one_is_unchanged(members: dict[str, Adapter], tmp_path: Path) -> None:
    assert compose(members, {"b": 1.0, "a": 0.0}, tmp_path / "none") == members["b"]
    assert not (tmp_path / "none").exists()


def test_a_composition_is_cached_whatever_the_order_and_names_of_its_members(
    members: dict[str, Adapter], tmp_path: Path
) -> None:
    first = compose(members, {"a": 0.6, "b": 0.4}, tmp_path / "one")
    assert Path(first.folder).name == first.digest == adapter_digest(Path(first.folder))
    written = (Path(first.folder) / "adapter_model.safetensors").stat().st_mtime_ns
    renamed = {"y": members["b"], "z": members["a"]}
    assert compose(renamed, {"y": 0.4, "z": 0.6}, tmp_path / "one") == first
    assert (Path(first.folder) / "adapter_model.safetensors").stat().st_mtime_ns == written
    elsewhere = compose(members, {"b": 0.4, "a": 0.6}, tmp_path / "two")
    assert elsewhere.digest == first.digest and elsewhere.folder != first.folder
    assert compose(members, {"a": 0.5, "b": 0.5}, tmp_path / "one").digest != first.digest
    assert sorted(path.name[0] for path in (tmp_path / "one").iterdir()).count(".") == 0


def test_an_altered_composition_is_made_again(members: dict[str, Adapter], tmp_path: Path) -> None:
    first = compose(members, {"a": 1.0, "b": 1.0}, tmp_path)
    weights = Path(first.folder) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\1\2\3\4")
    assert compose(members, {"a": 1.0, "b": 1.0}, tmp_path) == first and weights.read_bytes() == whole


def test_members_that_cannot_be_added_are_refused(tiny: Path, members: dict[str, Adapter], tmp_path: Path) -> None:
    fewer = lora(tiny, tmp_path / "fewer", 5, target_modules=["q_proj"])
    with pytest.raises(UserError, match="change different modules"):
        compose({"a": members["a"], "fewer": fewer}, {"a": 1.0, "fewer": 1.0}, tmp_path)
    stabilised = lora(tiny, tmp_path / "stabilised", 5, use_rslora=True)
    with pytest.raises(UserError, match="not a plain LoRA adapter .use_rslora"):
        compose({"a": members["a"], "s": stabilised}, {"a": 1.0, "s": 1.0}, tmp_path)
    with pytest.raises(UserError, match="nowhere/adapter_config.json is missing"):
        compose({"a": members["a"], "n": Adapter("nowhere", "0")}, {"a": 1.0, "n": 1.0}, tmp_path)


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"b": 1.0, "a": 1.0}, "a+b"),
        ({"a": 0.6, "b": 0.4}, "0.6*a+0.4*b"),
        ({"wrong_record": 1.0}, "wrong_record"),
        ({"a": 0.5}, "0.5*a"),
        ({"a": 1.0, "b": 0.3}, "a+0.3*b"),
        ({"a": 1.2, "b": 3.0}, "1.2*a+3.0*b"),
    ],
)
def test_weights_and_names_convert_both_ways(weights: dict[str, float], name: str) -> None:
    assert composition_name(weights) == name and parse_composition(name) == weights


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 0.62, "b": 0.38}, {"a": 0.6, "b": 0.4}),
        ({"a": 2.0, "b": 2.0, "c": 2.0}, {"a": 0.4, "b": 0.3, "c": 0.3}),
        ({"b": 0.97, "a": 0.03}, {"b": 1.0}),
        ({"a": 0.25, "b": 0.75}, {"a": 0.3, "b": 0.7}),
        ({"a": 7.0}, {"a": 1.0}),
    ],
)
def test_normalised_weights_are_tenths_that_sum_to_one(weights: dict[str, float], shares: dict[str, float]) -> None:
    assert normalised_weights(weights) == shares and parse_composition(composition_name(shares)) == shares


def test_weights_finer_than_tenths_have_no_name() -> None:
    for weights in ({"a": 0.65}, {"a": 0.0}, {"a": -0.1}):
        with pytest.raises(ValueError, match="positive number of tenths"):
            composition_name(weights)


def test_negative_and_zero_weights_are_refused(tmp_path: Path) -> None:
    for weights in ({"a": -1.0, "b": 3.0}, {"a": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            normalised_weights(weights)
    with pytest.raises(ValueError, match="needs a member"):
        compose({"a": Adapter("a", "0")}, {"a": 0.0}, tmp_path)
