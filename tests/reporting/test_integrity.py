"""Flipped bytes, where DVC believes times and sizes."""

import os
from pathlib import Path

from support.finished import Captrain


def flip(path: Path) -> None:
    """Change one byte, and keep time and size."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_verify_deep_names_a_flipped_byte_of_the_cache_and_of_an_output(pipeline: Path, captrain: Captrain) -> None:
    status, out, _ = captrain(pipeline, "verify", "--deep")
    assert status == 0 and " files hashed, 0 damaged" in out
    cached = next(path for path in (pipeline / ".dvc/cache/files/md5").glob("??/*") if path.suffix != ".dir")
    flip(cached)
    status, out, _ = captrain(pipeline, "verify", "--deep")
    assert status == 1 and f"{cached.parent.name}/{cached.name} of DVC's cache is damaged" in out
    flip(cached)
    output = next(path for path in (pipeline / "artifacts").rglob("*") if path.is_file())
    if output.is_symlink() or output.stat().st_nlink > 1:
        content = output.read_bytes()
        output.unlink()
        output.write_bytes(content)
    flip(output)
    status, out, _ = captrain(pipeline, "verify", "--deep")
    assert status == 1 and f"{output.relative_to(pipeline)}, of make, is not what dvc.lock has" in out
    (pipeline / "dvc.lock").write_text("stages: [\n")
    status, _, err = captrain(pipeline, "verify", "--deep")
    assert status == 2 and "Traceback" not in err
    (pipeline / "dvc.lock").unlink()
    status, out, err = captrain(pipeline, "verify", "--deep")
    assert status == 2 and "dvc.lock is missing" in err and "hashed" not in out
