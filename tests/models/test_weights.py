"""Code of a model's own runs only if the user allows it."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from captrain.agents.local import LocalPolicy
from captrain.errors import UserError
from captrain.models import load_module

ROOT = Path(__file__).parents[2]


@pytest.fixture
def brought(tiny: Path, tmp_path: Path) -> Path:
    """A model with configuration code that writes a file when it runs."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "brought",
        "auto_map": {"AutoConfig": "brought.Brought", "AutoModelForCausalLM": "brought.B"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "brought.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


LOADERS: dict[str, Callable[[Path], object]] = {
    "to act with": lambda folder: LocalPolicy(folder, 1, temperature=1.0, max_turns=1, max_tokens=1),
    "to train on": lambda folder: load_module(folder, "float32"),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_with_code_of_its_own_is_refused_and_does_not_run(
    brought: Path, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPTRAIN_TRUST_REMOTE_CODE", raising=False)
    with pytest.raises(UserError, match=r"brings Python code of its own \(config.json has auto_map\)"):
        LOADERS[loader](brought)
    assert not (brought.parent / "ran").exists()


def test_a_models_code_runs_if_the_user_allows_it(
    brought: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CAPTRAIN_TRUST_REMOTE_CODE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    with pytest.raises(Exception, match="Brought"):  # the file defines no such class, and was run to find out
        load_module(brought, "float32")
    assert (brought.parent / "ran").exists()


def test_every_load_of_a_model_decides_on_trust() -> None:
    for path in (ROOT / "src/captrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.match(r"Auto\w+\.from_pretrained$", ast.unparse(node.func)):
                assert "trust_remote_code" in {keyword.arg for keyword in node.keywords}, path
