"""Figures of hand-made results."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import seaborn as sns
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from support.figures import digests, written
from support.results import causal_tables, make_results
from support.waiting import PATIENCE

from captrain.capabilities.selection import select
from captrain.capabilities.selection_rule import replay
from captrain.comparison.published import read_published
from captrain.errors import UserError
from captrain.records import Capability, Label, RolloutLabels, publish_json, publish_text
from captrain.reporting import figures, style
from captrain.reporting.figures import draw
from captrain.reporting.style import render
from captrain.reporting.verdicts import VERDICTS
from captrain.run import SelectionSettings

STAGE = Path(__file__).parents[2] / "stages" / "figures.py"


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
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_two_processes_draw_the_same_bytes_without_torch_and_dates(tmp_path: Path, drawn: dict[str, str]) -> None:
    make_results(tmp_path / "results")
    # Settings of the machine's matplotlib must change nothing.
    (tmp_path / "matplotlibrc").write_text("font.size: 20\n")
    finished = run_stage(tmp_path)
    merging, causality, rediscovery, curve, ended, torch = finished.stdout.strip().splitlines()
    assert (finished.returncode, torch) == (0, "False"), finished.stderr
    assert ended.endswith("14 files in results/figures")
    assert merging.startswith("figure merging skipped") and "experiment=all_methods" in merging
    assert causality.startswith("figure causality skipped") and "dvc repro causality" in causality
    assert rediscovery.startswith("figure rediscovery skipped") and "baselines.solutions" in rediscovery
    assert curve.startswith("figure curve skipped") and "curve.points" in curve
    there = tmp_path / "results/figures"
    assert digests(there) == drawn
    stems = ("main", "capabilities", "stability", "thresholds", "training", "kinds", "routing")
    assert sorted(drawn) == sorted(f"{stem}.{kind}" for stem in stems for kind in ("pdf", "png"))
    assert not any(b"CreationDate" in path.read_bytes() for path in there.iterdir())


def test_changed_numbers_change_the_figure(tmp_path: Path, drawn: dict[str, str]) -> None:
    results = make_results(tmp_path / "results")
    selection = json.loads((results / "capabilities/selection.json").read_text())
    selection["thresholds"]["delta"] = 0.3
    publish_json(results / "capabilities/selection.json", selection)
    draw(results, tmp_path / "after")
    after = digests(tmp_path / "after")
    changed = ("capabilities", "stability", "thresholds")  # in the last, which cell is bold
    assert {name for name in drawn if drawn[name] != after[name]} == {
        f"{name}.{kind}" for name in changed for kind in ("pdf", "png")
    }


def test_a_run_that_selected_nothing_has_all_figures(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    publish_text(results / "evaluation/training.csv", "adapter,rollouts,reward,success,informative,stage\n")
    selection = json.loads((results / "capabilities/selection.json").read_text())
    publish_json(results / "capabilities/selection.json", selection | {"candidates": []})
    assert len(draw(results, tmp_path / "out")) == 14


@pytest.mark.parametrize(
    "missing",
    [
        "evaluation/main.csv",
        "evaluation/differences.csv",
        "evaluation/kinds.csv",
        "capabilities/selection.json",
        "capabilities/stability.csv",
        "evaluation/training.csv",
    ],
)
def test_a_missing_result_names_the_stage_that_makes_it(tmp_path: Path, missing: str) -> None:
    results = make_results(tmp_path / "results")
    (results / missing).unlink()
    stage = missing.split("/")[0].replace("evaluation", "comparison")
    with pytest.raises(UserError, match=f"dvc repro {stage}`"):
        draw(results, tmp_path / "out")


def test_the_stage_fails_with_one_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(STAGE), run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said
    assert said.startswith("error: results/evaluation/main.csv is missing")


def contrast(colour: Any) -> float:
    """Contrast of a colour on white, as WCAG defines it."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return 1.05 / (float(np.dot(parts, (0.2126, 0.7152, 0.0722))) + 0.05)


def test_every_colour_of_a_mark_or_text_has_a_contrast_of_four_and_a_half() -> None:
    colours = {style.GREY, style.PROJECT, *style.COLOURS, *(look.color for look in style.LOOKS.values())}
    assert {colour: round(contrast(colour), 2) for colour in colours if contrast(colour) < 4.5} == {}
    for place in np.linspace(0, 1, 41):  # cells of both maps of colours
        for colours_of in (colormaps[style.DIVERGING], sns.light_palette(style.PROJECT, as_cmap=True)):
            cell = colours_of(place)[:3]
            on_white = contrast(cell)
            assert (on_white if style.ink(*cell) == "white" else 21 / on_white) >= 4.5


@pytest.mark.parametrize("width", [3.3, 7.0])
def test_texts_stay_apart_and_inside_and_are_large_enough_at_every_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: float
) -> None:
    results = make_results(tmp_path / "results")
    for name, text in causal_tables("check_first", "copy_exactly").items():
        publish_text(results / name, text)
    seen: list[str] = []
    rc: Any = style.RC

    def examine(makers: Mapping[str, Callable[[], Figure]], out: Path) -> list[Path]:
        with matplotlib.rc_context(rc):
            for name, make in makers.items():
                figure = make()
                FigureCanvasAgg(figure).draw()
                assert figure.get_figwidth() == width
                seen.extend([name] if readable(figure) else [])
        return []

    monkeypatch.setattr(figures, "render", examine)
    draw(results, tmp_path / "out", width)
    assert {"main", "capabilities", "causality", "training"} <= {*seen}


def readable(figure: Figure) -> bool:
    """Check the texts of a drawn figure."""
    ticks = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()]
    boxes = {text: Text.get_window_extent(text) for text in texts if text.get_visible() and text.get_rotation() == 0}
    assert min(float(text.get_fontsize()) for text in boxes) >= 7
    wide, tall = figure.get_size_inches() * figure.dpi
    free = [text for text in boxes if text not in ticks]
    for text in free:
        box = boxes[text]
        assert box.x0 >= -1 and box.x1 <= wide + 1 and box.y0 >= -1 and box.y1 <= tall + 1, text.get_text()
    for first, second in combinations(free, 2):
        assert not boxes[first].padded(-1.5).overlaps(boxes[second]), (first.get_text(), second.get_text())
    return True


def test_the_title_of_a_figure_is_computed_from_its_data(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    before = title(figures.compared(results, name="main"))
    assert before.startswith("\u201cbound") is False and "no reliable difference" in before
    table = (results / "evaluation/differences.csv").read_text()
    publish_text(
        results / "evaluation/differences.csv",
        table.replace("0.1,-0.1,0.3,3,2,0.5,False", "0.1,0.05,0.3,9,1,0.0,True").replace("0.2,1.0\n", "0.2,0.001\n"),
    )
    after = title(figures.compared(results, name="main"))
    assert after != before and "0.10 less than TRACE" in after


def title(figure: Figure) -> str:
    """The title of a figure on one line."""
    return " ".join(figure.get_suptitle().split())


def test_no_interval_is_drawn_beyond_the_range_of_a_rate(tmp_path: Path) -> None:
    rows = [style.Line("trace", "TRACE", 0.9, 0.6, 1.2), style.Line("base", "base", 0.1, -0.2, 0.4)]
    figure = style.compare({"": rows}, "trace", "Found.", "pass rate")
    paths = [path for lines in figure.axes[0].collections for path in lines.get_paths()]
    assert paths and max(float(np.asarray(path.vertices)[:, 0].max()) for path in paths) <= 1.0
    axes = Figure().subplots()
    style.draw_rates(axes, [0], [{"pass_rate": 0.9, "low": 0.5, "high": 1.3, "label": "TRACE"}], style.LOOKS["trace"])
    drawn: Any = axes.containers[0]
    assert drawn.lines[2][0].get_segments()[0][:, 1].max() == pytest.approx(1.0)


@pytest.fixture
def drawn_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path, Path], set[str]]:
    """Draw only the wanted figure, and return the names of all figures."""

    def draw_alone(wanted: str, results: Path, out: Path) -> set[str]:
        names: set[str] = set()

        def render_wanted(figures: Mapping[str, Callable[[], Figure]], out: Path) -> list[Path]:
            names.update(figures)
            return render({name: make for name, make in figures.items() if name == wanted}, out)

        monkeypatch.setattr(figures, "render", render_wanted)
        assert {path.stem for path in draw(results, out)} == names & {wanted}
        return names

    return draw_alone


def test_a_tested_capability_is_drawn_with_placebo_and_every_adapter(
    tmp_path: Path, drawn_alone: Callable[[str, Path, Path], set[str]]
) -> None:
    results = make_results(tmp_path / "results")
    for name, text in causal_tables("check_first", "copy_exactly").items():
        publish_text(results / name, text)
    assert drawn_alone("causality", results, tmp_path / "out") > {"causality"}
    texts = written(figures.causality(results))
    assert {"check first", "claimed", "repaired", "other failures", "passed rollouts"} <= {*texts}
    assert texts.count("+0.40") == texts.count("+0.00") == 2  # on the diagonal and off it
    assert any("placebo" in text for text in texts)
    for name, text in causal_tables().items():
        publish_text(results / name, text)
    assert "causality" not in drawn_alone("causality", results, tmp_path / "none")


def test_figures_show_the_readings_of_the_table(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    said = written(figures.compared(results, name="main"))
    assert {one: said.count(one) for one in said if one in VERDICTS.values()} == {
        "differs": 2,  # the base, and the oracle, which is not tested
        "no reliable difference": 2,
    }
    routed = written(figures.compared(results, name="routing"))
    assert routed.count("no reliable difference") == 1
    assert "grpo_target (640)" not in routed and "bound:oracle (640)" in routed


def test_merging_is_drawn_if_a_merged_adapter_was_played(
    tmp_path: Path, drawn_alone: Callable[[str, Path, Path], set[str]]
) -> None:
    results = make_results(tmp_path / "results")
    with (results / "evaluation/main.csv").open("a") as file:
        file.write("merged:ties,ties,0.5,0.4,0.6,0.1,9,0,36,0,640\n")
    assert "merging" in drawn_alone("merging", results, tmp_path / "out")
    assert "ties (640)" in written(figures.compared(results, name="merging")) and "ties (640)" not in written(
        figures.compared(results, name="routing")
    )


def test_published_rates_are_marked_only_if_the_same_thing_was_measured(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results")
    assert not [one for one in written(figures.compared(results, name="main")) if "published" in one]
    known = read_published()
    publish_text(
        results / "spec.yaml",
        f"base: {{model: {known.model}}}\nbenchmark: {{_target_: captrain.benchmarks.tau2.Tau2, version: 0.2.1-dev}}\n",
    )
    figure = figures.compared(results, name="main")
    assert [one for one in written(figure) if "as published" in one and "tau2-bench" in one]
    marks = figure.axes[0].collections[-1].get_offsets()
    assert sorted(round(float(x), 3) for x, _ in np.asarray(marks)) == [0.329, 0.378, 0.470]


def test_replayed_thresholds_select_as_the_selection_does() -> None:
    generator = np.random.default_rng(0)
    names = ["a", "b", "c", "d"]
    lacks = dict(zip(names, ((0.9, 0.1), (0.6, 0.2), (0.4, 0.3), (0.2, 0.0)), strict=True))
    labels = []
    for run in range(5):
        for rollout in range(40):
            failed = rollout % 2 == 0
            verdicts = {}
            for name in names[: 3 if run == 0 else 4]:  # the last one is not proposed in the first run
                drawn = generator.random(2)
                lacking = drawn[0] < lacks[name][not failed]
                verdicts[name] = Label(verdict="LACKING" if lacking else "PRESENT" if drawn[1] < 0.5 else "NA")
            outcome = "failed" if failed else "passed"
            count = int(generator.integers(0, 3))
            labels.append(RolloutLabels(run=run, rollout=f"r{rollout}", outcome=outcome, count=count, labels=verdicts))
    candidates = [Capability(id=name, name=name, description="Does it.") for name in names]
    limits = {"agreement": 4, "confidence": 0.9, "floor": 0.0, "resamples": 200}
    account = select(labels, candidates, SelectionSettings(delta=0.2, coverage=0.1, **limits), 3, 0).report
    found = set()
    for delta in (0.0, 0.1, 0.2, 0.4, 0.6, 0.8):
        for coverage in (0.0, 0.1, 0.2, 0.4, 0.6):
            exact = select(labels, candidates, SelectionSettings(delta=delta, coverage=coverage, **limits), 3, 0)
            assert replay(account, delta, coverage) == [one.id for one in exact.capabilities], (delta, coverage)
            found.add(len(exact.capabilities))
    assert found == {0, 1, 2, 3}
