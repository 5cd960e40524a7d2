"""Questions to a chat model, answered in a given form: kept, counted, concurrent, within a budget.

Analysts and synthesizers ask here. An answer is written to disk the moment it is known to be valid, one file each,
under the digest of all that decides it (model, messages, schema, sampling, draw) and of nothing else (endpoint,
retries, machine): a run that was cut off asks no answered question again, and one that is whole is replayed without
endpoint or key. Faults that pass are tried again after growing pauses; where the server says when to come back,
nothing is sent before. An answer that is truncated, of another form or refused by `Question.check` is asked for
again, and the model is told what was wrong with it.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from captrain.config import Asking
from captrain.errors import InfrastructureError, UserError
from captrain.models.endpoint import TOLD, Choice, Completion, Endpoint, NoRoom, Passing, pause
from captrain.records import Record, digest, publish_text

PAUSE = 1.0
"""Seconds before the second attempt at a question; each later pause is twice as long, up to `LONGEST`."""
LONGEST = 60.0
PATIENCE = 3600.0
"""Seconds beyond which a server that says when to come back is not waited for."""
GRACE = 5.0
"""Seconds that requests under way are given to end after an error, so that what they cost is not lost."""

A = TypeVar("A", bound=BaseModel)


def _fine(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Question(Generic[A]):
    """A question. Equal ones of different draws are independent: asked anew, and kept apart.

    `answer` is the form of the answer. Endpoints take no defaults, open dictionaries or discriminated unions in it.
    `check` says what is wrong with an answer beyond its form, None when nothing is; it must depend on the answer and
    on what is asked alone.
    """

    system: str
    user: str
    answer: type[A]
    draw: int = 0
    check: Callable[[A], str | None] = _fine


@dataclass
class Spent:
    """What the answers took.

    `answers` and their tokens are over all that were used, found on disk or asked for, each once; they are the same
    when a run is replayed. The rest is of this run alone: answers `asked` for and received, those `refused` among
    them, what all of them took in `tokens`, and in `money` where prices are known.
    """

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    asked: int = 0
    refused: int = 0
    tokens: int = 0
    money: float | None = None


class Kept(Record):
    """An answer as it is kept: its text, what it took, and the model that the server says it is of."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    model: str


class _Wrong(Exception):
    """What is wrong with an answer."""


class Asker:
    """Asks a model.

    Args:
        asking: how, and at what cost; None: nothing may be asked, and only what is on disk is answered.
        name: of the model, or name@revision (see `Endpoint`).
        temperature: sampling temperature.
        max_tokens: tokens in one answer.
        answers: folder of the answers.

    Raises:
        UserError: a budget in money without prices.
    """

    def __init__(
        self, asking: Asking | None, *, name: str, temperature: float, max_tokens: int,
        answers: Path = Path(".cache/answers"),
    ) -> None:  # fmt: skip
        self.asking, self.answers = asking, answers
        self.name, self.temperature, self.max_tokens = name, temperature, max_tokens
        self.spent = Spent()
        self._used: set[str] = set()
        self._lock = threading.Lock()
        self._not_before = 0.0
        if asking is None:
            return
        priced = asking.input_price is not None and asking.output_price is not None
        if asking.money is not None and not priced:
            raise UserError(
                f"machine.asking.money = {asking.money} cannot be held without prices",
                "set machine.asking.input_price and machine.asking.output_price, for a million tokens each, or "
                "give the budget as machine.asking.tokens",
            )
        self.spent.money = 0.0 if priced else None
        self._endpoint = Endpoint(name, endpoint=asking.endpoint, key=asking.key, retries=0, timeout=asking.timeout)

    def ask(self, questions: Sequence[Question[A]], label: str) -> list[A]:
        """Answer all questions, equal ones once.

        Args:
            questions: what is asked.
            label: what it is for, in messages and on the progress bar.

        Returns:
            The answers, in the order of the questions.

        Raises:
            UserError: a budget is reached, a question cannot be answered in its form, the endpoint refuses what it
                would refuse again, or nothing may be asked. What is answered is kept.
            InfrastructureError: a fault of the server did not pass. What is answered is kept.
        """
        names = [self._name(question) for question in questions]
        asked = dict(zip(names, questions, strict=True))
        found: dict[str, A] = {}
        broken: list[Path] = []
        for name, question in asked.items():
            try:
                found[name] = self._found(name, question)
            except FileNotFoundError:
                pass
            except _Wrong:
                broken.append(self._path(name))
        if broken:
            print(f"{label}: {len(broken)} answers on disk cannot be used, such as {broken[0]}", file=sys.stderr)
        if missing := {name: question for name, question in asked.items() if name not in found}:
            if self.asking is None:
                raise UserError(
                    f"{label}: {len(missing)} of {len(asked)} answers are not in {self.answers}, and none is asked for",
                    "run the stage that asks",
                )
            self._ask(missing, found, label, self.asking)
        return [found[name] for name in names]

    def _name(self, question: Question[A]) -> str:
        return digest(
            self.name, self.temperature, self.max_tokens, question.draw, question.system, question.user,
            _schema(question.answer),
        )  # fmt: skip

    def _path(self, name: str) -> Path:
        return self.answers / name[:2] / f"{name}.json"

    def _found(self, name: str, question: Question[A]) -> A:
        """The answer on disk.

        Raises:
            FileNotFoundError: there is none.
            _Wrong: it is not whole, or does not answer the question.
        """
        try:
            kept = Kept.model_validate_json(self._path(name).read_bytes())
        except ValidationError as error:
            raise _Wrong(_problems(error)) from None
        answer = _read(question, kept.text)
        self._use(name, kept)
        return answer

    def _use(self, name: str, kept: Kept) -> None:
        with self._lock:
            if name not in self._used:
                self._used.add(name)
                self.spent.answers += 1
                self.spent.prompt_tokens += kept.prompt_tokens
                self.spent.completion_tokens += kept.completion_tokens

    def _ask(self, missing: Mapping[str, Question[A]], found: dict[str, A], label: str, asking: Asking) -> None:
        """Ask what is missing, and add it to what is found."""
        from tqdm import tqdm

        self._endpoint.client  # noqa: B018  (a variable that is not set is told before anything is asked)
        total, todo = len(missing) + len(found), iter([*missing.items()])
        done, stop = SimpleQueue[tuple[str, A] | Exception | None](), threading.Event()

        def work() -> None:
            try:
                for name, question in todo:
                    answer = self._answer(name, question, label, asking, stop)
                    if answer is None:
                        break
                    done.put((name, answer))
            except Exception as error:
                done.put(error)
            finally:
                done.put(None)

        # Not of an executor: those are waited for when the process ends, and Ctrl-C waits for no server.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(asking.concurrency, len(missing)))]
        for thread in threads:
            thread.start()
        bar = tqdm(total=total, initial=len(found), desc=label, unit="answer", mininterval=1.0)
        working = len(threads)
        try:
            while working:
                try:
                    got = done.get(timeout=0.5)
                except Empty:
                    self._show(bar, 0)
                    continue
                if got is None:
                    working -= 1
                elif isinstance(got, Exception):
                    stop.set()
                    until = time.monotonic() + GRACE
                    for thread in threads:
                        thread.join(max(0.0, until - time.monotonic()))
                    raise got
                else:
                    found[got[0]] = got[1]
                    self._show(bar, 1)
        finally:
            stop.set()
            bar.close()
        if len(found) < total and (setting := self._reached(asking)):
            raise self._exhausted(f"{label}: {len(found)} of {total}", setting, asking)

    def _exhausted(self, answered: str, setting: str, asking: Asking) -> UserError:
        return UserError(
            f"{answered} questions are answered, and the budget machine.asking.{setting} = {getattr(asking, setting)} "
            f"of this run is spent ({self.spent.tokens} tokens{_money(self.spent)})",
            f"raise machine.asking.{setting}, or run again to spend as much once more: what is answered is kept",
        )

    def _show(self, bar: Any, answered: int) -> None:
        """Count answers; say what was spent, and how long the server will still be left alone."""
        bar.update(answered)
        waiting = f", waiting {held:.0f} s for the server" if (held := self._held()) > 1 else ""
        bar.set_postfix_str(f"{self.spent.tokens} tokens{_money(self.spent)}{waiting}", refresh=bool(waiting))

    def _answer(self, name: str, question: Question[A], label: str, asking: Asking, stop: threading.Event) -> A | None:
        """The answer to one question; None when it may not be asked any more."""
        told = wrong = ""
        for attempt in range(asking.retries + 1):
            self._wait(stop)
            if stop.is_set() or self._reached(asking):
                return None
            try:
                completion, headers = self._endpoint.chat(
                    question.answer, messages=_messages(question, wrong), temperature=self.temperature,
                    # Another seed after an answer that was wrong: the same would be given again.
                    max_tokens=self.max_tokens, seed=int(digest(name, wrong)[:8], 16) >> 1,
                )  # fmt: skip
            except Passing as fault:
                told = str(fault)
                self._hold(fault.headers)
                stop.wait(min(LONGEST, PAUSE * 2**attempt) * random.uniform(0.5, 1.0))
                continue
            except NoRoom as fault:
                raise UserError(
                    f"{label}: question {name} is longer than {self.name} can read ({fault})",
                    "serve the model with room for more, or ask another one",
                ) from None
            self._hold(headers)
            try:
                text = _text(completion.choices[0])
                answer = _read(question, text)
            except _Wrong as problem:
                told = wrong = str(problem)
                self._pay(completion, asking, refused=True)
                continue
            read, written = _usage(completion)
            kept = Kept(text=text, prompt_tokens=read, completion_tokens=written, model=completion.model or self.name)
            publish_text(self._path(name), kept.model_dump_json(indent=1) + "\n")
            self._use(name, kept)
            self._pay(completion, asking)
            return answer
        problem = (
            f"{label}: question {name} is not answered after {asking.retries + 1} attempts, the last of which: {told}"
        )
        if told != wrong:  # the last attempt ended in a fault, not in an answer
            raise InfrastructureError(problem)
        raise UserError(
            problem,
            f"raise max_tokens from {self.max_tokens} if answers are cut off, serve {self.name} so that it keeps to "
            "response_format, or ask another model; what is answered is kept",
        )

    def _pay(self, completion: Completion, asking: Asking, refused: bool = False) -> None:
        read, written = _usage(completion)
        with self._lock:
            self.spent.asked += 1
            self.spent.refused += refused
            self.spent.tokens += read + written
            if self.spent.money is not None:
                self.spent.money += (read * (asking.input_price or 0) + written * (asking.output_price or 0)) / 1e6
        if not read + written and (asking.tokens or asking.money):
            raise UserError(
                f"the endpoint named by {asking.endpoint} does not say how many tokens an answer took: the budget in "
                "machine.asking cannot be held",
                "set machine.asking.tokens and machine.asking.money to null, or ask where usage is counted",
            )

    def _reached(self, asking: Asking) -> str | None:
        """The budget that is spent."""
        if asking.tokens is not None and self.spent.tokens >= asking.tokens:
            return "tokens"
        if asking.money is not None and (self.spent.money or 0.0) >= asking.money:
            return "money"
        return None

    def _hold(self, headers: Mapping[str, str]) -> None:
        """Hold all threads back for as long as the server asks."""
        seconds = pause(headers)
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _held(self) -> float:
        return max(0.0, self._not_before - time.monotonic())

    def _wait(self, stop: threading.Event) -> None:
        # Again after each wait, because another thread may have been told to wait for longer.
        while (left := self._held()) and not stop.is_set():
            if left > PATIENCE:
                raise InfrastructureError(f"the model server asks for a pause of {left:.0f} s")
            stop.wait(left)


def _money(spent: Spent) -> str:
    return "" if spent.money is None else f", cost {spent.money:.4f}"


@cache
def _schema(answer: type[BaseModel]) -> str:
    return digest(answer.model_json_schema())


def _messages(question: Question[Any], wrong: str) -> list[dict[str, str]]:
    refused = f"An earlier answer was refused: {wrong}" if wrong else ""
    system = "\n\n".join(part for part in (question.system, refused) if part)
    return [{"role": role, "content": text} for role, text in (("system", system), ("user", question.user)) if text]


def _usage(completion: Completion) -> tuple[int, int]:
    """Tokens read and written; 0 where the server does not say."""
    usage = completion.usage
    return (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)


def _text(choice: Choice) -> str:
    if choice.message.refusal:
        raise _Wrong(f"the model declined: {choice.message.refusal}"[:TOLD])
    if choice.finish_reason == "length":
        raise _Wrong("it was cut off at max_tokens")
    return choice.message.content or ""


def _read(question: Question[A], text: str) -> A:
    # Servers that do not hold a model to the schema let it put its answer into a fence.
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        answer = question.answer.model_validate_json(bare, strict=True)
    except ValidationError as error:
        raise _Wrong(_problems(error)) from None
    if wrong := question.check(answer):
        raise _Wrong(wrong)
    return answer


def _problems(error: ValidationError) -> str:
    """The first problems in one line, without what was answered."""
    problems = [(".".join(str(part) for part in one["loc"]), one["msg"]) for one in error.errors(include_url=False)]
    return "; ".join(f"{where}: {what}" if where else what for where, what in problems[:3])[:TOLD]
