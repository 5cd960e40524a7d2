"""Progress of long work: a bar on a terminal, lines elsewhere."""

import pytest

from captrain.records import ProgressBar


def test_piped_progress_is_a_line_a_minute_with_count_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("captrain.records.progress.time.monotonic", lambda: now[0])
    bar = ProgressBar(what="training", total=10, unit="adapter")
    for _ in range(10):
        now[0] += 31
        bar.update()
        bar.refresh()
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"training: {n} of 10 adapters" for n in (2, 4, 6, 8)]
    assert all(line.endswith("left") for line in lines)


def test_short_work_prints_nothing_where_output_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ProgressBar(range(5), what="short")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captrain.records.progress.PAUSE", 0.0)
    bar = ProgressBar(what="quiet", total=3, quiet=True)
    bar.update(3)
    bar.close()
    assert capsys.readouterr().err == ""
