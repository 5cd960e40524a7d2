"""Outputs of commands never replace files of the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.records import publish_text
from captrain.run import require_folder, user_outputs

CHATS = [
    {"messages": [{"role": "user", "content": f"Task {i}"}, {"role": "assistant", "content": "Done."}], "reward": i % 2}
    for i in range(4)
]


def chats(folder: Path) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return path


def test_outputs_are_moved_together_and_replace_earlier_ones(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    for text in ("first", "second"):
        with user_outputs(out, ["report.md"]) as aside:
            publish_text(aside / "report.md", text)
            publish_text(aside / "figures/a.txt", text)
        assert (out / "report.md").read_text() == (out / "figures/a.txt").read_text() == text
    assert sorted(path.name for path in out.iterdir()) == [".captrain-outputs.json", "figures", "report.md"]


@pytest.mark.parametrize("place", ["report.md", "figures/a.txt"])
def test_a_users_file_is_never_replaced_and_nothing_is_moved(tmp_path: Path, place: str) -> None:
    mine = tmp_path / place
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    refusal = pytest.raises(UserError, match="exists, and captrain did not write it")
    with refusal, user_outputs(tmp_path) as aside:
        publish_text(aside / "report.md", "captrain's")
        publish_text(aside / "figures/a.txt", "captrain's")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine] and mine.read_text() == "mine"


def test_a_changed_output_belongs_to_the_user(tmp_path: Path) -> None:
    with user_outputs(tmp_path) as aside:
        publish_text(aside / "report.md", "captrain's")
    (tmp_path / "report.md").write_text("captrain's, with my notes")
    with pytest.raises(UserError, match="report.md exists"), user_outputs(tmp_path, ["report.md"]):
        raise AssertionError("no work is done for what cannot be put in place")


KILLED = """
import os, shutil, sys
from pathlib import Path
from captrain.records import publish_text
from captrain.run import user_outputs
out, count = Path(sys.argv[1]), int(sys.argv[2])

def watch(event, arguments):
    global count
    if event in ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "ctypes.dlsym"):
        count -= 1
        if not count:
            os._exit(9)

with user_outputs(out, ["report.md", "old.txt", "new.txt"]) as aside:
    for name in ("report.md", "new.txt"):
        publish_text(aside / name, "second")
    sys.addaudithook(watch)
"""


def test_a_kill_at_any_time_leaves_all_old_files_or_all_new_ones_and_those_of_the_user(tmp_path: Path) -> None:
    old, new = {"report.md": "first", "old.txt": "first"}, {"report.md": "second", "new.txt": "second"}
    mine, states, out = {"mine.txt": "mine", "notes/a.txt": "mine"}, list[bool](), tmp_path
    for count in range(1, 200, 3):
        out = tmp_path / str(count) / "out"
        with user_outputs(out) as aside:
            for name, text in old.items():
                publish_text(aside / name, text)
        for name, text in mine.items():
            publish_text(out / name, text)
        done = subprocess.run([sys.executable, "-c", KILLED, str(out), str(count)], check=False)
        paths = [path for path in out.rglob("*") if path.is_file() and path.name != ".captrain-outputs.json"]
        found = {str(path.relative_to(out)): path.read_text(encoding="utf-8") for path in paths}
        assert found in ({**old, **mine}, {**new, **mine}), count
        assert {*json.loads((out / ".captrain-outputs.json").read_text(encoding="utf-8"))} == found.keys() - mine.keys()
        states.append("new.txt" in found)
        if done.returncode == 0:
            break
    assert states == sorted(states) and not states[0] and states[-1] and len(states) > 5
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_of_a_running_one(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", "with user_outputs(Path(sys.argv[1])): os._exit(9)"
    start = "import os, sys\nfrom pathlib import Path\nfrom captrain.run import user_outputs\n"
    for place in (out, tmp_path):  # the second is the current folder, which cannot be renamed
        subprocess.run([sys.executable, "-c", start + killed, str(place)], cwd=tmp_path, check=False)
    # Of a version that named the folder by its process: another process may have the same number.
    (tmp_path / f".out.{os.getpid()}.tmp").mkdir()
    left = {path.name for path in tmp_path.iterdir()}
    with user_outputs(out) as running, user_outputs(out) as aside:
        assert {path.name for path in tmp_path.iterdir()} - left == {running.name, aside.name}
        assert len([*tmp_path.glob(".out.*")]) == 3 and len([*tmp_path.glob(".captrain-*")]) == 1
    with user_outputs(tmp_path):
        pass
    assert not [*tmp_path.glob(".captrain-????????.tmp")]


def test_the_last_of_two_that_write_at_the_same_time_wins(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with user_outputs(out, ["report.md"]) as slow:
        publish_text(slow / "report.md", "slow")
        slow.rename(kept := tmp_path / "kept")
        with user_outputs(out, ["report.md"]) as quick:
            publish_text(quick / "report.md", "quick")
        kept.rename(slow)
    assert (out / "report.md").read_text(encoding="utf-8") == "slow" and [*tmp_path.iterdir()] == [out]


def test_files_move_one_by_one_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("first", "second"):
        with user_outputs(Path("."), ["report.md", f"{text}.txt", "first.txt"]) as aside:
            publish_text(aside / "report.md", text)
            publish_text(aside / f"{text}.txt", text)
    assert sorted(path.name for path in Path.cwd().iterdir()) == [".captrain-outputs.json", "report.md", "second.txt"]


def test_a_failed_command_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError), user_outputs(tmp_path / "out") as aside:
        publish_text(aside / "half.txt", "half")
        raise ValueError
    assert not [*tmp_path.iterdir()]


def test_a_deleted_current_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some file systems answer like this there.
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    with pytest.raises(UserError, match="^. is not a folder"):
        require_folder(Path("out"))


def test_a_diagnosis_does_not_replace_a_users_report(tmp_path: Path, captrain) -> None:
    (tmp_path / "report.md").write_text("my notes")
    status, _, err = captrain(tmp_path, "diagnose", str(chats(tmp_path)), "--out", ".")
    assert status == 2 and "report.md exists" in err and (tmp_path / "report.md").read_text() == "my notes"
    (tmp_path / "file").write_text("")
    status, _, err = captrain(tmp_path, "diagnose", str(chats(tmp_path)), "--out", "file")
    assert status == 2 and err.splitlines()[0] == "error: file is not a folder"
