"""Routing turn by turn: another adapter may act in every turn of one dialogue."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from captrain.benchmarks.servicedesk import ServiceDesk
from captrain.contract import Target, load_file
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import DEFICITS, TemplateSynthesizer
from captrain.errors import UserError
from captrain.models.lora import Adapter
from captrain.policies.local import LocalPolicy
from captrain.policies.scripted import ScriptedPolicy
from captrain.policies.turns import TurnPolicy
from captrain.records import Capability, Message, Rollout, digest
from captrain.rollouts.collection import collect
from captrain.routing.compositions import BASE, members
from captrain.routing.turns import TurnRouter, before_turns, features
from captrain.training.recipe import LINEAR

CHECK, PICK, STEPS, COPY = DEFICITS
PAIR = f"{COPY}+{PICK}"
Letters = Callable[..., Path]


class Chosen:
    """Names the arm by the number of turns so far; the last one for all that follow."""

    def __init__(self, *arms: str) -> None:
        self.arms, self.digest = arms, digest(arms)

    def choose(self, messages: Sequence[Message]) -> str:
        turns = sum(message["role"] == "assistant" for message in messages)
        return self.arms[min(turns, len(self.arms) - 1)]


class ByTask:
    """Names the arm by what the user said, so that plays of one batch part."""

    digest = "by task"

    def choose(self, messages: Sequence[Message]) -> str:
        return ("a", "b", BASE)[sum(map(ord, messages[-1]["content"])) % 3]


def local(tiny: Path, **settings: Any) -> LocalPolicy:
    return LocalPolicy(tiny, **{"temperature": 1.0, "max_turns": 3, "max_tokens": 6, "batch": 16, **settings})


def lora(model: Path, folder: Path, seed: int) -> str:
    """A LoRA adapter with random weights, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def arms(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("adapters")
    return {BASE: "", "a": lora(tiny, home / "a", 1), "b": lora(tiny, home / "b", 2)}


@pytest.fixture
def say(letters: Letters, tmp_path: Path) -> Callable[..., list[Rollout]]:
    target = load_file(letters())

    def play(policy: Any, folder: str = "") -> list[Rollout]:
        adapter = Adapter(folder, "some") if folder else None
        return collect(
            policy, target, target.tasks("training", 9), purpose="training", seed=0, trials=2, adapter=adapter,
            journals=tmp_path / "journals", quiet=True,
        )  # fmt: skip

    return play


def same(some: Sequence[Rollout], others: Sequence[Rollout]) -> None:
    """Equal in all but who acted, and in the last digit of log-probabilities."""
    apart = {"id", "policy", "adapter", "logprobs"}
    for one, other in zip(some, others, strict=True):
        assert one.model_dump(exclude=apart) == other.model_dump(exclude=apart)
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1.1e-9)


@pytest.mark.parametrize("arm", [BASE, "a"])
@pytest.mark.parametrize("settings", [{}, {"max_turns": 2, "temperature": 0.0}, {"max_tokens": 30}])
def test_a_chooser_that_always_names_one_arm_gives_that_arm_s_rollouts(
    arm: str, settings: dict[str, Any], tiny: Path, arms: dict[str, str], say: Callable[..., list[Rollout]]
) -> None:
    policy = local(tiny, guidance=["Be brief."], **settings)
    plain = say(policy, arms[arm])
    same(say(TurnPolicy(policy, Chosen(arm), arms)), plain)
    assert max(sum(message["role"] == "assistant" for message in one.messages) for one in plain) > 1


@pytest.mark.parametrize(("less", "in_a_turn"), [(2, True), (8, False)])
def test_a_dialogue_that_fills_the_room_ends_as_it_would_in_one_go(
    less: int, in_a_turn: bool, tiny: Path, arms: dict[str, str], say: Callable[..., list[Rollout]]
) -> None:
    policy = local(tiny)
    longest = max(len(one.token_ids) for one in say(policy))
    policy.max_length, policy.digest = longest - less, "less room"
    plain = say(policy)
    assert (max(len(one.token_ids) for one in plain) == policy.max_length) == in_a_turn
    same(say(TurnPolicy(policy, Chosen(BASE), arms)), plain)


def test_every_turn_is_drawn_from_the_arm_that_was_chosen_for_it(
    tiny: Path, arms: dict[str, str], say: Callable[..., list[Rollout]]
) -> None:
    import torch

    policy = local(tiny)
    plain, mixed = say(policy), say(TurnPolicy(policy, Chosen(BASE, "a", "b"), arms))
    three = 0
    for one, other in zip(plain, mixed, strict=True):
        turns = turns_of(other.mask)
        start, stop = turns[0]
        assert one.token_ids[:stop] == other.token_ids[:stop]
        for (start, stop), arm in zip(turns, (BASE, "a", "b"), strict=False):
            decoder = policy.decoder(arms[arm])
            for at in range(start, stop):
                decoder.reset()
                logits = decoder.forward(torch.tensor([other.token_ids[:at]]), [0])[0]
                expected = logits.log_softmax(-1)[other.token_ids[at]].item()
                assert other.logprobs[at] == pytest.approx(expected, rel=0, abs=1e-6)
        three += len(turns) == 3
    assert three and [one.token_ids for one in plain] != [one.token_ids for one in mixed]


def turns_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """List the bounds of the model's turns."""
    edges = [at for at in range(len(mask) + 1) if (mask[at - 1] if at else 0) != (mask[at] if at < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_rollouts_do_not_depend_on_the_batch(
    tiny: Path, arms: dict[str, str], say: Callable[..., list[Rollout]], tmp_path: Path
) -> None:
    whole = say(TurnPolicy(local(tiny), ByTask(), arms))
    for journal in (tmp_path / "journals").iterdir():
        journal.unlink()
    same(say(TurnPolicy(local(tiny, batch=1), ByTask(), arms)), whole)
    assert whole[0].policy and len({one.id for one in whole}) == len(whole)


def test_its_identity_holds_the_chooser_and_every_adapter(tiny: Path, arms: dict[str, str]) -> None:
    policy = local(tiny)
    digests = {
        policy.digest,
        *(TurnPolicy(policy, Chosen(*names), arms).digest for names in (["a"], ["a", "b"])),
        TurnPolicy(policy, Chosen("a"), {**arms, "a": arms["b"]}).digest,
        TurnPolicy(local(tiny, temperature=0.5), Chosen("a"), arms).digest,
    }
    assert len(digests) == 5
    assert TurnPolicy(policy, Chosen("a"), arms).digest == TurnPolicy(local(tiny, batch=1), Chosen("a"), arms).digest


def test_policies_without_an_engine_here_and_missing_adapters_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ScriptedPolicy"):
        TurnPolicy(ScriptedPolicy(), Chosen(BASE), {BASE: ""})
    with pytest.raises(UserError, match="adapter_config.json is missing"):
        TurnPolicy(local(tiny), Chosen("a"), {"a": str(tmp_path)})


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("environments")
    for name in (*DEFICITS, PAIR):
        wanted = Brief(Capability(id=name, name=name, description="."), [])
        (folder / f"{name}.py").write_text(TemplateSynthesizer().synthesize(wanted, []))
    return {name: load_file(folder / f"{name}.py") for name in (*DEFICITS, PAIR)}


@pytest.fixture(scope="module")
def desk() -> Target:
    return Target(ServiceDesk(mix="mixed"), "servicedesk", "desk")


@pytest.fixture(scope="module")
def router(targets: Mapping[str, Target], desk: Target, tmp_path_factory: pytest.TempPathFactory) -> TurnRouter:
    passed = collect(
        ScriptedPolicy(), desk, [t for t in desk.tasks("discovery", 60) if t.data["kind"] in ("status", "human")],
        purpose="diagnosis", seed=0, journals=tmp_path_factory.mktemp("journals"), quiet=True,
    )  # fmt: skip
    calibration = {
        name: collect(
            ScriptedPolicy(skill=0.5), targets[name], targets[name].tasks("training", 5), purpose="calibration",
            seed=0, trials=4, journals=tmp_path_factory.mktemp("journals"), quiet=True,
        )
        for name in DEFICITS
    }  # fmt: skip
    return TurnRouter.fit(targets, calibration, passed, count=40)


class TestRouter:
    """The fitted chooser."""

    def test_every_turn_gets_the_set_that_its_task_needs(self, router: TurnRouter, desk: Target) -> None:
        own = {"check": {CHECK}, "pick": {PICK}, "steps": {STEPS}, "copy": {COPY}, "pick+copy": {PICK, COPY}}
        own |= {"status": set(), "human": set()}
        tasks = [task for task in desk.tasks("test", 150) if task.data["kind"] in own]
        right = [
            members(router.choose(seen)) == own[task.data["kind"]]
            for task in tasks
            for seen in before_turns(desk.play(task, desk.reference(task)))
        ]
        assert len(right) > 300 and sum(right) / len(right) > 0.9

    def test_its_arms_are_all_that_it_can_choose(self, router: TurnRouter) -> None:
        singles, pairs = len(DEFICITS), len(DEFICITS) * (len(DEFICITS) - 1) // 2
        assert len({*router.arms}) == len(router.arms) == 1 + singles + pairs
        assert router.arms[0] == BASE and {*DEFICITS, PAIR} <= {*router.arms}

    def test_it_goes_by_opening_calls_so_far_and_last_action(self) -> None:
        call = {"type": "function", "function": {"name": "get_order", "arguments": {"order_id": "#12"}}}
        messages = [
            {"role": "system", "content": "Rules."},
            {"role": "user", "content": "Cancel #12."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "get_order", "content": "{}"},
            {"role": "assistant", "content": "Done."},
        ]
        seen = [features(turn) for turn in before_turns(messages)]
        assert seen == [["cancel", "last:nothing"], ["cancel", "called:get_order", "last:get_order"]]
        assert features(messages)[-1] == "last:words"

    def test_it_is_written_and_read_without_loss(self, router: TurnRouter, desk: Target, tmp_path: Path) -> None:
        path = tmp_path / "turns.json"
        router.write(path)
        again = TurnRouter.read(path)
        assert again.digest == router.digest and again.arms == router.arms
        for task in desk.tasks("test", 40):
            assert again.choose(desk.open(task).messages) == router.choose(desk.open(task).messages)
        path.write_text(json.dumps({"most": 2}))
        for broken in (path, tmp_path / "nowhere.json"):
            with pytest.raises(UserError, match=f"{broken.name} is (not a whole StoredRouter|missing)"):
                TurnRouter.read(broken)
