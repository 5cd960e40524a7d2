"""Figures of several runs, from small hand-made tables."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from support.figures import digests, written
from support.results import make_results
from support.scripts import SCRIPTS, load_script
from support.waiting import PATIENCE

from captrain.comparison.differences import differences_over_seeds, rates_over_seeds
from captrain.comparison.points import write_table
from captrain.comparison.published import read_published
from captrain.comparison.rows import GRPO, TRACE, label
from captrain.reporting.style import PROJECT

study_figures = load_script("study_figures")
STUDIES, draw = study_figures.STUDIES, study_figures.draw
RATES = {"base": 0.3, "grpo_target": 0.5, "gepa": 0.4, "trace": 0.6}
FEW = ("router:sets", "merged:ties", "bound:oracle", "control:placebo")


def points(rates: Mapping[str, float], seeds: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    """Rows for each seed, in which TRACE leads GRPO on the target by a constant."""
    return [
        {
            "experiment": "default", "seed": seed, **settings, "point": f"p{seed}", "method": name,
            "label": label(name), "pass_rate": rate + 0.05 * seed, "low": rate - 0.1, "high": rate + 0.1,
            "rollouts_spent": 100 * sum(value for value in settings.values() if isinstance(value, int)) + 640,
            "over_grpo": 0.1, "over_low": -0.1, "over_high": 0.3, "reading": "not distinguishable",
            "selected": "a b",
        }
        for name, rate in rates.items()
        for seed in seeds
    ]  # fmt: skip


def make_tables(results: Path) -> Path:
    """Write the smallest tables from which every figure can be drawn."""
    rates = RATES | dict.fromkeys(FEW, 0.5)
    whole = [
        {**row, "experiment": name} for name in ("default", "rare") for row in points(rates, range(3))
    ]  # fmt: skip
    write_table(rates_over_seeds(whole), results / "replicates/summary.csv")
    write_table(differences_over_seeds(whole), results / "replicates/differences.csv")
    shutil.copytree(results / "replicates", results / "replicates/headline")
    for name in ("domains", "mixture", "smollm"):
        shutil.copytree(results / "replicates/headline", results / f"replicates/{name}")
    by_rollouts = [row for n in (80, 640) for row in points(RATES, range(3), **{"adapters.rollouts": n})]
    write_table(by_rollouts, results / "sweeps/rollouts.csv")
    write_table(by_rollouts, results / "sweeps/paper_rollouts.csv")
    by_prompts = [row for n in (1, 4) for row in points(RATES, range(3), **{"baselines.gepa.prompts": n})]
    write_table(by_prompts, results / "sweeps/prompts.csv")
    section = "baselines.solutions.faults"
    by_fault = [
        row
        for kind in ("random", "systematic")
        for rate in (0.0, 0.4)
        for row in points(RATES | {"solutions": 0.9 - rate}, [0], **{f"{section}.kind": kind, f"{section}.rate": rate})
    ]
    write_table(by_fault, results / "sweeps/faults.csv")
    opened = [
        {"mixture": name, "place": place, "prompts": 2, "layer": layer, "adapter": adapter, "weight": weight}
        for name in ("mixture", "mixture:random")
        for layer in (0, 1)
        for place, weights in {"a": (0.9, 0.1, 0.0), "b": (0.7, 0.2, 0.1), "target: x": (0.2, 0.3, 0.5)}.items()
        for adapter, weight in zip(("a", "b", "base"), weights, strict=True)
    ]
    write_table(opened, results / "sweeps/mixture_gates.csv")
    by_count = [row for n in (1, 4) for row in points(RATES, range(3), **{"capabilities.count": n})]
    write_table(by_count, results / "sweeps/capabilities.csv")
    by_delta = [
        row
        for delta in (0.1, 0.5)
        for row in points(RATES, [0], **{"selection.delta": delta, "selection.coverage": 0.1})
    ]
    write_table(by_delta, results / "sweeps/thresholds.csv")
    return results


def figure_of(name: str, results: Path) -> Figure:
    study = STUDIES[name]
    tables = [pd.read_csv(results / table).to_dict("records") for table in study.tables]
    return study.draw(*tables)


@pytest.mark.needs("minutes")
def test_all_figures_redraw_to_the_same_bytes_without_torch(tmp_path: Path) -> None:
    results = make_tables(make_results(tmp_path / "results"))
    measured = {path: path.read_bytes() for path in results.rglob("*.csv")}
    once = {path.name for path in draw(results, tmp_path / "once")}
    assert once == {f"{name}.{kind}" for name in STUDIES for kind in ("pdf", "png")}
    script = str(SCRIPTS / "figures.py")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path({script!r}, run_name='__main__'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONHASHSEED": "random", "MPLBACKEND": "svg"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr
    assert digests(results / "studies") == digests(tmp_path / "once")
    assert (results / "figures/main.pdf").exists()
    assert measured == {
        path: path.read_bytes() for path in results.rglob("*.csv")
    }  # no published number got into a table


def test_the_curve_of_faults_falls_and_grpo_on_the_target_is_constant(tmp_path: Path) -> None:
    figure = figure_of("faults", make_tables(tmp_path))
    axes = figure.axes[0]
    curves = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}
    assert curves["GRPO on target"] == [0.5, 0.5]
    falling = [container.lines[0] for container in axes.containers if isinstance(container, ErrorbarContainer)]
    assert [np.asarray(line.get_ydata()).tolist() for line in falling] == [[0.9, 0.5], [0.9, 0.5]]
    assert [container.get_label() for container in axes.containers] == ["random faults", "systematic faults"]
    assert any(
        "falls below GRPO on target with random faults at 40%" in " ".join(text.split()) for text in written(figure)
    )


def test_the_figure_of_gates_counts_the_environments_whose_own_adapter_is_opened_most(tmp_path: Path) -> None:
    figure = figure_of("mixture_gates", make_tables(tmp_path))
    assert "Gates open an environment's own adapter most in 1 of 2 environments" in " ".join(written(figure)).replace(
        "\n", " "
    )
    drawn = [np.asarray(axes.images[0].get_array()).tolist() for axes in figure.axes[:2]]
    assert drawn == [[[0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]]] * 2


def test_the_rows_of_trace_have_the_projects_colour_and_the_best_row_comes_first(tmp_path: Path) -> None:
    figure = figure_of("headline", make_tables(tmp_path))
    bars = [to_hex(bar.get_facecolor()) for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert {text for text in written(figure) if text in map(label, RATES)} == {label("base"), label(GRPO), label(TRACE)}
    assert bars.count(PROJECT) == 1 and bars[0] == PROJECT
    said = [" ".join(text.split()) for text in written(figure)]
    assert any("TRACE passes 0.65 of the test tasks, 0.10 more than GRPO on target" in text for text in said), said
    assert any("3 seeds" in text for text in said)


def test_a_width_that_no_figure_is_made_for_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "figures.py"), "--width", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "--width must be between 3 and 14 inches, got 1" in done.stderr
    assert "Traceback" not in done.stderr and not [*tmp_path.iterdir()]


def test_a_missing_table_is_skipped_with_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw(tmp_path, tmp_path / "out") == []
    said = capsys.readouterr().out.splitlines()
    assert [one.split(":")[0] for one in said] == list(STUDIES)
    assert all(study.command in one for study, one in zip(STUDIES.values(), said, strict=True))


def test_a_table_of_other_settings_or_methods_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for clip in (0.1, 0.2) for row in points(RATES, [0], **{"adapters.rollouts": 80, "trainer.clip": clip})]
    write_table(rows, tmp_path / "sweeps/rollouts.csv")
    fixed = points(RATES, range(3), **{"capabilities.count": 2, "trainer.clip": 0.2})
    write_table(fixed, tmp_path / "sweeps/capabilities.csv")
    plain = points(RATES, range(3))
    write_table(rates_over_seeds(plain), tmp_path / "replicates/summary.csv")
    write_table(differences_over_seeds(plain), tmp_path / "replicates/differences.csv")
    assert {path.stem for path in draw(tmp_path, tmp_path / "out")} == {"replicates", "scaling_capabilities"}
    said = capsys.readouterr().out
    assert "sweeps/rollouts.csv varies other settings" in said and "has no method merged:" in said


def test_study_figures_show_the_readings_of_the_table(tmp_path: Path) -> None:
    results = make_tables(tmp_path)
    # TRACE and GRPO on the target differ by a constant over seeds; methods of equal rate do not differ.
    said = [" ".join(text.split()) for text in written(figure_of("scaling_rollouts", results))]
    assert "TRACE passes more than GRPO on target in 2 of 2 budgets" in said
    assert written(figure_of("merging", results)).count("no reliable difference") == 0
    rows = points(RATES | {"merged:ties": 0.6}, range(3))
    rates, differences = rates_over_seeds(rows), differences_over_seeds(rows)
    assert written(STUDIES["merging"].draw(rates, differences)).count("no reliable difference") == 1
    # With one seed, the reading is that of the evaluation over tasks.
    said = [" ".join(text.split()) for text in written(figure_of("thresholds", results))]
    assert "No reliable difference between TRACE and GRPO on target in 2 pairs of thresholds" in said


def test_published_curves_have_panels_of_their_own(tmp_path: Path) -> None:
    results = make_tables(tmp_path)
    for name, curves in (
        ("scaling_rollouts", ("tau2_rollouts", "toolsandbox_rollouts")),
        ("scaling_capabilities", ("tau2_capabilities",)),
    ):
        figure = figure_of(name, results)
        panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
        theirs = {title: axes for title, axes in panels.items() if title.startswith("as published")}
        assert len(theirs) == len(curves) and read_published().paper in " ".join(" ".join(written(figure)).split())
        drawn = {
            title: [np.asarray(line.get_ydata()).tolist() for line in axes.lines] for title, axes in panels.items()
        }
        ours = {value for title, lines in drawn.items() if title not in theirs for line in lines for value in line}
        for curve, title in zip(curves, theirs, strict=True):
            known = [list(line.values()) for line in read_published().curves[curve].lines.values()]
            assert drawn[title] == known and not ours & {value for line in known for value in line}
