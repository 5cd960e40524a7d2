"""The options of commands that ask a language model, and what they come to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from captrain.errors import UserError

if TYPE_CHECKING:
    from captrain.config import ModelAccess

EndpointVariable = Annotated[str, typer.Option(help="Environment variable that holds the endpoint's base URL.")]
KeyVariable = Annotated[str, typer.Option(help="Environment variable that holds its key.")]
Budget = Annotated[int | None, typer.Option(min=1, help="Budget of the model in tokens, read and written.")]
Prices = Annotated[tuple[float, float] | None, typer.Option(help="Money for a million tokens read, and written.")]
ENDPOINT, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"


@dataclass(frozen=True)
class ModelOptions:
    """A language model as options name it: its name, the environment variables that hold endpoint and key, its budget
    in tokens, prices, and whether it is to be asked at all."""

    model: str
    endpoint: str
    key: str
    tokens: int | None
    prices: tuple[float, float] | None
    dry_run: bool

    def access(self) -> "ModelAccess":
        """Build the settings by which the model is asked.

        Raises:
            UserError: an option names no environment variable, or a price is none.
        """
        from pydantic import ValidationError

        from captrain.config import ModelAccess

        read_price, write_price = self.prices or (None, None)
        try:
            return ModelAccess(
                endpoint=self.endpoint,
                key=self.key,
                tokens=self.tokens,
                input_price=read_price,
                output_price=write_price,
            )
        except ValidationError as error:  # a key where the name of a variable belongs is not repeated
            field = error.errors()[0]["loc"][0]
            if option := {"endpoint": "--endpoint-env", "key": "--key-env"}.get(str(field)):
                raise UserError(
                    f"{option} must be the name of an environment variable", "give a name, such as OPENAI_API_KEY"
                ) from None
            raise UserError(
                "--prices must be two numbers of 0 or more", "give, for example, --prices 0.4 1.6"
            ) from None
