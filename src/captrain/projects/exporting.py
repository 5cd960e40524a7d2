"""Exports an environment of a project as a package of another standard.

An environment without a valid passport is refused, because users of the package could not see that captrain would not
train in it.
"""

from pathlib import Path

from captrain.contract import CheckedEnvironment
from captrain.environments import derived_from, load_environment, world_of
from captrain.errors import EnvironmentFault, UserError
from captrain.interop import Package, Standard, write_package
from captrain.records import Passport, Split, read_json
from captrain.run import Machine, load_spec

FOLDERS = ("results/environments", "results/pairs")
COUNT = 1000
"""Tasks of a split in a package, if their number has no limit."""
SPLITS: tuple[Split, ...] = ("training", "discovery", "test")


def export_environment(name: str, root: Path, standard: Standard, out: Path) -> list[Path]:
    """Write the package of an environment.

    Args:
        name: a capability with an environment, or the path of an environment file with its passport beside it.
        root: the project.
        standard: standard of the package.
        out: folder of the package.

    Returns:
        The files.

    Raises:
        UserError: there is no such environment, its passport is missing, failed or outdated, the sandbox is weaker than
            required, or the package cannot be written.
        EnvironmentFault: the file does not load or play.
    """
    path, passport = _environment(name, root)
    text = path.read_text(errors="replace", encoding="utf-8")
    if (world := world_of(text)) is not None:
        raise UserError(
            f"{path} is derived from {world.target}, which needs worker processes of captrain: it cannot be packaged",
            "train in it here, or export an environment of synthesizer=openai",
        )
    derived = root / "results/spec.yaml"
    machine = load_spec(derived).machine if derived.exists() else Machine(workers=1, batch=1)
    target = load_environment(path.parent, passport, machine)
    first = target.tasks("training", 1)[0]
    package = Package(
        text=path.read_bytes(),
        passport=passport,
        tools=target.tools,
        tasks={split: count for split in SPLITS if (count := _count(target, split))},
        solution=target.reference(first),
        origin=derived_from(text),
    )
    return write_package(package, standard, out)


def _environment(name: str, root: Path) -> tuple[Path, Passport]:
    """Find an environment file and its passport."""
    paths = {path.stem: path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))}
    path = Path(name) if name.endswith(".py") else paths.get(name)
    if path is None:
        remedy = f"choose one of {', '.join(paths)}" if paths else "run `captrain run environments`"
        raise UserError(f"there is no environment {name!r}", f"{remedy}, or name an environment file")
    if not path.is_file():
        raise UserError(f"there is no file {path}", "name an environment file that has its passport beside it")
    beside = path.with_name(f"{path.stem}.passport.json")
    if not beside.is_file():
        raise UserError(f"{path} has no passport", f"`captrain validate {path}` makes one, or says what fails")
    remedy = f"make the passport again with `captrain validate {path}`"
    passport = read_json(beside, Passport, remedy)
    if passport.capability != path.stem:
        raise UserError(f"{beside} is the passport of {passport.capability!r}", remedy)
    if not passport.passed:
        raise UserError(
            f"{path} has failed its passport: {passport.complaints()}",
            f"fix {path}, and check it with `captrain validate {path}`",
        )
    return path, passport


def _count(target: CheckedEnvironment, split: Split) -> int:
    """Return the number of tasks of a split in the package; 0 if the environment does not have the split."""
    size = target.size(split)
    try:
        target.tasks(split, 1)
    except EnvironmentFault:
        if split == "training":
            raise
        return 0
    return COUNT if size is None else min(size, COUNT)
