"""Time and memory against the number of rollouts: the benchmark of growth, and limits on memory.

Times are not measured here. Memory is: by counting live objects, or by tracing at two sizes.
"""

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.needs import further
from support.scripts import load_script
from support.warm import EXECUTABLE, warm_commands

from captrain import statistics
from captrain.capabilities import select, select_by_verdicts
from captrain.capabilities import selection as selection_rule
from captrain.capabilities.occasions import Vocabulary
from captrain.capabilities.text import says
from captrain.diagnosis import diagnose, publish_diagnosis
from captrain.diagnosis.diagnosis import DiagnosedLabels
from captrain.interop import read_logs
from captrain.interop.logs import document
from captrain.interop.logs.document import JsonDocument
from captrain.records import Rollout, Spool, Task, Usage, publication, publish
from captrain.reporting.pages import build, rollouts
from captrain.run import SelectionSettings
from captrain.statistics import Bootstrap

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "tests/logs/library.json"
LIMITS = SelectionSettings(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=200)


bench_growth = load_script("bench_growth")


def prepared(size: int, folder: Path) -> Path:
    """Make a chat log of this many rollouts with the benchmark's own code."""
    folder.mkdir()
    bench_growth.prepare_chats(size, folder)
    return folder / "log.jsonl"


def prepare_tau2(size: int, folder: Path) -> None:
    """Write the same rollouts as one tau2 result file: tasks with gold actions, and simulations."""
    rows, names = bench_growth.shipped_rows(), {str(row["task_id"]) for _, row in bench_growth.copies(size)}
    with (folder / "log.json").open("w") as file:
        file.write('{"info": {"environment_info": {"domain_name": "desk"}}, "tasks": [')
        for number, name in enumerate(sorted(names)):
            gold = rows[int(name.removeprefix("task-")) % len(rows)]
            file.write(("," if number else "") + json.dumps({"id": name, "evaluation_criteria": criteria(gold)}))
        file.write('], "simulations": [')
        for number, row in bench_growth.copies(size):
            file.write(("," if number else "") + json.dumps(simulation(row)))
        file.write("]}")


def criteria(row: dict[str, object]) -> dict[str, object]:
    """Convert the gold actions of an example rollout to tau2's form."""
    calls = [
        call["function"] for message in objects(row["reference"]) for call in objects(message.get("tool_calls", []))
    ]
    actions = [{"name": call["name"], "arguments": json.loads(str(call["arguments"]))} for call in calls]
    return {"actions": actions, "communicate_info": []}


def objects(value: object) -> list[dict]:
    """Check that a value is a JSON list of objects."""
    assert isinstance(value, list)
    return value


def simulation(row: dict[str, object]) -> dict[str, object]:
    """Convert an example rollout to a simulation of tau2."""
    messages = []
    for message in objects(row["messages"]):
        calls = [call["function"] | {"id": call["id"]} for call in message.get("tool_calls", [])]
        result = {"id": message["tool_call_id"]} if message["role"] == "tool" else {}
        messages.append({"role": message["role"], "content": message["content"], "tool_calls": calls or None, **result})
    names = {key: row[key] for key in ("task_id", "trial")}
    return {**names, "termination_reason": "agent_stop", "reward_info": {"reward": row["reward"]}, "messages": messages}


def test_exponents_are_slopes_over_the_larger_half_of_the_sizes() -> None:
    sizes = bench_growth.sizes(3200, 6)
    assert sizes == [100, 200, 400, 800, 1600, 3200]
    costs = [bench_growth.Cost(size, 5.0 if size < 800 else size**2 / 1e4, 200.0) for size in sizes]
    assert bench_growth.exponent(costs, lambda cost: cost.seconds) == pytest.approx(2)
    assert bench_growth.exponent(costs, lambda cost: cost.memory) == pytest.approx(0)


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("name", bench_growth.MEASURES)
def test_every_growth_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTABLE, python := str(warm_commands() / "python"))
    monkeypatch.setattr(sys, "executable", python)
    cost = bench_growth.measure_once(bench_growth.MEASURES[name], 10)
    assert cost.size == 10 and cost.seconds > 0 and cost.memory > 0


@pytest.mark.needs("minutes")
def test_the_benchmark_prints_a_row_of_what_it_measures() -> None:
    python = str(warm_commands() / "python")
    command = [python, "scripts/bench_growth.py", "--only", "chat log", "--largest", "20", "--steps", "2"]
    environment = {**os.environ, EXECUTABLE: python}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [(name, first, last, *numbers)] = rows(done.stdout)
    assert (name, int(first), int(last)) == ("chat log, rollouts", 10, 20)
    assert all(math.isfinite(float(number)) for number in numbers)


def test_without_a_choice_it_measures_every_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_growth, "measure_once", lambda _, size: bench_growth.Cost(size, 1.0 * size, 200.0))
    bench_growth.main(["--largest", "40", "--steps", "3"])
    printed = rows(capsys.readouterr().out)
    assert [row[0] for row in printed] == [f"{name}, rollouts" for name in bench_growth.MEASURES]
    assert {tuple(map(float, row[1:3])) for row in printed} == {(20, 40)} and {row[5] for row in printed} == {"1.00"}


def rows(printed: str) -> list[list[str]]:
    """Return the cells of a table without its header."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]


def test_a_measure_that_fails_ends_the_benchmark_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = bench_growth.Measure("chat log", bench_growth.prepare_chats, ("diagnose", "none"))
    with pytest.raises(SystemExit, match="chat log at 2: exit status 2"):
        bench_growth.measure_once(broken, 2)


def test_records_are_published_as_they_come_and_spooled_ones_are_read_one_by_one(tmp_path: Path) -> None:
    most = 0
    forget_the_past()

    def rollouts() -> Iterator[Rollout]:
        nonlocal most
        for number in range(50):
            most = max(most, alive())
            task = Task(id=f"t{number}", split="discovery", data={})
            yield Rollout(
                id=f"r{number}",
                environment="e",
                task=task,
                trial=0,
                purpose="diagnosis",
                policy="p",
                messages=[],
                outcome="failed",
            )

    publish(tmp_path / "a.jsonl", rollouts())
    spool = Spool(Rollout)
    spooled = [spool.add(rollout) for rollout in rollouts()]
    assert len(spooled) == 50
    for twice in range(2):
        for number, rollout in enumerate(spool):
            most = max(most, alive())
            assert rollout.id == f"r{number}", twice
    publish(tmp_path / "b.jsonl", spool)
    assert len(spool) == 50 and most < 5
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_spooled_records_of_any_length_come_back_however_little_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "CHUNK", 16)
    numbers = [1, 10**9, 10**80, 2]
    spool = Spool(Usage)
    for number in numbers:
        spool.add(Usage(prompt_tokens=number))
    assert [record.prompt_tokens for record in spool] == numbers
    assert "".join(spool.lines) == "".join(f'{{"prompt_tokens":{number}}}\n' for number in numbers)


def test_spooled_records_leave_no_file_behind_whatever_ends_the_process(tmp_path: Path) -> None:
    if not (child := os.fork()):
        try:
            tempfile.tempdir = str(tmp_path)
            spool = Spool(Usage)
            spool.add(Usage(prompt_tokens=1))
            for record in spool:  # reading while it grows: neither side loses its place
                if len(spool) < 3:
                    spool.add(Usage(prompt_tokens=record.prompt_tokens + 1))
            if [record.prompt_tokens for record in spool] == [1, 2, 3]:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not [*tmp_path.iterdir()]


def forget_the_past() -> None:
    """Exclude everything that is in memory now from what `alive` counts."""
    gc.collect()
    gc.freeze()


def alive() -> int:
    """Count the new rollouts in memory."""
    return sum(type(thing) is Rollout for thing in gc.get_objects())


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 10])
def test_a_document_read_in_pieces_is_the_document(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "CHUNK", chunk)
    value = json.loads(LIBRARY.read_text()) | {"number": 123456789, "text": 'é"\\ \u2028 \U0001f600', "none": None}
    value |= {"empty": [], "last": -1.5e10}
    path = tmp_path / "a.json"
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False), "\ufeff" + json.dumps(value)):
        path.write_text(text, encoding="utf-8")
        whole = JsonDocument(path, ("simulations", "empty", "number"))
        lists = {name: [*whole.elements(name)] for name in ("simulations", "empty")}
        assert whole.members | lists == value
        assert whole.counts == {"simulations": len(value["simulations"]), "empty": 0}
    path.write_text(json.dumps([value, [], 1.5, *value["simulations"]]))
    assert [*JsonDocument(path).elements(document.ARRAY)] == json.loads(path.read_text())


@pytest.mark.parametrize(
    "text", ['{"simulations": [1, 2', '{"simulations": [1 2]}', '{"a": 1} 2', '{"a" 1}', "{1: 2}", ""]
)
def test_a_damaged_document_is_refused_before_anything_is_taken_from_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        JsonDocument(tmp_path / "a.json", ("simulations",))
    (tmp_path / "a.json").write_text(f"[{text}, {text}]")
    with pytest.raises(ValueError):
        JsonDocument(tmp_path / "a.json")


def test_lines_may_be_long(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in prepared(3, tmp_path / "log").read_text().splitlines()]
    rows[0]["messages"][0]["content"] += " and so on" * document.CHUNK
    for end in ("", "\n"):
        (tmp_path / "rows.json").write_text(" \n" + "\n".join(map(json.dumps, rows)) + end)
        assert len(read_logs([tmp_path / "rows.json"]).rollouts) == 3


def test_a_vocabulary_leaves_no_value_out_that_a_text_says() -> None:
    draw = random.Random(0)
    pieces = ["#W12", "w12", "3.50", "$3.50", "3", "50", "é", "ÉTÉ", "a-b", "-", "--", "order 7", "#12", "İ", "_x", "x"]
    values = [*dict.fromkeys(" ".join(draw.choices(pieces, k=draw.randint(1, 3))) for _ in range(300))]
    vocabulary = Vocabulary(values)
    for _ in range(300):
        text = draw.choice(["", "so: "]) + draw.choice([" ", ", ", "", "#"]).join(draw.choices(pieces, k=6))
        near = vocabulary.near(text)
        assert [value for value in near if says(text, value)] == [value for value in values if says(text, value)]
        assert len(near) < len(values)


def test_the_rows_that_a_diagnosis_writes_select_what_its_verdicts_select(tmp_path: Path) -> None:
    labels = diagnose(read_logs([prepared(120, tmp_path / "log")]), LIMITS, runs=10, count=4, seed=0).labels
    assert labels is not None
    by_verdicts = select_by_verdicts(labels.verdicts, labels.candidates, LIMITS, 4, 0)
    rows = [DiagnosedLabels.model_validate_json(line) for line in labels.lines]
    assert by_verdicts.capabilities and by_verdicts == select(rows, labels.candidates, LIMITS, 4, 0)


def test_resamples_are_the_same_however_many_are_drawn_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    streamed = diagnose(read_logs([prepared(80, tmp_path / "log")]), LIMITS, runs=10, count=4, seed=0).labels
    assert streamed is not None
    values = np.random.default_rng(0).integers(5, size=(2, 80)) / 4
    values[1, 3] = math.nan
    whole = select_by_verdicts(streamed.verdicts, streamed.candidates, LIMITS, 4, 0)
    intervals = [Bootstrap(80, 500, 0.95, 7).interval(row) for row in values]
    monkeypatch.setattr(selection_rule, "CHUNK", 250)
    monkeypatch.setattr(statistics, "CHUNK", 250)
    assert select_by_verdicts(streamed.verdicts, streamed.candidates, LIMITS, 4, 0) == whole
    assert Bootstrap(80, 500, 0.95, 7).intervals([*values]) == intervals


@pytest.mark.needs("minutes")
def test_the_memory_of_a_diagnosis_does_not_grow_with_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selection_rule, "CHUNK", 1 << 12)
    monkeypatch.setattr(statistics, "CHUNK", 1 << 12)
    for module in ("diagnosis", "report"):
        monkeypatch.setattr(f"captrain.diagnosis.{module}.LIST_LENGTH", 50)
    publish_diagnosis(  # loads the imports before measuring
        diagnose(read_logs([prepared(20, tmp_path / "20")]), LIMITS, runs=10, count=4, seed=0), tmp_path / "out-20"
    )
    peaks = {}
    for size in (110, 170):
        path = prepared(size, tmp_path / str(size))
        tracemalloc.start()
        diagnosis = diagnose(read_logs([path]), LIMITS, runs=10, count=4, seed=0)
        publish_diagnosis(diagnosis, tmp_path / f"out-{size}")
        peaks[size] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(diagnosis.logs.rollouts) == size
        del diagnosis
    # A rollout takes about 20 kB, so 60 more take 1 MB; a byte for each candidate and run takes 3 kB. The report lists
    # the first fifty failures with their causes, and both logs have that many.
    assert peaks[170] - peaks[110] < 150_000


@pytest.mark.parametrize("shape", further(["tau2's document in one line", "an array in one line", "an array of lines"]))
def test_a_log_is_never_in_memory_whole_however_its_lines_are_broken(shape: str, tmp_path: Path) -> None:
    read_logs([prepared(10, tmp_path / "small")])  # loads the imports before measuring
    if "tau2" in shape:
        prepare_tau2(1500, tmp_path)
        path = tmp_path / "log.json"
    else:
        rows = prepared(1000, tmp_path / "lines").read_text().splitlines()
        (path := tmp_path / "rows.json").write_text("[" + (", " if "one" in shape else ",\n").join(rows) + "]")
    tracemalloc.start()
    logs = read_logs([path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(logs.rollouts) == (1500 if "tau2" in shape else 1000) and not logs.unread
    assert peak < 4_000_000  # 2 MB is one read; parsing either file whole takes 8 MB or more


def test_what_a_diagnosis_leaves_out_is_counted_and_the_first_of_it_listed(tmp_path: Path) -> None:
    path = prepared(40, tmp_path / "log")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    silent = [{"role": "user", "content": "###STOP###"}, {"role": "assistant", "content": "Hello?"}]
    faults = [
        json.dumps(row | {"messages": silent, "reward": 0.0, "task_id": f"fault-{number}"})
        for number, row in enumerate(rows * 6)
    ]
    path.write_text("\n".join([*map(json.dumps, rows), *faults, *["{"] * 230]) + "\n")
    publish_diagnosis(diagnose(read_logs([path]), LIMITS, runs=2, count=4, seed=0), tmp_path / "out")
    report = (tmp_path / "out/report.md").read_text()
    assert "240 rollouts left out of the comparison because of an error" in report
    assert report.count("the user stopped before it stated a request") == 200 and "- and 40 more" in report
    assert "230 entries could not be read" in report and "- and 30 more" in report


def test_a_report_has_few_rollouts_in_memory_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most, calls, add = 0, 0, rollouts.Shard.add

    def counted(shard: rollouts.Shard, rollout: Rollout, marks: list[rollouts.Mark]) -> None:
        nonlocal most, calls
        calls += 1
        most = max(most, alive() if calls % 40 == 0 else 0)
        add(shard, rollout, marks)

    monkeypatch.setattr(rollouts.Shard, "add", counted)
    bench_growth.prepare_project(400, tmp_path)
    forget_the_past()
    build(tmp_path, tmp_path / "report")
    text = (tmp_path / "report/data/rows.js").read_text()
    table = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    assert len(table["columns"]["id"]) == 400 and len({*table["columns"]["id"]}) == 400
    # The examples on each capability's page, and the rollout being written.
    assert 0 < most < 80
    shutil.rmtree(tmp_path / "report")
