"""Untargeted synthetic environments, which do not depend on the diagnosis. The rows `awm` and `awm_sft` use them.

Without a source, the seed alone draws environments of our own. Each is the service desk narrowed to a few random
requests (one to three random operations, on named orders or on the oldest or newest one) and a random share of eligible
orders. Their writer takes no rollouts, labels or capabilities, so they cannot depend on the diagnosis. The reward is
that of the templates (half partial credit, half success). Each must earn a passport, but is not calibrated: that would
cost rollouts.

A source is a folder in the published layout of the Agent World Model (`captrain.comparison.baselines.scenarios`).
Training reads files and passports of both kinds from the row's results.
"""

import random
from importlib.resources import files
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.benchmarks import servicedesk as desk
from captrain.environments import WORLD, Brief, examine, make_passport, make_standard, passport_page
from captrain.errors import UserError
from captrain.records import Capability, Passport, publish_json, publish_text
from captrain.run import AwmSettings, Spec
from captrain.training import EnvironmentFile, TrainingEnvironment

VERBS = ("cancel", "return", "wrap", "zip")
ELIGIBLE = (0.3, 0.5, 0.7)
REQUESTS = (1, 3)
"""Least and most kinds of request in one environment."""
OPERATIONS = (1, 3)
"""Least and most operations in one request."""
EXTREMES = 2
"""Most operations by age in one request: there is one oldest and one newest order."""
DRAWS = 4
"""Draws for each environment before the row gives up."""


def untargeted_environments(spec: Spec, settings: AwmSettings, folder: Path) -> tuple[TrainingEnvironment, ...]:
    """Write the environments to `folder`, with their passports and pages.

    Args:
        spec: the whole specification. Only the seed, the benchmark, the bounds of passports, the test tasks and the
            sandbox are read.
        settings: source and number of the environments.
        folder: where training reads them.

    Raises:
        UserError: the source cannot be used, or too few environments earn a passport.
    """
    if settings.source:
        from captrain.comparison.baselines.scenarios import published_scenarios

        passports = published_scenarios(Path(settings.source), settings.environments, spec, folder)
    else:
        passports = drawn_environments(spec, settings.environments, folder)
    return tuple(TrainingEnvironment(passport.capability, EnvironmentFile(folder, passport)) for passport in passports)


def drawn_environments(spec: Spec, count: int, folder: Path) -> list[Passport]:
    """Draw environments of our own, and keep the first `count` that earn a passport.

    Raises:
        UserError: the benchmark is not the service desk, or too few draws earn a passport.
    """
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    if benchmark.tools != desk.TOOLS:
        raise UserError(
            f"untargeted environments can be drawn for the service desk only, and the benchmark is {benchmark.name}",
            "set baselines.awm.source to a folder of published environments, or baselines.awm.run to false",
        )
    bounds = make_standard(benchmark, spec.evaluation.tasks, spec.environments)
    passed, complaints = list[Passport](), list[str]()
    for number in range(DRAWS * count):
        name = f"untargeted_{number:02d}"
        text = narrowed_desk(name, spec.seed, number)
        path = folder / f"{name}.py"
        publish_text(path, text)
        capability = Capability(id=name, name=name, description="untargeted")
        checks = examine(path, bounds, Brief(capability, benchmark.tools), spec.machine, None, spec.seed, trusted=True)
        passport = make_passport(path, checks, 0, trusted=True)
        if not passport.passed:
            path.unlink()
            complaints.append(f"{name}: {passport.complaints()}")
            continue
        publish_json(folder / f"{name}.passport.json", passport)
        publish_text(folder / f"{name}.md", passport_page(passport, text))
        passed.append(passport)
        if len(passed) == count:
            return passed
    raise UserError(
        f"{len(passed)} of {DRAWS * count} untargeted environments earned a passport, but {count} are needed "
        f"({complaints[-1]})",
        "lower baselines.awm.environments, or widen the bounds in the section environments",
    )


def narrowed_desk(name: str, seed: int, number: int) -> str:
    """Return the text of an environment: the desk narrowed to requests drawn by seed and number."""
    rng = random.Random(f"untargeted-{seed}-{number}")
    requests = []
    for _ in range(rng.randint(*REQUESTS)):
        # Operations, as `servicedesk.make_data` takes them.
        count = rng.randint(*OPERATIONS)
        selectors = [rng.choice(["id", "extreme"]) for _ in range(count)]
        for index in [index for index, selector in enumerate(selectors) if selector == "extreme"][EXTREMES:]:
            selectors[index] = "id"
        requests.append([(rng.choice(VERBS), selector) for selector in selectors])
    package = files("captrain")
    _, _, world = package.joinpath(WORLD).read_text(encoding="utf-8").partition('\n"""\n')
    frame = package.joinpath("environments/templates/frame.py.txt").read_text(encoding="utf-8")
    template = package.joinpath("environments/templates/narrowed.py.txt").read_text(encoding="utf-8")
    title = "Random requests at the service desk, drawn without regard to any diagnosis."
    header = f'"""{title}\n\nDo not edit: the passport is made out for this file.\n"""\n'
    constants = f"NAME = {name!r}\nREQUESTS = {requests!r}\nELIGIBLE = {rng.choice(ELIGIBLE)!r}\nDIFFICULTY = 0\n"
    return f"{header}{world}\n\n{constants}\n\n{frame}{template}"
