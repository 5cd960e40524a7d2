"""A mixture of adapters: the shares of its gates, its KV cache, its gradients, and its folder."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import lora

from captrain.agents.local import LocalPolicy
from captrain.contract import RunningEpisode, load_file
from captrain.errors import UserError
from captrain.models import load_module
from captrain.models.gated import Mixture, load_mixture, save_mixture
from captrain.models.lora import Adapter, adapter_digest, merge_experts
from captrain.models.mixture import MixtureParts, deciding_tokens
from captrain.serving.endpoint import ChatServer
from captrain.serving.openai_schemas import CompletionRequest

KINDS = [("layer", "prompt"), ("layer", "turn"), ("layer", "token"), ("global", "prompt"), ("global", "turn")]
ACTIVATIONS = ["softmax", "sigmoid"]


@pytest.fixture(scope="module")
def members(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Two adapters of different ranks and scales; the second changes fewer layers."""
    home = tmp_path_factory.mktemp("members")
    fewer = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]}
    return {"a": lora(tiny, home / "a", 1), "b": lora(tiny, home / "b", 2, **fewer)}


def mixed(
    tiny: Path, members: dict[str, Adapter], scope: Any = "layer", decide: Any = "prompt", activation: Any = "softmax"
) -> tuple[Any, Mixture]:
    """The tiny model in float64 with a mixture whose gates differ between layers and states."""
    base = load_module(tiny, "float64").eval()
    mixture = Mixture(base, MixtureParts(members, scope, decide, activation))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn_like(parameter).float())
    return base, mixture


def test_a_mixture_is_an_adapter_where_its_gate_is_one_the_base_where_the_base_slot_is_and_the_mean_at_first(
    tiny: Path, members: dict[str, Adapter]
) -> None:
    ids = torch.randint(5, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    base, mixture = mixed(tiny, members)
    with torch.no_grad():
        plain = load_module(tiny, "float64").eval()
        expected = [merge_experts(plain, Path(adapter.folder))(input_ids=ids).logits for adapter in members.values()]
        expected.append(plain(input_ids=ids).logits)
        for slot, logits in enumerate(expected):
            decisions = torch.eye(3, dtype=torch.float64)[slot].expand(3, 2, 3)
            with mixture.fixed(decisions):
                torch.testing.assert_close(base(input_ids=ids).logits, logits, rtol=0, atol=1e-9)
        new = load_module(tiny, "float64").eval()
        Mixture(new, MixtureParts(members))
        with mixture.fixed(torch.full((3, 2, 3), 1 / 3, dtype=torch.float64)):
            torch.testing.assert_close(base(input_ids=ids).logits, new(input_ids=ids).logits, rtol=0, atol=1e-9)


def test_with_a_sigmoid_adapters_have_their_whole_weight_each_or_none(
    tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    ids = torch.randint(5, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    base, mixture = mixed(tiny, members, activation="sigmoid")
    weights = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    plain = load_module(tiny, "float64").eval()
    with torch.no_grad():
        second: Any = merge_experts(plain, Path(members["b"].folder))
        expected = [merge_experts(second, Path(members["a"].folder)), second, plain]
        for opened, model in zip(weights, expected, strict=True):
            for gate in mixture.linears:
                gate.weight.zero_()
                gate.bias.copy_(torch.tensor([50.0 if weight else -50.0 for weight in opened]))
            save_mixture(mixture, tmp_path / "mixture")
            again: Any = load_module(tiny, "float64").eval()
            load_mixture(again, tmp_path / "mixture")
            logits = model(input_ids=ids).logits
            torch.testing.assert_close(base(input_ids=ids).logits, logits, rtol=0, atol=1e-9)
            torch.testing.assert_close(again(input_ids=ids).logits, logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("scope", "decide"), KINDS)
def test_rollouts_with_a_cache_have_the_probabilities_of_a_pass_over_the_whole_dialogue(
    scope: str, decide: Any, tiny: Path, members: dict[str, Adapter], letters: Callable[..., Path], tmp_path: Path
) -> None:
    base, mixture = mixed(tiny, members, scope, decide)
    save_mixture(mixture, tmp_path / "mixture")
    target = load_file(letters())
    tasks = target.tasks("training", 4)
    acting = LocalPolicy(tiny, 16, temperature=1.0, max_turns=3, max_tokens=6)

    def played(keys: list[int]) -> list[RunningEpisode]:
        plays = [RunningEpisode(str(key), target.open(tasks[key % 4]), str(tmp_path / "mixture")) for key in keys]
        return [*acting.play(plays)]

    together = played([*range(12)])
    assert len({tuple(play.token_ids) for play in together}) == 12
    for play in together:
        ids, places = torch.tensor([play.token_ids]), torch.tensor([deciding_tokens(play.mask, decide)])
        with torch.no_grad(), mixture.at(places):
            scores = base(input_ids=ids).logits[0].log_softmax(-1)
        written = [at for at, mine in enumerate(play.mask) if mine]
        forced = [scores[at - 1, play.token_ids[at]].item() for at in written]
        assert [play.logprobs[at] for at in written] == pytest.approx(forced, rel=0, abs=1.1e-6)
    assert any(play.mask != sorted(play.mask) for play in together), "a dialogue has several turns"
    alone = [play for key in (3, 7) for play in played([key])]
    assert [play.token_ids for play in alone] == [together[3].token_ids, together[7].token_ids]


def test_decisions_are_those_of_the_prompt_of_the_turn_or_of_each_token() -> None:
    written = [0, 0, 0, 1, 1, 0, 0, 1, 0]
    assert deciding_tokens(written, "prompt") == [2] * 9
    assert deciding_tokens(written, "turn") == [2, 2, 2, 2, 6, 6, 6, 6, 6]
    assert deciding_tokens(written, "token") == [*range(9)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("scope", "decide"), KINDS)
def test_only_gates_get_gradients(
    scope: str, decide: Any, activation: str, tiny: Path, members: dict[str, Adapter]
) -> None:
    base, mixture = mixed(tiny, members, scope, decide, activation)
    ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([deciding_tokens([0, 0, 0, 1, 1, 0, 0, 1, 1], decide)] * 2)
    with mixture.at(places):
        base(input_ids=ids).logits.logsumexp(-1).sum().backward()
    moved = {name for name, parameter in base.named_parameters() if parameter.grad is not None}
    assert moved == {f"mixture.{name}" for name, _ in mixture.named_parameters()}
    assert all(gate.weight.grad is not None and gate.weight.grad.any() for gate in mixture.linears)


def test_a_saved_mixture_is_the_same_again_and_generates_with_the_decision_of_its_prompt(
    tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    base, mixture = mixed(tiny, members)
    save_mixture(mixture, tmp_path / "one")
    again: Any = load_module(tiny, "float64").eval()
    loaded = load_mixture(again, tmp_path / "one")
    save_mixture(loaded, tmp_path / "two")
    assert adapter_digest(tmp_path / "one") == adapter_digest(tmp_path / "two")
    prompt = torch.randint(5, 300, (1, 7), generator=torch.Generator().manual_seed(0))
    made = again.generate(prompt, max_new_tokens=6, do_sample=False)
    with torch.no_grad(), mixture.at(torch.full_like(made, 6)):
        assert base(input_ids=made).logits[0, 6:-1].argmax(-1).tolist() == made[0, 7:].tolist()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: next(folder.glob("adapters/*/adapter_config.json")).write_text("{}"), "was trained"),
        (lambda folder: (folder / "gates.safetensors").write_bytes(b"x"), "does not hold the gates"),
        (
            lambda folder: (folder / "mixture.json").write_text(
                json.dumps({**json.loads((folder / "mixture.json").read_text()), "scope": "global"})
            ),
            "does not hold the gates",
        ),
        (lambda folder: (folder / "mixture.json").write_text("{}"), "mixture.json"),
    ],
)
def test_a_damaged_mixture_is_refused(
    damage: Callable[[Path], Any], complaint: str, tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    save_mixture(mixed(tiny, members)[1], tmp_path / "mixture")
    damage(tmp_path / "mixture")
    with pytest.raises(UserError, match=complaint):
        load_mixture(load_module(tiny, "float64"), tmp_path / "mixture")


@pytest.mark.parametrize(("scope", "decide"), [("layer", "prompt"), ("global", "prompt"), ("layer", "token")])
def test_a_served_mixture_answers_a_later_turn_with_the_decision_of_the_first(
    scope: str, decide: Any, tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    base, mixture = mixed(tiny, members, scope, decide)
    save_mixture(mixture, tmp_path / "mixture")
    acting = LocalPolicy(tiny, 16, temperature=1.0, max_turns=1, max_tokens=8)
    asked = [{"role": "user", "content": "Close ticket 12."}]
    later = [*asked, {"role": "assistant", "content": "Which one?"}, {"role": "user", "content": "The red one."}]
    opening = len(acting.chat([]).dialogue(asked)) - 1
    server = ChatServer(acting, "base", {"mixture": tmp_path / "mixture"})
    request = {"model": "mixture", "messages": later, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answer: Any = asyncio.run(server.complete(CompletionRequest.model_validate(request)))
    prompt, turn = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    ids = torch.tensor([prompt + turn])
    places = torch.arange(ids.shape[1])[None] if decide == "token" else torch.full_like(ids, opening)
    with torch.no_grad(), mixture.at(places):
        scores = base(input_ids=ids).logits[0].log_softmax(-1)
    expected = [scores[len(prompt) + at - 1, token].item() for at, token in enumerate(turn)]
    given = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
    assert len(given) > 1 and given == pytest.approx(expected, rel=0, abs=1.1e-6)


def test_a_mixture_that_decides_before_each_turn_is_not_served(
    tiny: Path, members: dict[str, Adapter], tmp_path: Path
) -> None:
    save_mixture(mixed(tiny, members, decide="turn")[1], tmp_path / "mixture")
    server = ChatServer(LocalPolicy(tiny, 16, temperature=1.0, max_turns=1, max_tokens=8), "base", {})
    with pytest.raises(UserError, match="decide before each turn"):
        server.load("mixture", tmp_path / "mixture")


def test_one_decision_for_all_layers_at_each_token_is_refused(members: dict[str, Adapter]) -> None:
    with pytest.raises(UserError, match="read the whole dialogue again for each token"):
        MixtureParts(members, "global", "token")
