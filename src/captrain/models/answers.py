"""Asks a chat model questions and gets answers in a given schema: cached, in parallel, and within a budget.

Analysts and synthesizers use this module.

Cache: every valid answer is stored atomically in `FOLDER/<first two digits of its key>/<key>.json`, so it is paid for
only once. The key is the digest of everything that decides the answer (model, messages, schema, sampling, draw). It
excludes endpoint, retries and machine. So a resumed run does not repeat a question, and a finished run can be replayed
without endpoint or API key. Answers are files and not a database such as SQLite (which `diskcache` uses). SQLite's
journal does not work when the jobs of a cluster write from several hosts to a shared file system. And a damaged file,
which its digest shows, loses only one answer.

Retries: temporary errors are retried after growing pauses (`tenacity`). A server's Retry-After pauses all threads,
because rate limits apply to the API key. An answer that is truncated, does not fit the schema, or is refused by
`Question.check` is requested again, and the model is told what was wrong. This changes the request, so the `openai`
library's own retries are switched off.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from captrain.errors import InfrastructureError, UserError
from captrain.models.endpoint import EXCERPT, ContextLengthExceeded, Endpoint, TransientFault
from captrain.records import Message, Record, digest, publish_bytes, remains, sealed
from captrain.run import ModelAccess

if TYPE_CHECKING:
    from tenacity import RetryCallState

ANSWERS = Path(".cache/answers")
"""Cache folder of a project. It is not the output of a stage, because all runs share the answers."""
PAUSE = 1.0
"""Seconds before the second attempt at a question. Each later pause is twice as long, up to `LONGEST`, plus up to
`PAUSE` at random."""
LONGEST = 60.0
PATIENCE = 3600.0
"""Longest Retry-After that is waited for, in seconds."""
SILENCE = 5.0
"""The progress line shows a silence after this many seconds without an answer."""
GRACE = 5.0
"""After an error, running requests get this many seconds to finish, so that their answers are not lost."""

A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True)
class Question(Generic[A]):
    """A question. Equal questions with different `draw` are asked and stored separately.

    `schema` is the type of the answer. Endpoints accept no defaults, open dictionaries or discriminated unions in it.
    `check` returns what is wrong with an answer that fits the schema, or None. It must depend only on the answer and
    the question.
    """

    system: str
    user: str
    schema: type[A]
    draw: int = 0
    check: Callable[[A], str | None] | None = None


class StoredAnswer(Record):
    """An answer's text, its tokens, and the model that the server names."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    model: str


@dataclass
class AnswerUsage:
    """Counts of answers, tokens and money.

    `answers`, `prompt_tokens` and `completion_tokens` count each used answer once, cached or not. They stay the same
    when a run is replayed. The other fields count only this run: answers `received`, answers `rejected`, and the cost
    of all received answers in `tokens` and, if prices are known, in `money`.
    """

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received: int = 0
    rejected: int = 0
    tokens: int = 0
    money: float | None = None

    def __str__(self) -> str:
        return f"{self.tokens} tokens" + ("" if self.money is None else f", cost {self.money:.4f}")


class RejectedAnswer(Exception):
    """An answer that does not satisfy the question; the message says why."""


class StructuredAnswers:
    """A model's answers to questions.

    Args:
        access: endpoint, budget and prices. None: use only cached answers.
        name: name of the model, or name@revision (see `Endpoint`).
        temperature: sampling temperature.
        max_tokens: most tokens in one answer.
        folder: folder of the stored answers.

    Raises:
        UserError: the budget is in money, but there are no prices.
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
        self.access, self.folder, self.usage = access, folder, AnswerUsage()
        self.name, self.temperature, self.max_tokens = name, temperature, max_tokens
        self._keys: set[str] = set()
        self._not_before = 0.0
        self._lock = threading.Lock()
        if access is None:
            return
        priced = access.input_price is not None and access.output_price is not None
        if access.money is not None and not priced:
            raise UserError(
                f"machine.asking.money = {access.money} cannot be held without prices",
                "set machine.asking.input_price and machine.asking.output_price, for a million tokens each, or "
                "give the budget as machine.asking.tokens",
            )
        self.usage.money = 0.0 if priced else None
        self._endpoint = Endpoint(name, endpoint=access.endpoint, key=access.key, retries=0, timeout=access.timeout)

    def ask(self, questions: Sequence[Question[A]], label: str) -> list[A]:
        """Answer all questions. Equal questions are asked once. Valid answers are stored even if an error is raised.

        Args:
            questions: to answer.
            label: for messages and the progress bar.

        Returns:
            The answers, in the order of the questions.

        Raises:
            UserError: a budget is spent; a question cannot be answered in its schema; the endpoint refuses a request;
                or an answer is not cached and `access` is None.
            InfrastructureError: an error of the server persists.
        """
        schemas = {schema: digest(schema.model_json_schema()) for schema in {question.schema for question in questions}}
        sampling = self.name, self.temperature, self.max_tokens
        keys = [digest(*sampling, q.draw, q.system, q.user, schemas[q.schema]) for q in questions]
        distinct = dict(zip(keys, questions, strict=True))
        # 1. Use cached answers.
        answers, damaged = dict[str, A](), list[Path]()
        for key, question in distinct.items():
            path = self._path(key)
            if not path.exists():
                continue
            try:
                stored = next(iter(remains(path, StoredAnswer)), None)
                if stored is None:
                    raise RejectedAnswer("it differs from its digest")
                answers[key] = _parsed(question, stored.text)
                self._use(key, stored)
            except RejectedAnswer:
                damaged.append(path)
        if damaged:
            print(f"{label}: {len(damaged)} answers on disk cannot be used, such as {damaged[0]}", file=sys.stderr)
        # 2. Request the other answers.
        if missing := {key: question for key, question in distinct.items() if key not in answers}:
            if self.access is None:
                raise UserError(
                    f"{label}: {len(missing)} of {len(distinct)} answers are not in {self.folder}",
                    "run the stage that asks these questions",
                )
            self._request_all(missing, answers, label, self.access)
        return [answers[key] for key in keys]

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def _use(self, key: str, answer: StoredAnswer) -> None:
        """Count an answer once, however often it is used."""
        with self._lock:
            if key not in self._keys:
                self._keys.add(key)
                self.usage.answers += 1
                self.usage.prompt_tokens += answer.prompt_tokens
                self.usage.completion_tokens += answer.completion_tokens

    def _request_all(
        self, missing: Mapping[str, Question[A]], answers: dict[str, A], label: str, access: ModelAccess
    ) -> None:
        """Request missing answers and add them to `answers`. Uses daemon threads, so Ctrl-C need not wait for them."""
        from captrain.records import ProgressBar

        self._endpoint.client  # noqa: B018  (fail before the first request if a variable is not set)
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

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(access.concurrency, len(missing)))]
        for thread in threads:
            thread.start()
        bar = ProgressBar(what=label, total=total, initial=len(answers), unit="answer")
        try:
            # Collect results until all threads have ended.
            working, last = len(threads), time.monotonic()
            while working:
                try:
                    result = results.get(timeout=0.5)
                    last = time.monotonic()
                except Empty:
                    silence, pause = time.monotonic() - last, self._pause()
                    notice = f", no answer for {silence:.0f} s" if silence >= SILENCE else ""
                    notice = f", waiting {pause:.0f} s for the server" if pause > 1 else notice
                    bar.set_postfix_str(f"{self.usage}{notice}", refresh=bool(notice))
                    continue
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
                    bar.update()
                    bar.set_postfix_str(str(self.usage), refresh=False)
        finally:
            stop.set()
            bar.close()
        if len(answers) < total and (setting := self._exhausted(access)):
            raise UserError(
                f"{label}: {len(answers)} of {total} questions are answered, and the budget machine.asking.{setting} = "
                f"{getattr(access, setting)} of this run is spent ({self.usage})",
                f"raise machine.asking.{setting}, or run again to spend as much once more: answers are kept",
            )

    def _exhausted(self, access: ModelAccess) -> str | None:
        """Return the setting whose budget is spent, or None."""
        if access.tokens is not None and self.usage.tokens >= access.tokens:
            return "tokens"
        return "money" if access.money is not None and (self.usage.money or 0.0) >= access.money else None

    def _answer(
        self, key: str, question: Question[A], label: str, access: ModelAccess, stop: threading.Event
    ) -> A | None:
        """Ask one question until it is answered. Return None if the run stops or the budget is spent."""
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            sleep_using_event,
            stop_after_attempt,
            wait_exponential_jitter,
        )

        backoff = wait_exponential_jitter(multiplier=PAUSE, max=LONGEST, jitter=PAUSE)

        def pause(state: "RetryCallState") -> float:
            # After a wrong answer, ask again at once.
            error = state.outcome.exception() if state.outcome else None
            return 0.0 if isinstance(error, RejectedAnswer) else backoff(state)

        attempts = Retrying(
            retry=retry_if_exception_type((TransientFault, RejectedAnswer)),
            stop=stop_after_attempt(access.retries + 1),
            wait=pause,
            sleep=sleep_using_event(stop),
            reraise=True,
        )
        rejection = ""
        problem = f"{label}: question {key} is not answered after {access.retries + 1} attempts, the last of which"
        try:
            for attempt in attempts:
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
                "to response_format, or ask another model; answers are kept",
            ) from None
        except ContextLengthExceeded as refusal:
            raise UserError(
                f"{label}: question {key} is longer than {self.name} can read ({refusal})",
                "serve the model with a longer context, or ask another model",
            ) from None

    def _request(
        self, key: str, question: Question[A], rejection: str, access: ModelAccess, stop: threading.Event
    ) -> A | None:
        """Make one attempt. Return None if the run stops or the budget is spent.

        Raises:
            RejectedAnswer: the answer is invalid. It still counts towards the budget.
        """
        # Check again after each wait, because another thread may have got a longer Retry-After.
        while (seconds := self._pause()) and not stop.is_set():
            if seconds > PATIENCE:
                raise InfrastructureError(f"the model server asks for a pause of {seconds:.0f} s")
            stop.wait(seconds)
        if stop.is_set() or self._exhausted(access):
            return None
        try:
            completion = self._endpoint.chat(
                question.schema,
                messages=_messages(question, rejection),
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                # Change the seed after a rejected answer. With the same seed, the same answer would come again.
                seed=int(digest(key, rejection)[:8], 16) >> 1,
            )
        except TransientFault as fault:
            with self._lock:
                self._not_before = max(self._not_before, time.monotonic() + fault.pause)
            raise
        prompt, reply = completion.tokens
        choice, answer, refusal = completion.choices[0], None, None
        try:
            if choice.message.refusal:
                raise RejectedAnswer(f"the model declined: {choice.message.refusal}"[:EXCERPT])
            if choice.finish_reason == "length":
                raise RejectedAnswer("it was cut off at max_tokens")
            text = choice.message.content or ""
            answer = _parsed(question, text)
            model = completion.model or self.name
            stored = StoredAnswer(text=text, prompt_tokens=prompt, completion_tokens=reply, model=model)
            path = self._path(key)
            publish_bytes(path, sealed(path, stored.model_dump_json()))
            self._use(key, stored)
        except RejectedAnswer as error:
            refusal = error
        with self._lock:
            self.usage.received += 1
            self.usage.rejected += refusal is not None
            self.usage.tokens += prompt + reply
            if self.usage.money is not None:
                self.usage.money += (prompt * (access.input_price or 0) + reply * (access.output_price or 0)) / 1e6
        if not prompt + reply and (access.tokens or access.money):
            raise UserError(
                f"the endpoint named by {access.endpoint} does not say how many tokens an answer took: the budget in "
                "machine.asking cannot be held",
                "set machine.asking.tokens and machine.asking.money to null, or use an endpoint that counts tokens",
            )
        if refusal is not None:
            raise refusal
        return answer

    def _pause(self) -> float:
        """Return the seconds until the server may be asked again."""
        return max(0.0, self._not_before - time.monotonic())


def _messages(question: Question[A], rejection: str) -> list[Message]:
    complaint = f"An earlier answer was refused: {rejection}" if rejection else ""
    system = "\n\n".join(part for part in (question.system, complaint) if part)
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": question.user}]
    return [message for message in messages if message["content"]]


def _parsed(question: Question[A], text: str) -> A:
    # Without enforcement of the schema, models put answers into a code fence.
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        answer = question.schema.model_validate_json(bare, strict=True)
    except ValidationError as error:
        # The first problems in one line, without the answer itself.
        details = [(".".join(map(str, detail["loc"])), detail["msg"]) for detail in error.errors(include_url=False)[:3]]
        problems = "; ".join(f"{field}: {message}" if field else message for field, message in details)
        raise RejectedAnswer(problems[:EXCERPT]) from None
    if question.check is not None and (complaint := question.check(answer)):
        raise RejectedAnswer(complaint)
    return answer
