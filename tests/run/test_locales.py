"""captrain reads and writes UTF-8 under every locale."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPTRAIN = Path(sys.executable).with_name("captrain")
WORDS = "Straße, ığdır, Ünïted проект 東京 🚲"
LOG = [
    {
        "messages": [{"role": "user", "content": f"{WORDS} {i}"}, {"role": "assistant", "content": "Fertig."}],
        "reward": i % 2,
        "task_id": f"Größe {i // 2}",
    }
    for i in range(4)
]
COMMANDS = {
    "logs": [["diagnose", "größe.jsonl", "--out", "дело"], ["init", "ordner-ä"]],
    "logs/ordner-ä": [["run", "compose"]],
    ROOT: [["results"], ["report"]],
}


def outputs(folder: Path, variables: dict[str, str]) -> dict[str, bytes]:
    """The bytes of all that the commands write and print, in a new folder."""
    log = folder / "logs/größe.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in LOG), encoding="utf-8")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    contents = dict[str, bytes]()
    for place, commands in COMMANDS.items():
        for command in commands:
            out = ["--out", str(folder / "bericht-ü")] if command == ["report"] else []
            done = subprocess.run(
                [CAPTRAIN, *command, *out],
                cwd=folder / place,
                env=inherited | variables,
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr.decode()
            if command != ["run", "compose"]:  # it prints its seconds
                contents[" ".join(command)] = done.stdout.replace(os.fsencode(folder), b"")
    for path in folder.rglob("*"):
        if path.is_file() and not {".git", ".cache"} & {*path.parts}:
            contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_commands_run_without_any_locale(tmp_path: Path) -> None:
    contents = outputs(tmp_path, BARE)
    assert WORDS.encode() in contents["logs/дело/rollouts.jsonl"]


@pytest.mark.needs("localedef", "minutes")
def test_commands_write_the_same_bytes_under_every_locale(tmp_path: Path) -> None:
    expected, environments = outputs(tmp_path / "utf8", {"LC_ALL": "C.UTF-8"}), [BARE]
    encodings = {"de_DE": "ISO-8859-1", "tr_TR": "ISO-8859-9", "zh_CN": "GB18030", "ja_JP": "EUC-JP"}
    for name, encoding in encodings.items():
        target = tmp_path / f"{name}.{encoding}"
        subprocess.run(["localedef", "-i", name, "-f", encoding, target], check=True, capture_output=True)
        environments.append({"LC_ALL": target.name, "LOCPATH": str(tmp_path)})
    for number, variables in enumerate(environments):
        assert outputs(tmp_path / f"{number:04}", variables) == expected  # paths of one length wrap alike
