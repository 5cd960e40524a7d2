"""Assigns every rollout to an agent and a trial. Two implementations, runs or prompts of one model are two agents.

- Records that share the result file of a trial are one rollout. The most complete record is kept.
- If the files name their agent, rollouts of one model are split by it.
- If an agent then has two rollouts of the same task and trial, its rollouts are split by the first of these that
  separates all such duplicates: the path given by the user, the folder, the file, the system prompt.
- Remaining duplicates: if the file numbers no trials, they are numbered. Otherwise only the most complete one is kept.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.interop.logs.source import Entry, Read
from captrain.records import Rollout, bytes_digest, counted, plain

FEW = 12
"""Most agents that one model is split into by paths or prompts. With more, the differences are not agents."""


@dataclass
class Origin:
    """Where a rollout was read, and which agent and trial it is assigned to.

    first: the trial as read. trial: None if the file does not number trials. paths: what may separate agents, by kind.
    worth: sort key; of two duplicates the one with the larger worth is kept. result: see `Entry`. label, number: the
    assigned agent and trial. kept: false for a duplicate that is left out.
    """

    model: str
    task: str
    first: int
    trial: int | None
    agent: str
    paths: dict[str, str]
    worth: tuple[bool, int]
    result: str = ""
    label: str = ""
    kept: bool = True
    number: int = 0

    @property
    def is_changed(self) -> bool:
        """Whether the assignment changes the rollout's agent or trial, or leaves the rollout out."""
        return not self.kept or self.label != self.model or self.number != self.first


def origin_of(rollout: Rollout, entry: Read, argument: Path, path: Path) -> Origin:
    """Describe where the rollout of an entry was read."""
    is_entry = isinstance(entry, Entry)
    trial, agent, result = (entry.trial, entry.agent, entry.result) if is_entry else (rollout.trial, "", "")
    system = next((message["content"] for message in rollout.messages if message["role"] == "system"), "")
    below = path.relative_to(argument).parts if path != argument and path.is_relative_to(argument) else ()
    paths = {
        "path": str(argument),
        "folder": str(argument / below[0]) if len(below) > 1 else "",
        "file": str(path),
        "prompt": bytes_digest(system.encode())[:6] if system else "",
    }
    worth = rollout.outcome != "error", len(rollout.messages)
    return Origin(rollout.policy, rollout.task.id, rollout.trial, trial, agent, paths, worth, result)


def settle(origins: Sequence[Origin]) -> Iterator[str]:
    """Assign agents and trials to all rollouts, in place, and drop duplicates. Yield notes for the user."""
    yield from _records_of_one_trial(origins)
    origins = [origin for origin in origins if origin.kept]
    by_model: defaultdict[str, list[Origin]] = defaultdict(list)
    for origin in origins:
        by_model[origin.model].append(origin)
    for model, group in by_model.items():
        agents = {origin.agent for origin in group}
        named = defaultdict[str, list[Origin]](list)
        for origin in group:
            origin.label = f"{model} ({origin.agent})" if len(agents) > 1 and origin.agent else model
            named[origin.label].append(origin)
        for label, members in named.items():
            kind = _separating(members)
            values = sorted({origin.paths[kind] for origin in members}) if kind else []
            for origin in members:
                if kind:
                    origin.label = f"{label} ({_short(origin.paths[kind], values)})"
            if kind:
                yield f"{plain(label)} played each task in {len(values)} {kind}s, which are {len(values)} agents"
    yield from _repetitions(origins)


def _records_of_one_trial(origins: Sequence[Origin]) -> Iterator[str]:
    """Keep only the most complete of the records that share the result file of a trial. Yield a note for the user."""
    groups: defaultdict[str, list[Origin]] = defaultdict(list)
    for origin in origins:
        groups[origin.result].append(origin)
    dropped: list[Origin] = []
    for group in [group for result, group in groups.items() if result]:
        best = max(group, key=lambda origin: origin.worth)
        dropped += [origin for origin in group if origin is not best]
    for origin in dropped:
        origin.kept, origin.label = False, origin.model
    if dropped:
        yield (
            f"left out: {counted(len(dropped), 'further record')} of trials that another file records more completely, "
            f"such as {plain(Path(dropped[0].paths['file']).name)}"
        )


def _pairs(members: Sequence[Origin]) -> list[list[Origin]]:
    """Return the groups of two or more rollouts that have the same task and trial."""
    groups: defaultdict[tuple[str, int | None], list[Origin]] = defaultdict(list)
    for origin in members:
        groups[origin.task, origin.trial].append(origin)
    return [group for group in groups.values() if len(group) > 1]


def _separating(members: Sequence[Origin]) -> str:
    """Return which of "path", "folder", "file" and "prompt" separates all rollouts of the same task and trial.

    Returns "" if there are no such duplicates or none of these separates them. A split in which an agent would have a
    single rollout is not used, because single rollouts are more likely trials.
    """
    pairs = _pairs(members)
    if not pairs:
        return ""
    for kind in ("path", "folder", "file", "prompt"):
        sizes = Counter(origin.paths[kind] for origin in members)
        is_apart = all(len({origin.paths[kind] for origin in pair}) == len(pair) for pair in pairs)
        if 1 < len(sizes) <= FEW and min(sizes.values()) > 1 and "" not in sizes and is_apart:
            return kind
    return ""


def _short(value: str, values: Sequence[str]) -> str:
    """Return a path without the leading folders that all `values` share."""
    parts = [Path(other).parts for other in values]
    same = 0
    while all(len(part) > same + 1 for part in parts) and len({part[same] for part in parts}) == 1:
        same += 1
    return str(Path(*Path(value).parts[same:]))


def _repetitions(origins: Sequence[Origin]) -> Iterator[str]:
    dropped: list[Origin] = []
    by_label: defaultdict[str, list[Origin]] = defaultdict(list)
    for origin in origins:
        origin.number = origin.trial or 0
        by_label[origin.label].append(origin)
    for members in by_label.values():
        for pair in _pairs(members):
            if pair[0].trial is None:
                for number, origin in enumerate(pair):
                    origin.number = number
                continue
            best = max(pair, key=lambda origin: origin.worth)
            for origin in pair:
                origin.kept = origin is best
            dropped += [origin for origin in pair if not origin.kept]
    if dropped:
        first, count = dropped[0], counted(len(dropped), "rollout")
        yield (
            f"left out: {count} of a task and trial that stands twice for its agent, such as {plain(first.task)}, "
            f"trial {first.number} in {plain(Path(first.paths['file']).name)}: the more complete one counts"
        )
