"""Figures from hand-made results, drawn in processes of their own."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.figures import draw
from captrain.records import publish_json, publish_text

STAGE = Path(__file__).parents[1] / "stages" / "figures.py"


def make_results(results: Path) -> Path:
    """The smallest results folder that every figure can be drawn from."""
    methods = ["base", "grpo_target", "trace", "router:retrieval", "bound:oracle"]
    main = [
        f"{name},{name},{0.4 + i / 10},{0.35 + i / 10},{0.45 + i / 10},0.1,9,0,36,0,640"
        for i, name in enumerate(methods)
    ]
    columns = "method,label,pass_rate,low,high,pass_hat_k,tasks,excluded,trials,errors,rollouts_spent"
    publish_text(
        results / "evaluation/main.csv", "\n".join([columns, *main, "bound:best_single,b,,,,,0,9,0,0,640"]) + "\n"
    )
    kinds = [f"{kind},{name},{name},0.5,0.4,0.6,4" for kind in ("easy", "pv+sr") for name in methods]
    publish_text(
        results / "evaluation/kinds.csv", "\n".join(["kind,method,label,pass_rate,low,high,tasks", *kinds]) + "\n"
    )
    publish_json(results / "evaluation/metrics.json", {"confidence": 0.95})
    names = {"adapters": ["check_first", "copy_exactly"], "grpo_target": ["grpo_target"]}
    for stage, adapters in names.items():
        rows = [f"{name},{step},{step * 40},{step / 9},{step / 9},0.5" for name in adapters for step in range(1, 9)]
        publish_text(
            results / stage / "history.csv",
            "\n".join(["adapter,step,rollouts,reward,success,informative", *rows]) + "\n",
        )
    candidates = [candidate("check_first", 0.45, 0.3, True), candidate("copy_exactly", 0.1, 0.12, False)]
    undefined = candidate("never_used", 0.0, 0.0, False) | {"gap": None, "gap_low": None, "gap_high": None}
    thresholds = {"delta": 0.2, "coverage": 0.1, "agreement": 8, "confidence": 0.95, "floor": 0.0, "count": 4}
    selection = {"thresholds": thresholds, "candidates": [*candidates, undefined]}
    publish_json(results / "capabilities/selection.json", selection)
    return results


def candidate(slug: str, gap: float, coverage: float, selected: bool) -> dict:
    return {
        "id": slug,
        "name": slug.replace("_", " "),
        "description": "Does it.",
        "gap": gap,
        "gap_low": gap - 0.1,
        "gap_high": gap + 0.1,
        "coverage": coverage,
        "er_failed": gap + 0.1,
        "er_passed": 0.1,
        "runs_retained": 10 if selected else 3,
        "runs": 10,
        "selected": selected,
        "reason": "kept" if selected else "gap below delta",
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the figures, drawn in this process."""
    folder = tmp_path_factory.mktemp("drawn")
    draw(make_results(folder / "results"), folder / "out")
    return digests(folder / "out")


def run_stage(folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys; runpy.run_path({str(STAGE)!r}, run_name='__main__'); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONHASHSEED": "random", "MPLBACKEND": "svg"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_two_processes_draw_the_same_bytes_without_torch_and_without_dates(
    tmp_path: Path, drawn: dict[str, str]
) -> None:
    make_results(tmp_path / "results")
    # A setting of the machine's own matplotlib must change nothing.
    (tmp_path / "matplotlibrc").write_text("font.size: 20\n")
    finished = run_stage(tmp_path)
    assert (finished.returncode, finished.stdout.strip()) == (0, "False"), finished.stderr
    figures = tmp_path / "results/figures"
    assert digests(figures) == drawn
    stems = ("main", "capabilities", "training", "kinds")
    assert sorted(drawn) == sorted(f"{stem}.{kind}" for stem in stems for kind in ("pdf", "png"))
    assert not any(b"CreationDate" in path.read_bytes() for path in figures.iterdir())


def test_changed_numbers_change_the_figure(tmp_path: Path, drawn: dict[str, str]) -> None:
    results = make_results(tmp_path / "results")
    selection = json.loads((results / "capabilities/selection.json").read_text())
    selection["thresholds"]["delta"] = 0.3
    publish_json(results / "capabilities/selection.json", selection)
    draw(results, tmp_path / "after")
    after = digests(tmp_path / "after")
    assert {name for name in drawn if drawn[name] != after[name]} == {"capabilities.pdf", "capabilities.png"}


def test_a_run_that_selected_nothing_still_has_all_figures(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    publish_text(results / "adapters/history.csv", "adapter,step,rollouts,reward,success,informative\n")
    selection = json.loads((results / "capabilities/selection.json").read_text())
    publish_json(results / "capabilities/selection.json", selection | {"candidates": []})
    assert len(draw(results, tmp_path / "out")) == 8


@pytest.mark.parametrize(
    "missing",
    [
        "evaluation/main.csv",
        "evaluation/kinds.csv",
        "capabilities/selection.json",
        "adapters/history.csv",
        "grpo_target/history.csv",
    ],
)
def test_a_missing_result_names_the_stage_that_makes_it(tmp_path: Path, missing: str) -> None:
    results = make_results(tmp_path / "results")
    (results / missing).unlink()
    with pytest.raises(UserError, match=f"dvc repro {missing.split('/')[0]}"):
        draw(results, tmp_path / "out")


def test_the_stage_ends_in_one_message_without_traceback(tmp_path: Path) -> None:
    finished = run_stage(tmp_path)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: results/evaluation/main.csv is missing")
    assert "Traceback" not in finished.stderr
