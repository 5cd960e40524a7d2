"""Questions to a chat model, answered in a given schema: stored, counted, concurrent, within a budget.

Analysts and synthesizers stand on this. An answer is written to disk the moment it is known to be valid, under the
digest of all that decides it (model, messages, schema, sampling, draw) and of nothing else (endpoint, retries,
machine): a run that was cut off asks no answered question again, and one that is whole is replayed without endpoint or
key. Faults that pass are tried again after growing pauses (`tenacity`); where the server says when to come back,
nothing is sent before (`Throttle`). An answer that is truncated, of another schema or refused by `Question.check` is
asked for again, and the model is told what was wrong with it: those are attempts at one question with another request,
which is why the retries of the `openai` library, repetitions of one request, are switched off.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from captrain.config import ModelAccess
from captrain.errors import InfrastructureError, UserError
from captrain.models.answer_files import ANSWERS, StoredAnswer, answer_path, publish_answer, read_answer
from captrain.models.answer_usage import Accounts, AnswerUsage
from captrain.models.endpoint import (
    EXCERPT,
    CompletionChoice,
    ContextLengthExceeded,
    Endpoint,
    TransientFault,
)
from captrain.models.throttle import Throttle
from captrain.records import Message, digest

if TYPE_CHECKING:
    from tenacity import Retrying
    from tqdm import tqdm

PAUSE = 1.0
"""Seconds before the second attempt at a question; each later pause is twice as long, up to `LONGEST`, with up to
`PAUSE` added at random."""
LONGEST = 60.0
SILENCE = 5.0
"""Seconds without an answer after which the progress line says so."""
GRACE = 5.0
"""Seconds that requests under way are given to end after an error, so that what they cost is not lost."""

A = TypeVar("A", bound=BaseModel)


def _accept(_: BaseModel) -> None:
    return None


@dataclass(frozen=True)
class Question(Generic[A]):
    """A question. Equal ones of different draws are independent: asked anew, and stored apart.

    `schema` is the form of the answer. Endpoints take no defaults, open dictionaries or discriminated unions in it.
    `check` says what is wrong with an answer beyond its schema, None when nothing is; it must depend on the answer and
    on the question alone.
    """

    system: str
    user: str
    schema: type[A]
    draw: int = 0
    check: Callable[[A], str | None] = _accept


class RejectedAnswer(Exception):
    """Answer that does not satisfy the question; its text says why."""


class StructuredAnswers:
    """A model's answers to questions.

    Args:
        access: how the model is asked, and at what cost; None: nothing may be sent, and answers come from disk alone.
        name: of the model, or name@revision (see `Endpoint`).
        temperature: sampling temperature.
        max_tokens: tokens in one answer.
        folder: of the answers.

    Raises:
        UserError: a budget in money without prices.
    """

    def __init__(
        self,
        access: ModelAccess | None,
        *,
        name: str,
        temperature: float,
        max_tokens: int,
        folder: Path = ANSWERS,
    ) -> None:
        self.access, self.folder = access, folder
        self.name, self.temperature, self.max_tokens = name, temperature, max_tokens
        self.throttle = Throttle()
        self._accounts = Accounts(access)
        if access is not None:
            self._endpoint = Endpoint(name, endpoint=access.endpoint, key=access.key, retries=0, timeout=access.timeout)

    @property
    def usage(self) -> AnswerUsage:
        """Usage of all answers so far."""
        return self._accounts.usage

    def ask(self, questions: Sequence[Question[A]], label: str) -> list[A]:
        """Answer all questions, equal ones once.

        Args:
            questions: what is asked.
            label: what it is for, in messages and on the progress bar.

        Returns:
            The answers, in the order of the questions.

        Raises:
            UserError: a budget is reached, a question cannot be answered in its schema, the endpoint refuses what it
                would refuse again, or nothing may be asked. What is answered is kept.
            InfrastructureError: a fault of the server did not pass. What is answered is kept.
        """
        keys = [self._key(question) for question in questions]
        distinct = dict(zip(keys, questions, strict=True))
        answers: dict[str, A] = {}
        damaged: list[Path] = []
        for key, question in distinct.items():
            try:
                answers[key] = self._replayed(key, question)
            except FileNotFoundError:
                pass
            except RejectedAnswer:
                damaged.append(answer_path(self.folder, key))
        if damaged:
            print(f"{label}: {len(damaged)} answers on disk cannot be used, such as {damaged[0]}", file=sys.stderr)
        if missing := {key: question for key, question in distinct.items() if key not in answers}:
            if self.access is None:
                raise UserError(
                    f"{label}: {len(missing)} of {len(distinct)} answers are not in {self.folder}, and none is asked "
                    "for",
                    "run the stage that asks",
                )
            self._request_all(missing, answers, label, self.access)
        return [answers[key] for key in keys]

    def _key(self, question: Question[A]) -> str:
        sampling = self.name, self.temperature, self.max_tokens
        return digest(*sampling, question.draw, question.system, question.user, _schema_digest(question.schema))

    def _replayed(self, key: str, question: Question[A]) -> A:
        """Read the answer from disk.

        Raises:
            FileNotFoundError: there is none.
            RejectedAnswer: it is not whole, or does not answer the question.
        """
        try:
            stored = read_answer(self.folder, key)
        except ValidationError as error:
            raise RejectedAnswer(_problems(error)) from None
        answer = _parsed(question, stored.text)
        self._accounts.use(key, stored)
        return answer

    def _request_all(
        self, missing: Mapping[str, Question[A]], answers: dict[str, A], label: str, access: ModelAccess
    ) -> None:
        """Request what is missing, and add it to the answers."""
        from tqdm import tqdm

        self._endpoint.client  # noqa: B018  (a variable that is not set is reported before anything is requested)
        total, todo = len(missing) + len(answers), iter([*missing.items()])
        results, stop = SimpleQueue[tuple[str, A] | Exception | None](), threading.Event()

        def work() -> None:
            try:
                for key, question in todo:
                    answer = self._answer(key, question, label, access, stop)
                    if answer is None:
                        break
                    results.put((key, answer))
            except Exception as error:
                results.put(error)
            finally:
                results.put(None)

        # Not of an executor: those are waited for when the process ends, and Ctrl-C waits for no server.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(access.concurrency, len(missing)))]
        for thread in threads:
            thread.start()
        bar = tqdm(total=total, initial=len(answers), desc=label, unit="answer", mininterval=1.0)
        try:
            self._gather(results, answers, threads, stop, bar)
        finally:
            stop.set()
            bar.close()
        if len(answers) < total and (setting := self._accounts.exhausted()):
            raise self._accounts.exhaustion(setting, f"{label}: {len(answers)} of {total}")

    def _gather(
        self,
        results: "SimpleQueue[tuple[str, A] | Exception | None]",
        answers: dict[str, A],
        threads: Sequence[threading.Thread],
        stop: threading.Event,
        bar: "tqdm[NoReturn]",
    ) -> None:
        """Take what the threads bring until all of them have ended."""
        working, last = len(threads), time.monotonic()
        while working:
            try:
                result = results.get(timeout=0.5)
            except Empty:
                self._report(bar, 0, time.monotonic() - last)
                continue
            last = time.monotonic()
            if result is None:
                working -= 1
            elif isinstance(result, Exception):
                stop.set()
                until = time.monotonic() + GRACE
                for thread in threads:
                    thread.join(max(0.0, until - time.monotonic()))
                raise result
            else:
                answers[result[0]] = result[1]
                self._report(bar, 1)

    def _report(self, bar: "tqdm[NoReturn]", count: int, silence: float = 0.0) -> None:
        """Count answers; say what was spent, how long the server will still be left alone, and for how long it has
        answered nothing."""
        bar.update(count)
        pause = self.throttle.remaining()
        notice = f", no answer for {silence:.0f} s" if silence >= SILENCE else ""
        notice = f", waiting {pause:.0f} s for the server" if pause > 1 else notice
        bar.set_postfix_str(f"{self.usage.tokens} tokens{self.usage.cost}{notice}", refresh=bool(notice))

    def _answer(
        self, key: str, question: Question[A], label: str, access: ModelAccess, stop: threading.Event
    ) -> A | None:
        """Ask one question until it is answered; None when it may not be asked any more."""
        rejection = ""
        problem = f"{label}: question {key} is not answered after {access.retries + 1} attempts, the last of which"
        try:
            for attempt in _attempts(access.retries + 1, stop):
                with attempt:
                    try:
                        return self._request(key, question, rejection, access, stop)
                    except RejectedAnswer as error:
                        rejection = str(error)
                        raise
        except TransientFault as fault:
            raise InfrastructureError(f"{problem}: {fault}") from None
        except RejectedAnswer as error:
            raise UserError(
                f"{problem}: {error}",
                f"raise max_tokens from {self.max_tokens} if answers are cut off, serve {self.name} so that it keeps "
                "to response_format, or ask another model; what is answered is kept",
            ) from None
        except ContextLengthExceeded as refusal:
            raise UserError(
                f"{label}: question {key} is longer than {self.name} can read ({refusal})",
                "serve the model with room for more, or ask another one",
            ) from None

    def _request(
        self, key: str, question: Question[A], rejection: str, access: ModelAccess, stop: threading.Event
    ) -> A | None:
        """Make one attempt; None when nothing may be sent any more.

        Raises:
            RejectedAnswer: what came is no answer to the question; it is charged all the same.
        """
        self.throttle.wait(stop)
        if stop.is_set() or self._accounts.exhausted():
            return None
        try:
            completion, headers = self._endpoint.chat(
                question.schema,
                messages=_messages(question, rejection),
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                # Another seed after an answer that was wrong: the same would be given again.
                seed=int(digest(key, rejection)[:8], 16) >> 1,
            )
        except TransientFault as fault:
            self.throttle.hold(fault.headers)
            raise
        self.throttle.hold(headers)
        try:
            text = _text(completion.choices[0])
            answer = _parsed(question, text)
        except RejectedAnswer:
            self._accounts.charge(completion, access, rejected=True)
            raise
        prompt, reply = completion.tokens
        model = completion.model or self.name
        stored = StoredAnswer(text=text, prompt_tokens=prompt, completion_tokens=reply, model=model)
        publish_answer(self.folder, key, stored)
        self._accounts.use(key, stored)
        self._accounts.charge(completion, access)
        return answer


def _attempts(count: int, stop: threading.Event) -> "Retrying":
    """Yield the attempts at one question. Faults are followed by growing pauses, rejected answers by none."""
    from tenacity import (
        RetryCallState,
        Retrying,
        retry_if_exception_type,
        sleep_using_event,
        stop_after_attempt,
        wait_exponential_jitter,
    )

    backoff = wait_exponential_jitter(multiplier=PAUSE, max=LONGEST, jitter=PAUSE)

    def pause(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return 0.0 if isinstance(error, RejectedAnswer) else backoff(state)

    return Retrying(
        retry=retry_if_exception_type((TransientFault, RejectedAnswer)),
        stop=stop_after_attempt(count),
        wait=pause,
        sleep=sleep_using_event(stop),
        reraise=True,
    )


@cache
def _schema_digest(schema: type[BaseModel]) -> str:
    return digest(schema.model_json_schema())


def _messages(question: Question[A], rejection: str) -> list[Message]:
    complaint = f"An earlier answer was refused: {rejection}" if rejection else ""
    system = "\n\n".join(part for part in (question.system, complaint) if part)
    return [{"role": role, "content": text} for role, text in (("system", system), ("user", question.user)) if text]


def _text(choice: CompletionChoice) -> str:
    if choice.message.refusal:
        raise RejectedAnswer(f"the model declined: {choice.message.refusal}"[:EXCERPT])
    if choice.finish_reason == "length":
        raise RejectedAnswer("it was cut off at max_tokens")
    return choice.message.content or ""


def _parsed(question: Question[A], text: str) -> A:
    # Servers that do not hold a model to the schema let it put its answer into a fence.
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        answer = question.schema.model_validate_json(bare, strict=True)
    except ValidationError as error:
        raise RejectedAnswer(_problems(error)) from None
    if complaint := question.check(answer):
        raise RejectedAnswer(complaint)
    return answer


def _problems(error: ValidationError) -> str:
    """Word the first problems in one line, without what was answered."""
    details = error.errors(include_url=False)[:3]
    problems = [(".".join(str(part) for part in detail["loc"]), detail["msg"]) for detail in details]
    return "; ".join(f"{field}: {message}" if field else message for field, message in problems)[:EXCERPT]
