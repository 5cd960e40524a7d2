"""`captrain check-benchmark` on a benchmark that is sound, and on the same with one thing wrong."""

from importlib.resources import files
from pathlib import Path

import pytest
from support.finished import Captrain

from captrain import contract
from captrain.contract import Target, tool_call
from captrain.errors import EnvironmentFault
from captrain.projects import check_benchmark

SOUND = files("captrain").joinpath("projects/templates/calendar_desk.py.txt").read_text()
FAULTS = {
    "raises": (
        "        meeting = arguments.get(",
        "        meeting = arguments['meeting'] and arguments.get(",
        ["step on calendar/", "raised KeyError: 'meeting'", "calendar_desk.py:@"],
    ),
    "other_type": (
        "            return [], True\n",
        "            return None\n",
        ["step on", "returned 'None'", "return (messages, over)"],
    ),
    "no_score": ('"reward": min(parts.values())', '"reward": 3', ["score on", "is no score", "from 0 to 1"]),
    "not_deterministic": (
        'random.Random(f"{split}-{index}")',
        "random.Random()",
        ["tasks on split discovery", "are others when asked again"],
    ),
    "hash": (
        'random.Random(f"{split}-{index}")',
        'random.Random(hash(f"{split}-{index}"))',
        ["tasks: are others in another process"],
    ),
    "splits_mixed": (
        'random.Random(f"{split}-{index}")',
        'random.Random(f"{index}")',
        ["tasks of test are those of discovery under other ids"],
    ),
    "wrong_split": (
        '"split": split, "data"',
        '"split": "training", "data"',
        ["is of split 'training', asked was 'discovery'", "splits never mix"],
    ),
    "never_ends": (
        "        self.turns += 1\n",
        "        self.turns += 1\n        while self.turns > 2:\n            pass\n",
        ["step on", "did not return within 0.3 s", "calendar_desk.py:"],
    ),
    "prints": (
        "        self.turns += 1\n",
        "        self.turns += 1\n        print('turn')\n",
        ["prints to stdout: 'turn'"],
    ),
    "exits": ("        self.turns += 1\n", "        raise SystemExit(3)\n", ["step on", "raised SystemExit: 3"]),
    "changes_the_task": (
        "        return Calendar(task[",
        "        task['data']['kind'] = 'x'\n        return Calendar(task[",
        ["open on", "changes the task it is given"],
    ),
    "reference_fails": (
        'return [*messages, {"role": "assistant", "content": DONE}]',
        'return [*messages, {"role": "assistant", "content": "Bye."}]',
        ["reference on", "scores 0.0, success False"],
    ),
    "no_json": ('"named": rng.random() < 0.8}', '"named": {1, 2}}', ["tasks on split", "is no task", "plain JSON"]),
    "no_schema": ('"parameters": schema}}', '"parameters": None}}', ["tools:", "is no function schema"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_one_problem_with_method_place_and_remedy(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, phrases = FAULTS[fault]
    assert before in SOUND
    folder = tmp_path / f"desk_{fault}"
    folder.mkdir()
    (folder / "calendar_desk.py").write_text(SOUND.replace(before, after))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    report = check_benchmark(f"desk_{fault}.calendar_desk:CalendarDesk", tasks=6, limit=0.3)
    texts = [str(problem) for problem in report.problems]
    line = 1 + SOUND[: SOUND.index(before)].count("\n")
    phrases = [phrase.replace("@", str(line)) for phrase in phrases]
    assert any(all(phrase in text for phrase in phrases) for text in texts), texts
    assert len(texts) <= 4


def test_the_command_says_so_and_exits_with_one(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "sound_desk.py").write_text(SOUND)
    status, out, err = captrain(tmp_path, "check-benchmark", "sound_desk:CalendarDesk", "theirs=0.4", "--tasks", "4")
    assert status == 0, out + err
    assert "mean reward of reference: 1.00 of 12" in out and "calendar: keeps the contract" in out
    (tmp_path / "odd_desk.py").write_text(SOUND.replace('"success": all(', '"success": sum('))
    status, out, _ = captrain(tmp_path, "check-benchmark", "odd_desk:CalendarDesk", "--tasks", "4")
    assert status == 1 and "score on calendar/" in out and "remedy: return" in out
    status, _, err = captrain(tmp_path, "check-benchmark", "no_desk:CalendarDesk")
    assert status == 2 and "there is no module no_desk" in err


@pytest.mark.parametrize("answer", ["None", "([{'role': 'assistant', 'content': ''}], False)", "('text', True)"])
def test_in_the_pipeline_an_answer_of_another_type_names_method_and_task(answer: str) -> None:
    namespace: dict[str, type] = {}
    exec(SOUND.replace("            return [], True\n", f"            return {answer}\n"), namespace)
    target = Target(namespace["CalendarDesk"](), "calendar_desk.py", "")
    [task] = target.tasks("discovery", 1)
    with pytest.raises(EnvironmentFault, match=f"step on {task.id}"):
        target.play(
            task, [tool_call("get_meeting", {"meeting": "M10"}), {"role": "assistant", "content": "It is done."}]
        )


def test_in_the_pipeline_a_call_that_never_ends_names_method_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, type] = {}
    endless = "        while True:\n            try: pass\n            except Exception: pass\n"
    exec(SOUND.replace("        self.turns += 1\n", f"        self.turns += 1\n{endless}"), namespace)
    target = Target(namespace["CalendarDesk"](), "calendar_desk.py", "")
    [task] = target.tasks("discovery", 1)
    monkeypatch.setattr(contract, "CALL_LIMIT", 0.2)
    with pytest.raises(EnvironmentFault, match=f"did not return within 0.2 s from step on {task.id}"):
        target.play(task, [{"role": "assistant", "content": "It is done."}])
