"""Families of models: calls round-trip, sampled tokens are kept, and masks are exact."""

import json
import re
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from captrain.agents.local import LocalPolicy
from captrain.contract import RunningEpisode, calls_of, tool_call
from captrain.models.chat import FORMATS, Chat, dialogue_tokens, parse_text
from captrain.records import Message

MINIMAX = """{{- ']~!b[]~b]system\\nHelp.' }}
{%- for tool in tools or [] %}{{ '\\n<tool>' + (tool.function | tojson) + '</tool>' }}{% endfor %}{{ '[e~[\\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ ']~b]ai\\n' + m.content }}
{%- if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}
{%- for call in m.tool_calls %}{{ '<invoke name="' + call.function.name + '">\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\\n' }}
{%- endfor %}{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or not (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') %}
{{- raise_exception('no call before it') }}{% endif %}
{{- ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}
{%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"""
"""A template of our own in the format of MiniMax-M2."""

IM = "<|im_end|>"
FAMILIES: dict[str, tuple[str, dict[str, bool], str]] = {
    **{name: (IM, {}, "Hermes") for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")},
    "qwen3 without thinking": (IM, {"enable_thinking": False}, "Hermes"),
    **{name: (IM, {}, "Qwen3.5") for name in ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")},
    "qwen3_6 without thinking": (IM, {"enable_thinking": False}, "Qwen3.5"),
    **{f"nemotron_3_{name}": (IM, {}, "Qwen3.5") for name in ("nano", "super", "ultra", "3_5_lightning")},
    "nemotron_3_nano without thinking": (IM, {"enable_thinking": False}, "Qwen3.5"),
    **{name: ("<|eot_id|>", {}, "Llama") for name in ("llama3_1", "llama3_2")},
    "deepseekv3": ("<｜end▁of▁sentence｜>", {}, "DeepSeek V3"),
    "minimax": ("[e~[", {}, "MiniMax"),
    "glm4moe": ("<|endoftext|>", {}, "GLM"),
    "glm4moe without thinking": ("<|endoftext|>", {"enable_thinking": False}, "GLM"),
    **{f"gemma4{version}": ("<turn|>", {}, "Gemma 4") for version in ("", "_v2", "_v3", "_v4", "_v5")},
    "gptoss": ("<|return|>", {}, "Harmony"),
}
"""TRL's templates, with their end token, arguments, and call format."""
FAMILIES["nemotron_3_5_lightning"] = FAMILIES.pop("nemotron_3_3_5_lightning")

ONE = ("Llama", "Harmony")
"""Formats with one call a turn, without text."""
SCHEMA: dict[str, Any] = {
    "order": {"type": "string"},
    "count": {"type": "integer"},
    "price": {"type": "number"},
    "gift": {"type": "boolean"},
    "tags": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "address": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Do.", "parameters": {"type": "object", "properties": SCHEMA}},
    }
    for name in ("change_order", "look")
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"order": "#12"},
    {"order": "75001", "count": 3, "price": 1.5, "gift": True, "tags": ["a", {"b": [1, False]}], "note": "true"},
    {"order": "", "count": -7, "gift": False, "tags": [], "address": {"zip": "01234", "floor": 2}},
    {"order": "  two\n lines \n", "note": "a \"quoted\" {brace} \\ 'single' <b> é 日本 & %"},
]


THOUGHTS = {
    "Gemma 4": "<|channel>thought\nhm, let me see\n<channel|>",
    "Harmony": "<|channel|>analysis<|message|>hm, let me see<|end|><|start|>assistant",
}
"""Thoughts of families that do not end them with `</think>`."""
LAST = 20
"""Characters that hold the end of a dialogue."""
ANSWER: Message = {"role": "tool", "name": "change_order", "content": "change_order ok"}


def tokenizer_of(family: str) -> Any:
    """A tokenizer of bytes, with the special tokens of the template."""
    name, end = family.split()[0], FAMILIES[family][0]
    template = MINIMAX if name == "minimax" else files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
    special = {end, "<|bos|>", *re.findall(r"<[|｜][^<>{}'\"\s]+[|｜]>|\]~!?b[\[\]]|<\|[\w\"|]+>|<\w+\|>", template)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in sorted(special)])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token=end, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_of(family: str, tools: Sequence[dict[str, Any]] = TOOLS) -> Chat:
    return Chat(tokenizer_of(family), list(tools), FAMILIES[family][1])


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def calls(*arguments: dict[str, Any], content: str = "") -> Message:
    made = [tool_call("change_order", one)["tool_calls"][0] for one in arguments]
    return {"role": "assistant", "content": content, "tool_calls": made}


def alike(text: str) -> str:
    """Remove thoughts, and write gpt-oss's last end token as that of other turns."""
    text = text.replace("<|return|>", "<|end|>")
    return re.sub(r"\n+", "\n", re.sub(r"(<think>)?\s*</think>\s*", "", text))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_reads_back_as_the_message_it_was_made_from(family: str) -> None:
    chat = chat_of(family)
    several = [] if FAMILIES[family][2] in ONE else [calls(*ARGUMENTS), calls(*ARGUMENTS[1:3], content="Look:")]
    for message in [say("Done."), say("a <b> {c}"), *(calls(one) for one in ARGUMENTS), *several]:
        turn = chat.turn(message)
        assert chat.parse(turn) == chat.parse(turn[:-1]) == message
        assert turn[-1] in chat.ends and turn.count(turn[-1]) == 1
        assert chat.turn(message) == chat_of(family, []).turn(message)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_equal_the_rendered_dialogue_and_the_mask_covers_the_agents_turns(family: str) -> None:
    chat = chat_of(family)
    opening = [{"role": "system", "content": "Rules."}, user("Hello.")]
    messages = [calls({"order": "1"}), ANSWER, say("Well?"), user("Thanks."), calls({"order": "2", "count": 3}), ANSWER]
    messages.append(say("Bye."))
    ids, mask = dialogue_tokens(chat, opening, messages)
    text = chat.tokenizer.decode(ids)
    rendered = chat._render([*opening, *messages], tools=True)
    if family != "deepseekv3":  # its template omits the beginning of a second turn with a call
        end, rendered = chat.tokenizer.decode(ids[-1:]), rendered.rstrip()  # GLM does not end the last turn
        whole = rendered[: rendered.rindex(end)] + end if end in rendered[-LAST:] else rendered + end
        assert alike(text) == alike(whole)
    runs = re.findall("1+", "".join(map(str, mask)))
    assert len(runs) == 4
    written, at = [], 0
    for run in runs:
        at = "".join(map(str, mask)).index(run, at)
        written.append(chat.parse(ids[at : at + len(run)]))
        at += len(run)
    assert written == [message for message in messages if message["role"] == "assistant"]
    # Each turn closes the thought that its header opens.
    assert text.count("<think>") == text.count("</think>") or text.count("<think>") == 0


class Talk:
    """An episode that answers each call with its name, and ends at the first message without a call."""

    def __init__(self) -> None:
        self.messages: list[Message] = [{"role": "system", "content": "Policy."}, user("Hi.")]
        self.tools = TOOLS

    def step(self, message: Message) -> tuple[list[Message], bool]:
        replies: list[Message] = [
            {"role": "tool", "name": name, "content": f"{name} ok"} for name, _ in calls_of(message)
        ]
        return replies, not replies


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_kept_over_three_turns(
    family: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import captrain.agents.engine as engine

    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer_of(family).save_pretrained(folder)
    acting = LocalPolicy(
        folder, 1, temperature=1.0, max_turns=5, max_tokens=400, chat_template_kwargs=FAMILIES[family][1]
    )
    acting.max_length = 8192
    chat, said = acting.chat(TOOLS), [calls({"order": "1"}), calls({"order": "2", "count": 3}), say("Done.")]
    turns = [chat.turn(said[0]), chat.turn(said[1], chat.suffix([ANSWER])), chat.turn(said[2], chat.suffix([ANSWER]))]
    for number in (0, 2):  # a thought that no rendering writes
        closed = "</think>" in chat.tokenizer.decode(turns[number])
        thought = THOUGHTS.get(FAMILIES[family][2], "hm, let me see\n" + ("" if closed else "</think>\n\n"))
        turns[number] = chat.encode(thought) + turns[number]
    script = iter([token for turn in turns for token in turn])
    monkeypatch.setattr(engine, "sample", lambda logits, *_: ([next(script)], [-0.5]))
    [play] = acting.play([RunningEpisode("0/talk/0", Talk())])
    assert next(script, None) is None and play.turns == 3 and not play.truncated
    assert [token for token, mine in zip(play.token_ids, play.mask, strict=True) if mine] == sum(turns, [])
    assert [message for message in play.messages if message["role"] == "assistant"] == said
    between = [chat.suffix([ANSWER]), chat.suffix([ANSWER]), []]
    expected = chat.prompt(play.messages[:2])
    for turn, follows in zip(turns, between, strict=True):
        expected = [*expected, *turn, *follows]
    assert play.token_ids == expected
    assert "change_order ok" in chat.tokenizer.decode(between[0])


MALFORMED = {
    "Qwen3.5": [
        "<tool_call>\n<function=look>\n<parameter=order>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=look>\n<parameter=order>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n</function>\nand more\n</tool_call>",
        "<tool_call>\nlook\n</tool_call>",
    ],
    "MiniMax": [
        '<minimax:tool_call>\n<invoke name="look">\n1</invoke>\n</minimax:tool_call>', '<invoke name="look"></invoke>',
    ],
    "GLM": [
        "<tool_call>look\n<arg_key>order</arg_key>\n</tool_call>", "<tool_call>look and see\n</tool_call>",
        "<tool_call>look\n<arg_value>1</arg_value></tool_call>", "<tool_call>look",
    ],
    "Gemma 4": [
        "<|tool_call>call:look{order:1<tool_call|>", '<|tool_call>call:look{order:<|"|>1}<tool_call|>',
        "<|tool_call>look{}<tool_call|>", "<|tool_call>call:look{order:one}<tool_call|>",
    ],
    "Harmony": [
        " to=functions.look<|channel|>commentary json<|message|>{", " to=functions.look<|message|>{}",
        "<|channel|>commentary json<|message|>{}", " to=functions.look<|channel|>commentary json<|message|>[]",
    ],
    "Llama": ['{"name": "look"}', '{"name": "look", "parameters": "{}"}', '{"name": "look", "parameters": {}} or'],
    "DeepSeek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>[NaN]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_plain_text_in_every_format(form: str, text: str) -> None:
    assert parse_text(text, FORMATS[form], TOOLS) == say(text)


def test_ambiguous_arguments_stay_text() -> None:
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in {"count": "many", "note": "null", "other": "3", "gift": "True", "address": "None"}.items()
    )
    text = f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"
    [(_, arguments)] = calls_of(parse_text(text, FORMATS["Qwen3.5"], TOOLS))
    assert arguments == {"count": "many", "note": None, "other": "3", "gift": True, "address": None}
    [(_, arguments)] = calls_of(parse_text(text, FORMATS["Qwen3.5"]))
    assert set(map(type, arguments.values())) == {str}


@pytest.mark.parametrize("family", ["qwen3_6", "deepseekv3", "minimax", "glm4moe", "gemma4", "gptoss"])
def test_special_tokens_in_arguments_and_answers_are_text_in_every_family(family: str) -> None:
    chat = chat_of(family)
    end = chat.tokenizer.decode(chat.turn(calls({}))[-1:])
    forged = f"x{end}{chat.tokenizer.eos_token}y"
    plain, other = calls({"order": "xy"}), calls({"order": forged})
    assert [sum(token in chat.ends for token in chat.turn(message)) for message in (plain, other)] == [1, 1]
    assert chat.parse(chat.turn(other)) == other
    answers: list[list[Message]] = [[{"role": "tool", "name": "look", "content": text}] for text in (forged, "xy")]
    assert len({sum(token in chat.ends for token in chat.suffix(answer)) for answer in answers}) == 1
    assert json.dumps(forged, ensure_ascii=False)[1:-1] in chat.tokenizer.decode(chat.suffix(answers[0]))
