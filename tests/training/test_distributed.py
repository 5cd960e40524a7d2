"""Training in several processes, on CPUs over gloo: the same work as in one, and no orphans."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import yaml
from support.adapters import lora
from support.letters import LETTERS
from support.servers import STAND_IN
from support.training import ROOT, fine_tuned, inside, mixture_of, weights
from support.training import job as letters_job
from support.waiting import until
from support.warm import EXECUTABLE

from captrain.agents.policy import load_policy
from captrain.agents.servers import stop_servers
from captrain.contract import RunningEpisode
from captrain.errors import EnvironmentFault, UserError
from captrain.models import passes
from captrain.models.lora import adapter_digest
from captrain.records import JsonObject, sealed
from captrain.run import compose_spec
from captrain.run.components import Component, build
from captrain.run.machine import VLLM, Accelerate, Machine
from captrain.training import collectives
from captrain.training.checkpoints import read_mark
from captrain.training.jobs import Distillation, Job, Learner, Trained
from captrain.training.processes import configuration, fit
from captrain.training.recipe import GRPO
from captrain.training.runs import train

PYTHON = sys.executable
HINT = '    def hint(self, task):\n        return "Say letters."\n\n    def tasks'
SCORE = "    def score(self, task, messages):\n"
BROKEN = '        assert task["data"]["i"] != {} or messages[-1]["content"] in ("", "yes"), "broken"\n'
"""Fails for answers that are neither the reference nor empty, so that the audit before training passes."""
BUDGET = 20
"""Two and a half steps: in the last one, only rank 0 has rollouts of its own."""


@pytest.fixture(autouse=True, scope="module")
def warm_processes(warm: Path) -> Iterator[None]:
    """Fork processes from one that has loaded the libraries, `accelerate launch` included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm / "python"))
        patch.setenv(EXECUTABLE, str(warm / "python"))
        yield


class ByValue:
    """A function that is pickled by value: other processes cannot import modules of tests."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return cloudpickle.loads, (cloudpickle.dumps(self.function),)


def on(**settings: Any) -> Machine:
    return Machine(workers=1, batch=8, accelerate=Accelerate(**settings))


def two(strategy: str, **settings: Any) -> Machine:
    return on(processes=2, strategy=strategy, **settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environment(home: Path) -> Path:
    """The letters environment with hints."""
    path = home / "letters.py"
    path.write_text(LETTERS.format(name="letters", flat=3).replace("    def tasks", HINT))
    return path


@pytest.fixture(scope="module")
def job(tiny: Path, environment: Path) -> Job:
    return letters_job(tiny, environment, rollouts=BUDGET, trainer={"hints": 0.5, "epochs": 1, "groups_per_step": 2})


def trained(job: Job, folder: Path, machine: Machine) -> Trained:
    with inside(folder):
        one = train(replace(job, machine=machine))
    return replace(one, folder=folder / one.folder)


@pytest.fixture(scope="module")
def alone(job: Job, home: Path) -> Trained:
    """Trained by this process."""
    return trained(job, home / "alone", on())


@pytest.fixture(scope="module")
def shared(job: Job, home: Path) -> Trained:
    """Trained by two processes, each with a shard of the model."""
    return trained(job, home / "shared", two("fsdp"))


def counts(one: Trained) -> list[Any]:
    steps = [[row.step, row.rollouts, row.places, row.unhinted] for row in one.history]
    return [one.rollouts, one.errors, steps]


def adaptation(folder: Path) -> dict[str, Any]:
    """Return what the adapter adds to each weight, B A."""
    kept = weights(folder)
    return {
        name: kept[name.replace("lora_A", "lora_B")] @ down
        for name, down in kept.items()
        if name.endswith("lora_A.weight")
    }


def same_work(several: Trained, one: Trained, job: Job) -> None:
    assert several.rollouts == BUDGET and counts(several) == counts(one)
    # Before the first update the weights are the same, and so are all rollouts.
    assert several.history[0] == one.history[0] and one.history[0].informative > 0
    assert adapter_digest(several.folder) == several.digest
    added, expected = (torch.cat([w.flatten() for w in adaptation(x.folder).values()]) for x in (several, one))
    assert torch.cosine_similarity(added, expected, dim=0) > 0.95 and added.norm() > 0
    # The policy acts with the adapter differently than with the base.
    policy, [place] = load_policy(job.policy, job.base, job.machine, Learner), job.environments
    target = place.target(job.machine)
    [task] = target.tasks("training", 1)
    plays = [RunningEpisode("k", target.open(task, "k"), folder) for folder in ("", str(several.folder))]
    base, adapted = (play.logprobs for play in policy.play(plays))
    assert base[: len(adapted)] != adapted[: len(base)]


def test_two_fsdp_processes_train_the_adapter_of_one(job: Job, alone: Trained, shared: Trained) -> None:
    same_work(shared, alone, job)
    assert shared.digest == alone.digest  # sums in another order are rounded alike, in float64
    left = {path.name for path in shared.folder.parent.iterdir()}
    assert {"adapter", "result.json"} <= left and not any(name.startswith("checkpoints") for name in left)
    assert shared.digest in (shared.folder / "README.md").read_text()


def processes(workspace: str) -> list[int]:
    """List the processes that train in a workspace, and their launchers."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, args in rows if f"{workspace}/job.pkl" in args]


def test_processes_end_with_their_parent_and_a_later_run_resumes(
    job: Job, shared: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = replace(job, machine=two("fsdp"))
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(start))
    script = "import pickle, captrain.training.runs as a; a.train(pickle.load(open('job.pkl', 'rb')))"
    # Without the warm server, so that the processes are direct children.
    with monkeypatch.context() as patch:
        patch.delenv(EXECUTABLE)
        running = subprocess.Popen([PYTHON, "-c", script], cwd=tmp_path, stderr=subprocess.DEVNULL)
    until(lambda: [*tmp_path.glob(".cache/adapters/*/checkpoints-*/checkpoint-1/history.json")])
    [workspace] = tmp_path.glob(".cache/adapters/*")
    assert len(processes(workspace.name)) >= 3
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    until(lambda: not processes(workspace.name))
    assert not (workspace / "result.json").exists()
    # Each process has saved its shard.
    [checkpoint] = workspace.glob("checkpoints-*/checkpoint-1")
    assert len([*checkpoint.glob("pytorch_model_fsdp_0/*.distcp")]) == 2
    # Mark the first step in the checkpoint, to see that it is not played again.
    for mark in workspace.glob("checkpoints-*/checkpoint-*/history.json"):
        whole = read_mark(mark.parent)
        assert whole is not None and whole.history is not None
        first, *others = whole.history
        changed = whole.model_copy(update={"history": [replace(first, errors=7), *others]})
        mark.write_bytes(sealed(mark, changed.model_dump_json()))
    again = trained(job, tmp_path, two("fsdp"))
    assert again.history == [replace(shared.history[0], errors=7), *shared.history[1:]]
    assert again.digest == shared.digest


def test_an_error_in_a_process_reaches_the_caller(
    tiny: Path, environment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "letters.py"
    # The first task of the second group, which only the second process plays.
    path.write_text(environment.read_text(encoding="utf-8").replace(SCORE, SCORE + BROKEN.format(3)))
    with pytest.raises(EnvironmentFault, match="letters.*broken in score"):
        trained(letters_job(tiny, path, rollouts=8), tmp_path, two("ddp"))
    assert capfd.readouterr().err == ""


def test_rank_0_samples_for_all_where_a_policy_starts_servers(job: Job, tmp_path: Path) -> None:
    # The embedded server replaces vLLM. One turn: a random model's tokens seldom survive decoding and encoding.
    sampling = {"_target_": "captrain.agents.vllm.VLLMPolicy", "temperature": 1.0, "max_turns": 1, "max_tokens": 4}
    served = replace(job, policy=Component.model_validate(sampling))
    settings = {"vllm": VLLM(python=sys.executable, command=[STAND_IN], gpus=0)}
    several = trained(served, tmp_path / "two", two("ddp", rows=2).model_copy(update=settings))
    [log] = (tmp_path / "two/.cache/servers").glob("*.log")
    assert log.name != f"{os.getpid()}-0.log"  # of the first process: it asks its own server
    single = trained(served, tmp_path / "one", on().model_copy(update=settings))
    stop_servers()
    same_work(several, single, job)


def test_two_processes_fine_tune_as_one_does(tiny: Path, tmp_path: Path) -> None:
    one = fine_tuned(tiny, tmp_path / "one", on())
    several = fine_tuned(tiny, tmp_path / "two", two("fsdp", rows=1, gradient_checkpointing=True))
    assert len(one.losses) == 6 and one.losses[-1] < one.losses[0]
    assert several.losses == pytest.approx(one.losses, abs=1e-5) and several.digest == one.digest
    coarse = fine_tuned(tiny, tmp_path / "coarse", two("ddp", precision="bfloat16", gradient_checkpointing=True))
    assert coarse.losses == pytest.approx(one.losses, rel=0.05) and coarse.digest != one.digest


@pytest.mark.needs("minutes")
def test_two_processes_distil_in_bfloat16_as_one_does(job: Job, tiny: Path, tmp_path: Path) -> None:
    sampling = job.policy.model_copy(update={"precision": "float32"})
    trainer = job.trainer.model_copy(update={"hints": 0.0})
    teacher = lora(tiny, tmp_path / "teacher", 0)
    student = Distillation(
        name="distillation", base=tiny, policy=sampling, trainer=trainer, environments=job.environments, rollouts=16,
        seed=0, machine=on(precision="bfloat16"), teachers=(teacher,),
    )  # fmt: skip
    with inside(tmp_path / "one"):
        one = train(student)
    with inside(tmp_path / "two"):
        several = train(
            replace(student, machine=two("fsdp", precision="bfloat16", gradient_checkpointing=True, rows=2))
        )
        assert adapter_digest(several.folder) == several.digest
    first, expected = several.history[0], one.history[0]
    assert first.divergence == pytest.approx(expected.divergence, rel=0.05) and (first.divergence or 0) > 0.05
    assert [row.rollouts for row in several.history] == [8, 16] == [row.rollouts for row in one.history]


def test_explicit_defaults_and_smaller_passes_train_the_same_adapter(
    tiny: Path, environment: Path, tmp_path: Path
) -> None:
    one = letters_job(tiny, environment, rollouts=8)
    assert one.machine.accelerate == Accelerate() and collectives.checkpoints(Accelerate()) == "checkpoints"
    plain, explicit = trained(one, tmp_path / "a", one.machine), trained(one, tmp_path / "b", on(strategy="none"))
    assert plain.digest == explicit.digest and plain.folder.parent.name == explicit.folder.parent.name
    assert not [*tmp_path.glob("*/.cache/adapters/*/accelerate.yaml")]
    # Smaller passes add up to the batch.
    parted = trained(one, tmp_path / "c", on(rows=2))
    assert parted.history == plain.history
    whole, parts = adaptation(plain.folder), adaptation(parted.folder)
    assert all((whole[name] - parts[name]).abs().max() < 1e-3 for name in whole)
    with inside(tmp_path), pytest.raises(UserError, match="rows = 3 does not divide the 8 rows"):
        train(replace(one, machine=on(rows=3)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accelerate_reads_all_of_the_configuration(strategy: Any, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType

    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(configuration(on(processes=4, strategy=strategy))))
    found = load_config_from_file(str(path))
    assert isinstance(found, ClusterConfig) and found.num_processes == 4 and found.mixed_precision == "no"
    assert found.distributed_type == {"ddp": DistributedType.MULTI_GPU, "fsdp": DistributedType.FSDP}[strategy]
    options = vars(launch_command_parser().parse_args(["x.py"]))
    # accelerate ignores unknown settings silently.
    assert set(found.fsdp_config or {}) <= set(options)
    assert ((found.fsdp_config or {}).get("fsdp_version") == 2) == (strategy == "fsdp")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["machine.accelerate.processes=2"], "processes is 2 and strategy is none"),
        (["machine.accelerate.strategy=fsdp"], "processes is 1 and strategy is fsdp"),
        (["machine=fsdp", "machine.accelerate.processes=3"], "groups_per_step = 8 is not a multiple of .*= 3"),
        (["machine=fsdp", "machine.accelerate.precision=float16"], "float16|bfloat16"),
    ],
)
def test_contradictory_settings_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compose_spec("paper_tau2", 42, overrides, ROOT / "conf")


@pytest.mark.parametrize("experiment", ["paper_tau2", "paper_toolsandbox"])
def test_the_papers_settings_train_attention_over_gpus(experiment: str) -> None:
    chosen = compose_spec(experiment, 42, ["machine=fsdp"], ROOT / "conf")
    assert chosen.machine.accelerate.strategy == "fsdp" and chosen.machine.accelerate.precision == "bfloat16"
    assert build(chosen.trainer, GRPO).targets == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_groups_that_do_not_divide_are_refused_before_a_process_starts(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.training.processes._run", lambda *_: pytest.fail("they were started"))
    with pytest.raises(
        UserError, match="processes = 3 cannot share the trainer.groups_per_step groups .* evenly: there are 2"
    ):
        trained(letters_job(tiny, environment), tmp_path, on(processes=3, strategy="ddp"))


@pytest.fixture(scope="module")
def mixture(tiny: Path, home: Path) -> Path:
    return mixture_of(tiny, home / "mixture")


def test_a_mixture_of_experts_is_adapted_at_its_attention(mixture: Path, environment: Path, tmp_path: Path) -> None:
    attention = {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "epochs": 1}
    one = letters_job(mixture, environment, rollouts=8, trainer=attention, policy={"precision": "float32"})
    got = trained(one, tmp_path, on(precision="bfloat16", gradient_checkpointing=True, rows=4))
    kept = weights(got.folder)
    assert len(kept) == 2 * 2 * 4 and all(".self_attn." in name for name in kept)
    assert {str(tensor.dtype) for tensor in kept.values()} == {"torch.float32"}
    assert max(tensor.abs().max().item() for name, tensor in kept.items() if "lora_B" in name) > 0
    assert got.rollouts == 8 and got.history[0].informative > 0
    # Experts are tensors, not linear layers.
    with inside(tmp_path), pytest.raises(UserError, match=r"trainer\.targets.*gate_proj.*trainer\.experts=true adapts"):
        train(replace(letters_job(mixture, environment, rollouts=8), machine=on(precision="bfloat16")))


def test_shared_beginnings_train_a_dense_float32_base_as_trl_does(
    tiny: Path, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with TRL's heads, which compute each row separately."""
    # Not seed 0: there the gradient of one weight is only noise, and Adam makes a whole step of its sign.
    job = replace(letters_job(tiny, environment, rollouts=16, policy={"precision": "float32"}), seed=1)
    once = weights(trained(job, tmp_path / "once", on(precision="float32")).folder)
    monkeypatch.setattr(passes, "DENSE", ())
    by_rows = weights(trained(job, tmp_path / "rows", on(precision="float32")).folder)
    assert max(tensor.abs().max().item() for name, tensor in once.items() if "lora_B" in name) > 1e-3
    for name, tensor in once.items():
        torch.testing.assert_close(tensor, by_rows[name], rtol=0, atol=1e-5)


def test_cpu_processes_see_no_gpu_and_have_a_long_timeout(tmp_path: Path) -> None:
    def describe(machine: Machine, workspace: Path) -> JsonObject:
        group: Any = torch.distributed.group.WORLD
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "seconds": timeout.total_seconds()}

    sent: Any = ByValue(describe)
    described = fit("a", two("ddp"), (2, "groups"), sent, dict, tmp_path)
    assert described == {"gpus": "", "seconds": collectives.PATIENCE}
