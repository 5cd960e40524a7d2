"""Keys reach no file: they are refused in settings and removed from foreign text."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from captrain.comparison import sweep
from captrain.diagnosis import diagnose, publish_diagnosis
from captrain.errors import UserError
from captrain.interop import read_logs
from captrain.models.lora import save_adapter
from captrain.records import Label, Rollout, RolloutLabels, Score, Task, censored, publish, redacted, refuse_keys
from captrain.reporting.pages.rollouts import Archive
from captrain.run import SelectionSettings, compose_spec, copy_clean, load_choice

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
def test_a_key_in_a_setting_is_refused_before_anything_is_written(
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


@pytest.mark.parametrize("value", [f"a/{KEY}", "Bearer correct-horse-9", [{"deep": ["correct-horse-9"]}]])
def test_a_sweep_writes_no_key_of_conf(value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would write it to .cache/sweeps."""
    monkeypatch.setenv("MY_CREDENTIAL", "correct-horse-9")
    (tmp_path / "conf/policy").mkdir(parents=True)
    (tmp_path / "conf/policy/mine.yaml").write_text(yaml.safe_dump({"header": value}), encoding="utf-8")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captrain-sweep", "-m", "policy=mine"])
    with pytest.raises(UserError, match="holds what looks like a key") as refusal:
        sweep.main.__wrapped__()  # type: ignore[attr-defined]
    assert "horse" not in str(refusal.value) and KEY not in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "dvc.yaml"]


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
def test_a_setting_that_only_resembles_a_key_is_accepted(setting: str) -> None:
    refuse_keys([setting])


SPELLINGS: list[Callable[[str], str]] = [
    str,
    lambda key: quote(key, safe=""),
    lambda key: key.encode().hex(),
    lambda key: base64.b64encode(key.encode()).decode(),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_secret_is_removed_in_every_spelling(spelling: Callable[[str], str]) -> None:
    secret = "another/key+of=9"
    text = redacted(f"401: {{'echo': '{spelling(secret)}'}}", secret)
    assert spelling(secret).rstrip("=") not in text and "[redacted]" in text
    assert redacted("the model hf-internal-testing/tiny-random is not there", "x") == (
        "the model hf-internal-testing/tiny-random is not there"
    )


@pytest.mark.parametrize("name", ["GITHUB_PAT", "SESSION_COOKIE", "MY_PASSPHRASE", "private_key", "APIKEY", "DB_PASS"])
@pytest.mark.parametrize("value", ["correct-horse-9", "  correct-horse-9\n"], ids=["plain", "between blanks"])
def test_a_value_of_a_variable_named_like_a_key_is_removed(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert redacted("401: correct-horse-9 is not known") == "401: [redacted] is not known"


FOREIGN = {
    "sk-proj": "sk-proj-abcDEF1234567890abcdefGHI",
    "github": "ghp_" + "a1B2" * 9,
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "named": "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "json": '{"api_key": "q9w8e7r6t5"}',
    "header": base64.b64encode(b"Bearer abcdef1234567890").decode(),
    "headers": base64.b64encode(b"Authorization: Bearer abcdef1234567890").decode(),
    "percent": "sk%2Dproj%2DabcDEF1234567890abcdef",
    "escaped": "sk\\u002dproj\\u002dabcDEF1234567890abcdef",
    "discord": "M" + "a1" * 12 + ".abcdef." + "x" * 27,
    "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "address": "https://me:hunter2@host/v1",
}
SIGNS = ("abcDEF1234567890", "a1B2a1B2", "IOSFODNN7", "wJalrX", "q9w8e7", "QmVhcmVy", "QXV0aG9y", ".abcdef.", "eyJzdWI",
         "hunter2")  # fmt: skip
"""A part of each key that must not appear."""


@pytest.mark.parametrize(
    "words",
    ["your password: https://www.facebook.com/reset-password", "reset/token=?asfbuy3y2cdaqhvei", "password=cat"],
)
def test_codes_and_passwords_of_a_task_stay_in_a_log(words: str) -> None:
    """Replaying a call needs the value; in a message of an endpoint it is removed."""
    assert censored({"content": words}) == {"content": words}
    assert redacted(words.replace("cat", "horse")) != words.replace("cat", "horse")


def test_keys_in_a_log_are_removed_from_all_outputs(tmp_path: Path) -> None:
    words = " and ".join(FOREIGN.values())
    call = {"id": "c", "function": {"name": "look_up", "arguments": json.dumps({"note": words})}}
    rows = [
        {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "", "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c", "content": words}],
         "reward": number % 2, "task_id": f"t {words}", "reference": [{"role": "assistant", "tool_calls": [call]}],
         "tools": [{"name": "look_up", "description": words}]}
        for number in range(4)
    ]  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": [{"role": words}]}]))
    before, texts = log.read_bytes(), {}
    selection = SelectionSettings(
        delta=0.2, coverage=0.1, agreement=2, confidence=0.95, floor=0.0, resamples=10, ranking="product"
    )
    for keep in (False, True):
        logs = read_logs([log], keep_secrets=keep)
        paths = publish_diagnosis(diagnose(logs, selection, runs=2, count=4, seed=0), tmp_path / f"out {keep}")
        texts[keep] = {path.name: path.read_text(errors="replace") for path in paths}
    assert log.read_bytes() == before
    assert not [(name, sign) for name, text in texts[False].items() for sign in SIGNS if sign in text]
    assert all(sign in texts[True]["rollouts.jsonl"] for sign in SIGNS)


def test_keys_in_rollouts_and_evidence_are_shown_on_no_page(tmp_path: Path) -> None:
    words = " and ".join(FOREIGN.values())
    rollout = Rollout(
        id="r1", environment="e", task=Task(id="e/1", split="discovery", data={}), trial=0, purpose="diagnosis",
        policy="p", outcome="failed", score=Score(reward=0, success=False), error=words,
        messages=[{"role": "user", "content": words}, {"role": "assistant", "content": words}],
    )  # fmt: skip
    publish(tmp_path / "artifacts/rollouts/discovery.jsonl", [rollout])
    label = Label(verdict="LACKING", evidence=words, message=0)
    row = RolloutLabels(run=0, rollout="r1", outcome="failed", count=1, labels={"a": label})
    publish(tmp_path / "artifacts/labels/labels.jsonl", [row])
    with Archive(tmp_path) as archive:
        text = "".join(str(piece) for _, content in archive.data(["a"]) for piece in content)
    assert "[redacted]" in text and not [sign for sign in SIGNS if sign in text]


@pytest.mark.parametrize(
    "text",
    [
        "order #W2417020 of mia_li_3668, tokens: 4096, task-abcdefghijklmnopqrstuvwxyz-1, 0b1d7e6a4c2f4e0f8a9b7c6d",
        '{"email":"mia.li3668@example.com","token": null,"path":"/usr/share/python3/dist-packages/yaml.py"}',
        "https://example.com/a%20b%2Fc?x=1 basic economy, bearer of good news",
    ],
)
def test_ordinary_text_keeps_its_bytes(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "piece", ["://", "://a:", "token: ", "a.", "eyJ", "%41", "%25", "//", "-----BEGIN PRIVATE KEY-----", "sk-", "1_"]
)
def test_redaction_is_fast_on_any_text(piece: str) -> None:
    begin = time.process_time()
    redacted(piece * (200_000 // len(piece)))
    assert time.process_time() - begin < 3


def test_typed_keys_are_removed_and_other_words_stay() -> None:
    for text in ("override 'policy.api_key=abcd1234efgh'", "Bearer abcdefgh12345678", "https://me:hunter2@host/v1",
                 "sk-abcdefghijklmnop123456", "MY_TOKEN: zzzzzzzz9"):  # fmt: skip
        assert "[redacted]" in redacted(text) and not any(
            key in redacted(text) for key in ("abcd1234efgh", "abcdefgh12345678", "hunter2", "klmnop", "zzzzzzzz9")
        )
    words = "max_tokens = 4096; 640 tokens read; results/adapters/index.json is missing"
    assert redacted(words) == words


LEAKING = '''
import json
import logging
import os

from captrain.benchmarks.servicedesk import DeskEpisode, ServiceDesk

KEY = os.environ.get("PLANTED_TOKEN", "none")


class Leaking(ServiceDesk):
    """The desk of somebody whose tools echo their environment."""

    def open(self, task):
        class Episode(DeskEpisode):
            def step(self, message):
                answers, done = super().step(message)
                for answer in answers:
                    answer["content"] = f"{answer['content']} {KEY}"
                print("printed", KEY)
                logging.getLogger("desk").error("logged %s", KEY)
                return answers, done

        return Episode(task["data"])
'''
PLANTED = "very/secret+value=42"


def test_no_file_of_a_run_and_no_output_holds_a_key_that_tools_print_and_log(tmp_path: Path) -> None:
    (tmp_path / "leaking_desk.py").write_text(LEAKING, encoding="utf-8")
    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    settings = ["policy=scripted", "policy.skill=0.5", "rollouts.tasks=20", "benchmark._target_=leaking_desk.Leaking"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}", "PLANTED_TOKEN": PLANTED}

    def call(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    compose = (
        "from pathlib import Path; from captrain.run import compose_spec, publish_spec; "
        f"publish_spec(compose_spec('smoke', 0, {settings}, Path({str(ROOT / 'conf')!r})), Path('results/spec.yaml'))"
    )
    said = call("-c", compose)
    said += call("stages/rollouts.py") + call("stages/labels.py") + call("stages/capabilities.py")
    log = tmp_path / "artifacts/rollouts/discovery.jsonl"
    captrain = (sys.executable, "-c", "from captrain.cli.app import main; main()")
    for command in (["diagnose", log, "--out", "diagnosis"], ["export", log, "--to", "inspect", "--out", "exported"]):
        said += call(*captrain[1:], *command)
    forms = [spelling(PLANTED) for spelling in SPELLINGS]
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.parent.name == "rollouts" and ".cache" in path.parts for path in paths)
    assert (tmp_path / ".cache/logs/rollouts.log").exists()
    assert not [form for form in forms if form in said] and "printed [redacted]" in said
    holding = {path.name for path in paths for form in forms if form.encode() in path.read_bytes()}
    assert not holding


def test_an_adapters_configuration_and_the_log_of_a_child_process_hold_no_key(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", PLANTED)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(target_modules=["q_proj"]))
    save_adapter(model, tmp_path / "adapter", tiny, PLANTED)
    copy_clean([f"api_key={PLANTED} \x1b[2J\n".encode()], tmp_path / "server.log")
    kept = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert "[redacted]" in (tmp_path / "adapter/adapter_config.json").read_text(encoding="utf-8")
    assert kept == "api_key=[redacted] \\x1b[2J\n"
