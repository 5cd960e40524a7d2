"""Output of a stage in the terminal and in its log."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

STAGE = """
import logging, os, sys, warnings
from pathlib import Path
from captrain.run import entry_point
from captrain.records import publish_text

@entry_point
def main():
    warnings.warn("an option is deprecated", FutureWarning)
    logging.getLogger("library").warning("a default will change")
    if os.fork() == 0:
        warnings.warn("from a worker")
        os._exit(0)
    os.wait()
    publish_text(Path("results/small.json"), "{}")
    return SAID

main()
"""


def ended(folder: Path, said: str) -> subprocess.CompletedProcess[str]:
    """A stage `small` that warns, writes a file, and returns a text."""
    script = folder / "small.py"
    script.write_text(STAGE.replace("SAID", said))
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True
    )


def test_a_stage_ends_in_one_line_with_seconds_and_outputs(tmp_path: Path) -> None:
    words = ended(tmp_path, "'four of five'").stdout.split()
    assert words[0] == "small" and float(words[1]) >= 0 and words[2:] == ["s", "four", "of", "five"]
    assert ended(tmp_path, "None").stdout.endswith(" s   results/small.json\n")


def test_library_warnings_go_to_the_stages_log(tmp_path: Path) -> None:
    done = ended(tmp_path, "None")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
    log = (tmp_path / ".cache/logs/small.log").read_text()
    assert all(text in log for text in ("an option is deprecated", "a default will change", "from a worker"))


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_is_no_fault(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\nfrom captrain.run import entry_point\n"
        "def main():\n    print('out')\n    print('err', file=sys.stderr)\nentry_point(main, stage=False)()\n",
        encoding="utf-8",
    )
    command = f"PYTHONPATH={SRC} {sys.executable} {script} {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_removed_current_folder_is_one_message(tmp_path: Path) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m captrain.cli.app diagnose a.jsonl"
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the current folder was removed\n  remedy: change to a folder that exists\n"


def test_what_is_printed_holds_no_key_of_the_environment_and_controls_no_terminal(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        """
import logging, sys, threading
from captrain.run import entry_point

def fail():
    raise RuntimeError("thread abc-secret-123")

def main():
    print("out abc-secret-123 \\x1b[2J \\u202e")
    logging.getLogger("library").error("log abc-secret-123")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise ValueError("bug abc-secret-123 YWJjLXNlY3JldC0xMjM=")

entry_point(main, stage=False)()
""",
        encoding="utf-8",
    )
    env = {"PYTHONPATH": str(SRC), "MY_CREDENTIAL": "abc-secret-123"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8")
    said = done.stdout + done.stderr
    assert done.returncode == 70 and "secret" not in said and "YWJjLXNl" not in said
    assert all(f"{place} [redacted]" in said for place in ("out", "log", "thread", "bug"))
    assert "\\x1b[2J \\u202e" in said and "\x1b" not in said
