"""Samples of lm-eval (`samples_*.jsonl`, written with `--log_samples`): a question, the model's answer and its metrics.

Each filter of a task grades the same answers again, so a filter is read as an agent of its own. The reward is the first
metric of the row. Choices that are only ranked by their likelihood have no answer.
"""

from collections.abc import Mapping
from pathlib import Path

from captrain.interop.logs.records import ChatRow, RowFormat
from captrain.interop.logs.source import Foreign, loaded, text_of

USUAL = ("exact_match", "acc")
"""Metrics to look for in rows of older versions, which do not name theirs."""


def is_sample(row: Foreign) -> bool:
    """Return whether a row is a sample, with or without an answer."""
    return {"doc_id", "doc", "arguments", "resps", "filtered_resps"} <= row.keys()


def is_answered(row: Foreign) -> bool:
    """Return whether a row is a sample for which the model wrote a text."""
    request = _request(row) if is_sample(row) else []
    return len(request) > 1 and isinstance(request[1], Mapping) and isinstance(row["resps"][0][0], str)


def _request(row: Foreign) -> list[object]:
    """Return the arguments of the first request: the prompt and, if a text is generated, how."""
    requests = row["arguments"]
    first = next(iter(requests.values() if isinstance(requests, Mapping) else requests), [])
    return [*first.values()] if isinstance(first, Mapping) else [*first]


def _chat_row(row: Foreign, path: Path) -> ChatRow:
    prompt = _request(row)[0]
    prompt = loaded(prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt)
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": text_of(prompt)}]
    rewards = (row[name] for name in row.get("metrics") or USUAL if isinstance(row.get(name), int | float))
    name = row.get("filter")
    return ChatRow(
        [*asked, {"role": "assistant", "content": row["resps"][0][0]}],
        next(rewards, None),
        # Tasks number their documents from 0.
        task_id=f"{path.stem.removeprefix('samples_').rpartition('_')[0] or path.stem} {row['doc_id']}",
        agent=None if name in (None, "none") else name,
        submission=text_of(row["filtered_resps"][0]),
        expected={"target": row.get("target")},
    )


LM_EVAL = RowFormat("lm-eval samples", is_answered, _chat_row)
