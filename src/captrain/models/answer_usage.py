"""Usage of structured answers, and the budget of a run (`machine.asking.tokens`, `machine.asking.money`)."""

import threading
from dataclasses import dataclass

from captrain.config import ModelAccess
from captrain.errors import UserError
from captrain.models.answer_files import StoredAnswer
from captrain.models.endpoint import Completion


@dataclass
class AnswerUsage:
    """Counts of answers, tokens and money.

    `answers` and their tokens are over all that were used, read from disk or received, each once; they are the same
    when a run is replayed. The others are of this run alone: answers `received`, those `rejected` among them, what all
    of them took in `tokens`, and in `money` where prices are known.
    """

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received: int = 0
    rejected: int = 0
    tokens: int = 0
    money: float | None = None

    @property
    def cost(self) -> str:
        """The money in words, "" where no prices are known."""
        return "" if self.money is None else f", cost {self.money:.4f}"


class Accounts:
    """Counts answers, from any thread, and holds them against the budget.

    Args:
        access: prices and budget; None where nothing is requested.

    Raises:
        UserError: a budget in money without prices.
    """

    def __init__(self, access: ModelAccess | None) -> None:
        self.access, self.usage = access, AnswerUsage()
        self._keys: set[str] = set()
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

    def use(self, key: str, answer: StoredAnswer) -> None:
        """Count an answer, once however often it is used."""
        with self._lock:
            if key not in self._keys:
                self._keys.add(key)
                self.usage.answers += 1
                self.usage.prompt_tokens += answer.prompt_tokens
                self.usage.completion_tokens += answer.completion_tokens

    def charge(self, completion: Completion, access: ModelAccess, *, rejected: bool = False) -> None:
        """Count what a completion took.

        Raises:
            UserError: there is a budget, and the server does not say how many tokens it took.
        """
        prompt, reply = completion.tokens
        with self._lock:
            self.usage.received += 1
            self.usage.rejected += rejected
            self.usage.tokens += prompt + reply
            if self.usage.money is not None:
                self.usage.money += (prompt * (access.input_price or 0) + reply * (access.output_price or 0)) / 1e6
        if not prompt + reply and (access.tokens or access.money):
            raise UserError(
                f"the endpoint named by {access.endpoint} does not say how many tokens an answer took: the budget in "
                "machine.asking cannot be held",
                "set machine.asking.tokens and machine.asking.money to null, or ask where usage is counted",
            )

    def exhausted(self) -> str | None:
        """Return the setting whose budget is spent, if any is."""
        if self.access is None:
            return None
        if self.access.tokens is not None and self.usage.tokens >= self.access.tokens:
            return "tokens"
        if self.access.money is not None and (self.usage.money or 0.0) >= self.access.money:
            return "money"
        return None

    def exhaustion(self, setting: str, progress: str) -> UserError:
        """Word the error of a run that ends because a budget is spent."""
        return UserError(
            f"{progress} questions are answered, and the budget machine.asking.{setting} = "
            f"{getattr(self.access, setting)} of this run is spent ({self.usage.tokens} tokens{self.usage.cost})",
            f"raise machine.asking.{setting}, or run again to spend as much once more: what is answered is kept",
        )
