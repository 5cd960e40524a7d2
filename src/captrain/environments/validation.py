"""The passport of any environment file: what `captrain validate` measures, prints and writes.

The file is held against the target of this project, as the pipeline would hold it, and is confined whoever wrote it.
Where the project has evidence for a capability of the file's name, its transfer is predicted from that.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.benchmarks import load_benchmark
from captrain.config import Spec, compose_spec, load_choice, load_spec
from captrain.environments.loading import world_of
from captrain.environments.publication import passport_page
from captrain.environments.subject import make_standard
from captrain.environments.synthesis import examine, make_brief, make_passport
from captrain.environments.synthesizer import Brief
from captrain.errors import UserError
from captrain.execution import user_outputs
from captrain.ledger import LedgerEntry
from captrain.policies import load_policy
from captrain.records import (
    Capability,
    JsonObject,
    Passport,
    Rollout,
    load,
    publish_json,
    publish_text,
    read_bytes,
    require_file_name,
)

SOURCE = 1 << 20
"""Bytes that an environment file may have."""


@dataclass(frozen=True)
class Validation:
    """A file's passport, the sandbox that it was made out in, and what the base's rollouts cost."""

    text: str
    passport: Passport
    sandbox: str
    ledger: list[LedgerEntry]


def validate_file(path: Path, root: Path, out: Path, least: str | None, calibrating: bool) -> Validation:
    """Check a file.

    Args:
        path: the environment file.
        root: of the project, whose target it is held against.
        out: folder for passport and page.
        least: level of confinement; None: `machine.sandbox`.
        calibrating: play the base of the project in it, if everything else holds.

    Raises:
        UserError: there is no such file, its passport would lie among the pipeline's, the specification is not sound,
            the sandbox is weaker than asked for, or there is no base to play.
    """
    from captrain.environments.sandbox.confined import active_confinement

    if path.suffix != ".py":
        raise UserError(f"{path} is no Python file", "name a file that defines Environment")
    if not path.exists():
        raise UserError(f"there is no file {path}", "name a Python file that defines Environment")
    require_file_name(path.stem, str(path.parent))
    read_bytes(path, "name a file that can be read", SOURCE)
    if out.resolve().is_relative_to((root / "results").resolve()):
        # A passport that the pipeline did not make out would be taken for one that it did.
        raise UserError(f"{out} belongs to the pipeline", "name another folder with --out")
    spec = _specification(root)
    machine = spec.machine.model_copy(update={"sandbox": least}) if least else spec.machine
    benchmark = load_benchmark(spec.benchmark, machine)
    standard = make_standard(benchmark, spec.evaluation.tasks, spec.environments)
    policy = None
    if calibrating:
        base = root / "artifacts/base"
        if not base.exists():
            raise UserError(f"{base} is missing", "run `dvc repro base`, or validate without --calibrate")
        policy = load_policy(spec.exploring(), base, machine, batch=machine.batch)
    text = path.read_text(errors="replace")
    # What narrows a benchmark in workers has no world where it is confined; it is text of ours, or it is no such file.
    trusted = world_of(text) is not None
    brief = _brief(path, root, benchmark.tools)
    examination = examine(path, standard, brief, machine, policy, spec.seed, trusted=trusted)
    passport = make_passport(path, examination, 0, trusted=trusted)
    return Validation(text, passport, str(active_confinement()), examination.ledger)


def _specification(root: Path) -> Spec:
    """The project's derived specification, or where none is yet, what its params.yaml selects."""
    derived = root / "results/spec.yaml"
    if derived.exists():
        return load_spec(derived)
    selection = load_choice(root / "params.yaml")
    return compose_spec(selection.experiment, selection.seed, selection.overrides, root / "conf")


def _brief(path: Path, root: Path, tools: list[JsonObject]) -> Brief:
    """The brief of a capability of the file's name, with the project's evidence if there is any."""
    selected, rollouts = root / "results/capabilities/capabilities.jsonl", root / "artifacts/rollouts/discovery.jsonl"
    if selected.exists() and rollouts.exists():
        for capability in load(selected, Capability):
            if capability.id == path.stem:
                return make_brief(capability, tools, load(rollouts, Rollout))
    return Brief(Capability(id=path.stem, name=path.stem, description=""), tools)


def publish_validation(validation: Validation, out: Path) -> None:
    """Publish passport and page, named as the file, in the folder `out`.

    Raises:
        UserError: a file of that name lies there, which captrain did not write.
    """
    with user_outputs(out) as aside:
        name = validation.passport.capability
        publish_json(aside / f"{name}.passport.json", validation.passport)
        publish_text(aside / f"{name}.passport.md", passport_page(validation.passport, validation.text))


def validation_report(validation: Validation) -> list[RenderableType]:
    """Make what is printed: the sandbox, every check, what it cost, the verdict."""
    table = Table("check", "", "measured", "bound", "detail", title=f"passport of {validation.passport.capability}")
    table.add_column("task", overflow="fold")
    for check in validation.passport.checks:
        measured = "" if check.measured is None else f"{check.measured:g}"
        verdict = Text("passed", "green") if check.passed else Text("failed", "red")
        table.add_row(check.name, verdict, measured, check.bound, Text(check.detail), Text(check.task))
    failed = sum(not check.passed for check in validation.passport.checks)
    cost = [
        Text(
            f"spent on the base: {entry.rollouts} rollouts, {entry.prompt_tokens} tokens read, "
            f"{entry.completion_tokens} written"
        )
        for entry in validation.ledger
    ]
    verdict = Text(f"{failed} checks failed", "red") if failed else Text("every check passed", "green")
    return [Text(f"sandbox: {validation.sandbox}"), table, *cost, verdict]
