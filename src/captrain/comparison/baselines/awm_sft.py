"""Baseline: fine-tuning on the solutions of environments that no diagnosis asked for.

The environments are those of the row `awm`, drawn without regard to the diagnosis or published; what is taught, how
and in which dose is as in the row `solutions`. So beside `solutions` it shows what the targeting is worth: the
supervision is of one kind, and only what the environments are about differs. It costs no rollout.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.training import SFTBaseline
from captrain.comparison.baselines.untargeted import untargeted_environments
from captrain.config import Spec
from captrain.training import Faults, SolutionLesson, fine_tuning_settings, teach_solutions

NAME = "awm_sft"


def untargeted_lessons(spec: Spec, project: Path = Path()) -> Sequence[SolutionLesson]:
    """Make the one lesson, in environments that are written to the row's results.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.

    Raises:
        UserError: the source cannot be used, or too few environments earn a passport.
    """
    section = spec.baselines.awm_sft
    environments = untargeted_environments(spec, section, project / "results" / NAME)
    share, remainder = divmod(section.demonstrations, len(environments))
    return [
        SolutionLesson(
            name=NAME,
            stage=NAME,
            base=project / "artifacts/base",
            policy=spec.exploring(),
            settings=fine_tuning_settings(spec, section.epochs, section.learning_rate),
            counts=tuple((place, share + (number < remainder)) for number, place in enumerate(environments)),
            dose=section.demonstrations,
            source="reference",
            faults=Faults(),
            machine=spec.machine,
        )
    ]


BASELINE = SFTBaseline(
    name=NAME,
    label="AWM, solutions",
    order=3,
    lessons=untargeted_lessons,
    teach=teach_solutions,
    unequal="trains on demonstrations",
    compared_with=("solutions",),
)
