"""What is kept of synthesized environments, and the page on which a reader judges one.

An environment that passed lies in the results folder with its passport and its page; one that did not lies in
`rejected/` below it, where nothing looks for environments to train in.
"""

import ast
import html
from collections.abc import Sequence
from pathlib import Path

from captrain.environments.synthesis import Synthesized
from captrain.errors import UserError
from captrain.records import Capability, Passport, publish, publish_json, publish_text

REJECTED = "rejected"
LONGEST = 400
"""Characters of a cell or a docstring's paragraph: what an environment says may have any length."""


def publish_all(made: Sequence[Synthesized], results: Path, artifacts: Path) -> None:
    """Write environments, passports, pages and ledger to `results`, the base's rollouts in those that passed to
    `artifacts`/calibration.jsonl.

    Raises:
        UserError: no environment passed. What was found is written all the same.
    """
    for one in made:
        name = one.capability.id
        folder = results if one.passed else results / REJECTED
        publish_text(folder / f"{name}.py", one.best.text)
        publish_text(folder / f"{name}.md", page_of(one))
        if one.passed:
            publish_json(folder / f"{name}.passport.json", one.best.passport)
        else:
            publish_json(folder / f"{name}.findings.json", [attempt.passport for attempt in one.attempts])
    passed = [one for one in made if one.passed]
    publish(results / "ledger.jsonl", [entry for one in made for entry in one.ledger])
    publish(artifacts / "calibration.jsonl", [rollout for one in passed for rollout in one.rollouts])
    if made and not passed:
        reasons = " | ".join(f"{one.capability.id}: {one.best.passport.complaints()}" for one in made)
        raise UserError(
            f"no environment earned its passport. Best attempts: {reasons}",
            f"read {results / REJECTED}; widen the bounds in the environments section, or choose another synthesizer",
        )


def page_of(one: Synthesized) -> str:
    """The page of a synthesized environment, earlier attempts at the end."""
    text = page(one.best.passport, one.best.text, one.capability)
    others = [attempt.passport for attempt in one.attempts if attempt is not one.best]
    if not others:
        return text
    lines = "".join(f"- attempt {passport.attempt}: {_cell(passport.complaints(), 2000)}\n" for passport in others)
    return f"{text}\n## Other attempts\n\n{lines}"


def page(passport: Passport, text: str, capability: Capability | None = None) -> str:
    """A passport as a page: what the environment trains, how difficult it is, every check.

    Args:
        passport: of the environment.
        text: of its file.
        capability: what it was asked to train, where that is known.
    """
    failed = sum(not check.passed for check in passport.checks)
    verdict = "passed" if passport.passed else f"{failed} of {len(passport.checks)} checks failed"
    wanted = f"{capability.name}: {capability.description}\n\n" if capability else ""
    own = "> " + _cell(_docstring(text)) + "\n\n" if _docstring(text) else ""
    confined = "is our own text and runs unconfined" if passport.trusted else "runs in the sandbox only"
    head = (
        f"# {passport.capability}: {verdict}\n\n## What it trains\n\n{wanted}{own}"
        f"The file {confined}; its fingerprint is `{passport.environment}`, attempt {passport.attempt}.\n\n"
        f"## How difficult it is\n\n{_difficulty(passport)}\n\n## Checks\n\n"
    )
    rows = [
        f"| {'passed' if check.passed else '**failed**'} | {check.name} | {_number(check.measured)} | {check.bound} | "
        f"{_cell(check.detail)} | {_cell(check.task)} |\n"
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
    known = [f"{who} {_number(measured[name])}" for name, who in names.items() if measured.get(name) is not None]
    said = f"Mean reward: {', '.join(known)}." if known else "Nothing could be measured."
    if "pass rate of the base" not in measured:
        return f"{said} It was not played on the base."
    constant = measured["share of constant-reward groups on the base"]
    rate = _number(measured["pass rate of the base"])
    return f"{said} The base passes {rate} of its rollouts; {_number(constant)} of its groups have no spread."


def _docstring(text: str) -> str:
    try:
        return ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError, RecursionError):
        return ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _cell(text: str, longest: int = LONGEST) -> str:
    """Text of anyone's in one line of a page, where it neither breaks the table nor counts as markup."""
    flat = " ".join(text.split())
    flat = flat if len(flat) <= longest else f"{flat[:longest]}..."
    return html.escape(flat, quote=False).translate({ord(sign): f"\\{sign}" for sign in "|`*_[]"})
