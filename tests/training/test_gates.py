"""The training of a mixture's gates: what it changes, how it resumes, what it spends, and what it leaves."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.adapters import lora
from support.stages import stage
from support.training import ROOT, inside, job, passport, project
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer

from captrain.agents.local import LocalPolicy
from captrain.benchmarks import load_benchmark
from captrain.comparison.rows import TRACE, spending
from captrain.contract import RunningEpisode, load_file
from captrain.ledger import LedgerEntry
from captrain.models import Adapter, MixtureParts, adapter_digest, load_mixture, load_module
from captrain.records import load, publish
from captrain.run import compose_spec
from captrain.training.gate_lessons import GateLesson, Prompts, opened_gates, teach_gates
from captrain.training.grpo import PolicyTrainer
from captrain.training.jobs import EnvironmentFile, GateJob, Job, Trained, TrainingEnvironment
from captrain.training.runs import train

pytestmark = pytest.mark.usefixtures("vouched")


@pytest.fixture(scope="module")
def members(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Two adapters."""
    home = tmp_path_factory.mktemp("members")
    return {name: lora(tiny, home / name, seed) for seed, name in enumerate("ab")}


def gate_job(tiny: Path, environment: Path, members: dict[str, Adapter], **changes: Any) -> GateJob:
    """Gates to train in three steps of two groups."""
    plain = job(tiny, environment, name="mixture", **changes)
    return GateJob(
        **{field.name: getattr(plain, field.name) for field in fields(Job) if field.init}, parts=MixtureParts(members)
    )


def files(trained: Trained) -> dict[str, bytes]:
    folder = Path(trained.folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_moves_gates_only_and_its_folder_acts_the_same_elsewhere(
    tiny: Path,
    letters: Callable[..., Path],
    members: dict[str, Adapter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, moved = Trainer.training_step, set[str]()

    def watched(self: Any, *arguments: Any, **settings: Any) -> Any:
        loss = step(self, *arguments, **settings)
        moved.update(name for name, one in self.model.named_parameters() if one.grad is not None and one.grad.any())
        return loss

    monkeypatch.setattr(Trainer, "training_step", watched)
    environment = letters()
    with inside(tmp_path / "work"):
        trained = train(gate_job(tiny, environment, members))
        shutil.copytree(trained.folder, tmp_path / "elsewhere")
    assert moved == {f"mixture.gates.{layer}.{part}" for layer in range(2) for part in ("weight", "bias")}
    assert trained.digest == adapter_digest(tmp_path / "elsewhere") and trained.rollouts == 24
    for adapter in members.values():
        assert adapter_digest(tmp_path / "elsewhere/adapters" / adapter.digest) == adapter.digest
    mixture = load_mixture(load_module(tiny, "float64"), tmp_path / "elsewhere")
    assert all(gate.weight.abs().max() > 0 for gate in mixture.linears)
    target = load_file(environment)
    tasks = target.tasks("training", 2)

    def played(folder: Path) -> list[list[int]]:
        acting = LocalPolicy(tiny, 16, temperature=1.0, max_turns=3, max_tokens=8)
        plays = [RunningEpisode(str(key), target.open(tasks[key % 2]), str(folder)) for key in range(4)]
        return [play.token_ids for play in acting.play(plays)]

    assert played(tmp_path / "work" / trained.folder) == played(tmp_path / "elsewhere")


@pytest.mark.parametrize(("scope", "activation"), [("global", "softmax"), ("layer", "softmax"), ("global", "sigmoid")])
def test_fitted_gates_open_the_adapter_of_an_environment_both_of_a_pair_and_none_for_what_the_base_passes(
    tiny: Path, letters: Callable[..., Path], tmp_path: Path, scope: Any, activation: Any
) -> None:
    members = {name: lora(tiny, tmp_path / name, seed) for seed, name in enumerate(("alpha", "beta"))}
    places = dict[str, TrainingEnvironment]()
    for name, text in (("alpha", "Sing"), ("beta", "Dance to"), ("alpha+beta", "Sing and dance to"), ("other", "Eat")):
        path = letters(name)
        path.write_text(path.read_text().replace("Say {i}", text + " {i}"))
        places[name] = TrainingEnvironment(name, EnvironmentFile(tmp_path, passport(path)))
    spec = compose_spec("smoke", 0, [], ROOT / "conf")
    tasks = tuple(load_benchmark(spec.benchmark, spec.machine).tasks("discovery", 20))
    parts = MixtureParts(members, scope, activation=activation)
    with inside(tmp_path / "work"):
        lesson = GateLesson("mixture:supervised", "mixture", spec, tiny, parts, 20, tuple(places.values()), tasks)
        taught = [teach_gates(lesson), teach_gates(lesson)]
        assert taught[0].digest == taught[1].digest == adapter_digest(Path(taught[0].folder))
        assert "| alpha+beta | 20 |\n" in (card := (taught[0].folder / "README.md").read_text()) and "other" not in card
        unseen = {name: Prompts(one.target(spec.machine), []) for name, one in places.items()}
        for name, prompts in unseen.items():
            prompts.tasks.extend(places[name].target(spec.machine).tasks("training", 30)[20:])
        unseen["base"] = Prompts(load_benchmark(spec.benchmark, spec.machine), list(tasks[:5]))
        opened = opened_gates(spec, tiny, taught[0].folder, unseen)
    last = {name: [round(weight, 1) for weight in decisions.weights[-1]] for name, decisions in opened.items()}
    assert last["alpha"][0] > 0.6 and last["beta"][1] > 0.6 and max(last["base"][:2]) < 0.2, last
    if activation == "softmax":
        assert min(last["alpha+beta"][:2]) > 0.1 and last["alpha+beta"][2] < 0.2 and last["base"][2] > 0.8, last
    else:
        assert min(last["alpha+beta"]) > 0.6, last


def test_killed_gates_resume_to_the_same_bytes(
    tiny: Path,
    letters: Callable[..., Path],
    members: dict[str, Adapter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates, play, steps = gate_job(tiny, letters(), members), PolicyTrainer.play, list[int]()

    def deadly(self: Any, prompts: list[str]) -> Any:
        if len(self.history) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return play(self, prompts)

    def counted(self: Any, prompts: list[str]) -> Any:
        steps.append(len(self.history))
        return play(self, prompts)

    with inside(tmp_path / "killed"):
        if not (child := os.fork()):
            try:
                monkeypatch.setattr(PolicyTrainer, "play", deadly)
                train(gates)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        monkeypatch.setattr(PolicyTrainer, "play", counted)
        resumed = train(gates)
        assert steps == [2]
        content = files(resumed)
    with inside(tmp_path / "whole"):
        whole = train(gates)
        assert steps == [2, 0, 1, 2]
        assert (resumed.digest, resumed.history, content) == (whole.digest, whole.history, files(whole))


def row_project(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Path:
    """Make a project up to TRACE's adapters whose row `mixture` gets 32 rollouts for its gates."""
    for name in ("PROMPTS", "TARGET_PROMPTS"):
        monkeypatch.setattr(import_module("captrain.comparison.baselines.mixture"), name, 3)
    overrides = ["baselines.mixture.run=true", "baselines.mixture.start=0", "baselines.mixture.group_size=4"]
    overrides += ["baselines.mixture.groups_per_step=2", "baselines.mixture.share=0.5", *more]
    project(folder, base, "alpha", "beta", rollouts=32, more=overrides)
    places: Any = {"rollouts": ("diagnosis", "", 8), "environments": ("calibration", "alpha", 5)}
    places["adapters"] = ("training", "alpha", 64)
    for name, (purpose, item, spent) in places.items():
        entry = LedgerEntry(stage=name, purpose=purpose, method="trace", item=item, rollouts=spent)
        publish(folder / f"results/{name}/ledger.jsonl", [entry])
    return folder


def test_the_rollouts_of_gates_come_out_of_the_total_of_trace(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = row_project(tmp_path / "project", tiny, monkeypatch)
    assert stage(folder, "mixture") == 0
    stages = ("rollouts", "environments", "adapters", "mixture")
    entries = {name: load(folder / f"results/{name}/ledger.jsonl", LedgerEntry) for name in stages}
    assert [entry.rollouts for entry in entries["mixture"]] == [16, 16, 32]
    ledger = [entry for part in entries.values() for entry in part]
    assert spending([TRACE, "mixture"], ledger, ["alpha", "beta"], {}) == {TRACE: 77, "mixture": 77}
    index = json.loads((folder / "results/mixture/index.json").read_text())
    assert list(index) == ["mixture"] and index["mixture"]["rollouts"] == 32
    gates = pd.read_csv(folder / "results/mixture/gates.csv")
    assert {"alpha", "beta"} < {*gates["place"]} and {*gates["adapter"]} == {"alpha", "beta"}
    assert gates["weight"].between(0, 1).all()


def test_the_row_and_its_controls_run_on_a_llama_in_float32_as_smollm_does(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    more = ["policy.precision=float32", "machine.accelerate.precision=float32", "baselines.mixture.controls=true"]
    folder = row_project(tmp_path / "project", tmp_path / "llama", monkeypatch, *more)
    assert stage(folder, "mixture") == 0
    gates = pd.read_csv(folder / "results/mixture/gates.csv").set_index("mixture")["weight"]
    assert {*gates.index} == {"mixture", "mixture:uniform", "mixture:random"}
    assert {*gates["mixture:uniform"]} == {0.5} and 0.5 not in {*gates["mixture:random"]}
