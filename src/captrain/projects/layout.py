"""Creates a project in a folder (`captrain init`).

Nothing is overwritten: a folder with visible files is refused before anything is written. DVC's files are written as
`dvc init` would write them, so that the light installation, which has no DVC, can create a project.
"""

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Literal

from captrain import __version__
from captrain.errors import UserError
from captrain.projects.pipeline import COMPONENTS, VERSIONS, project_pipeline, stage_digests, versions_text
from captrain.records import publish_text
from captrain.run import find_project, shipped

Example = Literal["calendar"]
IGNORED = "/artifacts/\n/.cache/\n/report/\n/dvc_plots/\n/.venv\n__pycache__/\n.pytest_cache/\n.*.tmp\n"
DVC_CONFIG = "[core]\n    analytics = false\n    autostage = false\n"
DVC_IGNORED = "/config.local\n/tmp\n/cache\n"
UNSEEN = "# Patterns as in .gitignore: what DVC never looks at.\n.cache\n.venv\n__pycache__\n*.pyc\n.pytest_cache\n"
REQUIREMENTS = f"""\
# Where captrain comes from. No index that you use has it? Name the clone or the wheel in this line's place, such as
# captrain[train] @ file:///path/to/captrain  or  captrain[train] @ git+https://HOST/captrain@COMMIT
captrain[train]=={__version__}
"""
COMPONENTS_INIT = '"""Parts of this project\'s own, named in conf/ and overrides as components.module:Class."""\n'


def init_project(folder: Path, example: Example | None = None) -> list[Path]:
    """Create a project.

    Args:
        folder: created if it is missing.
        example: a complete benchmark to start from, with its test and an experiment that needs no model.

    Returns:
        The written files, relative to the folder.

    Raises:
        UserError: the folder is in a project or not empty (nothing is written), or git is missing.
    """
    place = folder.resolve()
    if place.exists() and not place.is_dir():
        raise UserError(f"{folder} is a file", "name a folder, new or empty")
    if outer := find_project(place):
        raise UserError(f"{folder} is in the project {outer.name}/ already", "name a folder outside of it")
    texts = _project_files(place, example)
    # Hidden files, such as a repository or a virtual environment, may exist.
    visible = [path.name for path in sorted(place.glob("*")) if not path.name.startswith(".")]
    if obstacles := [*visible, *(name for name in texts if (place / name).exists() and name not in visible)]:
        more = f" and {len(obstacles) - 5} more" if len(obstacles) > 5 else ""
        raise UserError(f"{folder} has {', '.join(obstacles[:5])}{more} already", "name a new folder, or an empty one")
    is_new = not place.exists()
    try:
        for name, text in texts.items():
            publish_text(place / name, text)
    except BaseException:
        # Remove an incomplete project; folders with other files stay.
        for name in texts:
            with suppress(OSError):
                (place / name).unlink(missing_ok=True)
                for parent in Path(name).parents:
                    if is_new or parent != Path():
                        (place / parent).rmdir()
        raise
    # DVC needs a git repository.
    if not any((parent / ".git").exists() for parent in (place, *place.parents)):
        git = shutil.which("git")
        if git is None:
            raise UserError("git is missing, and DVC needs it", f"install git, then run `git init {place}`")
        process = subprocess.run(
            [git, "init", "--quiet", str(place)], capture_output=True, encoding="utf-8", errors="replace"
        )
        if process.returncode:
            words = " ".join(process.stderr.split()) or f"git ended with {process.returncode}"
            raise UserError(f"the project has no git repository: {words}", f"fix that, then run `git init {place}`")
    return [Path(name) for name in texts]


def _project_files(root: Path, example: Example | None) -> Mapping[str, str]:
    """Return the files of a new project: relative paths and texts."""

    def template(name: str) -> str:
        return files("captrain").joinpath("projects/templates", name).read_text(encoding="utf-8")

    pipeline = project_pipeline(root)
    texts = {
        "params.yaml": template("params.yaml").replace("EXPERIMENT", example or "project"),
        "dvc.yaml": pipeline,
        VERSIONS: versions_text(pipeline, stage_digests()),
        "requirements.txt": REQUIREMENTS,
        "README.md": template("README.md"),
        ".gitignore": IGNORED,
        ".dvcignore": UNSEEN,
        ".dvc/config": DVC_CONFIG,
        ".dvc/.gitignore": DVC_IGNORED,
        ".github/workflows/check.yaml": template("check.yaml"),
        f"{COMPONENTS}/__init__.py": COMPONENTS_INIT,
    }
    texts |= {
        f".dvc/plots/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted(shipped(".dvc/plots").glob("*.json"))
    }
    if example is None:
        texts["conf/experiment/project.yaml"] = template("project.experiment.yaml")
        texts["tests/test_configuration.py"] = template("test_configuration.py.txt")
    else:
        for kind in ("benchmark", "experiment"):
            texts[f"conf/{kind}/{example}.yaml"] = template(f"{example}.{kind}.yaml")
        texts[f"{COMPONENTS}/{example}_desk.py"] = template(f"{example}_desk.py.txt")
        texts[f"tests/test_{example}.py"] = template(f"test_{example}.py.txt")
    return texts
