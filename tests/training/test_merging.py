"""Merging: each method on small matrices, and distillation of specialists into a student."""

import contextlib
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from support.adapters import lora
from support.needs import further
from support.training import job as grpo_job
from support.training import project as make_project
from support.training import synthesized, weights
from transformers import AutoModelForCausalLM

from captrain.agents import LocalPolicy
from captrain.agents.collection import collect
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models.lora import Adapter, adapter_digest, lora_factors
from captrain.records import Task, load, publish_json
from captrain.run import build
from captrain.run.components import Component
from captrain.training.jobs import Distillation, Trained, training_environments
from captrain.training.merging import merge
from captrain.training.runs import train

pytestmark = pytest.mark.usefixtures("vouched")

METHODS = ["sum", "mean", "ties", "dare", "svd", "core"]
MODULE = "base_model.model.layer"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapter(folder: Path, matrix: Any, scale: float = 1.0) -> Adapter:
    """An adapter that adds scale x matrix to one module, with the matrix's width as its rank."""
    up = torch.as_tensor(matrix, dtype=torch.float32)
    rank = up.shape[1]
    folder.mkdir(parents=True)
    tensors = {f"{MODULE}.lora_A.weight": torch.eye(rank), f"{MODULE}.lora_B.weight": up.contiguous()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": rank * scale, "target_modules": ["layer"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(str(folder), adapter_digest(folder))


def made(method: str, *members: Adapter, density: float = 1.0, seed: int = 0) -> Any:
    """Merge by a method and return what the result adds to the module."""
    named = {f"member_{at}": member for at, member in enumerate(members)}
    up, down = lora_factors(added(merge(method, named, density=density, seed=seed)))[MODULE]
    return up.double() @ down.double()


def added(one: Trained) -> Adapter:
    return Adapter(str(one.folder), one.digest)


def rank(folder: Path) -> int:
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"]
    return config["r"]


def near(found: Any, expected: Any) -> bool:
    return torch.allclose(found, torch.as_tensor(expected, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("sum", [[-2, 9], [4, 5]]),
        ("mean", [[-1, 4.5], [2, 2.5]]),
        # Each keeps its two largest, [[4, 0], [2, 0]] and [[-6, 10], [0, 0]]; the sign with more mass wins.
        ("ties", [[-6, 10], [2, 0]]),
    ],
)
def test_small_matrices_merge_as_computed_by_hand(inside: Path, method: str, expected: list[list[float]]) -> None:
    one = adapter(inside / "one", [[4, -1], [2, 1]])
    two = adapter(inside / "two", [[-3, 5], [1, 2]], scale=2.0)
    assert near(made(method, one, two, density=0.5), expected)


def test_dare_drops_weights_at_random_and_rescales(inside: Path) -> None:
    one, two = torch.full((8, 8), 1.0), torch.full((8, 8), 10.0)
    members = adapter(inside / "one", one), adapter(inside / "two", two)
    found = 2 * made("dare", *members, density=0.5)
    # Each member keeps and doubles each weight, or drops it.
    assert all(any(abs(value - kind) < 1e-4 for kind in (0, 2, 20, 22)) for value in found.flatten().tolist())
    assert {round(value) for value in found.flatten().tolist()} == {0, 2, 20, 22}
    assert near(made("dare", *members, density=0.5), found / 2)
    assert not near(made("dare", *members, density=0.5, seed=1), found / 2)


def test_svd_is_the_best_approximation_at_the_rank_of_a_member(inside: Path) -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(6, 2), torch.randn(2, 5)) for _ in range(2)]
    members = {str(at): thin(inside / str(at), *pair) for at, pair in enumerate(pairs)}
    total = sum(up.double() @ down.double() for up, down in pairs)
    left, values, right = torch.linalg.svd(torch.as_tensor(total), full_matrices=False)
    one = merge("svd", members, density=0.5, seed=0)
    up, down = lora_factors(added(one))[MODULE]
    assert near(up.double() @ down.double(), (left[:, :2] * values[:2]) @ right[:2]) and rank(one.folder) == 2
    share = (values[:2].square().sum() / values.square().sum()).item()
    assert f"| {share:.4f} |" in (one.folder / "README.md").read_text() and share < 0.999


def thin(folder: Path, up: Any, down: Any) -> Adapter:
    """An adapter with given factors."""
    adapter(folder, up)
    weights = {f"{MODULE}.lora_A.weight": down.float().contiguous(), f"{MODULE}.lora_B.weight": up.float().contiguous()}
    save_file(weights, folder / "adapter_model.safetensors")
    return Adapter(str(folder), adapter_digest(folder))


@pytest.mark.parametrize("method", METHODS)
def test_identical_adapters_merge_to_themselves(inside: Path, method: str) -> None:
    torch.manual_seed(1)
    up, down = torch.randn(7, 2), torch.randn(2, 5)
    members = {name: thin(inside / name, up, down) for name in ("a", "b", "c")}
    one = merge(method, members, density=1.0, seed=0)
    found, across = lora_factors(added(one))[MODULE]
    times = 3 if method in ("sum", "svd") else 1
    assert near(found.double() @ across.double(), times * (up @ down).double()) and rank(one.folder) == 2


def test_core_but_not_ties_keeps_adapters_of_orthogonal_subspaces(inside: Path) -> None:
    torch.manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(size, size))[0] for size in (6, 5))
    # Two adapters of rank 1 with different directions, none along an axis of the weights.
    one = thin(inside / "one", 3 * left[:, :1], right[:, :1].T)
    two = thin(inside / "two", 5 * left[:, 1:2], 2 * right[:, 1:2].T)
    total = (3 * left[:, :1] @ right[:, :1].T + 10 * left[:, 1:2] @ right[:, 1:2].T).double()
    assert near(made("core", one, two), total) and near(made("sum", one, two), total)
    assert not near(made("ties", one, two), total)
    # Each acts on its own input direction as if alone.
    assert near(made("core", one, two) @ right[:, 0].double(), 3 * left[:, 0].double())


def test_merged_updates_equal_those_of_peft(tiny: Path, inside: Path) -> None:
    members = {name: lora(tiny, inside / name, seed) for seed, name in enumerate(("a", "b"))}
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny), members["a"].folder, adapter_name="a"
    )
    model.load_adapter(members["b"].folder, "b")
    asked = {"svd": {"svd_rank": 4}, "ties": {"combination_type": "ties_svd", "svd_rank": 8, "density": 0.5}}
    for method, arguments in asked.items():
        model.add_weighted_adapter(["a", "b"], [1.0, 1.0], method, **arguments)
        ours = lora_factors(added(merge(method, members, density=0.5, seed=0)))
        for name, module in model.base_model.model.named_modules():
            if f"base_model.model.{name}" in ours:
                up, down = ours[f"base_model.model.{name}"]
                assert (module.get_delta_weight(method) - up @ down).abs().max() < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_merged_adapter_is_plain_and_reproducible(tiny: Path, inside: Path, method: str) -> None:
    members = {name: lora(tiny, inside / name, seed) for seed, name in enumerate(("a", "b"))}
    one = merge(method, members, density=0.5, seed=0)
    assert one.digest == adapter_digest(one.folder) and one.rollouts == 0
    files = {path.name: path.read_bytes() for path in one.folder.iterdir()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    shutil.rmtree(one.folder.parent)
    again = merge(method, dict(reversed(members.items())), density=0.5, seed=0)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == files
    other = merge(method, members, density=0.5, seed=1)
    assert (other.digest != one.digest) == (method == "dare")
    assert one.digest in files["README.md"].decode() and members["a"].digest in files["README.md"].decode()
    assert rank(one.folder) == (4 if method == "svd" else 8)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), str(one.folder))
    assert not list(Path(".cache/merging").glob(".*"))


def test_adapters_of_different_modules_are_refused(tiny: Path, inside: Path) -> None:
    members = {"a": lora(tiny, inside / "a", 0), "b": lora(tiny, inside / "b", 1, target_modules=["q_proj"])}
    with pytest.raises(UserError, match="change different modules"):
        merge("mean", members, density=0.5, seed=0)


# Distillation


@pytest.fixture(scope="module")
def teachers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Two adapters that change the tiny model a lot."""
    home = tmp_path_factory.mktemp("teachers")
    return {name: lora(tiny, home / name, seed) for seed, name in enumerate(("first", "second"))}


def job(tiny: Path, folder: Path, teachers: dict[str, Adapter], **changes: Any) -> Distillation:
    for name in teachers:
        synthesized(folder, name)
    places = tuple(place for place in training_environments(folder / "results/environments") if place.name in teachers)
    one = grpo_job(tiny, folder / "letters.py", name="distillation", environments=places, **changes)
    return Distillation(**vars(one), teachers=tuple(teachers[place.name] for place in places))


def test_the_student_approaches_the_teacher_of_each_environment(
    tiny: Path, inside: Path, teachers: dict[str, Adapter]
) -> None:
    quick = {"group_size": 8, "epochs": 4}
    for some in ({"first": teachers["first"]}, teachers):
        steps = train(job(tiny, inside, some, rollouts=80, trainer=quick)).history
        far = [step.divergence or 0.0 for step in steps]
        assert far[-1] < 0.7 * far[0] and far[0] > 0.05


def test_the_distillation_loss_is_the_mean_over_the_students_tokens(
    tiny: Path, inside: Path, teachers: dict[str, Adapter]
) -> None:
    """Before its first update, the student acts as the base: compute the divergence of its rollouts one by one."""
    one = job(tiny, inside, {"first": teachers["first"]}, rollouts=8, policy={"temperature": 0.7})
    (place,) = one.environments
    target = place.target(one.machine)
    acting = build(one.policy, LocalPolicy, model=tiny)
    played = collect(acting, target, target.tasks("training", 5)[3:], purpose="training", seed=0, trials=4, quiet=True)
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64), teachers["first"].folder
    ).eval()
    total, tokens = 0.0, 0
    for rollout in played:
        ids = torch.tensor([rollout.token_ids])
        with torch.no_grad():
            teacher = (model(input_ids=ids).logits[0] / 0.7).softmax(-1)
            with model.disable_adapter():
                student = (model(input_ids=ids).logits[0] / 0.7).softmax(-1)
        for at, written in enumerate(rollout.mask):
            if written:
                total += (student[at - 1] * (student[at - 1] / teacher[at - 1]).log()).sum().item()
        tokens += sum(rollout.mask)
    assert len({len(rollout.token_ids) for rollout in played}) > 1
    assert train(one).history[0].divergence == pytest.approx(total / tokens, abs=1e-5) and total / tokens > 0.02


def test_the_student_begins_as_the_base(tiny: Path, inside: Path) -> None:
    still = lora(tiny, inside / "still", 0)
    path = inside / "still/adapter_model.safetensors"
    save_file({n: torch.zeros_like(w) if "lora_B" in n else w for n, w in weights(path.parent).items()}, path)
    one = train(job(tiny, inside, {"first": Adapter(still.folder, adapter_digest(path.parent))}, rollouts=8))
    assert one.history[0].divergence == 0.0


def test_distillation_spends_its_budget_on_tasks_beyond_calibration_in_turn(
    tiny: Path, inside: Path, teachers: dict[str, Adapter], opened: list[Task]
) -> None:
    one = train(job(tiny, inside, teachers))
    assert (one.rollouts, one.errors, one.discarded, len(opened)) == (24, 0, 0, 24)
    expected = [f"{name}/training/{at}" for at in (3, 4, 5) for name in ("first", "second") for _ in range(4)]
    assert [task.id for task in opened] == expected
    assert [(row.step, row.rollouts) for row in one.history] == [(1, 8), (2, 16), (3, 24)]
    entry = one.ledger("merging", "distillation")
    assert (entry.rollouts, entry.item, entry.purpose) == (24, "distillation", "training")
    assert entry.completion_tokens == one.completion_tokens > 0 and entry.prompt_tokens == one.prompt_tokens > 0


@pytest.mark.needs("minutes")
def test_a_student_is_reproducible_and_resumes_from_its_last_step(
    tiny: Path, inside: Path, teachers: dict[str, Adapter], opened: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from captrain.training.student import Student

    whole = train(job(tiny, inside, teachers))
    opened.clear()
    assert train(job(tiny, inside, teachers)).history == whole.history and not opened
    other = train(job(tiny, inside, teachers, seed=1))
    assert other.digest != whole.digest

    def pull_the_plug(self: Any, model: Any, columns: Any) -> Any:
        if len(self.history) == 3:
            raise KeyboardInterrupt
        return loss(self, model, columns)

    loss = Student.loss
    (inside / "elsewhere").mkdir()
    with contextlib.chdir(inside / "elsewhere"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Student, "loss", pull_the_plug)
            train(job(tiny, inside, teachers))
        opened.clear()
        resumed = train(job(tiny, inside, teachers))
        # Only the third step is played again.
        assert len(opened) == 8
        assert (resumed.digest, resumed.history) == (whole.digest, whole.history)
        assert sorted(path.name for path in resumed.folder.parent.iterdir()) == ["adapter", "lock", "result.json"]
        for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
            assert (resumed.folder / name).read_bytes() == (inside / whole.folder / name).read_bytes()


def test_a_student_spends_its_budget_to_the_last_rollout(
    tiny: Path, inside: Path, teachers: dict[str, Adapter]
) -> None:
    whole, partial = (train(job(tiny, inside, teachers, rollouts=rollouts)) for rollouts in (16, 19))
    assert [row.rollouts for row in partial.history] == [8, 16, 19]
    assert partial.rollouts == 19 and partial.history[:2] == whole.history and partial.digest != whole.digest


@pytest.mark.parametrize("removed", further(["", "adapter_model.safetensors", "adapter_config.json", "README.md"]))
def test_an_altered_or_incomplete_student_is_refused_once_and_trained_again(
    tiny: Path, inside: Path, teachers: dict[str, Adapter], removed: str
) -> None:
    one = train(job(tiny, inside, teachers, rollouts=8))
    if removed:
        (one.folder / removed).unlink()
    else:
        with open(one.folder / "adapter_model.safetensors", "ab") as file:
            file.write(b"x")
    with pytest.raises(UserError, match="altered after training"):
        train(job(tiny, inside, teachers, rollouts=8))
    assert train(job(tiny, inside, teachers, rollouts=8)).digest == one.digest


def test_distilling_into_a_policy_without_weights_is_refused(
    tiny: Path, inside: Path, teachers: dict[str, Adapter]
) -> None:
    scripted = {"_target_": "captrain.agents.scripted.ScriptedPolicy", "skill": 1.0}
    acting = job(tiny, inside, teachers)
    with pytest.raises(UserError, match="distillation: training needs the weights of the model"):
        train(Distillation(**{**vars(acting), "policy": Component.model_validate(scripted)}))


# The stage


def project(folder: Path, base: Path, methods: list[str], teachers: dict[str, Adapter]) -> Path:
    """A project as far as adapters, with a tiny random model as the base."""
    overrides = [f"merging.methods=[{','.join(methods)}]", "merging.rollouts=16"]
    make_project(folder, base, *teachers, more=overrides)
    index = {}
    for name, teacher in teachers.items():
        shutil.copytree(teacher.folder, folder / "artifacts/adapters" / teacher.digest)
        index[name] = {"digest": teacher.digest, "path": f"artifacts/adapters/{teacher.digest}"}
    publish_json(folder / "results/adapters/index.json", index)
    return folder


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Run the stage in this process."""
    with contextlib.chdir(folder):
        runpy.run_path("stages/merging.py", run_name="__main__")
        yield


def test_the_merging_stage_publishes_every_adapter_and_its_ledger(
    tiny: Path, inside: Path, teachers: dict[str, Adapter]
) -> None:
    methods = [*METHODS, "distillation"]
    with running(project(inside / "project", tiny, methods, teachers)):
        index = json.loads(Path("results/merging/index.json").read_text(encoding="utf-8"))
        assert list(index) == methods
        for row in index.values():
            assert adapter_digest(Path(row["path"])) == row["digest"] == Path(row["path"]).name
            assert (Path(row["path"]) / "README.md").exists() and row["guidance"] == [] and row["discarded"] == 0
        assert {name: row["rollouts"] for name, row in index.items() if row["rollouts"]} == {"distillation": 16}
        (entry,) = load(Path("results/merging/ledger.jsonl"), LedgerEntry)
        assert (entry.stage, entry.method, entry.item) == ("merging", "distillation", "distillation")
        assert (entry.rollouts, entry.purpose, entry.errors) == (16, "training", 0)
        head, *rows = Path("results/merging/history.csv").read_text(encoding="utf-8").splitlines()
        assert head == "adapter,step,rollouts,reward,success,divergence"
        assert [row.split(",")[:3] for row in rows] == [["distillation", "1", "8"], ["distillation", "2", "16"]]


@pytest.mark.parametrize("methods", further([[], ["mean"]]))
def test_with_nothing_to_merge_the_stage_never_loads_torch(
    tiny: Path, inside: Path, teachers: dict[str, Adapter], methods: list[str]
) -> None:
    folder = project(inside / "project", tiny, methods, {} if methods else teachers)
    code = (
        "import runpy, sys; runpy.run_path('stages/merging.py', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    line = r"merging +\d+\.\d s   none: merging\.methods is empty, or there are no adapters\n"
    assert re.fullmatch(line, done.stdout)
    assert json.loads((folder / "results/merging/index.json").read_text()) == {}
    assert (folder / "results/merging/ledger.jsonl").read_text() == ""
    assert (folder / "results/merging/history.csv").read_text().count("\n") == 1
    assert (folder / "artifacts/merging").is_dir()


def test_the_merging_stage_refuses_an_altered_adapter(
    tiny: Path, inside: Path, teachers: dict[str, Adapter], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project(inside / "project", tiny, ["mean"], teachers)
    with open(folder / f"artifacts/adapters/{teachers['first'].digest}/adapter_model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(SystemExit, match="2"), running(folder):
        pass
    assert "it was altered: run `dvc repro -f adapters`" in capsys.readouterr().err
    assert not (folder / "results/merging").exists()
