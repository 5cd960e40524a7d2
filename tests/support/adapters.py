"""LoRA adapters with random weights."""

from pathlib import Path
from typing import Any

from captrain.models.lora import Adapter, adapter_digest
from captrain.training.recipe import LINEAR


def lora(model: Path, folder: Path, seed: int, **changes: Any) -> Adapter:
    """Save and return a LoRA adapter with random weights in PEFT's format."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": list(LINEAR), **changes}
    adapted: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return Adapter(str(folder), adapter_digest(folder))


def save_adapter(model: Path, folder: Path) -> Path:
    """Save a random adapter and return its folder."""
    return Path(lora(model, folder, 2).folder)
