"""Results made readable: rollouts beside their references, capabilities, environments, adapters, the final tables.

Everything is read from `results/` and `artifacts/` and returned as something rich can print; nothing is computed that
a stage has not computed, except where a rollout leaves its reference. No torch.
"""

import difflib
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from captrain.capabilities import read_selection
from captrain.comparison import ComparisonRow, arm_indices
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.records import Capability, IndexEntry, JsonObject, Passport, Rollout, censored, load, read_json, read_text
from captrain.reporting.divergence import Divergence, call_text, divergence

KINDS = ("kind", "method", "label", "tasks", "pass_rate", "low", "high", "pass_hat_k", "mean_reward")
DIFFERENCES = ("first", "second", "difference", "low", "high", "p", "distinguishable")
ROLLOUTS = ("artifacts/rollouts/discovery.jsonl", "artifacts/evaluation/rollouts.jsonl")
COLOURS = {"passed": "green", "failed": "red", "error": "yellow"}


def all_rollouts(root: Path) -> list[Rollout]:
    """Read the rollouts of diagnosis and evaluation that are here.

    Raises:
        UserError: neither file is here, or a line is corrupt.
    """
    paths = [root / name for name in ROLLOUTS if (root / name).exists()]
    if not paths:
        raise UserError(
            f"there are no rollouts here: neither {' nor '.join(ROLLOUTS)} exists (large outputs are not kept in git)",
            "run `dvc pull` if a remote holds them, or `dvc repro rollouts` to make them again",
        )
    return [rollout for path in paths for rollout in load(path, Rollout)]


DISTINCT = {
    "distinguishable": "yes",
    "not distinguishable": "no",
    "not distinguishable after correction": "no (Holm)",
}
"""Readings of a difference, in one word: a row of the table is one line of 80 columns."""


def _pick(noun: str, name: str, candidates: Collection[str]) -> str:
    """Pick the candidate of that name, or the only one that begins so; or refuse with those close to it."""
    if name in candidates:
        return name
    longer = sorted(candidate for candidate in candidates if name and candidate.startswith(name))
    if len(longer) == 1:
        return longer[0]
    near = longer[:3] or difflib.get_close_matches(name, candidates, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    raise UserError(f"there is no {noun} {name!r}", f"{hint}`captrain show {plural}` lists them")


def _columns(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    return table


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def rollouts(root: Path, outcome: str | None, limit: int) -> Table:
    """Tabulate the first `limit` rollouts, of one outcome if given."""
    matches = [match for match in all_rollouts(root) if outcome is None or match.outcome == outcome]
    table = _columns("rollouts", "id", "purpose", "task", "trial", "adapter", "outcome", "reward", "leaves reference")
    for match in map(censored, matches[:limit]):
        first = divergence(match.messages, match.reference).first
        table.add_row(
            *(match.id, match.purpose, match.task.id, str(match.trial), match.adapter or "base"),
            Text(match.outcome, COLOURS[match.outcome]),
            f"{match.score.reward:.2f}" if match.score else "",
            "never" if first is None else f"at call {first + 1}",
        )
    table.caption = f"{min(limit, len(matches))} of {len(matches)}; `captrain show rollouts ID` shows one"
    return table


def rollout(root: Path, name: str) -> RenderableType:
    """Render one rollout, its messages with the divergence from the reference marked."""
    by_id = {entry.id: entry for entry in all_rollouts(root)}
    name = _pick("rollout", name, by_id)
    entry = censored(by_id[name])
    facts = {
        "task": f"{entry.task.id} of {entry.environment} ({entry.task.split} split), trial {entry.trial}, "
        f"for {entry.purpose}",
        "adapter": entry.adapter or "none: the base",
        "policy": entry.policy,
        "tokens": f"{entry.usage.prompt_tokens} read, {entry.usage.completion_tokens} written",
    }
    if entry.score:
        facts["reward"] = f"{entry.score.reward:.3f}"
        facts |= {f"  {part}": f"{value:.3f}" for part, value in entry.score.parts.items()}
    if entry.error:
        facts["error"] = entry.error
    if entry.retries:
        facts["retries"] = str(entry.retries)
    title = Text.assemble("rollout ", (name, "bold"), " ", (entry.outcome, COLOURS[entry.outcome]))
    return Group(title, _facts(facts), Text(), *_dialogue(entry))


def _facts(facts: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def _dialogue(rollout: Rollout) -> list[Text]:
    """Render messages in order; calls that agree with the reference have a =, others ≠, + (extra) or - (missing)."""
    divergences = divergence(rollout.messages, rollout.reference)
    lines: list[Text] = []
    index = 0
    for message in rollout.messages:
        role = message["role"]
        lines.append(Text(f"{role} {message['name']}" if message.get("name") else role, "bold cyan"))
        if message.get("content"):
            lines.append(Text(f"  {message['content']}", "dim" if role == "system" else ""))
        for name, arguments in calls_of(message) if role == "assistant" else ():
            lines += _marked(index, call_text(name, arguments), divergences)
            index += 1
    if divergences.first == index:
        lines.append(Text("▶ here the rollout leaves its reference", "bold yellow"))
    lines += [Text(f"  - {call}   missing", "red") for call in divergences.missing.get(index, [])]
    if divergences.first is None:
        lines.append(Text("every tool call is the reference's", "green"))
    return lines


def _marked(index: int, call: str, divergences: Divergence) -> list[Text]:
    mark = divergences.marks[index]
    lines = [Text("▶ here the rollout leaves its reference", "bold yellow")] if divergences.first == index else []
    lines += [Text(f"  - {missing}   missing", "red") for missing in divergences.missing.get(index, [])]
    if mark.verdict == "same":
        return [*lines, Text(f"  = {call}", "green")]
    if mark.verdict == "extra":
        return [*lines, Text(f"  + {call}   extra: not in the reference", "red")]
    return [*lines, Text(f"  ≠ {call}", "red"), Text(f"    reference: {mark.expected}", "yellow")]


def capabilities(root: Path) -> Table:
    """Tabulate every candidate with the numbers of its selection."""
    selection = read_selection(root / "results")
    names = ("id", "selected", "gap", "interval", "coverage", "runs", "reason")
    table = _columns("candidate capabilities", *names)
    for candidate in selection["candidates"]:
        table.add_row(
            candidate["id"],
            Text("yes", "green") if candidate["selected"] else Text("no", "red"),
            _number(candidate["gap"]),
            f"{_number(candidate['gap_low'])} to {_number(candidate['gap_high'])}",
            _number(candidate["coverage"]),
            f"{candidate['runs_retained']} of {candidate['runs']}",
            Text(candidate["reason"]),
        )
    table.caption = "thresholds: " + ", ".join(f"{name} {value}" for name, value in selection["thresholds"].items())
    return table


def capability(root: Path, name: str) -> RenderableType:
    """Render one candidate: description, numbers of its selection and the reason, evidence."""
    selection = read_selection(root / "results")
    by_id = {candidate["id"]: candidate for candidate in selection["candidates"]}
    name = _pick("capability", name, by_id)
    candidate = by_id[name]
    facts = {
        "selected": f"{'yes' if candidate['selected'] else 'no'}: {candidate['reason']}",
        "gap": f"{_number(candidate['gap'])} ({_number(candidate['gap_low'])} to {_number(candidate['gap_high'])})",
        "error rate, failed": _number(candidate["er_failed"]),
        "error rate, passed": _number(candidate["er_passed"]),
        "coverage": _number(candidate["coverage"]),
        "labelling runs": f"retained in {candidate['runs_retained']} of {candidate['runs']}",
        "thresholds": ", ".join(f"{key} {value}" for key, value in selection["thresholds"].items()),
    }
    records = root / "results/labels/candidates.jsonl"
    for record in load(records, Capability) if records.exists() else []:
        if record.id == name:
            facts["lacking in"] = ", ".join(record.examples) or "no example"
            facts |= {key: json.dumps(value, ensure_ascii=False) for key, value in record.details.items()}
    return Group(Text(candidate["name"], "bold"), Text(candidate["description"]), _facts(facts))


def _passports(root: Path) -> dict[str, Passport]:
    paths = sorted((root / "results/environments").glob("*.passport.json"))
    if not paths:
        raise UserError("results/environments holds no passport", "run `dvc repro environments` to make them")
    return {path.name.removesuffix(".passport.json"): read_json(path, Passport) for path in paths}


def environments(root: Path) -> Table:
    """Tabulate every synthesized environment and whether its passport holds."""
    table = _columns("environments", "capability", "passport", "checks", "failed checks")
    for name, passport in _passports(root).items():
        failed = [check.name for check in passport.checks if not check.passed]
        checks = f"{len(passport.checks) - len(failed)} of {len(passport.checks)}"
        table.add_row(name, _verdict(passport.passed), checks, ", ".join(failed))
    for page in sorted((root / "results/environments/rejected").glob("*.md")):
        table.add_row(page.stem, _verdict(False), "", f"left out: see {page.relative_to(root)}")
    return table


def _verdict(passed: bool) -> Text:
    return Text("passed", "green") if passed else Text("failed", "red")


def environment(root: Path, name: str) -> RenderableType:
    """Render one passport, check by check."""
    passports = _passports(root)
    name = _pick("environment", name, passports)
    passport = passports[name]
    table = _columns(f"passport of {name}", "check", "", "measured", "bound", "detail", "task")
    for check in passport.checks:
        measured = "" if check.measured is None else str(check.measured)
        table.add_row(check.name, _verdict(check.passed), measured, check.bound, Text(check.detail), Text(check.task))
    facts = {key: str(value) for key, value in passport.model_dump(exclude={"checks"}).items()}
    return Group(table, _facts({**facts, "file": f"results/environments/{name}.py"}))


def _adapters(root: Path) -> dict[str, IndexEntry]:
    """Read the indices of adapters and, as far as they were trained, of all others."""
    indices = arm_indices(root).values()
    return {name: entry for index in indices for name, entry in index if entry.path}


def adapters(root: Path) -> Table:
    """Tabulate every adapter by its content hash."""
    table = _columns("adapters", "name", "content hash", "rollouts", "folder", "here")
    for name, entry in _adapters(root).items():
        presence = "yes" if (root / entry.path).exists() else "no"
        table.add_row(name, entry.digest, f"{entry.rollouts:,}", entry.path, presence)
    return table


def adapter(root: Path, name: str) -> RenderableType:
    """Render one adapter: its row of the index and its model card."""
    index = _adapters(root)
    name = _pick("adapter", name, index)
    entry = index[name]
    facts = _facts(
        {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in entry.model_dump(exclude_unset=True).items()
        }
    )
    card = root / entry.path / "README.md"
    if not card.exists():
        note = f"its model card {entry.path}/README.md is not here: run `dvc pull`, or `dvc repro` to train it again"
        return Group(Text(name, "bold"), facts, Text(note, "yellow"))
    text = read_text(card)
    front = text.split("---\n", 2)
    return Group(Text(name, "bold"), facts, Text(), Markdown(front[2] if text.startswith("---\n") else text))


def results(root: Path) -> RenderableType:
    """Render the paired differences, and last the final table.

    Before them stand, of a benchmark that describes itself, the rates by kind and the findings on the discovery split,
    what repaired what, re-discovery, and where the figures lie.
    """
    from captrain.comparison import ORACLE, evaluation_metrics, evaluation_table, interpret_difference
    from captrain.reporting.rediscovery import rediscovery_table
    from captrain.reporting.tables import NO_BOUND, causal_table, table

    folder = root / "results/evaluation"
    discovery = _discovery(root)
    if discovery and not folder.exists():
        return Group(discovery, Text("the test split has not been played: `dvc repro evaluation`"))
    final = table(folder)
    level = 1 - evaluation_metrics(folder).confidence
    paired = _columns("paired differences over tasks, in pass rate", "difference", "rate", "interval", "p", "distinct")
    for row in evaluation_table(folder, "differences", DIFFERENCES).dropna(subset=["difference"]).to_dict("records"):
        paired.add_row(
            f"{row['first']} - {row['second']}",
            f"{row['difference']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}",
            "" if row["p"] != row["p"] else f"{row['p']:.3f}" if row["p"] >= 0.001 else "< 0.001",
            NO_BOUND
            if row["first"] == ORACLE and row["difference"] < 0
            else DISTINCT.get(reading := interpret_difference(row, level), reading),
        )
    paired.caption = (
        "p: exact sign test over tasks; not given for bounds, which are no single policy\n"
        "distinct: by the interval and, where there is a test, by p after Holm's correction for all tests here; "
        "no (Holm): not after the correction"
    )
    figures = sorted((root / "results/figures").glob("*.p*"))
    figures_line = (
        f"figures: {', '.join(path.name for path in figures)} in results/figures/"
        if figures
        else ("figures: not drawn yet; run `dvc repro figures`")
    )
    kinds = evaluation_table(folder, "kinds", KINDS).to_dict("records") if discovery else []
    more = (_kinds(kinds), Text()) if kinds else ()
    more += (discovery, Text()) if discovery else ()
    causal = causal_table(root / "results/causality")
    more += (causal, Text()) if causal else ()
    again = rediscovery_table(root / "results")
    more += (again, Text()) if again else ()
    # The headline last: that is what a terminal still shows when all has been printed.
    return Group(*more, Text(figures_line), Text(), paired, Text(), final)


def costs(root: Path) -> RenderableType:
    """Tabulate what each method has spent, and what the stages that it rests on took."""
    from captrain.comparison import SUMS, evaluation_table
    from captrain.execution import times

    seconds_of = times(root)
    names = ("method", "rollouts", "constant groups", "errors", "tokens read", "written", "wall s", "CPU s", "stages")
    table = _columns("what each method spent before the evaluation", *names)
    for row in evaluation_table(root / "results/evaluation", "spent", ("label", "stages", *SUMS)).to_dict("records"):
        stages = str(row["stages"]).split() if isinstance(row["stages"], str) else []
        numbers = [f"{row[name]:,}" for name in SUMS]
        complete = all(stage in seconds_of for stage in stages)
        seconds = [
            f"{sum(getattr(seconds_of[stage], unit) for stage in stages):,.0f}" if stages and complete else ""
            for unit in ("wall_s", "cpu_s")
        ]
        table.add_row(row["label"], *numbers, *seconds, " ".join(stages))
    table.caption = "seconds: those of whole stages, of the run that made these results; empty where they are not known"
    return table


def _kinds(rows: Sequence[ComparisonRow]) -> Table:
    """Tabulate rates by kind of what was played: no bounds."""
    table = _columns("test split by kind", "kind", "method", "tasks", "pass rate", "interval", "pass^k", "mean reward")
    for row in rows:
        if row["mean_reward"] == row["mean_reward"] and not row["method"].startswith("router:"):
            numbers = (_number(row[name]) for name in ("pass_hat_k", "mean_reward"))
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            table.add_row(row["kind"], row["label"], str(row["tasks"]), _number(row["pass_rate"]), interval, *numbers)
    return table


class _Rates(BaseModel):
    pass_rate: float | None
    mean_reward: float | None


class _KindRates(_Rates):
    rollouts: int = 0
    floor: _Rates


class _Summary(_KindRates):
    """Fields that are read of results/rollouts/summary.json; `rollouts` stands with the kinds alone."""

    outcomes: dict[str, int]
    kinds: dict[str, _KindRates]
    benchmark: JsonObject = {}


def _discovery(root: Path) -> RenderableType | None:
    """Tabulate the base's results on the discovery split beside an agent that does nothing, and the facts that the
    benchmark gives of itself; None for a benchmark that gives none."""
    path = root / "results/rollouts/summary.json"
    summary = read_json(path, _Summary) if path.exists() else None
    if summary is None or not summary.benchmark:
        return None
    about = summary.benchmark
    names = ("kind", "rollouts", "pass rate", "mean reward", "doing nothing: pass rate", "mean reward")
    table = _columns("discovery split, base", *names)
    whole = summary.model_copy(update={"rollouts": sum(kind.rollouts for kind in summary.kinds.values())})
    for kind, row in {**summary.kinds, "all": whole}.items():
        rates = (_number(rate) for part in (row, row.floor) for rate in (part.pass_rate, part.mean_reward))
        table.add_row(kind, str(row.rollouts), *rates)
    errors, closed = summary.outcomes.get("error", 0), len(about.get("not_runnable") or {})
    lines = [
        f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in about.items() if name != "not_runnable"
    ]
    lines.append(f"{errors} rollouts ended in errors of infrastructure; {closed} tasks are not runnable here")
    return Group(table, Text("\n".join(lines)))
