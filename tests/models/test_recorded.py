"""The base must be the one that its stage has recorded."""

import shutil
from pathlib import Path

import pytest

from captrain.errors import UserError
from captrain.models import require_recorded
from captrain.records import file_digest, publish_json


def test_a_flipped_byte_of_the_base_is_refused_before_training_and_serving(
    tiny: Path, tmp_path: Path, captrain
) -> None:
    base = shutil.copytree(tiny, tmp_path / "artifacts/base")
    require_recorded(base)
    publish_json(tmp_path / "results/base.json", {"weights_sha256": file_digest(base / "model.safetensors")})
    require_recorded(base)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="base.json has"):
        require_recorded(base)
    status, _, err = captrain(tmp_path, "serve", "artifacts/base", "--port", "0")
    assert status == 2 and err.startswith("error: artifacts/base/model.safetensors has the hash ")
    publish_json(tmp_path / "results/base.json", {"model": "somebody/else"})
    require_recorded(base)
