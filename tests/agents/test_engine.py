"""The in-process engine, compared with Hugging Face and with itself in other batches."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.adapters import save_adapter
from support.needs import further

from captrain.agents.collection import RolloutBar, collect, summarise_rollouts
from captrain.agents.local import LocalPolicy
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file
from captrain.errors import UserError
from captrain.records import Rollout

Letters = Callable[..., Path]
Dialogue = tuple[list[int], list[int], list[float]]
KEYS = [f"0/{i}/0" for i in range(16)]


def policy(model: Path, **settings: Any) -> LocalPolicy:
    return LocalPolicy(model, **{"temperature": 1.0, "max_turns": 3, "max_tokens": 6, "batch": 16, **settings})


def played(
    acting: LocalPolicy, target: CheckedEnvironment, keys: Sequence[str] = KEYS, adapter: Path | None = None
) -> dict[str, Dialogue]:
    """Dialogues by key, which chooses the task."""
    tasks = target.tasks("training", 20)
    folder = str(adapter) if adapter else ""
    plays = [RunningEpisode(key, target.open(tasks[int(key.split("/")[1])]), folder) for key in keys]
    return {play.key: (play.token_ids, play.mask, play.logprobs) for play in acting.play(plays)}


def teacher_forced(model: Any, dialogue: Dialogue, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the written tokens, by one forward pass over the dialogue."""
    import torch

    ids, mask, _ = dialogue
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[at - 1, ids[at]].item() for at in range(len(ids)) if mask[at]]


def furthest(model: Any, dialogues: dict[str, Dialogue], temperature: float = 1.0) -> float:
    distances = []
    for dialogue in dialogues.values():
        written = [logprob for logprob, mine in zip(dialogue[2], dialogue[1], strict=True) if mine]
        forced = teacher_forced(model, dialogue, temperature)
        distances += [abs(one - other) for one, other in zip(written, forced, strict=True)]
    return max(distances)


def same(one: dict[str, Dialogue], other: dict[str, Dialogue]) -> None:
    """Equal tokens, and log-probabilities up to the last recorded digit."""
    assert one.keys() == other.keys()
    for key, (ids, mask, logprobs) in one.items():
        assert (ids, mask) == other[key][:2]
        assert logprobs == pytest.approx(other[key][2], rel=0, abs=1.1e-6)


def make(folder: Path, tokenizer_of: Path, config: Any, spread: float = 1.0) -> Path:
    """Save a model of this configuration with random weights, and the tiny model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(spread) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


def size(tokenizer_of: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    return {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


@pytest.fixture(scope="module")
def grouped(tiny: Path) -> Path:
    """A Qwen3 with grouped queries, an untied head, norms that are not 1, and sharp distributions."""
    from transformers import Qwen3Config

    config = Qwen3Config(**size(tiny), head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-5)
    return make(tiny.parent / "grouped", tiny, config, spread=1.5)


@pytest.fixture(scope="module")
def llama(tiny: Path) -> Path:
    """A Llama, which has no norms of queries and keys, with unrounded weights."""
    from transformers import LlamaConfig

    return make(tiny.parent / "llama", tiny, LlamaConfig(**size(tiny), tie_word_embeddings=True))


@pytest.fixture(scope="module")
def mistral(tiny: Path) -> Path:
    """An architecture without a decoder in the engine."""
    from transformers import MistralConfig

    return make(tiny.parent / "mistral", tiny, MistralConfig(**size(tiny), sliding_window=None))


@pytest.fixture(scope="module")
def adapter(tiny: Path) -> Path:
    return save_adapter(tiny, tiny.parent / "adapter")


def oracle(model: Path, adapter: Path | None = None) -> Any:
    """The model as Hugging Face and PEFT run it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    return (PeftModel.from_pretrained(plain, str(adapter)) if adapter else plain).eval()


@pytest.fixture
def target(letters: Letters) -> CheckedEnvironment:
    return load_file(letters())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("model", further(["tiny", "grouped", "mistral"], 2))
def test_log_probabilities_are_those_of_a_whole_forward_pass(
    model: str, temperature: float, target: CheckedEnvironment, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    dialogues = played(policy(folder, temperature=temperature), target)
    assert sum(sum(mask) for _, mask, _ in dialogues.values()) > 100
    assert all(
        logprob == 0.0 for _, mask, row in dialogues.values() for m, logprob in zip(mask, row, strict=True) if not m
    )
    assert furthest(oracle(folder), dialogues, temperature) < 1e-5


@pytest.mark.parametrize("model", ["grouped", "mistral"])
def test_single_precision_is_close(model: str, target: CheckedEnvironment, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    single, double = (played(policy(folder, precision=one), target) for one in ("float32", "float64"))
    assert 1e-8 < furthest(oracle(folder), single) < 1e-3
    assert sum(single[key][0] == double[key][0] for key in KEYS) >= 15


def test_log_probabilities_with_an_adapter_equal_those_of_peft(
    tiny: Path, adapter: Path, target: CheckedEnvironment
) -> None:
    acting = policy(tiny)
    base, adapted = played(acting, target), played(acting, target, adapter=adapter)
    assert furthest(oracle(tiny, adapter), adapted) < 1e-5
    assert furthest(oracle(tiny), adapted) > 0.1
    # Merging has not changed the base.
    same(played(acting, target), base)


def test_an_adapter_acts_through_any_architecture(mistral: Path, target: CheckedEnvironment) -> None:
    adapter = save_adapter(mistral, mistral.parent / "mistral-adapter")
    adapted = played(policy(mistral), target, adapter=adapter)
    assert furthest(oracle(mistral, adapter), adapted) < 1e-5 and furthest(oracle(mistral), adapted) > 0.1


@pytest.mark.parametrize("model", ["tiny", "grouped", "mistral"])
def test_a_rollout_does_not_depend_on_its_batch(
    model: str, target: CheckedEnvironment, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    together = played(policy(folder), target)
    assert len({len(ids) for ids, _, _ in together.values()}) > 3
    same(played(policy(folder, batch=1), target), together)
    same(played(policy(folder, batch=3), target), together)
    same(played(policy(folder, batch=5), target, [*KEYS[7:], *KEYS[6::-1]]), together)
    same(played(policy(folder), target, KEYS[5:6]), {KEYS[5]: together[KEYS[5]]})


def test_plays_of_several_adapters_may_be_mixed(tiny: Path, adapter: Path, target: CheckedEnvironment) -> None:
    tasks = target.tasks("training", 20)
    plays = [RunningEpisode(f"0/{i}/0", target.open(tasks[i]), str(adapter) if i % 2 else "") for i in range(8)]
    mixed = {play.key: (play.token_ids, play.mask, play.logprobs) for play in policy(tiny, batch=3).play(plays)}
    base, adapted = played(policy(tiny), target, KEYS[:8]), played(policy(tiny), target, KEYS[:8], adapter)
    same(mixed, {key: (adapted if int(key.split("/")[1]) % 2 else base)[key] for key in KEYS[:8]})


def test_tokens_depend_on_the_key(tiny: Path, target: CheckedEnvironment) -> None:
    first = played(policy(tiny), target, ["0/3/0", "0/3/1", "1/3/0"])
    assert len({tuple(ids) for ids, _, _ in first.values()}) == 3
    same(played(policy(tiny), target, ["1/3/0", "0/3/1", "0/3/0"]), first)


@pytest.mark.parametrize("model", ["tiny", "grouped", "llama"])
def test_the_fused_decoder_samples_what_the_module_samples(
    model: str, target: CheckedEnvironment, request: pytest.FixtureRequest
) -> None:
    from captrain.agents.engine import DenseDecoder, HuggingFaceDecoder

    folder = request.getfixturevalue(model)
    acting, found = policy(folder), []
    assert isinstance(acting.decoder(""), DenseDecoder)
    for decoder in (acting.decoder(""), HuggingFaceDecoder(oracle(folder))):
        tasks = target.tasks("training", 20)
        plays = [RunningEpisode(key, target.open(tasks[int(key.split("/")[1])])) for key in KEYS]
        found.append([(play.token_ids, play.mask) for play in acting.play_with(decoder, plays)])
    assert found[0] == found[1]


def test_bfloat16_only_affects_products(llama: Path, target: CheckedEnvironment) -> None:
    """Log-probabilities are close to those of full weights, but not equal."""
    distance = furthest(oracle(llama), played(policy(llama, precision="bfloat16"), target))
    assert 1e-4 < distance < 0.3


def test_the_decoder_gives_the_same_at_once_or_token_by_token(grouped: Path) -> None:
    import torch

    decoder = policy(grouped).decoder("")
    ids = torch.arange(90).view(2, 45)
    with torch.inference_mode():
        decoder.reset()
        decoder.keep([0, 0])
        at_once = decoder.forward(ids, [0, 1])
        decoder.reset()
        decoder.keep([0, 0])
        slowly = decoder.forward(ids[:, :7], [])
        for at in range(7, 45):
            slowly = decoder.forward(ids[:, at : at + 1], [1, 0])
    torch.testing.assert_close(at_once, slowly[[1, 0]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", ["grouped", "mistral"])
def test_common_prefixes_are_computed_once(
    model: str, target: CheckedEnvironment, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting = policy(request.getfixturevalue(model), temperature=0.3)
    decoder, positions = acting.decoder(""), 0
    forward = decoder.forward

    def counted(ids: Any, due: Sequence[int]) -> Any:
        nonlocal positions
        positions += ids.numel()
        return forward(ids, due)

    monkeypatch.setattr(decoder, "forward", counted)
    keys = [f"{trial}/{task}/0" for task in range(2) for trial in range(8)]
    tasks = target.tasks("training", 2)
    plays = [RunningEpisode(key, target.open(tasks[int(key.split("/")[1])])) for key in keys]
    dialogues = [tuple(play.token_ids) for play in acting.play_with(decoder, plays)]
    read = [row[:-1] for row in dialogues]  # the last token is not fed
    distinct = {row[:stop] for row in read for stop in range(1, len(row) + 1)}
    # Finished branches are fed until enough of them are finished.
    assert len(distinct) <= positions <= 1.3 * len(distinct) < 0.8 * sum(map(len, read))
    monkeypatch.undo()
    alone = played(acting, target, keys[3:4])
    assert alone[keys[3]][0] == list(dialogues[3])


def test_temperature_0_takes_the_most_probable_token(grouped: Path, target: CheckedEnvironment) -> None:
    import torch

    model = oracle(grouped)
    dialogues = played(policy(grouped, temperature=0.0), target, KEYS[:4])
    for ids, mask, _ in dialogues.values():
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert [ids[at] for at in range(len(ids)) if mask[at]] == [best[at - 1] for at in range(len(ids)) if mask[at]]
    assert furthest(model, dialogues) < 1e-5
    same(played(policy(grouped, temperature=0.0), target, ["7/0/7"]), {"7/0/7": dialogues["0/0/0"]})


def test_sampled_tokens_are_distributed_as_the_model_says() -> None:
    import torch

    from captrain.agents.engine import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64))
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5).div(1000)[:, None]
    tokens, logprobs = sample(logits, uniforms, 1.0, [0] * 1000)
    assert [tokens.count(token) for token in range(4)] == [500, 300, 200, 0]
    assert {round(value, 6) for value in logprobs} == {-0.693147, -1.203973, -1.609438}
    assert sample(logits, torch.tensor([[0.999999999]], dtype=torch.float64), 1.0, [0])[0] == [2]


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7}], ids=str)
def test_top_p_and_top_k_renormalize_the_likeliest_tokens(
    grouped: Path, target: CheckedEnvironment, settings: dict[str, Any]
) -> None:
    import torch

    model, temperature = oracle(grouped), 2.0
    acting = policy(grouped, temperature=temperature, **settings)
    dialogues = played(acting, target, KEYS[:6])
    drawn = set[int]()
    for ids, mask, logprobs in dialogues.values():
        with torch.inference_mode():
            shares = (model(input_ids=torch.tensor([ids])).logits[0].double() / temperature).softmax(-1)
        for at in (at for at in range(len(ids)) if mask[at]):
            values, order = shares[at - 1].sort(descending=True)
            values = values[: settings.get("top_k")] / values[: settings.get("top_k")].sum()
            kept = 1 + int((values.cumsum(0) < settings.get("top_p", 2.0)).sum())
            rank = order.tolist().index(ids[at])
            assert rank < kept
            assert logprobs[at] == pytest.approx(math.log(values[rank] / values[:kept].sum()), abs=1e-5)
            drawn.add(rank)
    assert len(drawn) > 1
    same(played(acting, target, KEYS[3:4]), {KEYS[3]: dialogues[KEYS[3]]})


def test_top_k_1_equals_temperature_0(grouped: Path, target: CheckedEnvironment) -> None:
    greedy = played(policy(grouped, temperature=0.0, top_p=0.5, top_k=4), target, KEYS[:3])
    plain = played(policy(grouped, temperature=0.0), target, KEYS[:3])
    one = played(policy(grouped, top_k=1), target, KEYS[:3])
    for key, (ids, mask, _) in plain.items():
        assert (ids, mask) == greedy[key][:2] == one[key][:2]


def test_a_turn_cut_at_its_limit_is_closed_and_the_dialogue_continues(tiny: Path, target: CheckedEnvironment) -> None:
    acting = policy(tiny, max_tokens=5)
    tasks = target.tasks("training", 20)
    play = RunningEpisode("0/2/0", target.open(tasks[2]))
    list(acting.play([play]))
    end, chat = acting.tokenizer.eos_token_id, acting.chat([])
    assert tasks[2].data["turns"] == 3 and play.turns == 3
    spoken = [message for message in play.messages if message["role"] == "assistant"]
    asked = [message for message in play.messages if message["role"] == "user"]
    assert len(spoken) == 3 and [message["content"] for message in asked[1:]] == ["Go on, 2 more.", "Go on, 1 more."]
    ids, mask = play.token_ids, play.mask
    starts = [at for at in range(len(ids)) if mask[at] and not mask[at - 1]]
    turns = [ids[at : at + 5] for at in starts]
    assert len(starts) == 3 and sum(mask) == 15 and end not in [token for turn in turns for token in turn]
    # The model did not write the end token of a cut turn; the usual answer follows it.
    expected = chat.prompt(play.messages[:2])
    for turn, reply in zip(turns, [*asked[1:], None], strict=True):
        expected += turn + ([end, *chat.suffix([reply])] if reply else [])
    assert ids == expected
    assert [chat.parse(turn) for turn in turns] == spoken


def test_a_play_ends_at_max_turns(tiny: Path, target: CheckedEnvironment) -> None:
    tasks = target.tasks("training", 20)
    plays = list(policy(tiny, max_turns=2).play([RunningEpisode(f"0/{i}/0", target.open(tasks[i])) for i in range(3)]))
    assert {play.key: play.turns for play in plays} == {"0/0/0": 1, "0/1/0": 2, "0/2/0": 2}


def test_a_dialogue_at_the_longest_length_ends(tiny: Path, target: CheckedEnvironment) -> None:
    task = target.tasks("training", 3)[2]

    def length(room: int, max_tokens: int) -> int:
        acting = policy(tiny, max_tokens=max_tokens)
        prompt = len(acting.chat([]).prompt(list(target.open(task).messages)))
        acting.max_length = prompt + room
        [dialogue] = played(acting, target, ["0/2/0"]).values()
        return len(dialogue[0]) - prompt

    assert length(room=400, max_tokens=3) > 3 + 3 + 3
    # Within a turn, and where the answer to a turn does not fit.
    assert length(room=12, max_tokens=30) == 12 and length(room=12, max_tokens=3) == 3


@pytest.mark.parametrize("model", ["tiny", "mistral"])
def test_a_prompt_that_is_too_long_is_a_failed_rollout_with_the_reason(
    model: str,
    letters: Letters,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acting, path = policy(request.getfixturevalue(model)), letters(flat=1)

    def collected(name: str) -> list[Rollout]:
        target = load_file(path)
        tasks = target.tasks("discovery", 3)
        return collect(acting, target, tasks, purpose="diagnosis", seed=0, journals=tmp_path / name)

    expected = collected("short")
    text = path.read_text().replace('f"Say {i}."', 'f"Say {i}." + " Please." * (4000 if i == 1 else 0)')
    path.write_text(text.replace("reward > 0.5", "True"))
    # Short work shows no progress where output is piped.
    assert "left" not in capfd.readouterr().err
    monkeypatch.setattr("captrain.records.progress.PAUSE", 0.0)
    rollouts = collected("long")
    first, long, last = rollouts
    assert [one.token_ids for one in (first, last)] == [expected[0].token_ids, expected[2].token_ids]
    assert first.truncated == last.truncated == "" and first.outcome == last.outcome == "passed"
    # Failed, although this environment scores everything as a success.
    assert long.outcome == "failed" and long.error is None and long.score is not None and long.score.success
    assert long.token_ids == long.mask == [] and [one["role"] for one in long.messages] == ["system", "user"]
    assert f"tokens, and the model takes {acting.config.max_position_embeddings}" in long.truncated
    with RolloutBar("letters", 4, 0, quiet=False) as bar:
        for rollout in rollouts:
            bar.add(rollout)
        bar._bar.refresh()
    said = capfd.readouterr().err
    assert "letters: 3 of 4 rollouts, " in said and "left, pass rate 0.667, 1 truncated" in said
    assert f"1 of 3 rollouts ended because the dialogue outgrew the model, such as {long.task.id} (the pr" in said
    target = load_file(path)
    assert summarise_rollouts(rollouts, target)["truncated"] == 1 and "truncated" not in summarise_rollouts(
        expected, target
    )


def test_a_dialogue_that_is_cut_off_is_marked(tiny: Path, target: CheckedEnvironment) -> None:
    acting = policy(tiny, max_tokens=3)
    task = target.tasks("training", 3)[2]
    acting.max_length = len(acting.chat([]).prompt(list(target.open(task).messages))) + 12
    [cut] = acting.play([RunningEpisode("0/2/0", target.open(task))])
    assert (
        cut.turns == 1
        and cut.truncated == f"the dialogue has reached the {acting.max_length} tokens that the model takes"
    )


def test_guidance_is_read_by_the_model_and_recorded(tiny: Path, target: CheckedEnvironment) -> None:
    play = RunningEpisode("0/0/0", target.open(target.tasks("training", 1)[0]))
    acting = policy(tiny, guidance=["Be friendly."])
    list(acting.play([play]))
    assert play.messages[0]["content"] == "Talk.\n- Be friendly."
    assert "Talk.\n- Be friendly.<|im_end|>" in acting.tokenizer.decode(play.token_ids)


def test_the_digest_covers_exactly_the_settings_that_change_results(tiny: Path, mistral: Path) -> None:
    plain = policy(tiny).digest
    assert policy(tiny, batch=3).digest == plain
    others = [
        policy(mistral), policy(tiny, temperature=0.5), policy(tiny, max_turns=2), policy(tiny, max_tokens=7),
        policy(tiny, guidance=["Be friendly."]), policy(tiny, precision="float32"),
        policy(tiny, top_p=0.5), policy(tiny, top_k=5), policy(tiny, chat_template_kwargs={"enable_thinking": False}),
    ]  # fmt: skip
    assert len({plain, *(other.digest for other in others)}) == 10
    assert policy(tiny, top_p=None, top_k=None, chat_template_kwargs={}).digest == plain


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("share", [None, 0.0, 0.6, 0.99], ids=["missing", "empty", "half", "cut short"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_or_damaged_model_file_is_named(tiny: Path, tmp_path: Path, name: str, share: float | None) -> None:
    model = copied(tiny, tmp_path / "model")
    content = (model / name).read_bytes()
    if share is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError) as refusal:
        policy(model)
    # Weights may be in several files, so the missing one is unknown.
    named = "*.safetensors" if share is None and name.startswith("model") else name
    assert str(model) in refusal.value.problem and named in refusal.value.problem
    assert "dvc repro base" in refusal.value.remedy


@pytest.mark.parametrize("architecture", ["tiny", "mistral"])
def test_a_model_whose_weights_do_not_match_its_configuration_is_refused(
    architecture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = copied(request.getfixturevalue(architecture), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model.layers.2"):
        policy(model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("share", [None, 0.0, 0.6], ids=["missing", "empty", "half"])
def test_a_damaged_adapter_ends_in_one_message(
    tiny: Path, adapter: Path, tmp_path: Path, target: CheckedEnvironment, name: str, share: float | None
) -> None:
    damaged = copied(adapter, tmp_path / "damaged")
    content = (damaged / name).read_bytes()
    if share is None:
        (damaged / name).unlink()
    else:
        (damaged / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError) as refusal:
        played(policy(tiny), target, KEYS[:1], damaged)
    assert str(damaged) in refusal.value.problem and "dvc repro adapters" in refusal.value.remedy


def test_an_adapter_of_another_model_is_refused(
    tiny: Path, tmp_path: Path, target: CheckedEnvironment, adapter: Path
) -> None:
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file

    foreign = copied(adapter, tmp_path / "foreign")
    weights = load_tensors(foreign / "adapter_model.safetensors")
    renamed = {name.replace("layers.1", "layers.7"): tensor for name, tensor in weights.items()}
    save_file(renamed, foreign / "adapter_model.safetensors")
    with pytest.raises(UserError, match="layers.7"):
        played(policy(tiny), target, KEYS[:1], foreign)
