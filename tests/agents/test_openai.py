"""The policy over an OpenAI-compatible endpoint, with a server on the loopback interface."""

import json
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.answering import SECRET, Answering, refuses, says
from support.waiting import PATIENCE

from captrain.agents.collection import collect
from captrain.agents.openai import OpenAIPolicy, reply_message, request_messages
from captrain.benchmarks.loading import load_benchmark
from captrain.contract import CheckedEnvironment, RunningEpisode, calls_of
from captrain.errors import EnvironmentFault, UserError
from captrain.models.endpoint import ReplyMessage
from captrain.records import Message
from captrain.run.components import Component

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    with Answering() as server:
        server.use(monkeypatch)
        yield server


class Talk:
    """An episode that answers each call with its name and ends at the first message without a call."""

    def __init__(self, *opening: Message, tools: list[dict[str, Any]] = TOOLS) -> None:
        self.messages = list(opening) or [{"role": "system", "content": "Policy."}, {"role": "user", "content": "Hi."}]
        self.tools = tools
        self.seen: list[Message] = []

    def step(self, message: Message) -> tuple[list[Message], bool]:
        self.seen.append(message)
        replies = [{"role": "tool", "name": name, "content": f"{name} ok"} for name, _ in calls_of(message)]
        return replies, not replies


def policy(batch: int = 16, **settings: Any) -> OpenAIPolicy:
    given = {
        "name": "some/model",
        "temperature": 0.7,
        "max_turns": 5,
        "max_tokens": 64,
        "retries": 0,
        "timeout": PATIENCE,
    }
    return OpenAIPolicy(None, batch, **given | settings)


def play(episode: Any = None, key: str = "0/task/0", **settings: Any) -> RunningEpisode:
    """Play one episode to its end."""
    return next(policy(**settings).play([RunningEpisode(key, episode or Talk())]))


def calling_once(body: dict[str, Any]) -> tuple[int, Any]:
    """A model that calls two tools in its first turn and then speaks."""
    if body["messages"][-1]["role"] == "tool":
        return says("Found it.")
    return says(None, ("find", '{"name": "Zoë", "size": 2}'), ("find", "{}"))


def test_a_request_holds_only_known_fields(server: Answering) -> None:
    opening = [{"role": "system", "content": "Policy."}, {"role": "user", "content": "Hi.", "compare": ["x"]}]
    done = play(Talk(*opening), guidance=["be brief"])
    assert done.error is None and done.messages[-1] == {"role": "assistant", "content": "Done."}
    [body], [headers] = server.requests, server.headers
    assert headers["path"] == "/v1/chat/completions" and headers["authorization"] == f"Bearer {SECRET}"
    assert {"model": "some/model", "temperature": 0.7, "max_tokens": 64, "tools": TOOLS}.items() <= body.items()
    assert set(body) == {"model", "messages", "temperature", "max_tokens", "seed", "tools"}
    assert body["messages"] == [
        {"role": "system", "content": "Policy.\n- be brief"},
        {"role": "user", "content": "Hi."},
    ]


def test_a_request_holds_sampling_and_template_options(server: Answering) -> None:
    template = {"enable_thinking": False}
    assert play(top_p=0.8, top_k=20, chat_template_kwargs=template).error is None
    assert play(chat_template_kwargs=template).error is None
    first, second = server.requests
    assert (first["top_p"], first["top_k"], first["chat_template_kwargs"]) == (0.8, 20, template)
    assert second["chat_template_kwargs"] == template and not {"top_p", "top_k"} & set(second)


def test_an_episode_without_tools_sends_none(server: Answering) -> None:
    play(Talk(tools=[]))
    assert "tools" not in server.requests[0]


def test_calls_are_received_as_objects_and_sent_as_text_with_ids_by_position(server: Answering) -> None:
    server.answer = calling_once
    done = play()
    function = {"name": "find", "arguments": {"name": "Zoë", "size": 2}}
    assert done.messages[2]["content"] == ""
    assert done.messages[2]["tool_calls"][0] == {"type": "function", "function": function}
    assert done.messages[-1]["content"] == "Found it."
    assert server.requests[1]["messages"][2:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call_{at}", "type": "function", "function": {"name": "find", "arguments": arguments}}
                for at, arguments in enumerate(['{"name": "Zoë", "size": 2}', "{}"])
            ],
        },
        {"role": "tool", "content": "find ok", "name": "find", "tool_call_id": "call_0"},
        {"role": "tool", "content": "find ok", "name": "find", "tool_call_id": "call_1"},
    ]
    assert (done.prompt_tokens, done.completion_tokens, done.turns) == (20, 6, 2)


def test_results_match_calls_by_position() -> None:
    call = {"id": "same", "type": "function", "function": {"name": "find", "arguments": "{}"}, "compare": ["x"]}
    two = {"role": "assistant", "content": None, "tool_calls": [call, call], "informs": ["60"]}
    result = {"role": "tool", "tool_call_id": "other", "content": "", "error": True}
    out = request_messages([two, result, result, two, result, result])
    assert [c["id"] for m in out for c in m.get("tool_calls", [])] == [f"call_{at}" for at in range(4)]
    assert [m["tool_call_id"] for m in out if m["role"] == "tool"] == [f"call_{at}" for at in range(4)]
    assert {key for m in out for key in m} == {"role", "content", "tool_calls", "tool_call_id"}
    with pytest.raises(EnvironmentFault, match="answers no call"):
        request_messages([two, result, result, result])


@pytest.mark.parametrize("text", ['{"name": ', "[1, 2]", "null", '{"name": "\\ud83d"}', '{"size": NaN}', "[" * 100_000])
def test_arguments_that_are_no_json_object_stay_text(server: Answering, text: str) -> None:
    server.answer = lambda body: says("Sorry.") if len(server.requests) > 1 else says("", ("find", text))
    episode = Talk()
    episode.step = lambda message: ([{"role": "tool", "content": "no"}] if message.get("tool_calls") else [], False)
    message = reply_message(written(text))
    assert message["tool_calls"][0]["function"]["arguments"] == text
    json.dumps(message, ensure_ascii=False).encode()
    if len(text) < 100:  # the last one only tests the parser
        done = play(episode)
        assert done.error is None and done.messages[2]["tool_calls"][0]["function"]["arguments"] == text
        assert done.messages[-1]["content"] == "Sorry."
        # Servers parse the arguments, so they must be an object again.
        again = server.requests[1]["messages"][2]["tool_calls"][0]["function"]["arguments"]
        assert isinstance(json.loads(again), dict)


def written(arguments: Any) -> ReplyMessage:
    """A message with one call."""
    return ReplyMessage.model_validate({"tool_calls": [{"function": {"name": "find", "arguments": arguments}}]})


@pytest.mark.parametrize(("given", "arguments"), [("", {}), (None, {}), ({"name": "Zoë"}, {"name": "Zoë"})])
def test_missing_arguments_and_objects_are_objects(given: Any, arguments: dict[str, Any]) -> None:
    assert calls_of(reply_message(written(given))) == [("find", arguments)]


def test_a_cut_off_message_is_kept_and_reasoning_is_dropped(server: Answering) -> None:
    _, body = says("The refund is")
    body["choices"][0]["finish_reason"] = "length"
    body["choices"][0]["message"]["reasoning_content"] = "Let me think."
    server.answer = lambda _: (200, body)
    done = play()
    assert done.messages[-1] == {"role": "assistant", "content": "The refund is"} and done.error is None


def test_a_revision_is_part_of_the_identity_and_not_of_the_request(server: Answering) -> None:
    play(name="some/model@0a1b2c")
    assert server.requests[0]["model"] == "some/model"
    assert policy(name="some/model@0a1b2c").digest != policy(name="some/model").digest
    play(name="@cf/some/model")
    assert server.requests[1]["model"] == "@cf/some/model"


def test_seeds_depend_only_on_play_and_turn(server: Answering) -> None:
    def seeds(key: str, **settings: Any) -> list[int]:
        server.requests.clear()
        play(key=key, **settings)
        return [body["seed"] for body in server.requests]

    server.answer = calling_once
    first = seeds("0/task/0")
    assert len({*first}) == 2 and all(0 <= seed < 2**31 for seed in first)
    assert seeds("0/task/0", batch=1, temperature=0.0) == first
    assert not {*seeds("0/task/1")} & {*first}


def test_64_episodes_at_once_equal_64_in_a_row(server: Answering) -> None:
    gate = threading.Barrier(64, timeout=PATIENCE)

    def by_request(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"]) == 1:
            gate.wait()  # passes when 64 first turns are requested at once
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        return says(f"{body['seed']}", *([("find", f'{{"n": {body["seed"]}}}')] if turns < 3 else []))

    def outcome(batch: int) -> dict[str, list[Message]]:
        plays = [RunningEpisode(f"0/task/{n}", Talk({"role": "user", "content": f"{n}"})) for n in range(64)]
        done = [*policy(batch).play(plays)]
        assert {id(one) for one in done} == {id(one) for one in plays} and not any(one.error for one in done)
        return {one.key: one.messages for one in done}

    server.answer = by_request
    together = outcome(64)
    gate, server.most = threading.Barrier(1), 0
    assert outcome(1) == together
    assert server.most == 1


def test_plays_are_yielded_as_they_end_and_no_more_than_a_batch_is_open(server: Answering) -> None:
    held, opened = threading.Event(), []

    class Opening(Talk):
        @property
        def messages(self) -> list[Message]:
            opened.append(self)
            return [{"role": "user", "content": "slow" if len(opened) == 1 else "quick"}]

        @messages.setter
        def messages(self, value: list[Message]) -> None: ...

    server.answer = lambda body: says() if body["messages"][0]["content"] == "quick" or held.wait(PATIENCE) else says()
    plays = [RunningEpisode(f"{n}", Opening()) for n in range(6)]
    going = policy(batch=2).play(plays)
    quick = [next(going) for _ in range(3)]
    assert plays[0] not in quick and len(opened) <= 4
    held.set()
    assert {id(one) for one in [*quick, *going]} == {id(one) for one in plays}


def test_max_turns_ends_an_episode(server: Answering) -> None:
    server.answer = lambda body: says("", ("find", "{}")) if len(server.requests) < 9 else refuses(400, "no end")
    assert play(max_turns=3).turns == len(server.requests) == 3


def test_it_plays_one_turn_of_a_simulated_user(server: Answering) -> None:
    class Turn(Talk):
        def step(self, message: Message) -> tuple[list[Message], bool]:
            return [], True

    server.answer = lambda body: says("I want a refund.")
    done = play(Turn({"role": "system", "content": "You are a customer."}, tools=[]), key="0/task/0/user/1")
    assert done.messages[-1] == {"role": "assistant", "content": "I want a refund."}
    assert done.turns == 1 and done.error is None


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_transient_fault_is_retried_and_then_an_error_of_the_play(server: Answering, status: int) -> None:
    server.answer = lambda body: (status, {"error": {"message": "not now"}})
    done = play(retries=1)
    assert done.error == f"model server: {status}: not now"
    assert len(server.requests) == 2


def test_a_retried_fault_leaves_no_trace(server: Answering) -> None:
    server.answer = lambda body: says() if len(server.requests) > 1 else refuses(503, "loading")
    done = play(retries=1)
    assert done.error is None and done.messages[-1]["content"] == "Done."


def test_a_slow_or_missing_server_is_an_error_of_the_play(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda body: time.sleep(0.5) or says()
    assert "timed out" in str(play(timeout=0.1).error)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert "Connection" in str(play().error)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"\xff",
        ["nothing"],
        {"object": "nothing"},
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"tool_calls": [{"function": None}]}}]},
        b'{"choices": [{"message": {"content": "\\ud83d"}}]}',
    ],
)
def test_an_answer_without_a_message_is_an_error_of_the_play(server: Answering, answer: Any) -> None:
    server.answer = lambda body: (200, answer)
    done = play()
    assert str(done.error).startswith("model server: answered with no message") and done.turns == 0


def test_a_rollout_is_played_again_after_a_fault_and_then_scored(server: Answering, tmp_path: Any) -> None:
    """`collect` counts the fault as a retry, never as a failure."""
    desk: CheckedEnvironment = load_benchmark(
        Component.model_validate({"_target_": "captrain.benchmarks.servicedesk.ServiceDesk"})
    )
    server.answer = lambda body: says() if len(server.requests) > 1 else refuses(503, "loading")
    [one] = collect(
        policy(), desk, desk.tasks("discovery", 1), purpose="diagnosis", seed=0, journals=tmp_path, quiet=True
    )
    assert one.outcome == "failed" and one.retries == 1 and one.messages[-1]["content"] == "Done."
    assert one.usage.completion_tokens == 3 and one.token_ids == []


@pytest.mark.parametrize(
    ("status", "message", "says"),
    [
        (401, "bad key", r"OPENAI_BASE_URL refuses the key in OPENAI_API_KEY(.|\n)*set OPENAI_API_KEY"),
        (403, "not yours", r"OPENAI_BASE_URL refuses the key in OPENAI_API_KEY"),
        (404, "no such model", r"OPENAI_BASE_URL has no model some/model(.|\n)*set OPENAI_BASE_URL"),
        (400, "tool choice needs --enable-auto-tool-choice", r"\(model server: 400: tool choice needs --enable"),
        (422, "temperature too high", r"\(model server: 422: temperature too high\)"),
        (402, "no credit", r"\(model server: 402: no credit\)"),
    ],
)
def test_an_error_that_the_user_must_fix_ends_the_run(server: Answering, status: int, message: str, says: str) -> None:
    server.answer = lambda body: refuses(status, message)
    with pytest.raises(UserError, match=says):
        list(policy(batch=2).play([RunningEpisode(f"{n}", Talk()) for n in range(8)]))
    assert len(server.requests) <= 2


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "the request exceeds the available context size",
    ],
)
def test_a_dialogue_that_is_too_long_ends(server: Answering, message: str) -> None:
    server.answer = lambda body: says("", ("find", "{}")) if len(body["messages"]) < 4 else refuses(400, message)
    done = play()
    assert done.error is None and done.turns == 1 and message in done.truncated
    assert [one["role"] for one in done.messages] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_KEY"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named_before_an_episode_is_opened(
    server: Answering, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    one = RunningEpisode("0/task/0", Talk())
    with pytest.raises(UserError, match=f"environment variable {variable} is not set"):
        next(policy().play([one]))
    assert one.messages == [] and server.requests == []


def test_other_variables_can_hold_endpoint_and_key(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_URL", server.url)
    monkeypatch.setenv("USER_KEY", "another")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    [done] = policy(endpoint="USER_URL", key="USER_KEY").play([RunningEpisode("0/task/0", Talk())])
    assert done.error is None
    assert server.headers[0]["authorization"] == "Bearer another"


@pytest.mark.parametrize("value", ["localhost:8000", "http://", "http://host:port/v1", "http://[::1"])
def test_an_invalid_url_is_refused(server: Answering, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", value)
    with pytest.raises(UserError, match="OPENAI_BASE_URL is not a base URL"):
        play()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500])
def test_the_key_is_in_no_message(server: Answering, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body: refuses(status, f"the key {SECRET}, or Bearer%20{SECRET}, is wrong")
    try:
        told = str(play().error)
    except UserError as error:
        told = "".join(traceback.format_exception(error))
    assert "[redacted]" in told and SECRET not in told
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "spelling", [str, lambda key: b64encode(key.encode()).decode(), lambda key: key.encode().hex()]
)
def test_a_key_echoed_by_an_answer_is_removed(server: Answering, spelling: Callable[[str], str]) -> None:
    server.answer = lambda body: says(f"Your key is {spelling(SECRET)}.")
    kept = play()
    assert kept.error is None and spelling(SECRET) not in json.dumps(kept.messages)
    assert "[redacted]" in kept.messages[-1]["content"]


def test_a_key_that_does_not_fit_a_header_is_refused_without_being_shown(
    server: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    with pytest.raises(UserError, match="OPENAI_API_KEY is not a key") as refused:
        play()
    assert SECRET not in str(refused.value)
    with pytest.raises(ValueError) as given:
        policy(key=SECRET)
    assert SECRET not in str(given.value)


def test_an_adapter_is_refused(server: Answering) -> None:
    with pytest.raises(UserError, match="cannot act with adapter abc"):
        next(policy().play([RunningEpisode("0/task/0", Talk(), "artifacts/adapters/abc")]))


def test_the_digest_does_not_depend_on_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    same = policy().digest
    assert policy(batch=1, endpoint="USER_URL", key="USER_KEY", retries=9, timeout=1.0).digest == same
    changed = [
        {"name": "other/model"},
        {"temperature": 0.0},
        {"max_turns": 6},
        {"max_tokens": 65},
        {"guidance": ["be brief"]},
        {"top_p": 0.5},
        {"top_k": 5},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]
    assert len({same, *(policy(**one).digest for one in changed)}) == 9


def test_a_fault_of_the_episode_is_an_error_without_a_request(server: Answering) -> None:
    from captrain.errors import InfrastructureError

    class Shut(Talk):
        def __getattribute__(self, name: str) -> Any:
            if name == "messages":
                raise InfrastructureError("worker died")
            return super().__getattribute__(name)

    assert play(Shut()).error == "worker died"
    assert server.requests == []
