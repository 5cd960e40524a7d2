"""An environment out of this project: by its name or file, with its passport, as a package of another standard.

What has no passport, has failed it, or was changed since is refused: whoever trains in a package cannot see what
captrain would have refused to train in.
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
"""Tasks of a split that a package offers where the environment makes as many as one asks for."""
SPLITS: tuple[Split, ...] = ("training", "discovery", "test")


def export_environment(name: str, root: Path, standard: Standard, out: Path) -> list[Path]:
    """Write the package of an environment.

    Args:
        name: of a capability whose environment has passed, or the path of an environment file with its passport
            beside it.
        root: of the project.
        standard: of the package.
        out: folder of the package.

    Returns:
        The files.

    Raises:
        UserError: there is no such environment, it has no passport, has failed it or was changed since, the sandbox
            is weaker than asked for, or the package cannot be written.
        EnvironmentFault: the file does not load or play.
    """
    path, passport = _environment(name, root)
    text = path.read_text(errors="replace")
    if (world := world_of(text)) is not None:
        raise UserError(
            f"{path} narrows {world.target}, which runs in workers of captrain: no package can hold it",
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
    """Find an environment file and read the passport beside it."""
    paths = {path.stem: path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))}
    path = Path(name) if name.endswith(".py") else paths.get(name)
    if path is None:
        names = ", ".join(paths) or "none: run `dvc repro environments`"
        raise UserError(f"there is no environment {name!r}", f"there are {names}; or name an environment file")
    if not path.is_file():
        raise UserError(f"there is no file {path}", "name an environment file that has its passport beside it")
    beside = path.with_name(f"{path.stem}.passport.json")
    if not beside.is_file():
        raise UserError(f"{path} has no passport", f"`captrain validate {path}` makes one out, and says what it lacks")
    passport = read_json(beside, Passport, "make it out again")
    if passport.capability != path.stem:
        raise UserError(f"{beside} was made out for {passport.capability!r}", "make it out again")
    if not passport.passed:
        raise UserError(f"{path} has failed its passport: {passport.complaints()}", "mend it first")
    return path, passport


def _count(target: CheckedEnvironment, split: Split) -> int:
    """Count the tasks of a split that a package offers; none where the environment has none."""
    size = target.size(split)
    try:
        target.tasks(split, 1)
    except EnvironmentFault:
        if split == "training":
            raise
        return 0
    return COUNT if size is None else min(size, COUNT)
