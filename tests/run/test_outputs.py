"""Outputs of commands never replace files of the user."""

import json
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
