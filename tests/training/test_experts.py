"""Low-rank weights of the experts of a mixture: one by one in the adapter, stacked in PEFT, and the same function."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.training import inside, job, mixture_of, weights

from captrain.agents.local import LocalPolicy, with_adapter
from captrain.errors import UserError
from captrain.models import LoraShape, compose, load_module, lora_config, read_plain_lora, save_adapter
from captrain.models.lora import Adapter, adapter_digest, load_weights
from captrain.training.runs import train

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHAPE = LoraShape(rank=2, alpha=6, targets=ATTENTION, experts=True)
LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def mixture(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_of(tiny, tmp_path_factory.mktemp("mixture"))


def adapted(mixture: Path, seed: int) -> Any:
    """The mixture in PEFT with an adapter of random weights."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(seed)
    base = load_module(mixture, "float32")
    model: Any = get_peft_model(base, lora_config(base, SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 30, 7, 12, 3]])).logits


def test_an_adapter_of_experts_is_plain_and_acts_as_in_training(mixture: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    model = adapted(mixture, 0)
    save_adapter(model, tmp_path / "first", mixture, "of-a-policy")
    plain = read_plain_lora(tmp_path / "first")
    assert len(plain.factors) == LAYERS * (len(ATTENTION) + 3 * EXPERTS)
    config = json.loads((tmp_path / "first/adapter_config.json").read_text())
    assert config["target_modules"] == sorted([*ATTENTION, "gate_proj", "up_proj", "down_proj"])
    base = load_module(mixture, "float32")
    without, expected = logits(base), logits(model)
    assert (expected - without).abs().max() > 0.1
    base.load_state_dict(with_adapter(dict(base.state_dict()), str(tmp_path / "first")))
    assert (logits(base) - expected).abs().max() < 1e-4
    # PEFT itself reads it as an adapter of the time when experts were layers.
    foreign: Any = PeftModel.from_pretrained(load_module(mixture, "float32"), str(tmp_path / "first")).eval()
    assert (logits(foreign) - expected).abs().max() < 1e-4
    # What was saved can be trained further: the same weights, in the same places.
    again = adapted(mixture, 1)
    load_weights(again, tmp_path / "first")
    kept = model.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in again.state_dict().items())


def test_adapters_of_experts_are_added_up_exactly(mixture: Path, tmp_path: Path) -> None:
    members = {}
    for seed, name in enumerate(("first", "second")):
        save_adapter(adapted(mixture, seed), tmp_path / name, mixture, "of-a-policy")
        members[name] = Adapter(str(tmp_path / name), adapter_digest(tmp_path / name))
    total = compose(members, {"first": 1.0, "second": 1.0}, tmp_path / "composed")
    state = load_module(mixture, "float32").double().state_dict()
    parts = {name: with_adapter(dict(state), folder.folder) for name, folder in {**members, "sum": total}.items()}
    for name, weight in state.items():
        change = parts["first"][name] + parts["second"][name] - weight
        assert (parts["sum"][name] - change).abs().max() < 1e-5
    assert {*state} == {*parts["sum"]} and state["model.layers.0.mlp.experts.down_proj"].ndim == 3


def test_grpo_trains_experts_and_samples_with_them(mixture: Path, tmp_path: Path) -> None:
    from support.letters import LETTERS

    (tmp_path / "letters.py").write_text(LETTERS.format(name="letters", flat=0))
    settings = {"targets": ATTENTION, "experts": True, "epochs": 1, "rank": 2}
    one = job(mixture, tmp_path / "letters.py", rollouts=16, trainer=settings, policy={"precision": "float32"})
    accelerate = one.machine.accelerate.model_copy(update={"precision": "float32"})
    one = one.__class__(**{**vars(one), "machine": one.machine.model_copy(update={"accelerate": accelerate})})
    with inside(tmp_path / "run"):
        trained = train(one)
        saved = weights(trained.folder)
        assert trained.digest == adapter_digest(trained.folder) and len(trained.history) == 2
        ups = [tensor for name, tensor in saved.items() if ".experts." in name and "lora_B" in name]
        assert len(ups) == LAYERS * EXPERTS * 3 and max(up.abs().max().item() for up in ups) > 0
        acting = LocalPolicy(mixture, 8, temperature=1.0, max_turns=3, max_tokens=8, precision="float32")
        prompt = [5, 9, 30, 7]
        assert acting.scores(prompt, [4, 8, 15], str(trained.folder)) != acting.scores(prompt, [4, 8, 15])


def test_a_base_without_experts_is_refused_them(tiny: Path) -> None:
    with pytest.raises(UserError, match="trainer.experts = true, and the base is not a mixture of experts"):
        lora_config(load_module(tiny, "float32"), SHAPE)
