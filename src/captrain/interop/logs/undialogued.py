"""Well-known files that hold no dialogue: what they are, and what to name in their place."""

from collections.abc import Callable
from dataclasses import dataclass

from captrain.interop.logs import assistants, bot_framework, crewai, lm_eval
from captrain.interop.logs.source import Foreign


@dataclass(frozen=True)
class NoDialogue:
    """A kind of file without a dialogue. `reason` says what it lacks, `remedy` what to do."""

    recognizes: Callable[[Foreign], bool]
    reason: str
    remedy: str


def _is_submission(row: Foreign) -> bool:
    return {"task_id", "model_answer"} <= row.keys() <= {"task_id", "model_answer", "reasoning_trace"}


WITHOUT_DIALOGUE = (
    NoDialogue(
        _is_submission,
        "a submission to GAIA holds answers, but no dialogue and no outcome",
        "name the logs that the agent wrote while it worked, with --scores FILE for the outcomes",
    ),
    NoDialogue(
        lm_eval.is_sample,
        "these samples of lm-eval hold likelihoods of choices, but no text that the model wrote",
        "evaluate a task that generates text (output_type: generate_until), and name its samples",
    ),
    NoDialogue(
        crewai.is_event,
        "the log of a crew holds when its tasks began and ended, but no messages and no mark of a run",
        "write CrewOutput.model_dump_json() of each run as a line, and name that file",
    ),
    NoDialogue(
        assistants.is_step,
        "these run steps of OpenAI's Assistants hold the ids of messages, but no text and no call",
        "put the messages of the threads (thread.message) into the same file",
    ),
    NoDialogue(
        bot_framework.is_activity,
        "the messages of this transcript do not tell the bot from the user (`from.role`)",
        'add "role": "bot" or "role": "user" to `from` of each message',
    ),
)
