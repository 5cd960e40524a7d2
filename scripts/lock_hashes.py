"""Writes the hashes in the lock files after a pin has changed.

Each pin gets the hashes of all files that the package index has for that version, on any platform. Existing hashes of
the same version stay, and those of wheels named on the command line are added, because torch's CPU wheels come from
another index. Pins for one platform stay. Needs `uv` on the path.
"""

import argparse
import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-gpu.lock", "requirements-vllm.lock", "requirements-vllm-cpu.lock")
PYTHON = "3.11.7"
PIN = re.compile(r"^([\w.-]+)===?([^\s;\\]+)(.*)$")
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def plain(name: str) -> str:
    """Normalise the name of a distribution as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_in(text: str) -> dict[tuple[str, str], set[str]]:
    """Collect the hashes of a lock file by name and version."""
    table: dict[tuple[str, str], set[str]] = {}
    hashes = set[str]()
    for line in text.splitlines():
        if match := PIN.match(line):
            hashes = table.setdefault((plain(match[1]), match[2]), set())
        hashes |= {*HASH.findall(line)}
    return table


def hashes_of_files(paths: list[Path]) -> dict[tuple[str, str], set[str]]:
    """Hash wheels by name and version, without the local build label."""
    return {
        (plain(name), version.partition("+")[0]): {f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}
        for path in paths
        for name, version in [path.name.split("-")[:2]]
    }


def locked(text: str, sources: list[Mapping[tuple[str, str], set[str]]]) -> str:
    """Return a lock file with the hashes from all sources."""
    lines, is_marked = list[str](), False
    for line in text.splitlines():
        match = PIN.match(line)
        is_marked = ";" in match[3] if match else is_marked and bool(HASH.search(line))
        if is_marked:
            lines.append(line)
        elif match:
            key = plain(match[1]), match[2]
            hashes = sorted(set[str]().union(*(source.get(key, set()) for source in sources)))
            if not hashes:
                raise SystemExit(f"there is no hash for {line}")
            lines.append(" \\\n    ".join([line.rstrip(" \\"), *(f"--hash={value}" for value in hashes)]))
        elif not HASH.search(line):
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the hashes of all lock files: from the index, the files themselves, and the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, help="files whose hashes are taken, too")
    wheels = hashes_of_files(parser.parse_args().wheels)
    options = ("--no-deps", "--generate-hashes", "--no-annotate", "--no-header", "--python-version", PYTHON)
    for path in map(Path, LOCKS):
        command, text = ["uv", "pip", "compile", str(path), *options], path.read_text(encoding="utf-8")
        index = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
        path.write_text(locked(text, [hashes_in(index), hashes_in(text), wheels]), encoding="utf-8")


if __name__ == "__main__":
    main()
