"""The base must be the one that its stage has recorded."""

import os
import random
import shutil
from pathlib import Path

import pytest

from captrain.agents import PolicySource
from captrain.errors import UserError
from captrain.models import load_module, record_files, require_recorded
from captrain.records import file_digest, publish_json
from captrain.run import Component, Machine

ACTING = {"temperature": 1.0, "max_turns": 4, "max_tokens": 12}


def test_a_flipped_byte_of_the_base_is_refused_before_training_and_serving(
    tiny: Path, tmp_path: Path, captrain
) -> None:
    base = shutil.copytree(tiny, tmp_path / "artifacts/base")
    require_recorded(base)
    publish_json(tmp_path / "results/base.json", {"weights_sha256": file_digest(base / "model.safetensors")})
    with pytest.raises(UserError, match="lacks SHA256SUMS"):
        require_recorded(base)
    record_files(base)
    require_recorded(base)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    record_files(base)  # a whole base of another run
    with pytest.raises(UserError, match="base.json has"):
        require_recorded(base)
    status, _, err = captrain(tmp_path, "serve", "artifacts/base", "--port", "0")
    assert status == 2 and err.startswith("error: artifacts/base/model.safetensors has the hash ")
    publish_json(tmp_path / "results/base.json", {"model": "somebody/else"})
    require_recorded(base)
    publish_json(base / "model.json", {"model": "somebody/elsf"})
    record_files(base)
    with pytest.raises(UserError, match="model.json names somebody/elsf, and .*base.json somebody/else"):
        require_recorded(base)


def changed(path: Path, old: bytes, new: bytes) -> None:
    """Change bytes and keep size and times, as a disk that flips a bit."""
    status, content = path.stat(), path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its record, in a plain folder."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("recorded") / "model"))
    record_files(folder)
    return folder


def test_an_altered_model_acts_and_trains_nowhere_and_the_file_is_named(
    recorded: Path, tmp_path: Path, captrain
) -> None:
    policy = Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **ACTING})
    assert PolicySource(policy, recorded, Machine(workers=1, batch=1)).policy.digest
    damages = {
        "tokenizer.json": lambda path: changed(path, b"wrap", b"wrop"),
        "chat_template.jinja": lambda path: changed(path, b"im_start", b"im_stbrt"),
        "config.json": lambda path: changed(path, b"rms_norm_eps", b"rms_norm_epz"),
        "generation_config.json": Path.unlink,
        "SHA256SUMS": lambda path: path.write_bytes(path.read_bytes()[:-1].rpartition(b"\n")[0]),
        "another.safetensors": Path.touch,
    }
    for number, (name, damage) in enumerate(damages.items()):
        base = Path(shutil.copytree(recorded, tmp_path / str(number)))
        damage(base / name)
        said = f"{base / ('tokenizer_config.json' if name == 'SHA256SUMS' else name)} is not the file that "
        with pytest.raises(UserError, match=f"^{said}"):
            PolicySource(policy, base, Machine(workers=1, batch=1)).policy  # noqa: B018
        with pytest.raises(UserError, match=f"^{said}"):
            load_module(base, "float32")
        status, out, err = captrain(tmp_path, "serve", str(base), "--port", "0")
        assert status == 2 and err.startswith(f"error: {said}") and "Traceback" not in err + out


def test_no_bit_of_a_model_can_change_unseen(recorded: Path, tmp_path: Path) -> None:
    base, rng = Path(shutil.copytree(recorded, tmp_path / "base")), random.Random(0)
    require_recorded(base)
    for path in sorted(base.iterdir()):
        for _ in range(5):
            whole = path.read_bytes()
            content = bytearray(whole)
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            with pytest.raises(UserError, match="is not the file that"):
                require_recorded(base)
            path.write_bytes(whole)
