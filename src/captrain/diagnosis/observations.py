"""Observations on rollouts of any agent, with a shell, an editor, a browser, search, or any other tools.

An observation is not a cause, because nothing shows that it cost the reward. The report lists observations separately,
with quotes and counts of failed and passed rollouts. To add one, write a function that finds it in a rollout, and an
entry in `OBSERVATIONS`, or in `DOUBTS` if it says why a pass should not have passed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from captrain.capabilities import (
    Call,
    RolloutView,
    atoms,
    forbidden_values,
    forbidden_writes,
    is_malformed,
    quoted,
    says,
    text_of,
)
from captrain.records import Rollout

REPEATS = 3
"""Minimum number of equal calls with equal results that are reported."""
TAIL = 2000
"""Number of characters at the end of an output that are searched for a failure."""
SHORTEST, WORDS = 4, 4
"""Minimum number of characters and maximum number of words of an answer whose source is looked for."""
EDITS = re.compile(r"edit|write|create|insert|replace|patch|delete|rename")
VIEWS = re.compile(r"view|read|open")
WRITES = re.compile(
    r"(?:^|[;&|(]\s*)(?:sudo )?(?:sed (?:-\w+ )*-i|tee|patch|git (?:apply|checkout|mv|rm|restore)|rm|mv|cp|touch)\b"
    r"|(?<![<>&\d=-])>{1,2}\s*[\w./~$\"']",
    re.MULTILINE,
)
"""Shell commands that change files."""
FAILURE = re.compile(
    r"Traceback \(most recent|^\s*\w*(?:Error|Exception)\b|\b[1-9]\d* (?:failed|errors?)\b|\bFAILED\b|command not found"
    r"|No such file or directory|\bexit(?:ed with)?(?: code| status)?:? [1-9]|returncode\W+[1-9]|Segmentation fault"
    r"|^fatal: |Permission denied",
    re.MULTILINE,
)
SUBMITS = re.compile(r"submit|finish|complete|final|answer|done|exit", re.IGNORECASE)
SIGNAL = re.compile(r"[\s#<\[*]*([A-Z][A-Z_ ]*)[\s#>\]*.!]*")
"""A message that may only end a dialogue of agents, such as TERMINATE."""
SURE = 0.9
"""Minimum share of a signal among the dialogues that end in such a word."""
AGREED = "TERMINATE"
"""The signal of AutoGen's documentation."""
PATH = re.compile(r"[\w.~-]*/[\w./~-]+|[\w-]+\.[a-z]{2,5}(?=[\s\"'`;|)]|$)")
URL = re.compile(r"https?://\S+")
"""A web address. Its path is not a file of the task."""
ORACLE = re.compile(
    r"(?:reference_|sample_)?solutions?|oracle|grader|grading|answer_?keys?|(?:gold|golden|expected|reference)_?"
    r"(?:patch|outputs?|answers?|results?)|ground_?truth|verifier|hidden_?tests?",
    re.IGNORECASE,
)
"""Names of files and folders by which an agent is graded."""
SHELLS = re.compile(r"bash|shell|terminal|command|cmd|exec|run", re.IGNORECASE)
COMMANDS = {"command", "cmd", "script", "keystrokes"}
"""Names of arguments that hold a shell command."""
CODE = re.compile(r"python|code|cell|sql|jupyter", re.IGNORECASE)
CONFIRM = re.compile(r"(?<![^.\n])[^.\n]*\b(?:obtain|ask|get|require|wait)[^.\n]*\bconfirm[^.\n]*", re.IGNORECASE)
Noted = tuple[int, str] | None
"""The index of the message that shows an observation, and the evidence."""


@dataclass(frozen=True)
class Observation:
    """Something that a program finds in a rollout without a reference. `title` says it in words."""

    name: str
    title: str
    applies: Callable[[RolloutView], Noted]


# What an agent did in its environment


def _commands(view: RolloutView) -> list[Call]:
    """Return calls to shells, interpreters, editors, browsers and search, without those that submit an answer."""
    return [call for call in view.acts if call.kind == "environment" and not SUBMITS.search(call.tool)]


def _text(call: Call) -> str:
    return "\n".join(text_of(value) for value in atoms(call.arguments))


def _is_change(call: Call) -> bool:
    """Return whether a call edits files, by its tool and its command."""
    command = call.arguments.get("command")
    verb = command if isinstance(command, str) and command.isidentifier() else call.tool.lower()
    is_edit = EDITS.search(verb) is not None and not VIEWS.fullmatch(verb)
    # Search tools also count as environments, but a search query is not a command.
    is_command = SHELLS.search(call.tool) is not None or not COMMANDS.isdisjoint(call.arguments)
    is_shell = is_command and not CODE.search(call.tool)
    return not call.failed and (is_edit or (is_shell and WRITES.search(_text(call)) is not None))


def _has_failed(call: Call) -> bool:
    return call.failed or _shows_failure(text_of(call.result or "")[-TAIL:])


@lru_cache(4096)
def _shows_failure(text: str) -> bool:
    return FAILURE.search(text) is not None


def nothing_checked(view: RolloutView) -> Noted:
    """The agent did nothing after its last change, so it did not check the change."""
    commands = _commands(view)
    if not commands or not _is_change(commands[-1]) or view.facts.limit:
        return None
    later = [call for call in view.acts if call.place > commands[-1].place and not SUBMITS.search(call.tool)]
    if any(call.kind != "think" for call in later):  # a tool of an unknown kind may have been the check
        return None
    return commands[-1].message, f"{commands[-1]} is the last change; the agent ran nothing after it"


def last_check_failed(view: RolloutView) -> Noted:
    """The last command failed, and the agent finished nevertheless."""
    commands = _commands(view)
    is_finished = bool(commands) and view.last > commands[-1].message and not view.facts.limit
    if not is_finished or not _has_failed(commands[-1]):
        return None
    return commands[-1].message, f"{commands[-1]} failed: {quoted(text_of(commands[-1].result or '')[-TAIL:])}"


def repeated(view: RolloutView) -> Noted:
    """One call was made at least `REPEATS` times with the same result."""
    for calls in [calls for calls in view.equal_calls if len(calls) >= REPEATS]:
        [(result, _)] = Counter(text_of(call.result) for call in calls).most_common(1)
        peers = [call for call in calls if text_of(call.result) == result and call.by == "assistant"]
        if len(peers) >= REPEATS:
            failing = " and failed each time" if _has_failed(peers[0]) else " with the same result"
            return peers[1].message, f"{peers[0]} was called {len(peers)} times{failing}"
    return None


def unanswered_error(view: RolloutView) -> Noted:
    """A call failed, and no later call of its tool succeeded."""
    for call in [call for call in view.acts if call not in _commands(view)[-1:]]:
        later = [peer for peer in view.acts if peer.place > call.place and peer.tool == call.tool]
        if call.result is not None and _has_failed(call) and all(map(_has_failed, later)):
            return (
                call.message,
                f"{call} failed, and no later call of {call.tool} succeeded: {quoted(text_of(call.result))}",
            )
    return None


def left_as_text(view: RolloutView) -> Noted:
    """A call was written as text, and never executed."""
    for place, message in enumerate(view.messages):
        if is_malformed(message):
            tools = ", ".join(map(str, message.get("unexecuted") or ())) or "some tool"
            return place, f"a call of {tools} was written as text and never executed"
    return None


# How it ended


def limited(view: RolloutView) -> Noted:
    """A limit of the harness ended the rollout."""
    return (view.last, f"stopped at a limit: {view.facts.limit}") if view.facts.limit else None


def answer_of(view: RolloutView) -> tuple[int, str]:
    """Return the answer that the agent submitted, with the index of its message.

    It is the first of these that exists: the submission in the log, the arguments of a call that submits, the last
    message, or the calls of the last message if the log has no results.
    """
    if "submission" in view.rollout.task.data:
        return view.last, view.facts.submission
    for call in reversed(view.acts):
        if SUBMITS.search(call.tool):
            return call.message, _text(call)
    if view.final or any(call.result is not None for call in view.acts):
        return view.last, view.final or ""
    return view.last, "; ".join(str(call) for call in view.acts if call.message == view.last)


def no_submission(view: RolloutView) -> Noted:
    """The submission is empty, or the agent only looked things up and ends without a message.

    An agent that changed something has submitted this change: a record, a file, or the state of a machine.
    """
    is_empty = "submission" in view.rollout.task.data and not view.facts.submission.strip()
    is_owed = _is_asked(view) or all(call.kind in ("read", "think") for call in view.acts)
    is_excused = view.handover or view.facts.limit or not is_owed or _is_closed_by_team(view)
    if not is_empty and (is_excused or answer_of(view)[1].strip()):
        return None
    return view.last, "the submission is empty" if is_empty else "there is no answer and no last message"


def _is_asked(view: RolloutView) -> bool:
    """Return whether the task is a question: the ground truth in the log is as short as an answer."""
    return any(0 < len(entry.text.split()) <= WORDS for entry in view.facts.expected)


def _is_closed_by_team(view: RolloutView) -> bool:
    """Return whether the last of several agents only ends the dialogue, so that the answer is in an earlier message."""
    answer = answer_of(view)[1]
    return is_team(view.rollout) and (not answer.strip() or signal_in(answer) in {AGREED, *view.context.signals})


def is_team(rollout: Rollout) -> bool:
    """Return whether several agents speak in a rollout."""
    return len({message.get("name") for message in rollout.messages if message["role"] == "assistant"}) > 1


def signal_in(text: str) -> str:
    """Return the text if it consists of one word that may be a signal; "" otherwise."""
    match = SIGNAL.fullmatch(text)
    return match[1].strip() if match else ""


class Signals:
    """Finds the words whose only purpose is to end dialogues of teams.

    Such a word ends at least half of the dialogues, and at least `SURE` of those that end in any such word, on several
    tasks. No speaker continues after it, and no task expects it as its answer.
    """

    def __init__(self) -> None:
        self._teams, self._within = Counter[str](), set[str]()
        self._questions: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, rollout: Rollout) -> None:
        """Count a rollout of a team."""
        if not is_team(rollout):
            return
        words = [signal_in(message.get("content") or "") for message in rollout.messages]
        last = words[-1]
        self._teams[last] += 1
        self._within |= {word for place, word in enumerate(words) if {*words[place:]} != {word}} - {""}
        self._questions[last].add(rollout.task.id)
        if any(signal_in(entry.text) == last for entry in rollout.task.facts.expected):
            self._within.add(last)

    @property
    def found(self) -> set[str]:
        """The signals."""
        number = sum(self._teams.values())
        least = max(number / 2, SURE * (number - self._teams[""]))
        words = {word for word, count in self._teams.items() if count >= least and len(self._questions[word]) > 1}
        return words - self._within - {""}


def answer_from_nowhere(view: RolloutView) -> Noted:
    """The agent made the answer up: no message of a tool or of anybody else contains it before.

    Only short answers to a question count. A patch, for example, is the agent's own work.
    """
    place, answer = answer_of(view)
    is_handed_in = bool(view.facts.submission) or any(SUBMITS.search(call.tool) for call in view.acts)
    is_short = is_handed_in and len(answer.strip()) >= SHORTEST and len(answer.split()) <= WORDS
    if not is_short or not _is_asked(view) or not any(call.result is not None for call in view.acts):
        return None
    for index, message in enumerate(view.messages):
        words = [view.text(index), *(_text(call) for call in view.acts if call.message == index)]
        if any(says(text, answer) for text in words):
            is_own = message["role"] == "assistant"
            return (index, f"the answer {quoted(answer)} is in no earlier message") if is_own else None
    return place, f"the answer {quoted(answer)} is in no message"


def truth_beside_answer(view: RolloutView) -> Noted:
    """The log has the ground truth or a comment of the grader. It is quoted beside the agent's answer."""
    if view.rollout.outcome != "failed" or not (view.facts.expected or view.facts.grading):
        return None
    place, answer = answer_of(view)
    parts = [f"{entry.name} {quoted(entry.text)}" for entry in view.facts.expected]
    parts += [f"the grader says {quoted(view.facts.grading)}"] if view.facts.grading else []
    if not _is_closed_by_team(view):
        parts.append(f"the agent's answer {quoted(answer) if answer else 'is missing'}")
    return place, "; ".join(parts)


# What a pass should not do


def oracle_read(view: RolloutView) -> Noted:
    """The agent opened a file of the grader, of the solution or of expected answers that it did not make itself."""
    own = ""
    for call in _commands(view):
        if _is_change(call):
            own += _text(call)
        elif not _has_failed(call):
            for path in PATH.findall(URL.sub("", _text(call))):
                names = [part.partition(".")[0] for part in path.split("/")]
                if any(map(ORACLE.fullmatch, names)) and path.split("/")[-1] not in own:
                    return call.message, f"{call} opens {path}"
    return None


def clause_broken(view: RolloutView) -> Noted:
    """The agent made a change that a clause of the policy forbids."""
    signs = [*forbidden_writes(view), *forbidden_values(view)]
    return min(signs)[:2] if signs else None


def unconfirmed(view: RolloutView) -> Noted:
    """The policy demands a confirmation, and the agent changed something without asking the user."""
    for call in [call for call in view.writes if call.kind == "write" and view.is_answered]:
        is_asked = any(view.put_to_user(call) or "?" in view.text(place) for place in view.replies(call.message))
        demand = None if is_asked else CONFIRM.search(view.context.policy)
        if demand:
            return call.message, f"{call} was never put to the user; the policy says {quoted(demand.group().strip())}"
    return None


def nothing_to_do(view: RolloutView) -> Noted:
    """Doing nothing would pass: the check compares records and words, and the reference changes and tells nothing."""
    is_state = bool(view.facts.graded) and {*view.facts.graded} <= {"db", "communicate"}
    is_idle = not view.informs and not view.facts.user_calls and all(goal.kind == "read" for goal in view.goals)
    return (view.last, "the reference changes nothing and tells nothing") if is_state and is_idle else None


OBSERVATIONS = (
    Observation("truth", "The answer, beside what the log expects", truth_beside_answer),
    Observation("limit", "Stopped at a limit of steps, time or tokens", limited),
    Observation("no_submission", "Nothing was handed in", no_submission),
    Observation("call_as_text", "A call was written as text and never executed", left_as_text),
    Observation("last_check_failed", "The agent finished although its last command failed", last_check_failed),
    Observation("nothing_checked", "Nothing was run after the last change", nothing_checked),
    Observation("repeated", "The same call again and again", repeated),
    Observation("unanswered_error", "An error without a successful retry", unanswered_error),
    Observation("answer_from_nowhere", "The answer is in no tool result", answer_from_nowhere),
    Observation("oracle_read", "The agent opened the grader, a solution or expected answers", oracle_read),
)
"""Observations on failed and passed rollouts."""
DOUBTS = (
    Observation("clause_broken", "The agent broke a clause of the policy", clause_broken),
    Observation("unconfirmed", "The agent did not ask for the confirmation that the policy demands", unconfirmed),
    Observation("oracle_read", "The agent opened the grader, a solution or expected answers", oracle_read),
    Observation("nothing_to_do", "Doing nothing would have passed as well", nothing_to_do),
)
"""Observations on passed rollouts that should not have passed."""


def observe(view: RolloutView, entries: tuple[Observation, ...]) -> Iterator[tuple[str, int, str]]:
    """Yield name, message and evidence of each observation that applies to a rollout."""
    for entry in entries:
        if (noted := entry.applies(view)) is not None:
            yield entry.name, *noted
