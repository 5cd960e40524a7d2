"""Damaged files, as arguments of commands and in a project: every command ends with one message, or works.

No command ends with a traceback or the name of a Python error, or waits for a pipe. `tests/test_disk.py` tests full
disks.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.finished import Captrain
from support.needs import further

from captrain.records import publish_text

LOGS = Path(__file__).parents[2] / "docs/examples/servicedesk.jsonl"
PATIENCE = 240
"""Seconds for one command: reading a pipe would wait forever."""
CONTENTS: Mapping[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "half a document": b'{"messages": [{"role": "user", "content": "He',
    "another document": b'{"a": [1]}\n',
    "100,000 brackets": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "a lone surrogate": b'{"id": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}\n',
    "a looping document": b"a: &a [*a]\n",
    "a huge number": b'{"seed": 1' + b"0" * 30 + b"}\n",
    "another table": b"a,b\nx,y\n",
}
Maker = Callable[[Path], object]
OTHERS: Mapping[str, Maker] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
}
DAMAGES: Mapping[str, Maker] = {
    **{name: lambda path, content=content: path.write_bytes(content) for name, content in CONTENTS.items()},
    **OTHERS,
}
FEW = ("binary", "another document", "another table", "a folder", "a pipe")
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "log.json": ("diagnose", "FILE", "--out", "OUT"),
    "log.jsonl": ("diagnose", "FILE", "--out", "OUT"),
    "log.eval": ("diagnose", "FILE", "--out", "OUT"),
    "scores.csv": ("diagnose", str(LOGS), "--scores", "FILE", "--out", "OUT"),
    "diagnosis": ("synthesize", "wrong_argument", "--diagnosis", "FILE", "--out", "OUT"),
    "rollouts.jsonl": ("export", "FILE", "--to", "inspect", "--out", "OUT"),
    "chats.jsonl": ("export", "FILE", "--to", "openai", "--out", "OUT/chats.jsonl"),
    "environment.py": ("export-environment", "FILE", "--to", "trl", "--out", "OUT"),
    "run": ("compare", "FILE", "."),
    "model": ("serve", "FILE"),
    "adapters": ("serve", "--adapters-from", "FILE"),
}
"""Names of files, and the command that gets each as an argument."""


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError("the command waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def require_message(status: int, out: str, err: str) -> None:
    """Require that a command succeeded or ended with one message, without names of Python errors."""
    assert status in (0, 1, 2), err[-2000:]
    assert "Traceback" not in out + err and not re.search(r"\b[A-Z]\w+(Error|Exception)\b", out + err), out + err
    if status == 2:
        assert err.startswith("error: ") and "\n  remedy: " in err and err.count("error: ") == 1, err


@pytest.mark.parametrize("damage", further(DAMAGES, 2))
@pytest.mark.parametrize("file", ARGUMENTS)
def test_a_damaged_argument_is_one_message_that_names_it(
    file: str, damage: str, tmp_path: Path, captrain: Captrain
) -> None:
    publish_text(tmp_path / "dvc.yaml", "stages: {}\n")
    DAMAGES[damage](tmp_path / file)
    arguments = [word.replace("FILE", file).replace("OUT", "out") for word in ARGUMENTS[file]]
    status, out, err = captrain(tmp_path, *arguments)
    if (file, damage) == ("adapters", "a folder"):
        assert "artifacts/base" in err  # the argument is valid, but there is no model
        return
    require_message(status, out, err)
    assert status == 2 and file in err, (status, out, err)
    assert not (tmp_path / "out").exists()


OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "diagnose": ("diagnose", str(LOGS), "--out", "OUT"),
    "synthesize": ("synthesize", "wrong_argument", "--diagnosis", ".", "--out", "OUT"),
    "export": ("export", "artifacts/rollouts/discovery.jsonl", "--to", "inspect", "--out", "OUT"),
    "export-environment": ("export-environment", "invalid_call", "--to", "trl", "--out", "OUT"),
    "validate": ("validate", "results/environments/invalid_call.py", "--out", "OUT"),
    "report": ("report", "--out", "OUT"),
    "init": ("init", "OUT"),
}


@pytest.fixture(scope="module")
def shared_project(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(smoke, tmp_path_factory.mktemp("project") / "repository", symlinks=True)


@pytest.fixture
def project(shared_project: Path) -> Iterator[Path]:
    """A finished pipeline; damage by `damaged` is undone after each test."""
    yield shared_project
    for path in shared_project.rglob("*.whole"):
        remove(whole := path.with_suffix(""))
        path.rename(whole)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damaged(path: Path, damage: Maker) -> None:
    """Replace a file by something else."""
    path.rename(path.with_name(f"{path.name}.whole"))
    damage(path)


@pytest.mark.parametrize("place", ["a file", "a pipe", "a link to itself"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_is_not_a_folder_is_one_message_and_stays_unchanged(
    command: str, place: str, project: Path, tmp_path: Path, captrain: Captrain
) -> None:
    out_path = tmp_path / "out"
    makers: Mapping[str, Maker] = {**OTHERS, "a file": lambda path: path.write_text("mine")}
    makers[place](out_path)
    before = out_path.lstat()
    status, out, err = captrain(project, *(word.replace("OUT", str(out_path)) for word in OUTPUTS[command]))
    require_message(status, out, err)
    after = out_path.lstat()
    assert status == 2 and str(out_path) in err, err
    assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)
    assert [*tmp_path.iterdir()] == [out_path]


READ: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "results/evaluation/main.csv": (("results",), ("compare", ".", "HEAD"), ("power",)),
    "results/evaluation/differences.csv": (("results",), ("power",)),
    "results/evaluation/ledger.csv": (("results", "--all"),),
    "results/evaluation/spent.csv": (("results", "--spent"),),
    "results/evaluation/metrics.json": (("results",), ("power",)),
    "results/causality/capabilities.csv": (("results", "--all"),),
    "results/solutions/rediscovery.csv": (("results", "--all"),),
    "results/capabilities/selection.json": (("compare", ".", "HEAD"),),
    "results/routes/routes.csv": (("compare", ".", "."),),
    "results/adapters/index.json": (("report", "--out", "OUT"),),
    "results/environments/invalid_call.passport.json": (("report", "--out", "OUT"),),
    "artifacts/rollouts/discovery.jsonl": (("report", "--out", "OUT"),),
    "artifacts/played/trace/rollouts.jsonl": (("compare", ".", "."),),
    "params.yaml": (("plan",),),
}
"""Files of a project, and commands that read them."""


@pytest.mark.parametrize("file", further(READ, 5))
def test_a_damaged_file_of_a_project_is_one_message_in_every_command_that_reads_it(
    file: str, project: Path, tmp_path: Path, captrain: Captrain
) -> None:
    half = (project / file).read_bytes()
    half = half[: len(half) // 2].rstrip()
    damages = {name: DAMAGES[name] for name in FEW} | {"half of it": lambda path: path.write_bytes(half)}
    for name, damage in damages.items():
        damaged(project / file, damage)
        for command in READ[file]:
            words = [word.replace("OUT", str(tmp_path / "out")) for word in command]
            status, out, err = captrain(project, *words)
            require_message(status, out, err)
            assert status == 2 and Path(file).name in err, (name, command, status, err)
        remove(project / file)
        (project / f"{file}.whole").rename(project / file)


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("params.yaml", "a pipe", "params.yaml is a pipe"),
        ("params.yaml", "a looping document", "nested without end"),
        ("dvc.lock", "binary", "dvc.lock"),
    ],
)
def test_a_damaged_file_that_dvc_reads_is_one_message_without_waiting(
    file: str, damage: str, words: str, project: Path, captrain: Captrain
) -> None:
    damaged(project / file, DAMAGES[damage])
    status, out, err = captrain(project, "verify")
    require_message(status, out, err)
    assert status == 2 and words in err, err


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_gap_that_is_not_finite_is_one_message(
    number: str, project: Path, tmp_path: Path, captrain: Captrain
) -> None:
    file = project / "results/capabilities/selection.json"
    text = re.sub(r'"gap": [-.\d]+', f'"gap": {number}', file.read_text(), count=1)
    damaged(file, lambda path: path.write_text(text))
    for command in (("compare", ".", "HEAD"), ("report", "--out", str(tmp_path / "out"))):
        status, out, err = captrain(project, *command)
        require_message(status, out, err)
        assert status == 2 and "selection.json" in err, (command, status, err)
