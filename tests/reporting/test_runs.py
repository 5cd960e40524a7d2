"""`captrain compare`: two runs side by side, from folders and from commits."""

import shutil
from pathlib import Path

import pytest
from support.finished import Captrain, commit, initialise
from support.results import publish_played

from captrain.records import Rollout, Score, Task, publish_json, publish_text
from captrain.reporting.runs import Rate, difference

MAIN = "method,label,pass_rate,low,high,tasks\nbase,base,{base},0.3,0.5,40\ntrace,TRACE,{trace},{low},{high},40\n"


def write_run(folder: Path, delta: float, trace: float, seed: int = 0) -> Path:
    publish_text(folder / "dvc.yaml", "stages: {}\n")
    publish_text(
        folder / "results/spec.yaml", f"seed: {seed}\nselection:\n  delta: {delta}\nmachine:\n  workers: {seed}\n"
    )
    main = MAIN.format(base=0.4, trace=trace, low=trace - 0.05, high=trace + 0.05)
    publish_text(folder / "results/evaluation/main.csv", main)
    rows = [{"id": "check_first", "gap": delta, "selected": True}, {"id": "other", "gap": None, "selected": False}]
    publish_json(folder / "results/capabilities/selection.json", {"candidates": rows})
    return folder


def play(folder: Path, passes: dict[str, list[int]], *, data: str = "") -> None:
    """Write one rollout for each task, by adapter or "base", in the order of the tasks."""
    tasks = [Task(id=f"desk/test/{number}", split="test", data={"number": number, "of": data}) for number in range(40)]
    rollouts = {
        arm: [
            Rollout(
                id=f"{arm}{number}", environment="desk", task=task, trial=0, purpose="evaluation", policy="p",
                adapter=None if arm == "base" else arm, messages=[], outcome="passed" if passed else "failed",
                score=Score(reward=float(passed), success=bool(passed)),
            )
            for number, (task, passed) in enumerate(zip(tasks, outcomes, strict=True))
        ]
        for arm, outcomes in passes.items()
    }  # fmt: skip
    publish_played(folder, rollouts)
    rows = [f"{task.id},,check_first" for task in tasks]
    publish_text(folder / "results/routes/routes.csv", "\n".join(["task,kind,chosen", *rows]) + "\n")


def test_runs_on_the_same_tasks_are_paired_by_task_and_others_are_not(tmp_path: Path, captrain: Captrain) -> None:
    """TRACE passes four tasks more than before: too few to see in two independent runs."""
    base = [1] * 16 + [0] * 24
    for name, count in (("one", 20), ("two", 24)):
        write_run(tmp_path / name, 0.2, count / 40)
        play(tmp_path / name, {"base": base, "check_first": [1] * count + [0] * (40 - count)})
    status, out, err = captrain(tmp_path, "compare", "one", "two")
    assert status == 0, err
    trace = next(line for line in out.splitlines() if "TRACE" in line)
    assert "+0.100" in trace and "yes" in trace.split("to")[-1]
    low, high = (float(word) for word in trace.replace("│", " ").split() if word[0] in "+-" and word != "+0.100")
    assert low == pytest.approx(0.025, abs=0.026) and high == pytest.approx(0.2, abs=0.026)
    assert trace.count("yes") == 1 and "+0.000 to +0.000" in out and "Paired by task." in out
    play(tmp_path / "two", {"base": base, "check_first": [1] * 24 + [0] * 16}, data="another desk")
    out = captrain(tmp_path, "compare", "one", "two")[1]
    trace = next(line for line in out.splitlines() if "TRACE" in line)
    assert "the tasks or trials differ" in " ".join(out.split())
    assert "Compared as two independent runs" in out and "Paired" not in out
    shutil.rmtree(tmp_path / "two/artifacts/played")
    assert "the rollouts of two are not here" in " ".join(captrain(tmp_path, "compare", "one", "two")[1].split())


def test_two_folders_differ_in_settings_capabilities_and_rates(tmp_path: Path, captrain: Captrain) -> None:
    write_run(tmp_path / "one", 0.2, 0.6)
    write_run(tmp_path / "two", 0.3, 0.9)
    status, out, err = captrain(tmp_path, "compare", "one", "two")
    assert status == 0, err
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "0.2" in rows["selection.delta"] and "0.3" in rows["selection.delta"]
    assert "gap 0.200" in rows["check_first"] and "other" not in rows
    assert "+0.300" in rows["TRACE"] and "yes" in rows["TRACE"] and "no" in rows["base"]
    assert "machine" not in out and "do not play the same tasks" not in out


def test_two_commits_are_compared_and_different_tasks_are_noted(tmp_path: Path, captrain: Captrain) -> None:
    initialise(tmp_path)
    for seed, trace in ((0, 0.6), (1, 0.62)):
        write_run(tmp_path, 0.2, trace, seed)
        commit(tmp_path)
    status, out, err = captrain(tmp_path, "compare", "HEAD~1", "HEAD")
    assert status == 0, err
    assert "+0.020" in out and "do not play the same tasks" in out
    for name in ("nothing-like-it", "--output=x"):
        status, _, err = captrain(tmp_path, "compare", "HEAD", "--", name)
        assert status == 2 and "there is no run" in err


def test_a_missing_test_split_is_noted_and_a_broken_table_is_refused(tmp_path: Path, captrain: Captrain) -> None:
    write_run(tmp_path / "one", 0.2, 0.6)
    table = write_run(tmp_path / "two", 0.2, 0.6) / "results/evaluation/main.csv"
    table.write_text("method,label\nbase,base\n")
    status, _, err = captrain(tmp_path, "compare", "one", "two")
    assert status == 2 and "main.csv of two is not a whole table" in err
    whole = (tmp_path / "one/results/evaluation/main.csv").read_text()
    for part in (whole[:-1], whole[:-8], whole[: whole.rindex(",")] + "\n", whole.replace("0.", "o."), whole[:30]):
        table.write_text(part)
        status, out, err = captrain(tmp_path, "compare", "one", "two")
        assert status == 2 and not out and "main.csv of two is not a whole table" in err, part
    table.unlink()
    assert "two has not played the test split" in captrain(tmp_path, "compare", "one", "two")[1]


def test_the_interval_of_a_difference_of_independent_runs() -> None:
    first, second = Rate("a", 0.6, 0.5, 0.68), Rate("b", 0.4, 0.34, 0.5)
    assert difference(first, second) == pytest.approx((0.2, 0.2 - 0.2**0.5 / 10**0.5, 0.3), abs=1e-9)
