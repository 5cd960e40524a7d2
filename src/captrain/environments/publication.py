"""Publishes synthesized and validated environments, and the page on which a reader judges one.

A passed environment is written to the results folder with its passport and page. A rejected one is written to its
subfolder `rejected/`, where no stage looks for environments. `captrain validate` writes passport and page of any file.
"""

import ast
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.agents import load_policy
from captrain.benchmarks import Verifiers, load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.environments.answers import EMPTY, MISTAKEN, OTHER, PREDICTED, STORED
from captrain.environments.evidence import make_standard
from captrain.environments.loading import world_of
from captrain.environments.passport import widening
from captrain.environments.synthesis import PairEnvironments, SynthesisResult, examine, make_brief, make_passport
from captrain.environments.synthesizer import Brief, render
from captrain.environments.taskset import probe_taskset
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import (
    Capability,
    Passport,
    Rollout,
    as_markdown,
    counted,
    load,
    publish,
    publish_json,
    publish_text,
    read_bytes,
    require_file_name,
)
from captrain.run import Component, Spec, compose_spec, load_choice, load_spec, user_outputs

SOURCE = 1 << 20
"""Most bytes of an environment file."""
REJECTED = "rejected"
AGENTS = {
    "reward of doing nothing": "an agent that does nothing",
    "reward of random calls": "one that calls tools at random",
    "reward of the broken solution": "one that does all but the capability's step",
    "reward of the reference solution": "the reference, at least",
    PREDICTED: "the best prediction of the answer",
    EMPTY: "the best text without an answer",
    MISTAKEN: "the best wrong answer made from the right one",
    OTHER: "one that gives another task's answer",
    STORED: "one that says the answer in the task's data",
    "mean reward of the base": "the base",
}
"""Checks that measure the reward of an agent."""
LONGEST = 400
"""Most characters of a cell or a paragraph of a docstring."""


def publish_environments(
    environments: Sequence[SynthesisResult], results: Path, artifacts: Path, *, required: bool = True
) -> None:
    """Write environments, passports, pages and ledger to `results`, and the base's rollouts in passed environments to
    `artifacts`/calibration.jsonl.

    Args:
        environments: the outcome of each capability.
        results: folder of small outputs.
        artifacts: folder of large outputs.
        required: whether one of them must have passed.

    Raises:
        UserError: no environment passed. Everything is written nevertheless.
    """
    for result in environments:
        name = result.capability.id
        folder = results if result.passed else results / REJECTED
        publish_text(folder / f"{name}.py", result.best.text)
        earlier = [attempt.passport for attempt in result.attempts if attempt is not result.best]
        page = passport_page(result.best.passport, result.best.text, result.capability, earlier)
        publish_text(folder / f"{name}.md", page)
        if result.passed:
            publish_json(folder / f"{name}.passport.json", result.best.passport)
        else:
            publish_json(folder / f"{name}.findings.json", [attempt.passport for attempt in result.attempts])
    passed = [result for result in environments if result.passed]
    publish(results / "ledger.jsonl", [entry for result in environments for entry in result.ledger])
    publish(artifacts / "calibration.jsonl", [rollout for result in passed for rollout in result.rollouts])
    if required and environments and not passed:
        reasons = " | ".join(f"{result.capability.id}: {result.best.passport.complaints()}" for result in environments)
        raise UserError(
            f"no environment earned its passport. Best attempts: {reasons}",
            f"read {results / REJECTED}; {widening(result.best.passport for result in environments)}set another "
            "synthesizer (synthesizer=openai synthesizer.name=MODEL)",
        )


def publish_pairs(pairs: PairEnvironments, results: Path, artifacts: Path) -> None:
    """Write the environments of pairs, passed or not, and pairs.json with all outcomes."""
    publish_environments(pairs.results, results, artifacts, required=False)
    publish_json(results / "pairs.json", pairs.account)


def passport_page(
    passport: Passport,
    text: str,
    capability: Capability | None = None,
    earlier: Sequence[Passport] = (),
    unprobed: Sequence[str] = (),
) -> str:
    """Write a passport as a page: what the environment trains, how difficult it is, and every check.

    Args:
        passport: the passport.
        text: the text of the file.
        capability: the requested capability, if known.
        earlier: passports of other attempts.
        unprobed: what could not be probed, for a taskset of verifiers.
    """
    failed = sum(not check.passed for check in passport.checks)
    docstring = None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        docstring = ast.get_docstring(ast.parse(text))
    return render(
        "passport.md",
        passport=passport,
        verdict="passed" if passport.passed else f"{failed} of {counted(len(passport.checks), 'check')} failed",
        capability=capability,
        docstring=docstring,
        difficulty=_difficulty(passport),
        rewards=[(AGENTS[one.name], one.measured, one.deviation) for one in passport.checks if one.name in AGENTS],
        exploits=[check for check in passport.checks if check.script],
        earlier=earlier,
        unprobed=unprobed,
        cell=_cell,
        number=_number,
    )


def _difficulty(passport: Passport) -> str:
    measured = {check.name: check.measured for check in passport.checks}
    rewards = [f"{agent} {_number(measured[name])}" for name, agent in AGENTS.items() if measured.get(name) is not None]
    summary = f"Mean reward: {', '.join(rewards)}." if rewards else "Nothing could be measured."
    if "pass rate of the base" not in measured:
        return f"{summary} It was not played on the base."
    constant = measured["share of constant-reward groups on the base"]
    rate = _number(measured["pass rate of the base"])
    return f"{summary} The base passes {rate} of its rollouts; {_number(constant)} of its groups have no spread."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _cell(text: str, longest: int = LONGEST) -> str:
    """Return a text as one escaped line of a Markdown table."""
    flat = " ".join(text.split())
    return as_markdown(flat if len(flat) <= longest else f"{flat[:longest]}...")


def validate_file(
    path: Path, root: Path, out: Path, least: str | None, calibrating: bool
) -> tuple[Passport, list[RenderableType]]:
    """Make the passport of an environment file, publish it with its page, and return it with the lines to print.

    The file is examined against the project's target, as in the pipeline, and always in the sandbox. If the project has
    failed rollouts for a capability of the file's name, they predict the transfer.

    Args:
        path: the environment file.
        root: the project.
        out: folder for passport and page.
        least: required level of the sandbox; None for `machine.sandbox`.
        calibrating: whether to play the project's base if all other checks pass.

    Raises:
        UserError: there is no such file, `out` belongs to the pipeline, the specification is invalid, the sandbox is
            weaker than required, there is no base to play, or `out` has a file of the passport's name that captrain did
            not write.
    """
    from captrain.environments.sandbox.confined import active_confinement

    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file", "name a .py file that defines the class Environment")
    require_file_name(path.stem, str(path.parent))
    text = read_bytes(path, "name a Python file that defines Environment", SOURCE).decode(errors="replace")
    if out.resolve().is_relative_to((root / "results").resolve()):
        # This passport could not be told from one that the pipeline made.
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
    # A file that narrows a benchmark in workers has no benchmark in the sandbox. Only our own text is such a file.
    trusted = world_of(text) is not None
    brief = _brief(path, root, benchmark)
    examination = examine(path, standard, brief, machine, policy, spec.seed, trusted=trusted)
    passport = make_passport(path, examination, 0, trusted=trusted)
    with user_outputs(out) as aside:
        publish_json(aside / f"{passport.capability}.passport.json", passport)
        publish_text(aside / f"{passport.capability}.passport.md", passport_page(passport, text))
    page = out / f"{passport.capability}.passport.md"
    return passport, _report(passport, str(active_confinement()), examination.ledger, page)


def validate_taskset(
    name: str, root: Path, out: Path, scale: tuple[float, float]
) -> tuple[Passport, list[RenderableType]]:
    """Probe a taskset of verifiers, publish what was measured with its page, and return it with the lines to print.

    Args:
        name: id of the taskset, or the folder of its package, a slash and the id if it is not installed.
        root: the project, whose bounds count. If its benchmark is this taskset, its settings count, too.
        out: folder for the files.
        scale: lowest and highest reward of an episode, unless the project's benchmark says so.

    Raises:
        UserError: verifiers or the taskset is not installed, or a reward is outside the scale.
    """
    spec = _specification(root)
    folder, _, taskset = name.rpartition("/")
    folder, taskset = (folder, taskset) if folder and Path(folder).is_dir() else ("", name)
    if spec.benchmark.settings().get("taskset") == taskset:
        target = load_benchmark(spec.benchmark, spec.machine)
    else:
        component = Component.model_validate(
            {"_target_": f"{Verifiers.__module__}.Verifiers", "taskset": taskset, "folder": folder, "scale": [*scale]}
        )
        target = load_benchmark(component, spec.machine)
    probes = probe_taskset(target, spec.environments, spec.seed)
    passed = all(check.passed for check in probes.checks)
    passport = Passport(
        capability=target.name,
        environment=target.fingerprint,
        attempt=0,
        passed=passed,
        trusted=False,
        calibration_tasks=0,
        checks=probes.checks,
    )
    with user_outputs(out) as aside:
        publish_json(aside / f"{target.name}.validation.json", passport)
        publish_text(aside / f"{target.name}.validation.md", passport_page(passport, "", unprobed=probes.unprobed))
    notes = [Text(f"not probed: {subject}") for subject in probes.unprobed]
    sandbox, page = "none: a taskset is code that you have installed", out / f"{target.name}.validation.md"
    return passport, [*_report(passport, sandbox, (), page, "probes"), *notes]


def _specification(root: Path) -> Spec:
    if (derived := root / "results/spec.yaml").exists():
        return load_spec(derived)
    selection = load_choice(root / "params.yaml")  # nothing has run yet
    return compose_spec(selection.experiment, selection.seed, selection.overrides, root / "conf")


def _brief(path: Path, root: Path, benchmark: CheckedEnvironment) -> Brief:
    """Make the brief of a capability of the file's name, with the project's rollouts if there are any."""
    selected, rollouts = root / "results/capabilities/capabilities.jsonl", root / "artifacts/rollouts/discovery.jsonl"
    if selected.exists() and rollouts.exists():
        for capability in load(selected, Capability):
            if capability.id == path.stem:
                return make_brief(capability, benchmark.tools, load(rollouts, Rollout))
    return Brief(Capability(id=path.stem, name=path.stem, description=""), benchmark.tools)


def _report(
    passport: Passport, sandbox: str, ledger: Sequence[LedgerEntry], page: Path, title: str = "passport"
) -> list[RenderableType]:
    """Render the checks, what was spent, and the verdict with the page that was written."""
    said = set[str]()
    table = Table("check", "", "measured", "bound", "detail", title=f"{title} of {passport.capability}")
    table.add_column("task", overflow="fold")
    for check in passport.checks:
        measured = "" if check.measured is None else f"{check.measured:g}"
        verdict = Text("passed", "green") if check.passed else Text("failed", "red")
        detail = "as above" if check.detail in said else check.detail
        said |= {check.detail} - {""}
        table.add_row(check.name, verdict, measured, check.bound, Text(detail), Text(check.task))
    failed = sum(not check.passed for check in passport.checks)
    cost = [
        Text(
            f"spent on the base: {counted(entry.rollouts, 'rollout')}, {entry.prompt_tokens} tokens read, "
            f"{entry.completion_tokens} written"
        )
        for entry in ledger
    ]
    verdict = Text(f"{counted(failed, 'check')} failed", "red") if failed else Text("every check passed", "green")
    return [Text(f"sandbox: {sandbox}"), table, *cost, verdict, Text(f"the page with every check: {page}")]
