"""Lock files: every version is pinned, and every file has its hash."""

import re
from pathlib import Path

import pytest

from captrain.benchmarks.installing import PACKAGES

ROOT = Path(__file__).parents[1]
PIN = r"[\w.-]+===?[^\s;\\]+"


@pytest.mark.parametrize("lock", sorted(ROOT.glob("requirements*.lock")), ids=lambda path: path.name)
def test_each_version_in_a_lock_has_hashes(lock: Path) -> None:
    content = re.sub(r"^#.*\n", "", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    entries = re.sub(r"\\\n\s*", "", content).splitlines()
    bare = [
        entry for entry in entries if not re.fullmatch(rf"{PIN}( ?;[^-]*)?( ?--hash=sha256:[0-9a-f]{{64}})+", entry)
    ]
    assert len(entries) > 100 and not bare, bare[:3]


def test_the_makefile_installs_from_locks_with_hashes_alone() -> None:
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line and " -r " in line]
    assert len(lines) == 2 and all("--require-hashes" in line for line in lines)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_version_of_an_installation_is_pinned(name: str) -> None:
    options, packages = [part for part in PACKAGES[name] if part.startswith("-")], PACKAGES[name][1:]
    if options == ["--no-deps"]:
        assert all(re.fullmatch(PIN, package) for package in packages)
        return
    assert options == ["--constraint"]
    versions = [line for line in Path(packages[0]).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(PIN, version) for version in versions)
    names = {version.partition("==")[0] for version in versions}
    assert {package.partition("==")[0] for package in packages[1:]} <= names
