"""Cost of asking a language model, told before anything is asked."""

from dataclasses import dataclass

from captrain.config import ModelAccess

PER_TOKEN = 4
"""Characters of a token, about."""


@dataclass(frozen=True)
class AskingCost:
    """About what asking will take: questions, tokens read and written, and money where prices are known; `most`: it is
    the most that it can take."""

    questions: int
    prompt_tokens: int
    completion_tokens: int
    money: float | None
    most: bool = False

    def __str__(self) -> str:
        price = "" if self.money is None else f", {self.money:.2f} in money"
        return (
            f"{'at most' if self.most else 'about'} {self.questions} questions, {self.prompt_tokens} tokens read and "
            f"{self.completion_tokens} written{price}; answers on disk cost nothing"
        )


def priced(
    questions: int, prompt_tokens: int, completion_tokens: int, access: ModelAccess, *, most: bool = False
) -> AskingCost:
    """The cost of so many questions, tokens read and tokens written, at the prices that are known."""
    money = None
    if access.input_price is not None and access.output_price is not None:
        money = (prompt_tokens * access.input_price + completion_tokens * access.output_price) / 1e6
    return AskingCost(questions, prompt_tokens, completion_tokens, money, most)
