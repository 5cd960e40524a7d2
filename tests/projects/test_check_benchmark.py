"""`captrain check-benchmark` on a sound benchmark, and on variants with one fault."""

import inspect
import time
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.finished import Captrain
from support.needs import further

from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import EnvironmentFault
from captrain.projects.examination import ExaminedBenchmark

SOUND = files("captrain").joinpath("projects/templates/calendar_desk.py.txt").read_text()
FAULTS = {
    "raises": (
        "        meeting = arguments.get(",
        "        meeting = arguments['meeting'] and arguments.get(",
        ["calendar_desk.py:{here}: ", "raised KeyError: 'meeting' in step on calendar/", "do not raise"],
    ),
    "raises_in_a_library": (
        "        self.turns += 1\n",
        "        json.loads('{' * self.turns)\n        self.turns += 1\n",
        ["calendar_desk.py:{here}: ", "raised JSONDecodeError", "in step on calendar/", "do not raise"],
    ),
    "other_type": (
        "            return [], True\n",
        "            return None\n",
        ["calendar_desk.py:{step}: ", "returned 'None' from step on calendar/", "return (messages, over)"],
    ),
    "no_score": (
        '"reward": min(parts.values())',
        '"reward": 3 + len(messages)',
        ["calendar_desk.py:{score}: ", "scored calendar/", "keep rewards in [0, 1]"],
    ),
    "no_list": (
        '        return [*messages, {"role": "assistant", "content": DONE}]',
        "        return messages[0]['content'] if messages else ''",
        ["calendar_desk.py:{reference}: reference on", " is ''", "return the assistant messages"],
    ),
    "no_name": ('    name = "calendar"\n', "    name = 3\n", ["calendar_desk.py:{desk}: name is 3", "to a string"]),
    "not_deterministic": (
        'random.Random(f"{split}-{index}")',
        "random.Random()",
        ["calendar_desk.py:{tasks}: tasks on split discovery change when they are listed again", "random.Random(seed)"],
    ),
    "hash": (
        'random.Random(f"{split}-{index}")',
        'random.Random(hash(f"{split}-{index}"))',
        ["calendar_desk.py:{tasks}: tasks are others in another process", "no hash()"],
    ),
    "splits_mixed": (
        'random.Random(f"{split}-{index}")',
        'random.Random(f"{index}")',
        ["calendar_desk.py:{tasks}: tasks: ", "in test are also in discovery", "of each split different"],
    ),
    "wrong_split": (
        '"split": split, "data"',
        '"split": "training", "data"',
        ["calendar_desk.py:{tasks}: ", "of split training as discovery", "splits never mix"],
    ),
    "never_ends": (
        "        self.turns += 1\n",
        "        while self.turns >= 2: pass\n        self.turns += 1\n",
        ["calendar_desk.py:{here}: ", "did not return within 0.3 s from step on calendar/", "end every loop"],
    ),
    "exits": (
        "        self.turns += 1\n",
        "        raise SystemExit(3)\n",
        ["calendar_desk.py:{step}: step on calendar/", "ended the process (exit status 3)"],
    ),
    "reference_fails": (
        'return [*messages, {"role": "assistant", "content": DONE}]',
        'return [*messages, {"role": "assistant", "content": "Bye."}]',
        ["calendar_desk.py:{score}: reference on", "scores 0.0, success False"],
    ),
    "no_json": (
        '"named": rng.random() < 0.8}',
        '"named": {1, 2}}',
        ["calendar_desk.py:{tasks}: the data of task calendar/", "is not plain JSON"],
    ),
    "no_schema": (
        '"parameters": schema}}',
        '"parameters": None}}',
        ["calendar_desk.py:{desk}: tools: ", "is not a function schema"],
    ),
}


RICH = """

class Said(str):
    pass


class RichDesk(CalendarDesk):
    def open(self, task):
        episode = super().open(task)
        result = episode.result
        episode.result = lambda function: {**result(function), "content": Said("{}")}
        return episode

    def score(self, task, messages):
        said = [isinstance(message["content"], Said) for message in messages if message["role"] == "tool"]
        return {"reward": float(all(said)), "success": all(said)}
"""
"""A desk whose score depends on types that JSON does not keep."""


def line_of(text: str, phrase: str) -> int:
    """The line number of the first occurrence of a phrase."""
    return 1 + text[: text.index(phrase)].count("\n")


def problems_in(out: str) -> list[str]:
    """The problems that the command printed, each with its remedy."""
    return [f"{before} {line}" for before, line in pairwise(out.splitlines()) if line.startswith("  remedy: ")]


@pytest.mark.parametrize("fault", further(FAULTS, 6))
def test_what_is_wrong_is_one_message_with_line_method_task_and_remedy(
    fault: str, tmp_path: Path, captrain: Captrain
) -> None:
    before, after, phrases = FAULTS[fault]
    text = SOUND.replace(before, after)
    assert before in SOUND
    folder = tmp_path / f"desk_{fault}"
    folder.mkdir()
    (folder / "calendar_desk.py").write_text(text)
    target = f"desk_{fault}.calendar_desk:CalendarDesk"
    status, out, err = captrain(tmp_path, "check-benchmark", target, "--tasks", "6", "--limit", "0.3")
    lines = {name: line_of(text, f"def {name}(") for name in ("tasks", "open", "step", "score", "reference")}
    lines |= {"here": line_of(SOUND, before), "desk": line_of(text, "class CalendarDesk")}
    problems = problems_in(out)
    expected = [phrase.format(**lines) if ".py:" in phrase else phrase for phrase in phrases]
    expected[0] = f"desk_{fault}/{expected[0]}"
    assert status == 1 and any(all(phrase in problem for phrase in expected) for problem in problems), out + err
    assert problems[0].startswith(f"desk_{fault}/") and len(problems) <= 4
    assert str(tmp_path) not in out


def test_tasks_that_never_come_in_another_process_are_a_problem(
    tmp_path: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.projects.benchmark.START", 1 - 6 * 5)
    mark = tmp_path / "imported"
    first, others = f"if not pathlib.Path({str(mark)!r}).exists()", f"pathlib.Path({str(mark)!r}).touch()"
    wait = f"import pathlib, time\n{first}:\n    {others}\nelse:\n    time.sleep(600)\n"
    head, _, rest = SOUND.partition("\nclass ")
    (tmp_path / "desk.py").write_text(f"{head}\n{wait}\nclass {rest}")
    status, out, err = captrain(tmp_path, "check-benchmark", "desk:CalendarDesk", "--tasks", "2", "--limit", "5")
    [problem] = problems_in(out)
    assert status == 1 and "tasks do not come in another process within 1 s" in problem, out + err


def test_what_comes_later_of_a_benchmark_is_foreseen(tmp_path: Path, captrain: Captrain) -> None:
    """Missing references and low variety are reported with remedies, and are no problems."""
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / "desk.py").write_text(SOUND)
    status, out, _ = captrain(tmp_path, "check-benchmark", "desk:CalendarDesk")
    assert status == 0 and "structures of tasks: " in out and "references: " not in out
    (tmp_path / "bare.py").write_text(
        SOUND + "\n\nclass Bare(CalendarDesk):\n    def reference(self, task):\n        return []\n"
    )
    status, out, _ = captrain(tmp_path, "check-benchmark", "bare:Bare")
    assert status == 0 and "60 of 60 tasks have none" in out and "analyst=openai analyst.name=" in out
    (tmp_path / "wordy.py").write_text(SOUND.replace('"It is done."', '"Consider it settled."'))
    status, out, _ = captrain(tmp_path, "check-benchmark", "wordy:CalendarDesk")
    assert status == 0 and "60 of 60 references lose reward if their words change" in out.replace("\n", " ")


def test_a_fault_of_a_module_beside_the_benchmark_is_at_its_line_there(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "rooms_of_desk.py").write_text("def check(turns):\n    return 1 // (turns - 1)\n")
    text = SOUND.replace("        self.turns += 1\n", "        self.turns += 1\n        check(self.turns)\n")
    (tmp_path / "parted_desk.py").write_text(
        text.replace("import json\n", "import json\nfrom rooms_of_desk import check\n")
    )
    status, out, _ = captrain(tmp_path, "check-benchmark", "parted_desk:CalendarDesk", "--tasks", "2")
    assert status == 1
    [problem] = problems_in(out)
    assert problem.startswith("rooms_of_desk.py:2: ") and "raised ZeroDivisionError" in problem and "step on" in problem


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("        self.theirs = theirs\n", "        self.theirs = theirs / 0\n", "ZeroDivisionError"),
        ("class CalendarDesk:\n", "class CalendarDesk\n", "SyntaxError: expected ':'"),
        ("MEETINGS = [f", "MEETINGS = [unknown + f", "NameError: name 'unknown' is not defined"),
    ],
)
def test_what_cannot_be_built_is_named_by_its_line(
    before: str, after: str, reason: str, tmp_path: Path, captrain: Captrain
) -> None:
    name = f"unbuilt_{reason.partition(':')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(SOUND.replace(before, after))
    status, _, err = captrain(tmp_path, "check-benchmark", f"{name}:CalendarDesk")
    assert status == 2 and f"cannot be built: {name}.py:{line_of(SOUND, before)}: {reason}" in err


def test_the_command_says_so_and_exits_with_one(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "sound_desk.py").write_text(SOUND)
    status, out, err = captrain(tmp_path, "check-benchmark", "sound_desk:CalendarDesk", "theirs=0.4", "--tasks", "4")
    assert status == 0, out + err
    assert "mean reward of reference: 1.00 of 12" in out and "calendar: keeps the contract" in out
    (tmp_path / "odd_desk.py").write_text(SOUND.replace('"success": all(', '"success": sum('))
    status, out, _ = captrain(tmp_path, "check-benchmark", "odd_desk:CalendarDesk", "--tasks", "4")
    assert status == 1 and "scored calendar/" in out and "remedy: return" in out
    status, _, err = captrain(tmp_path, "check-benchmark", "no_desk:CalendarDesk")
    assert status == 2 and "there is no module no_desk" in err


@pytest.mark.parametrize("answer", ["None", "([{'role': 'assistant', 'content': ''}], False)", "('text', True)"])
def test_in_the_pipeline_an_answer_of_another_type_names_method_and_task(answer: str) -> None:
    namespace: dict[str, type] = {}
    exec(SOUND.replace("            return [], True\n", f"            return {answer}\n"), namespace)
    target = CheckedEnvironment(namespace["CalendarDesk"](), "calendar_desk.py", "")
    [task] = target.tasks("discovery", 1)
    with pytest.raises(EnvironmentFault, match=f"step on {task.id}"):
        target.play(
            task, [tool_call("get_meeting", {"meeting": "M10"}), {"role": "assistant", "content": "It is done."}]
        )


def test_in_the_pipeline_a_call_that_never_ends_names_method_and_task() -> None:
    namespace: dict[str, type] = {}
    endless = "        while True:\n            try: pass\n            except Exception: pass\n"
    exec(SOUND.replace("        self.turns += 1\n", f"        self.turns += 1\n{endless}"), namespace)
    target = CheckedEnvironment(namespace["CalendarDesk"](), "calendar_desk.py", "")
    [task] = target.tasks("discovery", 1)
    target.limit = 0.2
    with pytest.raises(EnvironmentFault, match=f"did not return within 0.2 s from step on {task.id}"):
        target.play(task, [{"role": "assistant", "content": "It is done."}])


def test_a_score_that_reads_more_than_json_holds_is_found_out(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "rich_desk.py").write_text(SOUND + RICH)
    status, out, _ = captrain(tmp_path, "check-benchmark", "rich_desk:RichDesk", "--tasks", "2")
    assert status == 1 and any(
        "scored calendar/" in problem or "reference on calendar/" in problem for problem in problems_in(out)
    ), out


AMID_A_MESSAGE = """
        import sys
        frame = sys._getframe()
        while frame.f_code.co_name != "_examine":
            frame = frame.f_back
        os.write(frame.f_locals["connection"].fileno(), b"\\0\\0\\1\\0half of it")
"""
"""Statements that cut off a message before the process ends."""


@pytest.mark.parametrize(("name", "before"), [("leaving", ""), ("interrupted", AMID_A_MESSAGE)])
def test_an_end_is_seen_at_once_though_what_was_started_goes_on(
    name: str, before: str, tmp_path: Path, captrain: Captrain
) -> None:
    leaving = f"        import os, time\n{before}        if not os.fork():\n            time.sleep(600)\n"
    leaving += "        os._exit(3)\n"
    (tmp_path / f"{name}.py").write_text(SOUND.replace("        self.turns += 1\n", leaving))
    began = time.monotonic()
    status, out, _ = captrain(tmp_path, "check-benchmark", f"{name}:CalendarDesk", "--tasks", "2", "--limit", "60")
    [problem] = problems_in(out)
    assert status == 1 and "step on calendar/" in problem and "ended the process (exit status 3)" in problem
    assert time.monotonic() - began < 120  # its patience is 500 s


def test_the_line_of_a_method_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Desk:
        name = "desk"

        def size(self, split: str) -> int:
            return 3

        def open(self, task: dict[str, Any]) -> None: ...

    read, lookups = inspect.getsourcelines, list[object]()

    def counted(member: Any) -> tuple[list[str], int]:
        lookups.append(member)
        return read(member)

    monkeypatch.setattr(inspect, "getsourcelines", counted)
    desk: Any = Desk()
    examined = ExaminedBenchmark(desk, "desk:Desk", 10, lambda _: None)
    assert [examined.size("test") for _ in range(3)] == [3, 3, 3]
    assert lookups == [Desk.size]
