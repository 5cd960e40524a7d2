"""Output of a stage in the terminal and in its log."""

import subprocess
import sys
from pathlib import Path

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
