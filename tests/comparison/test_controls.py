"""Controls: TRACE with other capabilities, and everything else the same."""

import contextlib
import json
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.needs import further
from support.results import account

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.loading import load_benchmark
from captrain.capabilities import SelectionAccount
from captrain.comparison.baselines.controls import NAMES, Workshop, choices, control_routes, publish_routes, rankings
from captrain.contract import CheckedEnvironment, load_file
from captrain.environments.evidence import make_standard
from captrain.environments.loading import read_passports
from captrain.environments.synthesis import DRAFTS, examine, make_passport
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import CONTROLS, DEFICITS, TemplateSynthesizer
from captrain.ledger import LedgerEntry
from captrain.records import Capability, Rollout, load, publish, publish_json, publish_text
from captrain.routing.compositions import members
from captrain.routing.gains import COLUMNS
from captrain.routing.router import AskedModel
from captrain.routing.routes import RoutingEvidence, route_tasks
from captrain.run import compose_spec, publish_spec
from captrain.training.recipe import capability_jobs

pytestmark = pytest.mark.usefixtures("vouched")

ROOT = Path(__file__).parents[2]
OVERRIDES = [
    "controls.run=true", "adapters.rollouts=40", "environments.seeds=10", "evaluation.tasks=10", "machine.batch=40",
]  # fmt: skip
SPEC = compose_spec("smoke", 0, OVERRIDES, ROOT / "conf")
BENCHMARK = load_benchmark(SPEC.benchmark)
STRICT = compose_spec("default", 0, ["environments.seeds=10"], ROOT / "conf").environments
AGAINST = make_standard(BENCHMARK, SPEC.evaluation.tasks, STRICT.model_copy(update={"groups": 5, "group_size": 8}))


def capability(name: str) -> Capability:
    return Capability(id=name, name=name.replace("_", " ").capitalize(), description="What it takes.")


def report(**rows: tuple[float | None, float | None]) -> SelectionAccount:
    """A selection account of candidates, name -> (gap, coverage), best first."""
    return account({"id": name, "gap": gap, "coverage": share} for name, (gap, share) in rows.items())


FIVE = report(a=(0.9, 0.3), b=(0.6, 0.4), c=(0.4, 0.9), d=(None, None), e=(0.0, 0.01))


def always(name: str) -> bool:
    return True


def test_failures_ranks_by_coverage_and_lowest_by_gap_with_undefined_last() -> None:
    found = rankings(FIVE, 0)
    assert tuple(found) == NAMES
    assert found["failures"] == ["c", "b", "a", "e", "d"]
    assert found["lowest"] == ["e", "c", "b", "a", "d"]
    assert sorted(found["random"]) == ["a", "b", "c", "d", "e"]


def test_a_controls_choice_depends_only_on_its_own_criterion() -> None:
    """`random` uses no numbers, and `failures` uses no passed rollouts and so no gap."""
    rng = random.Random(0)
    for seed in range(20):
        numbers = {name: (rng.random(), rng.random()) for name in "edcba"}
        coverage = {row["id"]: (rng.random(), row["coverage"]) for row in FIVE["candidates"]}
        assert rankings(report(**numbers), seed)["random"] == rankings(FIVE, seed)["random"]
        assert rankings(report(**coverage), seed)["failures"] == rankings(FIVE, seed)["failures"]
    assert len({tuple(rankings(FIVE, seed)["random"]) for seed in range(20)}) > 10


def test_controls_have_traces_number_of_capabilities_and_skip_those_without_environment() -> None:
    asked: list[str] = []

    def has(name: str) -> bool:
        asked.append(name)
        return name != "c"

    found = choices(FIVE, has, 2, 0)
    # Choices are in the order of TRACE's ranking, not of the control's.
    assert found["failures"] == ["a", "b"] and found["lowest"] == ["b", "e"]
    assert len(found["random"]) == 2 and "c" not in found["random"]
    assert "d" not in asked or "d" in rankings(FIVE, 0)["random"][:3]
    assert all(len(names) == 4 for names in choices(FIVE, has, 4, 0).values())


def test_all_candidates_are_drawn_equally_often() -> None:
    drawn = [name for seed in range(400) for name in choices(FIVE, always, 2, seed)["random"]]
    assert all(120 < drawn.count(name) < 200 for name in "abcde")


# Environments for capabilities without an adapter of TRACE.


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Use the working folder for drafts and journals."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


def workshop(policy: ScriptedPolicy, *, against: Any = AGAINST, rollouts: Any = ()) -> Workshop:
    pool = {name: capability(name) for name in (*DEFICITS, *CONTROLS, "small_talk")}
    return Workshop(DEFICITS[:2], pool, rollouts, TemplateSynthesizer(), policy, against, SPEC.machine, 0)


def test_traces_adapters_are_reused_and_untrainable_capabilities_skipped(elsewhere: Path) -> None:
    shop = workshop(ScriptedPolicy())
    assert all(shop.has(name) for name in DEFICITS[:2]) and not shop.has("small_talk")
    assert shop.ledger == [] and shop.syntheses == {} and shop.lacking["small_talk"].startswith("no template trains")


def test_calibration_is_charged_to_controls_without_bounds_on_rewards(
    elsewhere: Path,
) -> None:
    shop = workshop(ScriptedPolicy())
    assert shop.has("invalid_call") and shop.has("invalid_call")
    [entry] = shop.ledger
    assert (entry.stage, entry.method, entry.item, entry.purpose) == (
        "controls",
        "controls",
        "invalid_call",
        "calibration",
    )
    assert entry.rollouts == AGAINST.bounds.groups * AGAINST.bounds.group_size == 40
    passport = shop.syntheses["invalid_call"].best.passport
    # The base is perfect here, so every group is constant. TRACE's passport would fail.
    measured = {check.name: (check.measured, check.passed) for check in passport.checks}
    assert measured["share of constant-reward groups on the base"] == (1.0, True)
    assert measured["pass rate of the base"] == (1.0, True) and passport.calibration_tasks == 5
    assert AGAINST.bounds.constant_groups == STRICT.constant_groups < 1


def test_a_capability_with_a_failed_passport_is_skipped_with_the_reason(elsewhere: Path) -> None:
    hard = replace(AGAINST, bounds=AGAINST.bounds.model_copy(update={"broken_reward": 0.0, "rounds": 1}))
    shop = workshop(ScriptedPolicy(), against=hard)
    refused = [name for name in CONTROLS if not shop.has(name)]
    assert refused and shop.ledger == []
    assert all("reward of the broken solution" in shop.lacking[name] for name in refused)


@pytest.mark.parametrize("name", CONTROLS)
def test_rejected_capabilities_also_get_an_honest_environment(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(TemplateSynthesizer().synthesize(Brief(capability(name), BENCHMARK.tools), []))
    found = examine(path, AGAINST, Brief(capability(name), BENCHMARK.tools), SPEC.machine, None, 0, trusted=True)
    assert [(check.name, check.detail) for check in found.checks if not check.passed] == []
    target, environment = load_file(path), load_file(path).environment
    verbs = set()
    for task in target.tasks("training", 80):
        score = target.score(task, target.play(task, environment.broken(task.model_dump())))  # type: ignore[attr-defined]
        assert score.reward < 0.5 and score.parts["skill"] < 1.0
        assert task.data["operations"][0]["order"] in environment.hint(task.model_dump()) or name == "reply_wording"  # type: ignore[attr-defined]
        verbs.add(task.data["operations"][0]["verb"])
    # The environments also need the desk's other rules.
    assert verbs == {"wrap", "zip", "cancel", "return"}


# Routes.


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckedEnvironment]:
    folder, made = tmp_path_factory.mktemp("environments"), {}
    for name in (*DEFICITS, "reply_wording"):
        path = folder / f"{name}.py"
        path.write_text(TemplateSynthesizer().synthesize(Brief(capability(name), []), []))
        made[name] = load_file(path)
    return made


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return collect(
        ScriptedPolicy(skill=0.4), BENCHMARK, BENCHMARK.tasks("discovery", 60), purpose="diagnosis", seed=0,
        journals=tmp_path_factory.mktemp("journals"), quiet=True,
    )  # fmt: skip


def gained(**gains: float) -> pd.DataFrame:
    rows = [(name, 0.3, 40, 0.3 + gain, 40, gain, gain, gain) for name, gain in gains.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


@pytest.mark.parametrize("router", further(["retrieval", "sets", "gate"]))
def test_a_control_with_traces_capabilities_is_routed_like_trace(
    environments: dict[str, CheckedEnvironment], rollouts: list[Rollout], tmp_path: Path, router: str, tiny: Path
) -> None:
    spec = compose_spec("smoke", 0, [f"router={router}"], ROOT / "conf")
    component, base = spec.router, AskedModel.of(spec, tiny)
    known = RoutingEvidence({name: environments[name] for name in DEFICITS}, {}, {}, rollouts)
    tasks = BENCHMARK.tasks("test", 20)
    # One adapter gained nothing, so neither TRACE's router nor a control's uses it.
    gains = gained(**dict.fromkeys(DEFICITS[:3], 0.2), **{DEFICITS[3]: 0.0})
    trace = route_tasks(component, base, known, gains, BENCHMARK, tasks).table
    wider = replace(known, targets=environments)
    more = pd.concat([gains, gained(reply_wording=0.5)])
    chosen = {"random": DEFICITS, "lowest": [DEFICITS[0], "reply_wording"], "failures": [DEFICITS[3]]}
    table = control_routes(component, base, wider, more, chosen, BENCHMARK, tasks)
    assert [*table] == ["task", "control:random", "control:lowest", "control:failures"]
    assert table["task"].tolist() == trace["task"].tolist()
    assert table["control:random"].tolist() == trace["chosen"].tolist() and DEFICITS[0] in {*table["control:random"]}
    arms = {name for arm in table["control:lowest"] for name in members(arm)}
    assert arms <= {DEFICITS[0], "reply_wording"} and "reply_wording" in arms
    assert {*table["control:failures"]} == {"base"}


def test_compositions_of_controls_are_written_with_their_weights(tmp_path: Path) -> None:
    table = pd.DataFrame({"task": ["t", "u", "v"], "control:random": ["base", "a+b", "0.6*a+0.4*c"]})
    publish_routes(table, gained(a=0.1), tmp_path)
    assert json.loads((tmp_path / "compositions.json").read_text()) == {
        "a+b": {"a": 1.0, "b": 1.0},
        "0.6*a+0.4*c": {"a": 0.6, "c": 0.4},
    }
    assert (tmp_path / "routes.csv").read_text().startswith("task,control:random\nt,base\n")


# The stage.


def trace_stood(folder: Path, base: Path, rollouts: list[Rollout]) -> None:
    """Write the outputs of TRACE's stages for two capabilities."""
    publish_spec(SPEC, folder / "results/spec.yaml")
    (folder / "artifacts").mkdir()
    (folder / "artifacts/base").symlink_to(base)
    names, played = DEFICITS[1:3], []
    for name in names:
        path = folder / f"results/environments/{name}.py"
        publish_text(path, TemplateSynthesizer().synthesize(Brief(capability(name), BENCHMARK.tools), []))
        brief, policy = Brief(capability(name), BENCHMARK.tools), ScriptedPolicy(skill=0.3)
        checked = examine(path, AGAINST, brief, SPEC.machine, policy, 0, trusted=True)
        played += checked.rollouts
        passport = make_passport(path, checked, 0, trusted=True)
        publish_json(path.with_suffix(".passport.json"), passport)
    publish(folder / "artifacts/environments/calibration.jsonl", played)
    publish(folder / "artifacts/rollouts/discovery.jsonl", rollouts)
    for stage in ("adapters", "routes"):
        publish_json(folder / f"results/{stage}/index.json", {name: {"digest": "d", "path": "p"} for name in names})
    publish_text(folder / "results/routes/routes.csv", "task,kind,chosen\n")
    publish_json(folder / "results/routes/compositions.json", {})
    rows = "".join(f"{name},1,40,0.9,0.9,0.5\n" for name in names)
    publish_text(folder / "results/adapters/history.csv", "adapter,step,rollouts,reward,success,informative\n" + rows)
    pool = [*names, "invalid_call", "reply_wording", "small_talk"]
    numbers = dict(zip(pool, [(0.8, 0.5), (0.6, 0.4), (0.1, 0.05), (0.2, 0.6), (0.0, 0.3)], strict=True))
    publish_json(folder / "results/capabilities/selection.json", report(**numbers))
    publish(folder / "results/labels/candidates.jsonl", [capability(name) for name in pool])


def test_the_stage_trains_only_missing_adapters_with_the_same_budget(
    elsewhere: Path, tiny: Path, rollouts: list[Rollout], capsys: pytest.CaptureFixture[str]
) -> None:
    trace_stood(elsewhere, tiny, rollouts)
    runpy.run_path(str(ROOT / "stages/controls.py"), run_name="__main__")
    assert "no control takes small_talk: no template trains" in capsys.readouterr().out
    chosen = json.loads(Path("results/controls/choices.json").read_text(encoding="utf-8"))
    assert chosen["failures"] == [DEFICITS[1], "reply_wording"]
    assert chosen["lowest"] == [
        "invalid_call",
        "reply_wording",
    ]
    further = {name for names in chosen.values() for name in names} - {*DEFICITS}
    index = json.loads(Path("results/controls/index.json").read_text(encoding="utf-8"))
    assert {*index} == further == {"reply_wording", "invalid_call"}
    assert all(Path(row["path"], "adapter_model.safetensors").exists() for row in index.values())
    ledger = load(Path("results/controls/ledger.jsonl"), LedgerEntry)
    calibration = SPEC.environments.groups * SPEC.environments.group_size
    spent = [(entry.stage, entry.method, entry.item, entry.purpose, entry.rollouts) for entry in ledger]
    assert spent == [
        ("controls", "controls", name, purpose, count)
        for purpose, count in (("calibration", calibration), ("training", SPEC.adapters.rollouts))
        for name in sorted(further)
    ]
    table = pd.read_csv("results/controls/routes.csv", keep_default_na=False)
    assert [*table] == ["task", *(f"control:{name}" for name in NAMES)]
    assert table["task"].tolist() == [task.id for task in BENCHMARK.tasks("test", 10)]
    assert {*table["control:lowest"]} <= {"base", *chosen["lowest"]}
    for name in ("index.json", "routes.csv", "compositions.json"):
        assert Path("results/controls/trace", name).read_bytes() == Path("results/routes", name).read_bytes()
    # Jobs differ from TRACE's only in their environment, and calibration used the same number of tasks.
    mine, trace = (capability_jobs(SPEC, tiny, Path("results", stage)) for stage in ("controls", "environments"))
    for job in mine:
        assert replace(job, name=trace[0].name, environments=trace[0].environments) == trace[0]
        assert [place.skip for place in job.environments] == [SPEC.environments.groups]
    assert {*read_passports(Path("results/controls"))} == further and DRAFTS.exists()


def test_without_controls_the_stage_writes_empty_results_quickly_and_without_torch(tmp_path: Path) -> None:
    off = SPEC.model_copy(update={"controls": SPEC.controls.model_copy(update={"run": False})})
    publish_spec(off, tmp_path / "results/spec.yaml")
    code = f"import runpy, sys; runpy.run_path({str(ROOT / 'stages/controls.py')!r}, run_name='__main__')"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    line = r"controls +\d+\.\d s   no controls: controls\.run is false\n"
    assert done.returncode == 0 and re.fullmatch(line, done.stdout), done.stderr
    assert [json.loads((tmp_path / f"results/controls/{name}.json").read_text()) for name in ("index", "choices")] == [
        {},
        {},
    ]
    assert (tmp_path / "results/controls/ledger.jsonl").read_text() == "" and (tmp_path / "artifacts/controls").is_dir()
    assert not (tmp_path / "results/controls/routes.csv").exists()


def test_one_adapter_for_all_capabilities_gives_no_controls(
    elsewhere: Path, tiny: Path, rollouts: list[Rollout], capsys: pytest.CaptureFixture[str]
) -> None:
    trace_stood(elsewhere, tiny, rollouts)
    publish_json(Path("results/adapters/index.json"), {"ramp": {"digest": "d", "path": "p"}})
    runpy.run_path(str(ROOT / "stages/controls.py"), run_name="__main__")
    line = r"controls +\d+\.\d s   no controls: TRACE has no adapter of a single capability\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    assert json.loads(Path("results/controls/choices.json").read_text(encoding="utf-8")) == {}
