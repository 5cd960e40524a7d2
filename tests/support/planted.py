"""Diagnosis of rollouts with a planted mistake."""

from collections.abc import Collection, Sequence

from captrain.agents.scripted import Script, by_the_book
from captrain.contract import IDLE, RunningEpisode, tool_call
from captrain.diagnosis.diagnosis import diagnose
from captrain.interop import logs_of_rollouts
from captrain.records import Message, Rollout
from captrain.run import SelectionSettings


def selected_causes(rollouts: Sequence[Rollout]) -> list[str]:
    """List the causes that a diagnosis selects with the default thresholds."""
    rule = SelectionSettings(
        delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=100, ranking="product"
    )
    report = diagnose(logs_of_rollouts(rollouts), rule, runs=10, count=4, seed=0).report
    assert report is not None
    return [candidate["id"] for candidate in report["candidates"] if candidate["selected"]]


def slipping(fault: str, tasks: Collection[str], slip: str = "x") -> Script:
    """An agent that plays the reference, with one mistake in the named tasks.

    Args:
        fault: "last call left out", or "value with a slip" in the last call that has a text argument.
        tasks: ids of the tasks with the mistake.
        slip: what is appended to the value.
    """

    def script(play: RunningEpisode) -> Sequence[Message]:
        reference = by_the_book(play)
        if not any(f"/{task}/" in f"/{play.key}/" for task in tasks):
            return reference
        places = [index for index, message in enumerate(reference) if message.get("tool_calls")]
        if fault == "last call left out":
            return [*reference[: places[-1]], *reference[places[-1] + 1 :]]
        for index in reversed(places):
            function = reference[index]["tool_calls"][0]["function"]
            texts = {name: value for name, value in function["arguments"].items() if isinstance(value, str)}
            if texts:
                slipped = {**function["arguments"], **{name: f"{value}{slip}" for name, value in texts.items()}}
                return [*reference[:index], tool_call(function["name"], slipped), *reference[index + 1 :]]
        return [IDLE]

    return script
