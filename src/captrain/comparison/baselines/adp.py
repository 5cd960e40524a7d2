"""Row `adp`: supervised fine-tuning on generic agent trajectories, without rollouts.

`captrain.interop` reads trajectories in the schemas of the Agent Data Protocol and converts them to tool-native
messages. The row trains on the first `demonstrations` of the file that convert and fit into the model. The model card
counts the others by reason.

Without a file, the row first writes demonstrations of our own in that schema and then reads them like any other file.
They are generic: requests of every kind of the base's own corpus, in the shares of that corpus and not of the target,
and no task of the benchmark. The demonstrator takes each of the base's shortcuts half as often (`CARE`), whatever the
diagnosis found. So they are neither expert nor from the target, and `CARE` alone decides how much they help. The
embedded row says nothing about the protocol's real data for a real model.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.benchmarks import servicedesk as desk
from captrain.comparison.baselines.sft import Demonstrated, Lesson, SFTBaseline, teach
from captrain.errors import UserError
from captrain.interop import Inexpressible, atif_document, messages_of, read_trajectories, tools_of
from captrain.models import Chat
from captrain.records import JsonObject, digest, file_digest, publish_text
from captrain.run import Spec
from captrain.training import (
    KINDS,
    SHORTCUTS,
    TOO_LONG,
    Demonstration,
    FineTuned,
    Learner,
    demonstration_of,
    take_shortcuts,
)

WORKSPACES = Path(".cache/adp")
CARE = 0.5
"""Factor on the probability of each shortcut in our own demonstrations."""
ELIGIBLE = 0.3
"""Share of cancellations and returns that the desk's policy allows, as in the base's corpus."""


def write_generic(path: Path, count: int, seed: int) -> None:
    """Write generic demonstrations of the service desk, one ATIF trajectory per line."""
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
        document = atif_document(messages, name=f"generic-{seed}-{index}", agent="demonstrator", extra={})
        lines.append(json.dumps(document) + "\n")
    publish_text(path, "".join(lines))


def demonstrations(
    path: Path, count: int, policy: Learner, tools: Sequence[JsonObject]
) -> tuple[list[Demonstration], int, dict[str, int]]:
    """Read the first `count` demonstrations of a file that convert to messages and fit into the model.

    Args:
        path: ATIF trajectories, one per line.
        count: the most demonstrations.
        policy: gives the tokenizer and the context length.
        tools: schemas of the target.

    Returns:
        Demonstrations, the number of trajectories read, and the number left out by reason.

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


def generic_trajectories(lesson: Lesson, policy: Learner) -> Demonstrated:
    """Demonstrate the trajectories of the lesson's file, or write our own first.

    Raises:
        UserError: no trajectory can be used.
    """
    spec, count, source = lesson.spec, lesson.spec.baselines.adp.demonstrations, lesson.source
    if source is None:
        source = WORKSPACES / f"generic-{spec.seed}-{count}.jsonl"
        write_generic(source, count, spec.seed)
    tools = load_benchmark(spec.benchmark, spec.machine).tools
    rows, trajectories, left_out = demonstrations(source, count, policy, tools)
    key = file_digest(source)
    card = f"| trajectories from | {source.name}, SHA-256 {key} |\n| trajectories read | {trajectories} |\n"
    return Demonstrated(rows, left_out, card, key)


def trajectory_lessons(spec: Spec, project: Path = Path()) -> list[Lesson]:
    """Make the job of the row."""
    source = spec.baselines.adp.source
    return [Lesson("adp", spec, project / "artifacts/base", Path(source) if source else None)]


def teach_trajectories(lesson: Lesson) -> FineTuned:
    """Train the adapter of the row."""
    return teach(lesson, generic_trajectories)


BASELINE = SFTBaseline(
    name="adp",
    label="ADP",
    order=3,
    lessons=trajectory_lessons,
    teach=teach_trajectories,
    unequal="trains on demonstrations",
)
