"""Baseline: supervised fine-tuning on generic agent trajectories, which costs no rollout.

Trajectories are read in the schemas of the Agent Data Protocol (`captrain.interop`), told as tool-native messages,
and trained on as `captrain.training` does. The first `demonstrations` of the file that can be told and fit into the
model are used; what is left out is counted by reason in the model card.

Without a file, demonstrations of our own are written in that schema first and then read like any other. They are
generic: requests of every kind that the base's own corpus has, in that corpus's shares and not the target's, none of
the benchmark's tasks, by a demonstrator that takes each of the base's shortcuts half as often (`CARE`), whatever the
diagnosis found. So they are neither an expert's nor the target's. How far such data help is decided by that factor
alone: of what the protocol's real data do for a real model, the embedded row says nothing.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.benchmarks import servicedesk as desk
from captrain.comparison.baselines.sft import Lesson, SFTBaseline
from captrain.errors import UserError
from captrain.interop import Inexpressible, atif_document, messages_of, read_trajectories, tools_of
from captrain.models import Chat
from captrain.records import JsonObject, digest, file_digest, publish_text
from captrain.run import Spec, code_digest
from captrain.training import (
    KINDS,
    SHORTCUTS,
    TOO_LONG,
    Demonstration,
    FineTuned,
    FineTuning,
    Learner,
    demonstration_of,
    fine_tune,
    fine_tuning_settings,
    learner,
    take_shortcuts,
)

WORKSPACES = Path(".cache/adp")
CARE = 0.5
"""Factor on the probability of each shortcut in demonstrations of our own."""
ELIGIBLE = 0.3
"""Share of cancellations and returns in them that the desk's policy allows, as in the base's corpus."""


def write_generic(path: Path, count: int, seed: int) -> None:
    """Write generic demonstrations of the service desk, one trajectory in ATIF a line."""
    rng = random.Random(f"generic-{seed}")
    lines = []
    for index in range(count):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        data = desk.make_kind(rng, kind, ELIGIBLE)
        shortcuts = {shortcut for shortcut, p in SHORTCUTS.items() if rng.random() < p * CARE}
        episode = desk.DeskEpisode(data)
        messages = list(episode.messages)
        for action in take_shortcuts(data, shortcuts, rng):
            replies, _ = episode.step(action)
            messages += [action, *replies]
        lines.append(
            json.dumps(atif_document(messages, name=f"generic-{seed}-{index}", agent="demonstrator", extra={})) + "\n"
        )
    publish_text(path, "".join(lines))


def demonstrations(
    path: Path, count: int, policy: Learner, tools: Sequence[JsonObject]
) -> tuple[list[Demonstration], int, dict[str, int]]:
    """Read the first `count` demonstrations of a file that can be told and fit into the model.

    Args:
        path: trajectories in ATIF, one a line.
        count: at most so many.
        policy: its tokenizer, and how much it reads.
        tools: schemas of the target.

    Returns:
        Demonstrations, the number of trajectories read, and why others were left out, by reason.

    Raises:
        UserError: the file is missing, has a line that is no trajectory, or none that can be used.
    """
    chats, rows, left_out, trajectories = dict[str, Chat](), list[Demonstration](), Counter[str](), 0
    for trajectory in read_trajectories(path):
        trajectories += 1
        try:
            messages = messages_of(trajectory)
        except Inexpressible as reason:
            left_out[str(reason)] += 1
            continue
        schemas = tools_of(trajectory, messages, tools)
        key = digest(schemas)
        if key not in chats:
            chats[key] = policy.chat(schemas)
        row = demonstration_of(chats[key], messages, policy.max_length)
        if row is None:
            left_out[TOO_LONG] += 1
            continue
        rows.append(row)
        if len(rows) == count:
            break
    if not rows:
        reasons = "; ".join(f"{reason}: {times}" for reason, times in left_out.items()) or "it is empty"
        raise UserError(
            f"none of the {trajectories} trajectories in {path} can be trained on ({reasons})",
            "set baselines.adp.source to trajectories of text and tool calls",
        )
    return rows, trajectories, dict(sorted(left_out.items()))


def trajectory_lessons(spec: Spec, project: Path = Path()) -> list[Lesson]:
    """Make the one lesson of the row."""
    source = spec.baselines.adp.source
    return [Lesson("adp", spec, project / "artifacts/base", Path(source) if source else None)]


def teach_trajectories(lesson: Lesson) -> FineTuned:
    """Train the adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the base cannot be trained, or the trajectories cannot be used.
    """
    spec, base, settings = lesson.spec, lesson.base, lesson.spec.baselines.adp
    policy = learner(spec.policy, base, spec.machine, "adp", "set baselines.adp.run to false")
    source = lesson.source
    if source is None:
        source = WORKSPACES / f"generic-{spec.seed}-{settings.demonstrations}.jsonl"
        write_generic(source, settings.demonstrations, spec.seed)
    tools = load_benchmark(spec.benchmark, spec.machine).tools
    rows, trajectories, left_out = demonstrations(source, settings.demonstrations, policy, tools)
    hashed = file_digest(source)
    card = f"| trajectories from | {source.name}, SHA-256 {hashed} |\n| trajectories read | {trajectories} |\n"
    recipe = fine_tuning_settings(spec, settings.epochs, settings.learning_rate)
    key = [code_digest(teach_trajectories), hashed]
    return fine_tune(FineTuning("adp", base, recipe, rows, left_out, card, spec.machine, key), policy)


BASELINE = SFTBaseline(
    name="adp",
    label="ADP",
    order=3,
    lessons=trajectory_lessons,
    teach=teach_trajectories,
    unequal="trains on demonstrations",
)
