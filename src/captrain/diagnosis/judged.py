"""Lets a language model analyse logs: chats without references, or to compare with the programmatic causes.

The analyst, its blind labels and its cached answers are the pipeline's (`analyst=openai`). captrain prints the cost
before it asks anything, and a budget stops it. Answers are kept: a second run asks only for the rest.
"""

from pathlib import Path

from rich.table import Table

from captrain.capabilities import (
    Analyst,
    label_runs,
    measure_agreement,
    select,
    selection_table,
    text_of,
)
from captrain.diagnosis.diagnosis import FEW
from captrain.diagnosis.rollouts import diagnose_rollouts
from captrain.diagnosis.synthesis import PER_TOKEN, AskingCost
from captrain.interop import Logs
from captrain.records import Rollout, publish, publish_json, publish_lines
from captrain.run import Component, ModelAccess, SelectionSettings, build, user_outputs

ANALYST = "captrain.capabilities.openai.OpenAIAnalyst"
CHARACTERS = 16000
"""Maximum number of characters of one rollout; the analyst shortens longer ones."""
EXCERPTS = 8
"""Rollouts in a discovery question."""
RULES = 4000
"""Approximate number of characters of a question without its rollouts."""
ANSWER = 400
"""Approximate number of tokens of an answer."""


def judging_cost(logs: Logs, runs: int, access: ModelAccess) -> AskingCost:
    """Estimate what `judge` would ask and cost."""
    sizes = [
        min(CHARACTERS, sum(len(text_of(message.get("content") or "")) for message in rollout.messages))
        for rollout in logs.rollouts
        if rollout.outcome != "error"
    ]
    mean = sum(sizes) / max(1, len(sizes))
    discovery = runs * (RULES + EXCERPTS * mean)
    questions = runs * (len(sizes) + 1) + 1
    read = int((discovery + runs * (sum(sizes) + RULES * len(sizes))) / PER_TOKEN)
    return AskingCost(questions, read, questions * ANSWER, access)


def judge(
    logs: Logs,
    model: str,
    access: ModelAccess,
    selection: SelectionSettings,
    out: Path,
    *,
    runs: int,
    count: int,
    seed: int,
) -> list[Table | str]:
    """Let a language model propose capabilities and label rollouts without knowing their outcome; then select.

    Rollouts without a verdict and rollouts with a suspect reference are left out. Writes selection.json,
    candidates.jsonl, labels.jsonl, agreement.json, asked.json, rollouts.jsonl and tools.json.

    Returns: Parts to print: the ranking, the nearest cause of each candidate, what was asked, and what is missing.

    Raises:
        UserError: all rollouts have the same outcome, a budget is reached, or the endpoint cannot be asked.
    """
    settings = {"_target_": ANALYST, "name": model, "temperature": 1.0, "max_tokens": 4096, "characters": CHARACTERS}
    analyst = build(Component.model_validate(settings), Analyst, access=access)
    rows = zip(diagnose_rollouts(logs).rollouts, logs.rollouts, strict=True)
    rollouts: list[Rollout] = [rollout for row, rollout in rows if row.standing not in ("error", "suspect")]
    candidates, labels = label_runs(analyst, rollouts, logs.tools, runs, seed)
    report = select(labels, candidates, selection, count, seed).report
    agreement = measure_agreement(analyst, labels, rollouts, logs.tools)
    usage: dict[str, int] = getattr(analyst, "usage", {})
    with user_outputs(out) as aside:
        publish_lines(aside / "rollouts.jsonl", logs.rollouts.lines)
        publish_json(aside / "tools.json", logs.known_tools)
        publish_json(aside / "selection.json", report)
        publish(aside / "candidates.jsonl", candidates)
        publish(aside / "labels.jsonl", labels)
        publish_json(aside / "agreement.json", agreement)
        publish_json(aside / "asked.json", usage)
    lines: list[Table | str] = [selection_table(report)]
    for slug, entry in agreement.get("programmatic", {}).get("candidates", {}).items():
        if entry["best"] is not None and entry["kappa"] is not None:
            lines.append(f"{slug}: nearest cause {entry['best']}, kappa {entry['kappa']:.2f}")
    if usage:
        counts = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in usage.items())
        answers, prompt, completion = (usage.get(name, 0) for name in ("answers", "prompt_tokens", "completion_tokens"))
        money = AskingCost(answers, prompt, completion, access).money
        lines.append(f"asked: {counts}{f'; at these prices {money}' if money else ''}")
    passed, failed = report["rollouts"]["passed"], report["rollouts"]["failed"]
    if min(passed, failed) < FEW:
        counts = f"{passed} passed and {failed} failed rollouts; at least {FEW} of each are needed"
        lines.append(f"nothing can be concluded: {counts} to conclude anything")
    return lines
