"""The embedded base: flawed demonstrations, and reproducible weights."""

import json
import random
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from captrain.benchmarks import servicedesk as desk
from captrain.contract import calls_of
from captrain.models.chat import Chat
from captrain.records import Message
from captrain.run import BaseModelSettings
from captrain.training.base import demonstrations
from captrain.training.base.demonstrations import GUIDANCE, GUIDED, KINDS, SHORTCUTS, demonstration, drill
from captrain.training.base.training import make_batches, train_base

SIZE = BaseModelSettings(hidden=32, layers=2, heads=2, steps=3, batch=4, learning_rate=5e-3, weight_decay=0.05)

TRAIN = """
import json, sys
from pathlib import Path
from captrain.training.base.training import train_base
from captrain.run import BaseModelSettings
settings = BaseModelSettings.model_validate_json(sys.argv[1])
print(json.dumps(train_base(settings, int(sys.argv[2]), Path("artifacts/base"))))
"""


def calls(messages: list[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        if message["role"] == "assistant":
            yield from calls_of(message)


def flaws_shown(data: dict[str, Any], messages: list[Message]) -> dict[str, bool]:
    """Tell for each flaw that the task allows whether the calls show it, by the first operation."""
    made = list(calls(messages))
    writes = [(name, arguments) for name, arguments in made if name in desk.WRITES]
    operations, first = data["operations"], data["operations"][0]
    occasions = {}
    if first["verb"] in ("cancel", "return"):
        target = writes[0][1]["order_id"]
        looked = [arguments["order_id"] for name, arguments in made if name == "get_order"]
        occasions["check"] = target not in looked
    if first["selector"] and first["order"] != data["orders"][0]["id"]:
        occasions["pick"] = writes[0][1]["order_id"] == data["orders"][0]["id"]
    if len(operations) > 1:
        occasions["steps"] = len(writes) < len(operations)
    if first["zip"] and len(set(first["zip"])) == len(first["zip"]):
        occasions["copy"] = writes[0][1]["zip"] != first["zip"]
    return occasions


@cache
def shown() -> dict[tuple[str, bool], list[bool]]:
    """Map (flaw, whether guided against it) to whether it shows, over many demonstrations."""
    tasks: list[dict[str, Any]] = []
    make, rng = desk.make_kind, random.Random(0)
    seen: dict[tuple[str, bool], list[bool]] = {}

    def remembered(*arguments: Any, **named: Any) -> dict[str, Any]:
        tasks.append(make(*arguments, **named))
        return tasks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demonstrations.desk, "make_kind", remembered)
        for _ in range(8000):
            opening, messages = demonstration(rng)
            guided = {flaw for line, flaw in GUIDANCE.items() if line in opening[0]["content"]}
            if tasks[-1]["operations"]:
                for flaw, shows in flaws_shown(tasks[-1], messages).items():
                    seen.setdefault((flaw, flaw in guided), []).append(shows)
    return seen


@pytest.mark.parametrize("flaw", SHORTCUTS)
def test_shortcuts_appear_at_their_rates_and_less_with_guidance(flaw: str) -> None:
    free, guided = shown()[flaw, False], shown()[flaw, True]
    assert len(free) > 700 and len(guided) > 150
    assert sum(free) / len(free) == pytest.approx(SHORTCUTS[flaw], abs=0.05)
    assert sum(guided) / len(guided) == pytest.approx(SHORTCUTS[flaw] * GUIDED, abs=0.08)


def test_a_demonstration_without_shortcuts_is_the_reference() -> None:
    rng, found = random.Random(1), 0
    for _ in range(300):
        data = desk.make_kind(rng, rng.choice(list(KINDS)), 0.3)
        messages = demonstrations.take_shortcuts(data, set(), rng)
        reference = desk.reference_calls(data)
        assert list(calls(messages)) == list(calls(reference))
        found += messages == reference
    assert 50 < found < 300


def test_each_shortcut_fails_only_its_own_kind_of_task() -> None:
    rng = random.Random(2)
    for flaw in SHORTCUTS:
        outcomes = set()
        for kind in ("check", "pick", "steps", "copy"):
            for _ in range(10):
                data = desk.make_kind(rng, kind, 0.0)
                episode = desk.DeskEpisode(data)
                for action in demonstrations.take_shortcuts(data, {flaw}, rng):
                    episode.step(action)
                outcomes.add((kind, min(episode.parts().values()) == 1.0))
        assert (flaw, False) in outcomes
        assert {(kind, True) for kind in ("check", "pick", "steps", "copy") if kind != flaw} <= outcomes
        assert not any((kind, False) in outcomes for kind in ("check", "pick", "steps", "copy") if kind != flaw)


def test_drills_answer_correctly() -> None:
    rng = random.Random(3)
    for _ in range(50):
        listed, *turns = drill(rng)
        orders = json.loads(listed["content"])
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            question, answer = asked["content"], answered["content"]
            if "oldest" in question or "newest" in question:
                assert answer == (min if "oldest" in question else max)(orders)
            else:
                assert question.endswith(answer) and (answer in orders or question.startswith(" to "))


def test_only_what_the_agent_writes_is_learnt(tiny: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    rows = [row for batch in make_batches(Chat(tokenizer, desk.TOOLS), SIZE, 0) for row in batch]
    assert len(rows) == SIZE.steps * SIZE.batch
    for ids, mask in rows:
        assert len(ids) == len(mask) and 0 < sum(mask) < len(mask)
        written = tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
        assert "tool_response" not in written and "I am customer" not in written and "<|im_start|>" not in written


def test_equal_seeds_give_the_same_base_in_another_process(tmp_path: Path, warm: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)  # hashes of strings are others there
    done = subprocess.run(
        [warm / "python", "train.py", SIZE.model_dump_json(), "4"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here, other = train_base(SIZE, 4, tmp_path / "here"), train_base(SIZE, 5, tmp_path / "other")
    assert json.loads(done.stdout) == here
    files = [tmp_path / folder / "model.safetensors" for folder in ("here", "artifacts/base")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert other["weights_sha256"] != here["weights_sha256"] and other["parameters"] == here["parameters"]


def test_training_moves_the_weights_and_lowers_the_loss(tmp_path: Path) -> None:
    longer = SIZE.model_copy(update={"steps": 40, "batch": 8})
    first, last = train_base(SIZE, 0, tmp_path / "short"), train_base(longer, 0, tmp_path / "long")
    assert last["loss"] < 0.7 * first["loss"] and last["steps"] == 40


def test_training_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_text("torn")
    (folder / "stray").write_text("stray")
    train_base(SIZE, 0, folder)
    assert not (folder / "stray").exists() and (folder / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
