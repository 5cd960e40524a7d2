"""Publication of synthesized environments, and the page on which a reader judges one.

An environment that passed lies in the results folder with its passport and its page; one that did not lies in
`rejected/` below it, where nothing looks for environments to train in.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from captrain.environments.passport import widening
from captrain.environments.synthesis import SynthesisResult
from captrain.errors import UserError
from captrain.records import Capability, Passport, as_markdown, publish, publish_json, publish_text

REJECTED = "rejected"
PURPOSE = 2000
"""Characters of what a capability is said to be."""
LONGEST = 400
"""Characters of a cell or a docstring's paragraph: what an environment says may have any length."""


def publish_environments(
    environments: Sequence[SynthesisResult], results: Path, artifacts: Path, *, required: bool = True
) -> None:
    """Write environments, passports, pages and ledger to `results`, the base's rollouts in those that passed to
    `artifacts`/calibration.jsonl.

    Args:
        environments: what came of each capability.
        results: folder of small outputs.
        artifacts: folder of large ones.
        required: whether one of them must have passed.

    Raises:
        UserError: no environment passed. What came of them is written all the same.
    """
    for result in environments:
        name = result.capability.id
        folder = results if result.passed else results / REJECTED
        publish_text(folder / f"{name}.py", result.best.text)
        publish_text(folder / f"{name}.md", result_page(result))
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


def result_page(result: SynthesisResult) -> str:
    """The page of a synthesized environment, earlier attempts at the end."""
    text = passport_page(result.best.passport, result.best.text, result.capability)
    passports = [attempt.passport for attempt in result.attempts if attempt is not result.best]
    if not passports:
        return text
    lines = "".join(f"- attempt {passport.attempt}: {_cell(passport.complaints(), 2000)}\n" for passport in passports)
    return f"{text}\n## Other attempts\n\n{lines}"


def passport_page(passport: Passport, text: str, capability: Capability | None = None) -> str:
    """A passport as a page: what the environment trains, how difficult it is, every check.

    Args:
        passport: of the environment.
        text: of its file.
        capability: what it was asked to train, where that is known.
    """
    failed = sum(not check.passed for check in passport.checks)
    verdict = "passed" if passport.passed else f"{failed} of {len(passport.checks)} checks failed"
    purpose = f"{_cell(f'{capability.name}: {capability.description}', PURPOSE)}\n\n" if capability else ""
    quotation = "> " + _cell(_docstring(text)) + "\n\n" if _docstring(text) else ""
    confinement = "is our own text and runs unconfined" if passport.trusted else "runs in the sandbox only"
    head = (
        f"# {_title(passport.capability)}: {verdict}\n\n## What it trains\n\n{purpose}{quotation}"
        f"The file {confinement}; its fingerprint is `{passport.environment}`, attempt {passport.attempt}.\n\n"
        f"## How difficult it is\n\n{_difficulty(passport)}\n\n## Checks\n\n"
    )
    rows = [
        f"| {'passed' if check.passed else '**failed**'} | {check.name} | {_number(check.measured)} | "
        f"{_cell(check.bound)} | {_cell(check.detail)} | {_cell(check.task)} |\n"
        for check in passport.checks
    ]
    table = "| | check | measured | bound | detail | task |\n|---|---|---|---|---|---|\n"
    return f"{head}{table}{''.join(rows)}"


def _difficulty(passport: Passport) -> str:
    names = {
        "reward of doing nothing": "an agent that does nothing",
        "reward of random calls": "one that calls tools at random",
        "reward of the broken solution": "one that does all but the capability's step",
        "reward of the reference solution": "the reference, at least",
        "mean reward of the base": "the base",
    }
    measured = {check.name: check.measured for check in passport.checks}
    rewards = [f"{agent} {_number(measured[name])}" for name, agent in names.items() if measured.get(name) is not None]
    summary = f"Mean reward: {', '.join(rewards)}." if rewards else "Nothing could be measured."
    if "pass rate of the base" not in measured:
        return f"{summary} It was not played on the base."
    constant = measured["share of constant-reward groups on the base"]
    rate = _number(measured["pass rate of the base"])
    return f"{summary} The base passes {rate} of its rollouts; {_number(constant)} of its groups have no spread."


def _docstring(text: str) -> str:
    try:
        return ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _title(name: str) -> str:
    """A name in a heading: underscores within a word are no markup there."""
    return _cell(name).replace("\\_", "_")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _cell(text: str, longest: int = LONGEST) -> str:
    """Text of anyone's in one line of a page, where it neither breaks the table nor counts as markup."""
    flat = " ".join(text.split())
    return as_markdown(flat if len(flat) <= longest else f"{flat[:longest]}...")
