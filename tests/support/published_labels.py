"""Made-up labels of the shape of the reference's own files: 164 rollouts of which 110 failed, 9 candidates,
10 runs. Per-run numbers are written down here as counts, so that what a selection comes to follows by hand."""

from captrain.records import Capability, Label, RolloutLabels, Verdict

RUNS, FAILED, PASSED = 10, 110, 54

COUNTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    # failed rollouts that lack it and that have occasion to it, passed ones that lack it (of 40), for each run
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
"""By candidate; the first is given the published means of its coverage, .4773, and of its gap, .7947."""

CANDIDATES = [Capability(id=slug, name=slug, description=slug) for slug in COUNTS]


def published_labels() -> list[RolloutLabels]:
    """One row for each run and rollout; failed rollouts come first."""
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
