"""What several tests share: a tiny model with random weights, and an environment that needs no skill to be rewarded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# As the Makefile sets it: nothing needs a network, and one thread is the faster number here.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")

# Pays for ASCII letters, so that a model that says anything at all earns a little; tasks whose number is a multiple
# of `flat` pay the same for everything.
LETTERS = '''"""Say letters."""


class Episode:
    def __init__(self, data):
        self.left = data["turns"]
        self.messages = [{{"role": "system", "content": "Talk."}}, {{"role": "user", "content": data["say"]}}]

    def step(self, message):
        self.left -= 1
        return ([{{"role": "user", "content": f"Go on, {{self.left}} more."}}] if self.left else []), not self.left


class Environment:
    name = "{name}"
    tools = []

    def tasks(self, split, count):
        data = [{{"i": i, "say": f"Say {{i}}.", "turns": 1 + i % 3}} for i in range(count)]
        return [{{"id": f"{name}/{{split}}/{{i}}", "split": split, "data": one}} for i, one in enumerate(data)]

    def open(self, task):
        return Episode(task["data"])

    def score(self, task, messages):
        said = "".join(message["content"] for message in messages if message["role"] == "assistant")
        letters = sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))
        reward = 0.5 if {flat} and task["data"]["i"] % {flat} == 0 else letters
        return {{"reward": reward, "success": reward > 0.5, "parts": {{"letters": letters}}}}

    def reference(self, task):
        return [{{"role": "assistant", "content": "yes"}}] * task["data"]["turns"]
'''


LONGEST = ("test_pipeline.py", "test_dispatch.py", "test_sweep.py", "test_distributed.py")
"""Minutes each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that workers which take a file at a time end at about the same time."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with random weights and the embedded base's tokenizer."""
    import torch

    from captrain.benchmarks.base.tokenizer import build_tokenizer
    from captrain.benchmarks.base.training import build_model
    from captrain.config.spec import Base

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    size = Base(hidden=32, layers=2, heads=2, steps=1, batch=1, learning_rate=1e-3, weight_decay=0.0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_model(tokenizer, size, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def letters(tmp_path: Path) -> Callable[..., Path]:
    """Write an environment file that pays for letters; every `flat`-th task, or with 1 each, pays 0.5 for anything."""

    def write(name: str = "letters", flat: int = 0, folder: Path = tmp_path) -> Path:
        path = folder / f"{name}.py"
        path.write_text(LETTERS.format(name=name, flat=flat))
        return path

    return write
