"""The commands on the repository's pages, and their output."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.waiting import PATIENCE
from support.warm import warm_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run here: ([^\n]*) -->\n)?^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
"""A shell fence. A comment on the line before says why tests do not run its commands; readers do not see it."""


@dataclass(frozen=True)
class PageCommand:
    """A command on a page. reason: why it is not run, or ""."""

    page: str
    line: str
    reason: str = ""


def commands_of(page: Path) -> list[PageCommand]:
    """List the commands in a page's shell fences, in order, without comments."""
    commands: list[PageCommand] = []
    for reason, fence in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in fence.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                commands.append(PageCommand(page.name, shlex.join(words), reason))
    return commands


def sentences_of(text: str) -> list[str]:
    """List the sentences of a page's paragraphs and lists, without code, tables, headings and comments."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->|^ *\|.*?$|^#.*?$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(?:[-*>]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|(?<=\])\([^)]*\)|[*\[\]]", "", text)
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    sentences = [sentence for each in paragraphs for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`\"])", each)]
    return [sentence for sentence in sentences if len(sentence.split()) > 3]


def run_command(line: str, folder: Path, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """Run a page's command in a folder, with the programs of this environment."""
    words = shlex.split(line.removeprefix(".venv/bin/"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(warm_commands()), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": str(columns),
        "DVC_NO_ANALYTICS": "1",
    }
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def printed_diagnosis(out: Path) -> str:
    """Run `captrain diagnose` on the included example and return its output without the line about the report."""
    command = f"captrain diagnose docs/examples/servicedesk.jsonl --out {shlex.quote(str(out))}"
    *printed, _ = run_command(command, ROOT, columns=200).stdout.splitlines()
    return "\n".join(line.rstrip().replace(str(out), "diagnosis") for line in printed)
