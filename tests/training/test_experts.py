"""Low-rank weights of the experts of a mixture, through PEFT: trained, acted with, and trained further."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from support.letters import LETTERS
from support.training import inside, job, mixture_of, weights

from captrain.agents.local import LocalPolicy
from captrain.errors import UserError
from captrain.models import LoraShape, compose, copy_adapter, load_module, lora_config, merge_experts, save_adapter
from captrain.models.lora import Adapter, adapter_digest
from captrain.run.machine import Accelerate
from captrain.training.runs import train

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHAPE = LoraShape(rank=2, alpha=6, targets=ATTENTION, experts=True)


@pytest.fixture(scope="module")
def mixture(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_of(tiny, tmp_path_factory.mktemp("mixture"))


def adapted(mixture: Path, seed: int) -> Any:
    """The mixture in PEFT with an adapter of random weights."""
    torch.manual_seed(seed)
    base = load_module(mixture, "float32")
    model: Any = get_peft_model(base, lora_config(base, SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 30, 7, 12, 3]])).logits


def test_an_adapter_of_experts_acts_as_in_training_and_can_be_trained_further(mixture: Path, tmp_path: Path) -> None:
    model = adapted(mixture, 0)
    save_adapter(model, tmp_path / "first", mixture, "of-a-policy")
    base = load_module(mixture, "float32")
    expected = logits(model)
    assert (expected - logits(base)).abs().max() > 0.1
    assert (logits(merge_experts(base, tmp_path / "first").float()) - expected).abs().max() < 1e-4
    again = adapted(mixture, 1)
    copy_adapter(again, Adapter(str(tmp_path / "first"), adapter_digest(tmp_path / "first")))
    kept = model.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in again.state_dict().items())


def test_adapters_of_experts_are_not_composed(mixture: Path, tmp_path: Path) -> None:
    save_adapter(adapted(mixture, 0), tmp_path / "first", mixture, "of-a-policy")
    member = Adapter(str(tmp_path / "first"), adapter_digest(tmp_path / "first"))
    with pytest.raises(UserError, match=r"not a plain LoRA adapter \(target_parameters\)"):
        compose({"a": member, "b": member}, {"a": 1.0, "b": 1.0}, tmp_path / "composed")


def test_grpo_trains_experts_and_samples_with_them(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(LETTERS.format(name="letters", flat=0))
    settings = {"targets": ATTENTION, "experts": True, "epochs": 1, "rank": 2}
    one = job(mixture, tmp_path / "letters.py", rollouts=16, trainer=settings, policy={"precision": "float32"})
    machine = one.machine.model_copy(update={"accelerate": Accelerate(precision="float32")})
    with inside(tmp_path / "run"):
        trained = train(replace(one, machine=machine))
        saved = weights(trained.folder)
        assert trained.digest == adapter_digest(trained.folder) and len(trained.history) == 2
        ups = [tensor for name, tensor in saved.items() if ".experts." in name and "lora_B" in name]
        assert len(ups) == 2 * 2 and max(up.abs().max().item() for up in ups) > 0
        acting = LocalPolicy(mixture, 8, temperature=1.0, max_turns=3, max_tokens=8, precision="float32")
        prompt = [5, 9, 30, 7]
        assert acting.scores(prompt, [4, 8, 15], str(trained.folder)) != acting.scores(prompt, [4, 8, 15])


def test_experts_of_a_dense_base_are_refused(tiny: Path) -> None:
    with pytest.raises(UserError, match="trainer.experts = true, and the base is not a mixture of experts"):
        lora_config(load_module(tiny, "float32"), SHAPE)
