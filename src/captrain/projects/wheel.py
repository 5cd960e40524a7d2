"""Build step that copies conf/, stages/, dvc.yaml and its plots into the wheel, because projects need them.

They are at the top of the repository, where readers look for them, and outside of every package. setuptools runs this
class when it builds (`[tool.setuptools.cmdclass]`), before captrain can be imported. An editable installation does not
need it: `captrain.run.shipped` finds the files in the repository.
"""

from pathlib import Path

from setuptools.command.build_py import build_py

PATTERNS = ("conf/**/*.yaml", "stages/*.py", "dvc.yaml", ".dvc/plots/*.json")
FOLDER = "captrain/pipeline"


class BuildWithPipeline(build_py):
    """Copies the package's modules, then the pipeline."""

    def run(self) -> None:
        """See `setuptools.Command.run`."""
        super().run()
        if not self.editable_mode:
            for source in pipeline_files():
                target = Path(self.build_lib, FOLDER, source)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        """List the files of a source distribution."""
        return [*super().get_source_files(), *map(str, pipeline_files())]


def pipeline_files() -> list[Path]:
    """List the files of the pipeline, relative to the repository, in which setuptools builds."""
    return sorted(path for pattern in PATTERNS for path in Path().glob(pattern))
