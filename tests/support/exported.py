"""A project with one checked environment, ready for export."""

from pathlib import Path

from support.training import passport

from captrain.environments.synthesizer import Brief
from captrain.environments.templates import TemplateSynthesizer
from captrain.records import Capability, CheckResult, publish_json
from captrain.run import ModelAccess

NAME = "wrong_record"
CHECKS = [
    CheckResult(name="reward of the reference solution", passed=True, measured=1.0, bound="1"),
    CheckResult(name="reward of doing nothing", passed=True, measured=0.05, bound="at most 0.2"),
    CheckResult(name="same play, same observations", passed=True, measured=1.0, bound="1"),
]


def make_project(folder: Path) -> Path:
    """Make a project with one environment that has its passport."""
    (folder / "dvc.yaml").touch()
    path = folder / f"results/environments/{NAME}.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        TemplateSynthesizer(ModelAccess()).synthesize(Brief(Capability(id=NAME, name="n", description="d"), []), [])
    )
    publish_json(path.with_suffix(".passport.json"), passport(path).model_copy(update={"checks": CHECKS}))
    return path
