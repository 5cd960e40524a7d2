"""Questions to a chat model: no answer is lost, doubled or paid for twice, and the key never shows."""

import email.utils
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answering import KINDS, SECRET, Answering, Body, refuses, says
from support.needs import further
from support.questions import Verdict, asker, question, verdict
from support.waiting import PATIENCE, until

from captrain.errors import InfrastructureError, UserError
from captrain.models import Endpoint, TransientFault
from captrain.models.answers import Question, StructuredAnswers
from captrain.run.machine import ModelAccess


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    with Answering(verdict) as server:
        server.use(monkeypatch)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "answers"


def offline(folder: Path, **settings: Any) -> StructuredAnswers:
    given: dict[str, Any] = {"name": "some/model", "temperature": 0.7, "max_tokens": 64}
    return StructuredAnswers(None, folder=folder, **given | settings)


def numbers(answers: list[Verdict]) -> list[int]:
    return [answer.number for answer in answers]


def test_a_request_holds_only_the_question_and_a_strict_schema(server: Answering, folder: Path) -> None:
    assert asker(folder).ask([question(7)], "labels") == [Verdict.model_validate(verdict(server.requests[0]))]
    [body] = server.requests
    assert set(body) == {"model", "messages", "temperature", "max_tokens", "seed", "response_format", "stream"}
    assert {"model": "some/model", "temperature": 0.7, "max_tokens": 64}.items() <= body.items()
    assert body["messages"] == [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": "Question 7 please"},
    ]
    form = body["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["strict"] is True
    schema = form["json_schema"]["schema"]
    for one in (schema, schema["$defs"]["Where"]):
        assert one["additionalProperties"] is False and one["required"] == [*one["properties"]]


def test_answers_keep_the_order_of_concurrent_questions(server: Answering, folder: Path) -> None:
    gate = threading.Barrier(8, timeout=PATIENCE)
    server.answer = lambda body: (gate.wait(), verdict(body))[1]
    order = [5, 3, 9, 1, 8, 2, 7, 4]
    assert numbers(asker(folder, ModelAccess(concurrency=8)).ask([question(n) for n in order], "labels")) == order


def test_concurrency_limits_running_requests(server: Answering, folder: Path) -> None:
    gate = threading.Barrier(3, timeout=PATIENCE)
    server.answer = lambda body: (gate.wait(), time.sleep(0.02), verdict(body))[2]
    asker(folder, ModelAccess(concurrency=3)).ask([question(n) for n in range(12)], "labels")
    assert server.most == 3


def test_equal_questions_are_asked_once_per_draw(server: Answering, folder: Path) -> None:
    one = asker(folder)
    assert numbers(one.ask([question(1), question(2), question(1), question(1)], "labels")) == [1, 2, 1, 1]
    assert len(server.requests) == one.usage.answers == 2
    one.ask([question(1, draw=draw) for draw in range(4)], "labels")
    assert len(server.requests) == one.usage.answers == 5
    assert len({body["seed"] for body in server.requests}) == 5


def test_only_what_decides_an_answer_is_in_its_key(
    server: Answering, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker(folder).ask([question(1)], "labels")
    first = server.requests[0]["seed"]
    monkeypatch.setenv("USER_URL", server.url)
    monkeypatch.setenv("USER_KEY", "another")
    same = ModelAccess(endpoint="USER_URL", key="USER_KEY", concurrency=1, retries=0, timeout=9.0, tokens=10**6)
    asker(folder, same).ask([question(1)], "others")
    assert len(server.requests) == 1

    class Other(Verdict):
        pass

    others = [{"name": "some/model@0a1b2c"}, {"temperature": 0.8}, {"max_tokens": 65}]
    for settings in others:
        asker(folder, **settings).ask([question(1)], "labels")
    asker(folder).ask([Question("Judge!", "Question 1 please", Verdict)], "labels")
    asker(folder).ask([Question("Judge.", "Question 1 please", Other)], "labels")
    assert len({body["seed"] for body in server.requests}) == len(server.requests) == 6
    assert {body["model"] for body in server.requests} == {"some/model"}
    asker(folder.parent / "elsewhere").ask([question(1)], "labels")
    assert server.requests[-1]["seed"] == first


def test_under_five_kinds_of_errors_no_answer_is_lost_or_doubled(
    server: Answering, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions = [question(number, draw=draw) for number in range(100) for draw in range(2)]
    expected = [Verdict.model_validate(verdict({"messages": [{"content": one.user}]})) for one in questions]
    server.share = 0.3
    one = asker(folder, ModelAccess(timeout=4.0))
    assert one.ask(questions, "labels") == expected
    assert set(server.faults) == {*KINDS} and min(server.faults.values()) >= 4
    failed = sum(server.faults.values())
    assert 0.25 < failed / len(server.requests) < 0.35
    assert len(server.answered) == len(questions) == one.usage.answers == len([*folder.glob("*/*.json")])
    assert len(server.requests) == len(questions) + failed
    assert one.usage.rejected == server.faults["cut"] + server.faults["wrong"] == one.usage.received - len(questions)
    assert set(Counter(body["messages"][-1]["content"] for body in server.answered).values()) == {2}
    assert one.ask(questions, "labels") == expected and len(server.requests) == len(questions) + failed
    told = "".join(capfd.readouterr()) + "".join(path.read_text() for path in folder.glob("*/*"))
    assert SECRET not in told


def test_the_requests_do_not_depend_on_the_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    for concurrency, step in ((1, 1), (8, -1)):
        with Answering(verdict, share=0.3, kinds=("broken", "cut", "wrong")) as server:
            server.use(monkeypatch)
            one = asker(tmp_path / f"{step}", ModelAccess(concurrency=concurrency))
            one.ask([question(number) for number in range(40)][::step], "labels")
            seen.append((server.faults, Counter(json.dumps(body, sort_keys=True) for body in server.requests)))
            assert sum(server.faults.values()) > 6
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "bad",
    [
        (200, b'{"choices": [{"message": {"content": "'),
        (200, b"<html>"),
        (200, {"choices": []}),
        says('{"verdict": "PRESENT", "num'),
        says('{"verdict": "MAYBE", "number": 1, "where": []}'),
        says('{"verdict": "PRESENT", "number": "1", "where": []}'),
        says('{"verdict": "PRESENT", "number": -1, "where": []}'),
        says('{"verdict": "PRESENT", "number": 1}'),
        says('{"verdict": "PRESENT", "number": 1, "where": [{"message": 1, "why": "\\ud83d"}]}'),
        says('{"verdict": "PRESENT", "number": 1, "where": []}', finish="length"),
        says(None),
        says("I would rather not."),
        (200, {"choices": [{"message": {"content": None, "refusal": "I can not."}}]}),
        refuses(429, "Rate limit reached"),
        refuses(503, "loading"),
    ],
)
def test_an_invalid_answer_is_asked_for_again_and_not_stored(server: Answering, folder: Path, bad: Any) -> None:
    server.answer = lambda body: verdict(body) if len(server.requests) > 2 else bad
    assert numbers(asker(folder).ask([question(1)], "labels")) == [1]
    assert len(server.requests) == 3 and numbers(offline(folder).ask([question(1)], "labels")) == [1]


def test_an_answer_in_a_code_fence_is_read(server: Answering, folder: Path) -> None:
    server.answer = lambda body: f"```json\n{json.dumps(verdict(body))}\n```"
    assert numbers(asker(folder).ask([question(4)], "labels")) == [4]
    assert len(server.requests) == 1 and numbers(offline(folder).ask([question(4)], "labels")) == [4]


def test_the_model_is_told_what_the_check_found_and_gets_another_seed(server: Answering, folder: Path) -> None:
    server.answer = lambda body: {**verdict(body), "number": 99 if len(server.requests) < 3 else 1}
    known = question(1, check=lambda answer: None if answer.number < 50 else f"there is no number {answer.number}")
    one = asker(folder, temperature=0.0)
    assert numbers(one.ask([known], "labels")) == [1]
    first, second, third = server.requests
    assert "there is no number 99" in second["messages"][0]["content"] and second["seed"] != first["seed"]
    assert second["messages"][1:] == first["messages"][1:] and third == second
    assert (one.usage.received, one.usage.rejected, one.usage.answers) == (3, 2, 1)


def test_an_answer_that_stays_invalid_is_an_error_and_the_others_are_kept(server: Answering, folder: Path) -> None:
    server.answer = lambda body: (
        verdict(body) if "Question 3 " not in body["messages"][1]["content"] else {"verdict": "MAYBE"}
    )
    with pytest.raises(UserError, match=r"labels: question \w{16} is not answered after 3 attempts.*verdict: Input"):
        asker(folder, ModelAccess(retries=2, concurrency=1)).ask([question(n) for n in range(5)], "labels")
    assert numbers(offline(folder).ask([question(n) for n in range(3)], "labels")) == [0, 1, 2]
    server.answer = lambda body: says('{"verdict": "PRES', finish="length")
    with pytest.raises(UserError, match=r"cut off at max_tokens(.|\n)*raise max_tokens from 64"):
        asker(folder, ModelAccess(retries=0)).ask([question(3)], "labels")


def test_a_persistent_server_error_is_an_infrastructure_error(server: Answering, folder: Path) -> None:
    server.answer = lambda body: refuses(500, f"out of memory ({SECRET})")
    with pytest.raises(InfrastructureError, match=r"after 3 attempts.*500: out of memory \(\[redacted\]\)"):
        asker(folder, ModelAccess(retries=2, concurrency=2)).ask([question(n) for n in range(2)], "labels")
    assert len(server.requests) <= 6


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            refuses(401, f"bad key {SECRET}"),
            r"refuses the key in OPENAI_API_KEY \(model server: 401: bad key \[redacted\]\)",
        ),
        (refuses(404, "no such model"), "has no model some/model"),
        (refuses(400, "response_format is not known"), "refuses a request to some/model"),
        (refuses(400, "This model's maximum context length is 10 tokens"), "longer than some/model can read"),
        (refuses(429, "You exceeded your current quota", "insufficient_quota"), "has no credit left for the key in"),
        (refuses(402, "Insufficient Balance"), "has no credit left for the key in"),
    ],
)
def test_an_error_that_only_the_user_can_fix_ends_the_run_at_once(
    server: Answering, folder: Path, answer: Any, says: str
) -> None:
    server.answer = lambda body: verdict(body) if len(server.requests) <= 4 else answer
    with pytest.raises(UserError, match=says) as error:
        asker(folder, ModelAccess(concurrency=2)).ask([question(n) for n in range(40)], "labels")
    assert len(server.requests) <= 8
    assert len([*folder.glob("*/*.json")]) == len(server.answered)
    assert SECRET not in "".join(traceback.format_exception(error.value))


def test_a_rate_limit_is_not_mistaken_for_missing_credit(server: Answering, folder: Path) -> None:
    told = "Rate limit reached. Add a payment method at https://example.invalid/account/billing to increase it."
    server.answer = lambda body: verdict(body) if len(server.requests) > 1 else refuses(429, told, "tokens")
    assert numbers(asker(folder).ask([question(1)], "labels")) == [1]


def test_an_error_does_not_wait_for_hanging_requests(
    server: Answering, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.models.answers.GRACE", 2.0)
    free, over = threading.Event(), list[int]()

    def answer(body: dict[str, Any]) -> Any:
        number = verdict(body)["number"]
        if number == 0:
            free.wait(PATIENCE)
            over.append(number)
        if number == 1:
            time.sleep(0.2)
        return verdict(body) if number < 2 else refuses(401, "bad key")

    server.answer = answer
    with pytest.raises(UserError, match="refuses the key"):
        asker(folder, ModelAccess(concurrency=3)).ask([question(n) for n in range(9)], "labels")
    assert not over
    assert numbers(offline(folder).ask([question(1)], "labels")) == [1]
    assert len(server.requests) == 3
    free.set()


RUN = """
import signal, sys
from pathlib import Path
# A shell starts background jobs with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{tests!r}]
import captrain.models.answers
from support.questions import asker, question
from captrain.run.machine import ModelAccess
captrain.models.answers.PAUSE = 0.01
asker(Path(sys.argv[1]), ModelAccess(concurrency=4)).ask([question(n) for n in range(60)], "labels")
"""


def started(folder: Path) -> subprocess.Popen[str]:
    """Ask 60 questions in another process."""
    code = RUN.format(tests=str(Path(__file__).parents[1]))
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", further([signal.SIGKILL, signal.SIGINT]))
def test_a_resumed_run_asks_no_answered_question_again(server: Answering, folder: Path, how: signal.Signals) -> None:
    hung, free = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Any:
        if len(server.requests) > 30:
            hung.set()
            free.wait(PATIENCE)
        return verdict(body)

    server.answer = slow
    run = started(folder)
    assert hung.wait(PATIENCE)
    run.send_signal(how)
    _, told = run.communicate(timeout=PATIENCE)  # ends while requests hang
    assert run.returncode
    free.set()
    assert SECRET not in told
    kept = [*folder.glob("*/*.json")]
    assert 20 <= len(kept) <= 30
    answered = {json.loads(json.loads(path.read_text())["text"])["number"] for path in kept}
    server.answer = verdict
    before = len(server.requests)
    one = asker(folder)
    assert numbers(one.ask([question(n) for n in range(60)], "labels")) == [*range(60)]
    again = {verdict(body)["number"] for body in server.requests[before:]}
    assert again == {*range(60)} - answered and len(server.requests) - before == 60 - len(kept) == one.usage.received


def test_concurrent_processes_write_whole_answers(server: Answering, folder: Path) -> None:
    runs = [started(folder), started(folder)]
    assert [run.wait(30) for run in runs] == [0, 0]
    assert numbers(offline(folder).ask([question(n) for n in range(60)], "labels")) == [*range(60)]
    assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]


def test_a_run_is_replayed_without_key_and_endpoint(
    server: Answering, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [question(n) for n in range(5)]
    one = asker(folder, ModelAccess(input_price=1.0, output_price=2.0))
    answers = one.ask(questions, "labels")
    assert one.usage.tokens == one.usage.prompt_tokens + one.usage.completion_tokens > 0 == one.usage.rejected
    assert one.usage.money == pytest.approx((one.usage.prompt_tokens + 2 * one.usage.completion_tokens) / 1e6)
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    for again in (offline(folder), asker(folder)):
        assert again.ask(questions, "labels") == answers
        for name in ("answers", "prompt_tokens", "completion_tokens"):
            assert getattr(again.usage, name) == getattr(one.usage, name)
        assert (again.usage.received, again.usage.tokens) == (0, 0)
    assert len(server.requests) == 5
    with pytest.raises(UserError, match=r"labels: 1 of 6 answers are not in .*answers"):
        offline(folder).ask([*questions, question(5)], "labels")
    with pytest.raises(UserError, match="environment variable OPENAI_BASE_URL is not set"):
        asker(folder).ask([*questions, question(5)], "labels")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"text": "{}", "prompt_tokens": 1}', "\0\xff", "altered"])
def test_damaged_cached_answers_are_reported_once_and_asked_again(
    server: Answering, folder: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    questions = [question(n) for n in range(4)]
    answers = asker(folder).ask(questions, "labels")
    for path in sorted(folder.glob("*/*.json"))[:2]:
        # A whole answer in which one character differs, or something else.
        path.write_bytes(path.read_bytes().replace(b"1", b"2") if text == "altered" else text.encode("latin-1"))
    capfd.readouterr()
    assert asker(folder).ask(questions, "labels") == answers and len(server.requests) == 6
    told = capfd.readouterr().err
    assert told.count("cannot be used") == 1 and "2 answers on disk" in told and str(folder) in told
    asker(folder).ask(questions, "labels")
    assert len(server.requests) == 6 and "cannot" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("limits", "setting"),
    [({"tokens": 100}, "tokens = 100"), ({"money": 1e-4, "input_price": 1.0, "output_price": 1.0}, r"money = 0.0001")],
)
def test_a_spent_budget_ends_the_run_and_keeps_answers(
    server: Answering, folder: Path, limits: dict[str, Any], setting: str
) -> None:
    server.answer = lambda body: says(json.dumps(verdict(body)), tokens=(20, 5))
    questions = [question(n) for n in range(20)]
    one = asker(folder, ModelAccess(concurrency=1, **limits))
    with pytest.raises(UserError, match=rf"labels: 4 of 20 questions are answered.*{setting} .*spent(.|\n)*raise"):
        one.ask(questions, "labels")
    assert len(server.requests) == 4 and one.usage.tokens == 100
    with pytest.raises(UserError, match="8 of 20"):
        asker(folder, ModelAccess(concurrency=1, **limits)).ask(questions, "labels")
    assert numbers(asker(folder).ask(questions, "labels")) == [*range(20)] and len(server.requests) == 20


def test_running_requests_are_kept_when_the_budget_is_spent(server: Answering, folder: Path) -> None:
    gate = threading.Barrier(4, timeout=PATIENCE)
    server.answer = lambda body: (gate.wait(), says(json.dumps(verdict(body)), tokens=(20, 5)))[1]
    with pytest.raises(UserError, match="4 of 20 questions"):
        asker(folder, ModelAccess(concurrency=4, tokens=25)).ask([question(n) for n in range(20)], "labels")
    assert len(server.requests) == len([*folder.glob("*/*.json")]) == 4


def test_rejected_answers_count_towards_the_budget(server: Answering, folder: Path) -> None:
    server.answer = lambda body: says("{}", tokens=(20, 5))
    one = asker(folder, ModelAccess(tokens=60, retries=9))
    with pytest.raises(UserError, match="0 of 1 questions"):
        one.ask([question(1)], "labels")
    assert len(server.requests) == 3 == one.usage.rejected and one.usage.answers == 0


def test_a_budget_without_prices_or_token_counts_is_refused(server: Answering, folder: Path) -> None:
    with pytest.raises(UserError, match=r"machine.asking.money = 2.0 cannot be held(.|\n)*input_price"):
        asker(folder, ModelAccess(money=2.0, input_price=1.0))
    server.answer = lambda body: says(json.dumps(verdict(body)), usage=False)
    with pytest.raises(UserError, match="does not say how many tokens"):
        asker(folder, ModelAccess(tokens=100)).ask([question(1)], "labels")
    assert numbers(asker(folder).ask([question(1)], "labels")) == [1] and len(server.requests) == 1


@pytest.mark.parametrize(
    "first",
    [
        (*refuses(429, "slow down"), {"Retry-After": "0.6"}),
        pytest.param((*refuses(503, "busy"), {"Retry-After": "0.6"}), marks=pytest.mark.needs("minutes")),
    ],
)
def test_retry_after_holds_back_all_threads(server: Answering, folder: Path, first: Any) -> None:
    times: list[float] = []

    def answer(body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        return first if len(times) == 1 else says(json.dumps(verdict(body)))

    server.answer = answer
    one = asker(folder, ModelAccess(concurrency=6))
    held = threading.Thread(target=lambda: one.ask([question(0)], "first"))
    held.start()
    until(lambda: one._not_before)
    assert numbers(one.ask([question(n) for n in range(1, 7)], "labels")) == [*range(1, 7)]
    held.join(PATIENCE)
    assert len(times) >= 7 and min(times[1:]) - times[0] > 0.55


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("20", 20, 20), ("7.66", 7.66, 7.66), ("soon", 0, 0), (30.0, 27, 30), (-30.0, 0, 0), ("9" * 400, 1e300, math.inf)],
)
def test_retry_after_is_read_in_its_formats(server: Answering, text: str | float, least: float, most: float) -> None:
    moment = text if isinstance(text, str) else email.utils.formatdate(time.time() + text, usegmt=True)
    server.answer = lambda body: (*refuses(429, "later"), {"Retry-After": moment})
    endpoint = Endpoint("m", endpoint="OPENAI_BASE_URL", key="OPENAI_API_KEY", retries=0, timeout=PATIENCE)
    with pytest.raises(TransientFault) as refusal:
        endpoint.chat(messages=[])
    assert least <= refusal.value.pause <= most


def test_a_long_retry_after_ends_the_run(server: Answering, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captrain.models.answers.PATIENCE", 0.5)
    server.answer = lambda body: (*refuses(429, "come back tomorrow"), {"Retry-After": "2"})
    with pytest.raises(InfrastructureError, match="a pause of 2 s"):
        asker(folder, ModelAccess(retries=1)).ask([question(1)], "labels")
    assert len(server.requests) == 1


def test_pauses_between_attempts_grow(server: Answering, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captrain.models.answers.PAUSE", 0.1)
    gaps: list[float] = []
    monkeypatch.setattr("tenacity.sleep_using_event", lambda _: gaps.append)
    server.answer = lambda body: refuses(500, "no")
    with pytest.raises(InfrastructureError):
        asker(folder, ModelAccess(retries=3)).ask([question(1)], "labels")
    assert all(0.05 * 2**at <= gap <= 0.1 * 2**at + 0.3 for at, gap in enumerate(gaps)) and len(gaps) == 3


def test_the_progress_bar_shows_tokens_and_cost(
    server: Answering, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captrain.records.progress.PAUSE", 0.0)

    def slow(body: Body) -> tuple[int, Body]:
        time.sleep(0.2)  # the bar is drawn ten times a second at most
        return says(json.dumps(verdict(body)), tokens=(1_000_000, 0))

    server.answer = slow
    access = ModelAccess(input_price=2.0, output_price=8.0, concurrency=1)
    asker(folder, access).ask([question(number) for number in (1, 2, 3)], "labels")
    told = capfd.readouterr().err
    assert "labels" in told and "1000000 tokens, cost 2.0000" in told


def test_recorded_answers_are_found_by_the_request(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for name, number in (("Question 1", 1), ("Question 12", 12)):
        (recorded / f"{name}.json").write_text(json.dumps({"verdict": "PRESENT", "number": number, "where": []}))
    with Answering(recorded) as server:
        server.use(monkeypatch)
        assert numbers(asker(folder).ask([question(12), question(1)], "labels")) == [12, 1]
        with pytest.raises(UserError, match="no file of"):
            asker(folder).ask([question(3)], "labels")


def test_replaying_imports_nothing_heavy() -> None:
    heavy = "('openai', 'torch', 'tqdm')"
    code = f"import sys, captrain.models.answers; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0
