"""Policy vllm with a real vLLM; test_vllm.py tests it with captrain's own server."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import lora
from support.servers import policy, real_machine, replicas
from support.training import GRPO, inside, passport

from captrain.agents.collection import collect
from captrain.agents.local import LocalPolicy
from captrain.agents.policy import ClosedQuestion
from captrain.agents.servers import VllmServer, fleets
from captrain.agents.vllm import VLLMPolicy
from captrain.contract import CheckedEnvironment, load_file
from captrain.models.lora import Adapter, compose
from captrain.records import Rollout
from captrain.run import Machine
from captrain.run.components import Component
from captrain.training.jobs import EnvironmentFile, Job, TrainingEnvironment
from captrain.training.runs import train

pytestmark = pytest.mark.needs("vllm")

Letters = Callable[..., Path]
SAMPLING = {"temperature": 1.0, "max_turns": 3, "max_tokens": 8, "dtype": "float32"}
TOLERANCE = 1e-4
"""Tolerance of a log-probability in float32 with another order of sums; measured differences are below 1e-5."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put logs into a folder."""
    with inside(tmp_path_factory.mktemp("place")) as folder:
        yield folder
        for fleet in fleets.values():
            fleet.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights, with heads as wide as vLLM's kernels require."""
    from captrain.run import BaseModelSettings
    from captrain.training.base.tokenizer import build_tokenizer
    from captrain.training.base.training import build_model

    tokenizer, folder = build_tokenizer(), tmp_path_factory.mktemp("models") / "wide"
    size = BaseModelSettings(hidden=64, layers=2, heads=2, steps=1, batch=1, learning_rate=1e-3, weight_decay=0.0)
    build_model(tokenizer, size, seed=13).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Machine:
    return real_machine()


@pytest.fixture(scope="module")
def acting(model: Path, served: Machine) -> VLLMPolicy:
    return policy(model, served, **SAMPLING)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Two adapters and their sum, of twice their rank."""
    folder = tmp_path_factory.mktemp("adapters")
    members = {name: lora(model, folder / name, seed, r=8) for seed, name in enumerate(("first", "second"))}
    return members | {"sum": compose(members, {"first": 1.0, "second": 1.0}, folder / "composed")}


def played(
    acting: VLLMPolicy, target: CheckedEnvironment, folder: Path, adapter: Adapter | None = None
) -> list[Rollout]:
    return collect(
        acting, target, target.tasks("training", 6), purpose="training", seed=0, adapter=adapter, journals=folder,
        quiet=True,
    )  # fmt: skip


def furthest(rollouts: list[Rollout], alone: LocalPolicy, adapter: str) -> float:
    """Largest difference of recorded log-probabilities from those of this process in float64."""
    import torch

    differences = []
    for rollout in rollouts:
        decoder = alone.decoder(adapter)
        for position in [index for index, written in enumerate(rollout.mask) if written]:
            decoder.reset()
            logits = decoder.forward(torch.tensor([rollout.token_ids[:position]]), [0])[0]
            expected = logits.log_softmax(0)[rollout.token_ids[position]].item()
            differences.append(abs(expected - rollout.logprobs[position]))
    return max(differences)


def listed(replica: VllmServer) -> list[str]:
    return [model["id"] for model in json.loads(replica._control("/v1/models"))["data"]]


def test_recorded_tokens_are_exact_with_base_adapter_and_composition(
    acting: VLLMPolicy, model: Path, adapters: dict[str, Adapter], letters: Letters, tmp_path: Path
) -> None:
    target, alone = load_file(letters()), LocalPolicy(model, 8, temperature=1.0, max_turns=3, max_tokens=8)
    chat, first = alone.chat([]), []
    for name, adapter in {"": None, **adapters}.items():
        rollouts = played(acting, target, tmp_path / name, adapter)
        assert {rollout.outcome for rollout in rollouts} <= {"passed", "failed"}
        assert {len(rollout.messages) for rollout in rollouts} == {3, 5, 7}
        for rollout in rollouts:
            opening = chat.prompt(list(rollout.messages[:2]))
            assert rollout.token_ids[: len(opening)] == opening and rollout.mask[len(opening)] == 1
            # The answer to a turn is between its end and the next turn, as the template renders it.
            assert len(rollout.messages) == 3 or 0 in rollout.mask[len(opening) :]
        assert furthest(rollouts, alone, adapter.folder if adapter else "") < TOLERANCE
        [replica] = replicas(acting)
        assert listed(replica) == [acting.name, *([adapter.digest] if adapter else [])]
        first.append(rollouts[0].token_ids)
    assert len({tuple(ids) for ids in first}) > 1


def test_a_closed_question_is_answered_as_in_process(acting: VLLMPolicy, model: Path) -> None:
    alone = LocalPolicy(model, 8, temperature=1.0, max_turns=3, max_tokens=8)
    questions = [
        ClosedQuestion([{"role": "user", "content": f"Which of the {count}?"}], tuple("ABCDEFGH"[:count]))
        for count in (2, 5, 8)
    ]
    for real, ours in zip(acting.answer_scores(questions), alone.answer_scores(questions), strict=True):
        assert real == pytest.approx(ours, rel=0, abs=TOLERANCE)


def test_grpo_trains_through_vllm_and_a_killed_server_loses_nothing(
    acting: VLLMPolicy, model: Path, served: Machine, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = letters("single")
    path.write_text(path.read_text().replace("1 + i % 3", "1"))
    [replica] = replicas(acting)
    starts, sent = replica.starts, VLLMPolicy._sent

    def deadly(self: VLLMPolicy, server: VllmServer, *request: Any) -> Any:
        with turn:  # several threads send requests
            if not killed:
                killed.append(server_of(server))
                os.kill(killed[0], signal.SIGKILL)
        return sent(self, server, *request)

    killed, turn = list[int](), threading.Lock()
    monkeypatch.setattr(VLLMPolicy, "_sent", deadly)
    trained = train(job_in(path, model, served, "single", 0))
    assert killed and replica.starts == starts + 1
    assert (trained.rollouts, trained.errors, len(trained.history)) == (16, 0, 2)
    assert any(step.informative > 0 for step in trained.history)


def job_in(path: Path, model: Path, machine: Machine, name: str, seed: int) -> Job:
    """Sixteen rollouts in an environment."""
    place = TrainingEnvironment("single", EnvironmentFile(path.parent, passport(path)))
    sampling = Component.model_validate({"_target_": "captrain.agents.vllm.VLLMPolicy", **SAMPLING})
    recipe = Component.model_validate({"_target_": "captrain.training.recipe.GRPO", **GRPO})
    return Job(
        name, base=model, policy=sampling, trainer=recipe, environments=(place,), rollouts=16, seed=seed,
        machine=machine,
    )  # fmt: skip


def server_of(replica: VllmServer) -> int:
    """The server's process, beneath its keeper."""
    assert replica._process is not None
    [child] = (
        Path(f"/proc/{replica._process.pid}/task/{replica._process.pid}/children").read_text(encoding="utf-8").split()
    )
    return int(child)


def test_a_dismissed_server_exits_by_itself(acting: VLLMPolicy) -> None:
    [replica] = replicas(acting)
    process, server = replica._process, server_of(replica)
    assert process is not None
    acting.close()
    # The server's own status: it was not killed.
    assert process.returncode == 0
    assert "Application shutdown complete" in replica.log.read_text()
    assert not Path(f"/proc/{server}").exists()
