"""A tiny model that memorises a few dialogues, so that it can act in tasks with long texts and unknown words."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captrain.contract import CheckedEnvironment
from captrain.records import JsonObject, Message, Task

BETWEEN = re.compile(r"<\|im_start\|>\w+\n|<\|im_end\|>\n?|</?tool_response>\n?")
"""Marks of the chat template between the texts of a dialogue."""


def teach(
    target: CheckedEnvironment, solutions: Sequence[tuple[Task, list[Message]]], folder: Path, steps: int
) -> Path:
    """Train a random model on recorded solutions of tasks; each text in them becomes one token.

    Args:
        target: the environment of the tasks.
        solutions: each task with the agent's messages.
        folder: where model and tokenizer are written.
        steps: number of updates, with one dialogue each.
    """
    from tokenizers import AddedToken

    from captrain.models import Chat, dialogue_tokens
    from captrain.run import BaseModelSettings
    from captrain.training.base.tokenizer import build_tokenizer
    from captrain.training.base.training import build_model

    tokenizer: Any = build_tokenizer()
    dialogues: list[tuple[list[JsonObject], list[Message], list[Message]]] = []
    for task, actions in solutions:
        episode = target.open(task)
        opening, tools = list(episode.messages), episode.tools
        episode.close()
        messages = target.play(task, actions)
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        phrases = [phrase.strip("\n") for phrase in BETWEEN.split(text)]
        tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases if len(phrase) > 1])
        dialogues.append((tools, opening, messages[len(opening) :]))
    rows = [dialogue_tokens(Chat(tokenizer, tools), opening, messages) for tools, opening, messages in dialogues]
    size = BaseModelSettings(hidden=32, layers=2, heads=2, steps=1, batch=1, learning_rate=1e-3, weight_decay=0.0)
    model = build_model(tokenizer, size, seed=13)
    learn(model, rows, steps, 1e-2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn(model: Any, rows: Sequence[tuple[list[int], list[int]]], steps: int, rate: float) -> None:
    """Train a model on dialogues, one after another: token ids, and which of them the agent writes."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        ids, mask = rows[step % len(rows)]
        labels = [token if written else -100 for token, written in zip(ids, mask, strict=True)]
        model(torch.tensor([ids]), labels=torch.tensor([labels])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
