"""Keys reach no file: refused where they are typed, taken out where somebody echoes them."""

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from captrain.config import compose_spec, load_choice, redacted, refuse_keys
from captrain.errors import UserError
from captrain.experiments import sweep

ROOT = Path(__file__).parents[2]
KEY = "sk-abcdefghijklmnop1234567890"
TYPED = [
    f"policy.name={KEY}",
    f"+policy.extra.deep={KEY}",
    "policy.api_key=abcd1234efgh5678",
    "+policy.token=Zm9vYmFyYmF6MTIz",
    "base.model=https://me:hunter2@host/model",
    "policy.name=very/secret+value=42",
    "policy.name=hf_abcdefghijklmnopqrst",
]


@pytest.mark.parametrize("override", TYPED)
def test_a_key_in_a_setting_is_refused_unseen_before_anything_is_written(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "very/secret+value=42")
    value = override.partition("=")[2]
    with pytest.raises(UserError, match="holds what looks like a key") as plan:
        compose_spec("smoke", 0, [override], ROOT / "conf")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"experiment": "smoke", "seed": 0, "overrides": [override]}))
    with pytest.raises(UserError, match="holds what looks like a key") as choice:
        load_choice(tmp_path / "params.yaml")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captrain-sweep", "-m", override])
    with pytest.raises(UserError, match="holds what looks like a key") as points:
        sweep.main.__wrapped__()  # type: ignore[attr-defined]
    assert all(value not in str(refusal.value) for refusal in (plan, choice, points))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dvc.yaml", "params.yaml"]


def test_a_key_in_conf_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndefaults: [default]\npolicy:\n  adapter: [a, {KEY}]\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"setting policy\.adapter holds") as refusal:
        compose_spec("mine", 0, [], tmp_path)
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize(
    "setting",
    [
        "policy.max_tokens=4096",
        "policy.max_tokens=64,128",
        "policy.max_tokens=null",
        "policy.key=OPENAI_API_KEY",
        "policy.api_key=MY_KEY_OF_2026",
        "base.model=hf-internal-testing/tiny-random-gpt2@abc",
        "base.model=skywork-large-model-13b",
        "policy.endpoint=http://localhost:8000/v1",
        "benchmark._target_=desks.mine:Desk",
    ],
)
def test_what_only_looks_a_little_like_a_key_is_a_setting(setting: str) -> None:
    refuse_keys([setting])


SPELLINGS: list[Callable[[str], str]] = [
    str,
    lambda key: quote(key, safe=""),
    lambda key: key.encode().hex(),
    lambda key: base64.b64encode(key.encode()).decode(),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_secret_is_taken_out_in_every_spelling(spelling: Callable[[str], str]) -> None:
    secret = "another/key+of=9"
    text = redacted(f"401: {{'echo': '{spelling(secret)}'}}", secret)
    assert spelling(secret).rstrip("=") not in text and "[redacted]" in text
    assert redacted("the model hf-internal-testing/tiny-random is not there", "x") == (
        "the model hf-internal-testing/tiny-random is not there"
    )
