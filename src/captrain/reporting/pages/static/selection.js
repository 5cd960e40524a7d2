"use strict";
/* The rule of captrain.capabilities.rule over the per-run numbers that a selection reports. A gap or coverage that
   is undefined is null. Returns one account a candidate, in rank order: id, retained runs, runs needed, shortfall,
   selected. */
function captrainSelect(report, limits) {
  const candidates = report.candidates;
  const runs = candidates.length ? candidates[0].per_run.length : 0;
  const accounts = candidates.map((one) => {
    let retained = 0, speaking = 0;
    one.per_run.forEach((each) => {
      if (each.gap !== null && each.coverage !== null && each.gap >= limits.delta && each.coverage >= limits.coverage) retained++;
      // A run without a coverage (it did not propose the candidate, or drew no failed rollout) speaks against it.
      if (each.gap !== null || each.coverage === null) speaking++;
    });
    // A run whose gap is undefined has no say.
    const needed = Math.ceil(limits.agreement * speaking / runs) || limits.agreement;
    let shortfall = "";
    if (retained < needed) shortfall = `retained in ${retained} of ${runs} runs, ${needed} needed`;
    else if (one.gap_low === null) shortfall = "the gap is undefined in most resamples";
    else if (one.gap_low <= limits.floor) shortfall = `lower bound of the gap ${one.gap_low.toFixed(3)} is not above ${limits.floor}`;
    const gaps = one.per_run.filter((each) => each.gap !== null).map((each) => Math.round(each.gap * 1e6));
    const scores = {
      product: one.gap === null || one.coverage === null ? null : one.gap * one.coverage,
      gap: one.gap,
      mean_gap: gaps.length ? gaps.reduce((sum, gap) => sum + gap, 0) / (1e6 * gaps.length) : null,
      coverage: one.coverage,
    };
    const score = scores[limits.ranking || "product"] ?? -Infinity;
    return { id: one.id, name: one.name, gap: one.gap, coverage: one.coverage, retained, runs, needed, shortfall, score };
  });
  const order = (first, second) => (first < second ? -1 : first > second ? 1 : 0);
  accounts.sort((first, second) => order(first.shortfall !== "", second.shortfall !== "") || order(second.score, first.score) || order(first.id, second.id));
  accounts.forEach((one, at) => { one.selected = one.shortfall === "" && at < limits.count; });
  return accounts;
}
