"""Made-up labels with the shape of the reference's files: 164 rollouts, 110 failed, 9 candidates, 10 runs.

The counts of each run are written here, so that the result of a selection can be computed by hand.
"""

from captrain.records import Capability, Label, RolloutLabels, Verdict

RUNS, FAILED, PASSED = 10, 110, 54

COUNTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    # For each run: failed rollouts that lack it, failed rollouts with an occasion, and passed rollouts (of 40) that
    # lack it.
    "multi_step": (*[(52, 64, 0)] * 4, (52, 65, 0), *[(53, 68, 0)] * 5),
    "constraint": (*[(39, 54, 1)] * 6, *[(39, 54, 0)] * 4),
    "numerical": ((36, 52, 0),) * RUNS,
    "policy": ((44, 80, 0),) * RUNS,
    "aggregation": (*[(22, 36, 0)] * 9, (10, 16, 0)),
    "lookup": (*[(17, 34, 0)] * 9, (17, 100, 0)),
    "wording": (*[(30, 75, 0)] * 7, *[(15, 80, 0)] * 3),
    "tone": (*[(12, 50, 0)] * 3, *[(8, 50, 0)] * 7),
    "greeting": ((2, 90, 0),) * RUNS,
}
"""Counts by candidate. The first one reproduces the published mean coverage (.4773) and gap (.7947)."""

CANDIDATES = [Capability(id=slug, name=slug, description=slug) for slug in COUNTS]


def published_labels() -> list[RolloutLabels]:
    """Return one row for each run and rollout, failed rollouts first."""
    rows = []
    for run in range(RUNS):
        for number in range(FAILED + PASSED):
            labels = {slug: Label(verdict=_verdict(counts[run], number)) for slug, counts in COUNTS.items()}
            outcome = "failed" if number < FAILED else "passed"
            rows.append(RolloutLabels(run=run, rollout=f"r{number}", outcome=outcome, count=1, labels=labels))
    return rows


def _verdict(counts: tuple[int, int, int], number: int) -> Verdict:
    lacking, exercised, passed_lacking = counts
    if number >= FAILED:
        number, lacking, exercised = number - FAILED, passed_lacking, 40
    return "LACKING" if number < lacking else "PRESENT" if number < exercised else "NA"
