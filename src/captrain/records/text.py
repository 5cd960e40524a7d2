"""Text of anyone's, made fit for paths, terminals and pages: checked or escaped once, where it comes in or goes out."""

import html
from typing import Annotated

from pydantic import AfterValidator

from captrain.errors import UserError

LONGEST_NAME = 120
"""Characters of a name that becomes a file's: with endings it stays below the 255 bytes of any file system."""


def _file_name(text: str) -> str:
    """Return the text, if it can be a file's name anywhere and leads nowhere else.

    Raises:
        ValueError: it cannot.
    """
    if not text or len(text.encode(errors="replace")) > LONGEST_NAME:
        raise ValueError(f"a name has 1 to {LONGEST_NAME} bytes")
    if not text.isprintable() or text[0] in ". -" or set(text) & set("/\\"):
        raise ValueError("a name has printable signs alone, no slash, and does not begin with a dot, space or dash")
    return text


FileName = Annotated[str, AfterValidator(_file_name)]
"""A name that becomes a part of a path: checked once, where the record is read."""


def require_file_name(text: str, place: str) -> str:
    """Return the text, if it can be a `FileName`.

    Args:
        text: the name.
        place: whose name it is, for the message.

    Raises:
        UserError: it cannot.
    """
    try:
        return _file_name(text)
    except ValueError as error:
        raise UserError(
            f"{place}: {plain(text[:LONGEST_NAME])!r} is not a name of a file ({error})", "rename it"
        ) from None


def plain(text: str) -> str:
    """Show text of anyone's fit for a terminal and for any file: what is no printable sign, space or line break is
    shown as one that stands for it, so that nobody moves a cursor, changes a colour or turns a line around."""
    return (
        text
        if text.isprintable()
        else "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
    )


def as_markdown(text: str) -> str:
    """Escape text of anyone's for a page of Markdown, where it neither breaks a table nor counts as markup."""
    return html.escape(plain(text), quote=False).translate({ord(sign): f"\\{sign}" for sign in "|`*_[]"})
