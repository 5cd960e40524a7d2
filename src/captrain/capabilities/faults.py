"""Finds rollouts that say nothing about the agent, because the simulated user or the infrastructure failed.

A simulated user is a model, and its errors make the agent fail tasks. Only errors that the log proves count here. A
wrong detail cannot be recognized in the log, so it counts against the agent. The comparison of failed with passed
rollouts leaves these rollouts out, and the report lists them.
"""

from captrain.capabilities.text import AS_AGENT, DECLINES, asks_consent, is_reply, says, split_mark, text_of
from captrain.capabilities.toolbox import Toolbox
from captrain.capabilities.view import bare_view
from captrain.records import Rollout

OUT_OF_SCOPE = "OUT-OF-SCOPE"
ECHO = 40
"""Minimum length of a user message that repeats the agent's. Shorter messages may be equal by chance."""


def fault_of(rollout: Rollout) -> str | None:
    """Return the evidence that the infrastructure or the simulated user failed; None if neither did."""
    if rollout.outcome == "error":
        return f"infrastructure: {rollout.error or 'no reason is recorded'}"
    slip = slip_of(rollout)
    return f"message {slip[0]}: {slip[1]}" if slip else None


def slip_of(rollout: Rollout) -> tuple[int, str] | None:
    """Return the index of the first message in which the simulated user failed, and the evidence, or None.

    None for a passed rollout: no error of the user can have mattered.
    """
    if rollout.outcome != "failed":
        return None
    has_request, last_reply = False, ""
    for index, message in enumerate(rollout.messages):
        text = text_of(message.get("content") or "").strip()
        if is_reply(message):
            last_reply = text
        if message["role"] != "user" or message.get("tool_calls"):
            continue
        marks, words = split_mark(text)
        if OUT_OF_SCOPE in marks:
            return index, f"the user left its instructions ({OUT_OF_SCOPE})"
        if marks and not words and not has_request:
            return index, "the user stopped before it stated a request"
        if not text:
            return index, "the user said nothing"
        if AS_AGENT.search(words) or (len(words) >= ECHO and words == last_reply):
            return index, f"the user speaks as the agent: {words[:ECHO]}"
        has_request = has_request or bool(words)
    return _left_open(rollout)


def _left_open(rollout: Rollout) -> tuple[int, str] | None:
    """Find a user that left without an answer when the agent asked for consent to a write of the reference."""
    if len(rollout.messages) < 2:
        return None
    question, farewell = rollout.messages[-2:]
    marks, words_of_user = split_mark(text_of(farewell.get("content") or ""))
    if farewell["role"] != "user" or not marks or DECLINES.search(words_of_user):
        return None
    words = text_of(question.get("content") or "")
    if not (is_reply(question) and asks_consent(words)):
        return None
    # Without schemas no argument is a key. So any write by a tool matches a goal of that tool, and few goals are
    # missing.
    missing = [pair.goal for pair in bare_view(rollout, Toolbox(())).pairs if pair.write is None]
    goal_asked = next((goal for goal in missing if any(says(words, value) for value in goal.arguments.values())), None)
    index = len(rollout.messages) - 1
    return (index, f"the user left while asked about {goal_asked}") if goal_asked else None
