"""Messages of errors."""

import base64
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from rich.text import Text

from captrain.cli.console import print_all
from captrain.errors import InfrastructureError, UserError
from captrain.records import publish_bytes, publish_text
from captrain.run import compose_spec, entry_point, publish_spec
from captrain.run.boundary import BUG, disk_fault, ending

SRC = Path(__file__).parents[2] / "src"


def test_user_errors_are_one_message_without_exception_names() -> None:
    for error in (
        UserError("a", "b"), InfrastructureError("a"), PermissionError(errno.EACCES, "Permission denied", "results"),
        IsADirectoryError(errno.EISDIR, "Is a directory", "out"), OSError(errno.ENOSPC, "No space left", "results/x"),
        MemoryError(), KeyboardInterrupt(), OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300),
    ):  # fmt: skip
        status, text = ending(error)
        assert status in (2, 130) and "Error" not in text and "Traceback" not in text, text
    assert ending(BrokenPipeError(errno.EPIPE, "Broken pipe")) == (0, "")


def test_a_bug_is_one_block_with_the_lines_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    @entry_point
    def main() -> None:
        raise ZeroDivisionError("of ours")

    with pytest.raises(SystemExit) as end:
        main()
    text = capsys.readouterr().err
    assert end.value.code == BUG and text.startswith("error: this is a bug in captrain, not your mistake\n")
    assert "ZeroDivisionError: of ours" in text and "Python 3." in text and "open an issue" in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable", "git"),
    ],
)
def test_a_limit_of_processes_is_one_sentence(error: Exception) -> None:
    wrapped = ValueError("the pool broke")
    wrapped.__cause__ = error
    for raised in (error, wrapped):
        status, text = ending(raised)
        assert status == 2 and len(text.splitlines()) == 2 and "allows no further process or thread" in text


def test_disk_faults_are_recognised_in_wrapped_exceptions() -> None:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system", "artifacts/x")
        except OSError as error:
            raise RuntimeError("while saving") from error
    except RuntimeError as error:
        assert disk_fault(error) == "the disk is read-only (artifacts/x)"
    assert "full" in disk_fault(RuntimeError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })"))
    assert disk_fault(ValueError("code: none")) == ""


def limited(code: str, size: int) -> subprocess.CompletedProcess[str]:
    """A program with a file size limit."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )


def test_a_file_size_limit_is_one_message_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from captrain.run import entry_point, user_outputs
from captrain.records import publish_text
@entry_point
def main():
    with user_outputs(Path({str(tmp_path / "out")!r})) as aside:
        publish_text(aside / "small.txt", "a")
        publish_text(aside / "large.txt", "a" * 100_000)
main()
"""
    done = limited(code, 10_000)
    assert done.returncode == 2 and done.stderr.startswith("error: a file would be larger than a limit allows"), done
    assert "Traceback" not in done.stderr and not [*tmp_path.iterdir()]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_text(tmp_path / "a.txt", "before")

    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError):
        publish_bytes(tmp_path / "a.txt", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "before"


@pytest.mark.needs("no-root")
def test_an_unwritable_folder_is_one_message(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        publish_text(tmp_path / "a.txt", "a")


@pytest.mark.parametrize(
    "sign", ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\rb", "\x9b2J", "\u202egnp.exe", "\x08\x08"]
)
def test_untrusted_text_cannot_control_the_terminal(sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_all(f"before {sign} after", Text(sign))
    text = capsys.readouterr().out
    assert "before" in text and all(character.isprintable() or character == "\n" for character in text)
    _, message = ending(UserError(f"file {sign}", "rename it"))
    assert all(character.isprintable() or character == "\n" for character in message)


@pytest.mark.parametrize("form", [str, lambda key: quote(key, safe=""), lambda key: key.encode().hex(),
                                  lambda key: base64.b64encode(key.encode()).decode()])  # fmt: skip
def test_keys_are_redacted_in_messages_also_when_encoded(form, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "very/secret+value=42"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    _, message = ending(InfrastructureError(f"401: {{'echo': '{form(key)}'}}"))
    assert form(key).rstrip("=") not in message and "[redacted]" in message


@pytest.mark.parametrize(
    ("model", "before", "during"),
    [("null", None, "1"), ("null", "0", "0"), ("some/model", None, None), ("some/model", "1", "1")],
)
def test_the_hub_stays_offline_unless_a_model_is_named(
    model: str, before: str | None, during: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", before or "")
    if before is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    (tmp_path / "results").mkdir()
    spec = compose_spec("default", 0, [f"base.model={model}"], Path(__file__).parents[2] / "conf")
    publish_spec(spec, tmp_path / "results/spec.yaml")
    seen: list[str | None] = []
    entry_point(lambda: seen.append(os.environ.get("HF_HUB_OFFLINE")), stage=False)()
    entry_point(lambda: seen.append(os.environ.get("HF_HUB_OFFLINE")))()
    assert seen == [before, during]  # each stage decides for itself
