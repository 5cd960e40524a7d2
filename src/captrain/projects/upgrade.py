"""Upgrade of a project to another version of captrain: what it makes stale, said before it is taken over."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from captrain import __version__
from captrain.errors import UserError
from captrain.projects.pipeline import VERSIONS, project_pipeline, recorded_versions, stage_digests, versions_text
from captrain.records import JsonObject, digest, publish_text, read_text


@dataclass(frozen=True)
class Upgrade:
    """Change from one version to the installed one: stages whose code differs, those behind them, which run again only
    if what they read comes out different, and stages that came or went."""

    before: str
    after: str
    changed: list[str]
    behind: list[str]
    added: list[str]
    removed: list[str]
    pipeline: bool
    """True if dvc.yaml changes."""

    @property
    def is_needed(self) -> bool:
        """True if anything differs."""
        return self.pipeline or self.before != self.after or bool(self.changed or self.added or self.removed)


def upgrade_project(root: Path, *, dry: bool = False) -> Upgrade:
    """Compare a project with the captrain that is installed, and take that over.

    Args:
        root: of the project.
        dry: change nothing.

    Raises:
        UserError: this is captrain's own repository, or dvc.yaml was edited since captrain wrote it.
    """
    recorded = recorded_versions(root)
    if recorded is None:
        raise UserError(
            f"there is no {VERSIONS} in {root.name}/: its stages depend on the files of captrain themselves",
            "`dvc status` says what is stale",
        )
    present, text = read_text(root / "dvc.yaml", "restore it from git"), project_pipeline(root)
    if digest(present) != recorded.pipeline and present != text and not dry:
        raise UserError(
            "dvc.yaml was edited since captrain wrote it, and would be replaced",
            "keep your changes aside, `git checkout dvc.yaml`, and upgrade again; or `captrain upgrade --dry-run`",
        )
    before, after = recorded.stages, stage_digests()
    changed = [name for name in after if name in before and before[name] != after[name]]
    added = [name for name in after if name not in before]
    upgrade = Upgrade(
        recorded.captrain,
        __version__,
        changed,
        _behind(yaml.safe_load(text)["stages"], [*changed, *added]),
        added,
        [name for name in before if name not in after],
        present != text,
    )
    if upgrade.is_needed and not dry:
        publish_text(root / "dvc.yaml", text)
        publish_text(root / VERSIONS, versions_text(__version__, text, after))
    return upgrade


def pending_upgrade(root: Path) -> Upgrade | None:
    """List what `captrain upgrade` would change of a project; None where nothing is to be taken over, and in captrain's
    own repository.

    Raises:
        UserError: captrain.yaml is not what captrain wrote.
    """
    if recorded_versions(root) is None:
        return None
    upgrade = upgrade_project(root, dry=True)
    return upgrade if upgrade.changed or upgrade.added or upgrade.removed else None


def _behind(stages: dict[str, JsonObject], changed: list[str]) -> list[str]:
    """List the stages that read, directly or not, what these make, without these; in the order of the pipeline."""
    affected = set(changed)
    outputs = {name: outputs_of(stage) for name, stage in stages.items()}
    for name, stage in stages.items():  # in the order in which they run
        files = [path for entry in stage.get("params", []) if isinstance(entry, dict) for path in entry]
        products = {path for source in affected for path in outputs[source]}
        inputs = [*stage.get("deps", []), *files]
        if any(path == out or path.startswith(f"{out}/") for path in inputs for out in products):
            affected.add(name)
    return [name for name in stages if name in affected and name not in changed]


def outputs_of(stage: JsonObject) -> list[str]:
    """List the paths that a stage of dvc.yaml makes."""
    entries = [entry for kind in ("outs", "plots", "metrics") for entry in stage.get(kind, [])]
    return [path for entry in entries for path in ([entry] if isinstance(entry, str) else entry)]
