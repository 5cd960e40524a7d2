"""Row `adp`: trajectories of the Agent Data Protocol; only agent messages are trained on."""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.needs import further
from support.stages import run_here

from captrain.agents.collection import collect, pass_rate
from captrain.agents.policy import load_policy
from captrain.benchmarks import servicedesk as desk
from captrain.comparison.baselines.adp import demonstrations, teach_trajectories, write_generic
from captrain.comparison.baselines.sft import Lesson
from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import UserError
from captrain.interop.trajectories import (
    IMAGE,
    NO_ANSWER,
    UNPROMPTED,
    Atif,
    Inexpressible,
    atif_document,
    messages_of,
    read_trajectories,
    tools_of,
)
from captrain.ledger import LedgerEntry
from captrain.models.chat import parse_text
from captrain.models.lora import Adapter, adapter_digest
from captrain.records import Message, Task, load
from captrain.run import Spec, compose_spec, publish_spec
from captrain.training.jobs import Learner
from captrain.training.sft import TOO_LONG, Demonstration, FineTuned

ROOT = Path(__file__).parents[2]
SMALL = [
    # A small random model is never sure, so a low temperature shows what it has learnt.
    "policy.temperature=0.1", "policy.max_turns=3", "policy.max_tokens=8", "policy.precision=float32", "trainer.rank=8",
    "trainer.alpha=16",
    "baselines.adp.run=true", "baselines.adp.epochs=6", "baselines.adp.learning_rate=2e-2", "machine.workers=1",
]  # fmt: skip


def step(number: int, source: str, message: Any = "", *calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    asked = [{"tool_call_id": name, "function_name": name, "arguments": arguments} for name, arguments in calls]
    return {"step_id": number, "source": source, "message": message, **({"tool_calls": asked} if calls else {}), **more}


def answered(*results: tuple[str | None, str]) -> dict[str, Any]:
    return {"results": [{"source_call_id": name, "content": content} for name, content in results]}


def made(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"schema_version": "ATIF-v1.5", "agent": {"name": "a", "version": "1"}, "steps": [*steps]}


WEATHER = made(
    step(1, "user", "How warm is it in Rome?"),
    step(2, "agent", "I look.", ("weather", {"city": "Rome"}), observation=answered((None, "20"))),
    step(3, "agent", "20 degrees."),
    step(4, "user", "And the page?"),
    step(5, "agent", "", ("visit", {"url": "rome.example"}), observation=answered(("visit", "Hot"), ("nobody", "!"))),
    step(6, "agent", "Hot."),
)
TOLD: list[Message] = [
    {"role": "user", "content": "How warm is it in Rome?"},
    {**tool_call("weather", {"city": "Rome"}), "content": "I look."},
    {"role": "tool", "name": "weather", "content": "20"},
    {"role": "assistant", "content": "20 degrees."},
    {"role": "user", "content": "And the page?"},
    tool_call("visit", {"url": "rome.example"}),
    {"role": "tool", "name": "visit", "content": "Hot"},
    {"role": "user", "content": "!"},
    {"role": "assistant", "content": "Hot."},
]
ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.7",
    "agent": {"name": "a", "version": "1", "tool_definitions": [desk.TOOLS[0]]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Which orders?"}]},
        {
            "step_id": 3, "source": "agent", "message": "", "reasoning_content": "A list is asked for.",
            "tool_calls": [{"tool_call_id": "c", "function_name": "list_orders", "arguments": {"customer_id": "7"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "[]"}]},
        },
        {"step_id": 4, "source": "agent", "message": "None."},
    ],
    "final_metrics": {"steps": 4},
}  # fmt: skip
ATIF_TOLD: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which orders?"},
    tool_call("list_orders", {"customer_id": "7"}),
    {"role": "tool", "name": "list_orders", "content": "[]"},
    {"role": "assistant", "content": "None."},
]
PICTURE = [{"type": "image", "source": {"path": "a.png"}}]
GO = step(1, "user", "Go.")
SEEN = made(GO, step(2, "agent", PICTURE))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Use the working folder for workspaces and outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        yield folder


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def composed(*overrides: str, seed: int = 0) -> Spec:
    return compose_spec("default", seed, [*SMALL, *overrides], ROOT / "conf")


def lesson(spec: Spec, base: Path) -> Lesson:
    source = spec.baselines.adp.source
    return Lesson("adp", spec, base, Path(source) if source else None)


def human(count: int, split: str = "training") -> list[Task]:
    """Tasks that need one call, which a random model does not make."""
    data = [desk.make_kind(random.Random(f"human-{split}-{at}"), "human", 0.5) for at in range(count)]
    return [Task.model_validate({"id": f"{split}/{at}", "split": split, "data": one}) for at, one in enumerate(data)]


class TestReading:
    def test_a_trajectory_becomes_tool_native_messages(self, tmp_path: Path) -> None:
        weather, orders = read_trajectories(written(tmp_path / "a.jsonl", WEATHER, ATIF))
        assert messages_of(weather) == TOLD and messages_of(orders) == ATIF_TOLD
        assert tools_of(orders, ATIF_TOLD, desk.TOOLS) == [desk.TOOLS[0]]

    def test_answers_are_linked_to_calls_and_parallel_calls_are_one_message(self) -> None:
        acts = [step(2, "agent", "", ("a", {})), step(3, "agent", "", ("b", {}))]
        acts[1]["observation"] = answered(("b", "of b"), ("a", "of a"))
        messages = messages_of(Atif.model_validate(made(step(1, "user", "Go."), *acts, step(4, "agent", "Gone."))))
        assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["a", "b"]
        assert [(message["name"], message["content"]) for message in messages[2:4]] == [("b", "of b"), ("a", "of a")]
        assert messages[4] == {"role": "assistant", "content": "Gone."}

    @pytest.mark.parametrize(
        ("steps", "reason"),
        [
            ([step(1, "user", PICTURE), step(2, "agent", "Nice.")], IMAGE),
            ([step(1, "user", "Go."), step(2, "agent", "", observation={"results": [{"content": PICTURE}]})], IMAGE),
            ([step(1, "user", "Go.")], NO_ANSWER),
            ([step(1, "agent", "Gone.")], UNPROMPTED),
        ],
    )
    def test_trajectories_that_do_not_convert_are_reported(self, steps: list[dict[str, Any]], reason: str) -> None:
        with pytest.raises(Inexpressible, match=reason):
            messages_of(Atif.model_validate(made(*steps)))

    def test_undescribed_tools_get_a_schema_from_their_calls(self) -> None:
        shown = tools_of(Atif.model_validate(WEATHER), TOLD, desk.TOOLS)
        assert [(tool["function"]["name"], tool["function"]["parameters"]["properties"]) for tool in shown] == [
            ("weather", {"city": {"type": "string"}}),
            ("visit", {"url": {"type": "string"}}),
        ]

    @pytest.mark.parametrize(
        "line",
        [
            "{",
            "[1]",
            json.dumps({**ATIF, "schema_version": "ATIF-v2.0"}),
            json.dumps({**ATIF, "steps": []}),
            json.dumps({"id": "x", "content": [{"class_": "message_action", "content": "Hot."}], "details": {}}),
            json.dumps(made(step(1, "nobody", "x"))),
            json.dumps(made(step(1, "agent", "", ("f", [])))),  # type: ignore[arg-type]
        ],
    )
    def test_a_malformed_line_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(f"{json.dumps(WEATHER)}\n\n{line}\n")
        with pytest.raises(UserError, match=r"bad\.jsonl, line 3 is not a trajectory"):
            list(read_trajectories(path))

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"none\.jsonl is missing"):
            list(read_trajectories(tmp_path / "none.jsonl"))


class TestExport:
    def test_dialogues_round_trip(self) -> None:
        target = CheckedEnvironment(desk.ServiceDesk(mix="compound"), "desk", "")
        for task in target.tasks("discovery", 30):
            messages = target.play(task, target.reference(task))
            told = json.loads(
                json.dumps(atif_document(messages, name="r", agent="a", extra={"task": task.id}, tools=target.tools))
            )
            found = Atif.model_validate(told)
            assert messages_of(found) == messages
            assert tools_of(found, messages, []) == target.tools
            assert told["extra"] == {"task": task.id}
            assert [step["step_id"] for step in told["steps"]] == list(range(1, len(told["steps"]) + 1))

    def test_parallel_calls_keep_their_answers(self) -> None:
        calls = [tool_call(name, {"x": 1})["tool_calls"][0] for name in ("f", "f", "g")]
        answers = [{"role": "tool", "name": name, "content": str(at)} for at, name in enumerate(("f", "f", "g"))]
        start: list[Message] = [{"role": "user", "content": "Go."}]
        messages = [*start, {"role": "assistant", "content": "So.", "tool_calls": calls}, *answers]
        assert messages_of(Atif.model_validate(atif_document(messages, name="n", agent="a", extra={}))) == messages


@pytest.fixture(scope="module")
def policy(tiny: Path) -> Learner:
    return load_policy(composed().policy, tiny, composed().machine, Learner, batch=64)


class TestDemonstrations:
    def test_masks_are_token_exact(self, tmp_path: Path, policy: Any) -> None:
        target = CheckedEnvironment(desk.ServiceDesk(), "desk", "")
        plays = [target.play(task, target.reference(task)) for task in target.tasks("training", 20)]
        path = written(tmp_path / "a.jsonl", *(atif_document(play, name="n", agent="a", extra={}) for play in plays))
        found = demonstrations(path, 20, policy, desk.TOOLS)
        chat = policy.chat(desk.TOOLS)
        for row, play in zip(found[0], plays, strict=True):
            ends = [at + 1 for at, token in enumerate(row.ids) if row.mask[at] and token == chat.end]
            turns = []
            for end in ends:
                start = max(at for at in range(end) if not row.mask[at]) + 1
                turns.append(parse_text(chat.tokenizer.decode(row.ids[start : end - 1])))
            assert turns == [message for message in play if message["role"] == "assistant"]
            assert sum(row.mask) == sum(len(chat.turn(turn)) for turn in turns)
            last = max(at for at, message in enumerate(play) if message["role"] == "assistant")
            assert chat.dialogue(play[: last + 1])[: len(row.ids)] == row.ids

    def test_only_agent_tokens_have_labels(self) -> None:
        assert Demonstration([5, 6, 7], [0, 1, 0]).labels() == [-100, 6, -100]

    def test_unusable_trajectories_are_counted_by_reason(self, tmp_path: Path, policy: Learner) -> None:
        long = made(GO, step(2, "agent", "ö" * 3000))
        path = written(tmp_path / "a.jsonl", SEEN, long, WEATHER, SEEN, ATIF, ATIF)
        found = demonstrations(path, 2, policy, desk.TOOLS)
        assert (len(found[0]), found[1]) == (2, 5)
        assert found[2] == {IMAGE: 2, TOO_LONG: 1}

    def test_a_file_without_usable_trajectories_is_rejected_with_reasons(self, tmp_path: Path, policy: Learner) -> None:
        with pytest.raises(UserError, match=f"none of the 1 trajectories .*{IMAGE}: 1"):
            demonstrations(written(tmp_path / "a.jsonl", SEEN), 5, policy, desk.TOOLS)

    def test_generic_demonstrations_cover_every_kind_and_depend_only_on_the_seed(self, tmp_path: Path) -> None:
        write_generic(tmp_path / "a.jsonl", 300, 0)
        write_generic(tmp_path / "b.jsonl", 300, 0)
        write_generic(tmp_path / "c.jsonl", 300, 1)
        text = (tmp_path / "a.jsonl").read_text()
        assert text == (tmp_path / "b.jsonl").read_text() != (tmp_path / "c.jsonl").read_text()
        plays = [messages_of(found) for found in read_trajectories(tmp_path / "a.jsonl")]
        opened = [play[1]["content"] for play in plays]
        target = CheckedEnvironment(desk.ServiceDesk(), "desk", "")
        for split in ("training", "test"):
            tasks = target.tasks(split, 200)  # type: ignore[arg-type]
            shared = {target.open(task).messages[1]["content"] for task in tasks} & {*opened}
            # Small requests ("speak with a human") may be identical by chance, but no task with several orders.
            assert all(text.count("#") < 2 for text in shared)
        asked = ("cancel", "return", "gift-wrap", "zip", "status", "human")
        assert all(any(word in text for text in opened) for word in asked)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solutions of one-call tasks, and a trajectory without an agent."""
    target = CheckedEnvironment(desk.ServiceDesk(), "desk", "")
    plays = [target.play(task, target.reference(task)) for task in human(64)]
    path = tmp_path_factory.mktemp("source") / "human.jsonl"
    return written(path, *(atif_document(play, name="n", agent="a", extra={}) for play in plays), made(GO))


@pytest.fixture(scope="module")
def taught(tiny: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FineTuned]:
    with inside(tmp_path_factory.mktemp("taught")) as home:
        return home, teach_trajectories(lesson(composed(f"baselines.adp.source={source}"), tiny))


class TestTraining:
    def test_demonstrations_teach_a_missing_skill(self, policy: Any, taught: tuple[Path, FineTuned]) -> None:
        home, one = taught
        target = CheckedEnvironment(desk.ServiceDesk(), "desk", "")
        tasks, adapter = human(40, "test"), Adapter(str(home / one.folder), one.digest)
        with inside(home):
            rates = [
                pass_rate(collect(policy, target, tasks, purpose="evaluation", seed=0, adapter=acting, quiet=True))
                for acting in (None, adapter)
            ]
        assert rates[0] == 0.0
        assert rates[1] is not None and rates[1] > 0.8
        assert one.losses[-1] < one.losses[0]

    def test_equal_seeds_give_equal_bytes(
        self, tiny: Path, source: Path, taught: tuple[Path, FineTuned], tmp_path: Path
    ) -> None:
        home, one = taught
        with inside(tmp_path / "again"):
            again = teach_trajectories(lesson(composed(f"baselines.adp.source={source}"), tiny))
            other = teach_trajectories(lesson(composed(f"baselines.adp.source={source}", seed=1), tiny))
        assert again.digest == one.digest != other.digest
        assert again.losses == one.losses
        before = (home / one.folder / "adapter_model.safetensors").stat().st_mtime_ns
        with inside(home):
            assert teach_trajectories(lesson(composed(f"baselines.adp.source={source}"), tiny)) == one
        assert (home / one.folder / "adapter_model.safetensors").stat().st_mtime_ns == before

    @pytest.mark.parametrize("removed", further(["", "adapter_model.safetensors", "adapter_config.json", "README.md"]))
    def test_altered_and_incomplete_adapters_are_rejected_and_retrained(
        self, tiny: Path, source: Path, tmp_path: Path, removed: str
    ) -> None:
        asked = composed(f"baselines.adp.source={source}", "baselines.adp.demonstrations=8")
        with inside(tmp_path):
            one = teach_trajectories(lesson(asked, tiny))
            if removed:
                (one.folder / removed).unlink()
            else:
                (one.folder / "adapter_config.json").write_text("{}")
            with pytest.raises(UserError, match="altered after training"):
                teach_trajectories(lesson(asked, tiny))
            assert teach_trajectories(lesson(asked, tiny)).digest == one.digest

    def test_the_stage_writes_an_adapter_that_cost_no_rollouts(
        self, tiny: Path, taught: tuple[Path, FineTuned], source: Path
    ) -> None:
        home, one = taught
        with inside(home):
            Path("artifacts").mkdir(exist_ok=True)
            Path("artifacts/base").symlink_to(tiny)
            publish_spec(composed(f"baselines.adp.source={source}"), Path("results/spec.yaml"))
            run_here("adp", ROOT)
            row = json.loads(Path("results/adp/index.json").read_text(encoding="utf-8"))["adp"]
            assert load(Path("results/adp/ledger.jsonl"), LedgerEntry) == []
            assert (row["rollouts"], row["demonstrations"]) == (0, 64)
            assert row["digest"] == adapter_digest(Path(row["path"])) == one.digest
            card = (Path(row["path"]) / "README.md").read_text()
            assert "| demonstrations used | 64 |" in card and f"| left out: {NO_ANSWER} | 1 |" in card
            assert len(Path("results/adp/history.csv").read_text(encoding="utf-8").splitlines()) == 1 + len(one.losses)


def test_a_disabled_baseline_writes_empty_results_without_torch(tmp_path: Path) -> None:
    publish_spec(compose_spec("default", 0, [], ROOT / "conf"), tmp_path / "results/spec.yaml")
    code = (
        "import runpy, sys; sys.argv = ['row.py', 'adp']\n"
        f"runpy.run_path({str(ROOT / 'stages/row.py')!r}, run_name='__main__')\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not run" in done.stdout
    assert json.loads((tmp_path / "results/adp/index.json").read_text()) == {}
    assert (tmp_path / "results/adp/ledger.jsonl").read_text() == ""
