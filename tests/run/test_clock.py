"""Times of stages, stored apart from results and named by their digest."""

from pathlib import Path

import pytest

from captrain.records import publish_text
from captrain.run.entry import timed, times


def make(text: str) -> None:
    with timed("routes"):
        publish_text(Path("results/routes/routes.csv"), text)


def test_times_belong_to_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("one")
    first = times(Path())["routes"]
    assert first.wall_s >= 0 and first.cpu_s >= 0
    publish_text(Path("results/routes/routes.csv"), "another")
    assert times(Path()) == {}
    make("two")
    publish_text(Path("results/routes/routes.csv"), "one")
    assert times(Path()) == {"routes": first}


def test_a_failed_stage_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="broke"), timed("routes"):
        publish_text(Path("results/routes/routes.csv"), "half")
        raise ValueError("it broke")
    assert times(Path()) == {}


def test_a_stage_with_one_output_file_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with timed("base"):
        publish_text(Path("results/base.json"), "{}")
    assert [*times(Path())] == ["base"]
