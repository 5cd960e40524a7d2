"""Recognizes values and phrases in text: identifiers, numbers, refusals, consent and others. Each has one definition.

`tests/capabilities/test_text.py` has a table of examples for every pattern.
"""

import json
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TypeGuard

from captrain.records import Message, leaves

QUOTED = 140
PROSE = 4
"""A value of more words is prose, which is not compared."""
LONGEST = 40
"""Longest value, in characters, that is compared as a value."""
SMALL = 10
"""Numbers below this occur by chance."""
CALL_MARKS = ("<tool_call", "</tool_call")
SPACE = re.compile(r"[\s‐-―]+")
IDENTIFIER = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[#\w-]{2,}|\d{8,}")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
NUMBER = re.compile(r"[\d.,-]*\d[\d.,-]*")
EXACT_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
WORD = re.compile(r"#?\w(?:[\w.,-]*\w)?")
CODE = re.compile(r"[#\w-]+")
WHOLE = re.compile(r"-?\d+\.0")
BEFORE_NAME, BEFORE_NUMBER = re.compile(r"(?<![\w.#])#?\Z"), re.compile(r"(?<![\w.#])\Z")
AFTER_WORD = re.compile(r"(?:\.0+)?(?!\w|\.\d)")
"""Patterns of the text before and after a whole word."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
ERROR = re.compile(r"\w*(error|exception|traceback)\b", re.IGNORECASE)
NOT_FOUND = re.compile(r"\bnot found\b|\bno (such|match)|\bdoes not exist\b", re.IGNORECASE)
AFTERWARDS = re.compile(
    r"\b(afterwards?|further|again|from then on|until|unless|once|first|before (you|i|we)|if you|without your)\b"
)
"""Words that make a refusal a notice of what comes later, or a request for what comes first."""
CLOSING_MARK = re.compile(r"###([A-Z-]+)###")
PROPOSAL = re.compile(r"\b(confirm|proceed|go ahead|shall i|would you like)\b", re.IGNORECASE)
REQUEST = re.compile(
    r"\bplease (confirm|reply|let me know)\b|\breply (with )?\W{0,3}yes\b|\bconfirm (if|whether|that) you\b",
    re.IGNORECASE,
)
"""A question of consent that may have no question mark."""
AWAITS_REPLY = re.compile(r"\?|\b(confirm|please provide|would you like|let me know|reply)\b", re.IGNORECASE)
CONSENT = re.compile(r"\W*(yes|yeah|sure|ok|okay|confirm\w*|please( do)?|go ahead)?[\s\w,]{0,24}[.!\s]*", re.IGNORECASE)
DECLINES = re.compile(r"\b(no|not|never|nothing|instead|leave|skip|changed my mind)\b|n[’']t\b", re.IGNORECASE)
REFUSAL = re.compile(
    r"\b(?:can ?not|can[’']t|unable to|not able to|not allowed|not permitted|not eligible|not possible|"
    r"isn[’']t possible|do(?:es)? not allow|don[’']t allow|can only|only be (?:processed|made|done|modified))\b"
    r"(?! (?:be )?(?:\w+ )?once\b)",
    re.IGNORECASE,
)
DISCLAIMER = re.compile(
    r"\b(?:(?:can ?not|can[’']t|unable to|not able to) (?:directly )?(?:look up|access|retrieve|see|view|check)|"
    r"do(?:es)?(?:n[’']t| not) (?:have|retain|provide|store|hold)(?: direct| any)?(?: access| details| data|"
    r" information)?|(?:lacks?|no access to))\b",
    re.IGNORECASE,
)
CLAIM = re.compile(
    r"\b(ago|yesterday|this morning|members?|membership|insur\w+|approved|eligible|entitled|promised|guarantee\w*|"
    r"warranty|said (that )?(i|you|it)|told me)\b"
)
STANDING = re.compile(r"\b(?!a |the |your |my |our )\w+ (?:member|customer|subscriber|status|tier)\b")
AS_AGENT = re.compile(r"\bhow (can|may) i (help|assist) you\b|\banything else i can (help|assist)\b", re.IGNORECASE)

SORTED = json.JSONEncoder(sort_keys=True)
"""Encoder with the settings of `text_of`: `json.dumps` would make a new one for each value."""


def text_of(value: object) -> str:
    """Return text unchanged, and any other JSON value as JSON."""
    return value if isinstance(value, str) else SORTED.encode(value)


def atoms(value: object) -> Iterator[object]:
    """Yield the values inside a JSON value that are no list, object or null."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from atoms(item)
    elif value is not None:
        yield value


def plain(text: str) -> str:
    """Normalise a text for matching phrases: lower case, no bold marks, runs of spaces and dashes as one space."""
    return SPACE.sub(" ", text.lower().replace("**", "").replace("-", " "))


@lru_cache(4096)
def squeezed(text: str) -> str:
    """Normalise a text for matching values: lower case, without thousands separators and dollar signs."""
    return text.lower().replace(",", "").replace("$", "").replace("‑", "-")


def says(text: str, value: object) -> bool:
    """Return whether the text has every string and number of the value as whole words; False for an empty value."""
    text, words = squeezed(text), words_of(value)
    return bool(words) and all(occurs(text, word) for word in words)


def words_of(value: object) -> list[str]:
    """The strings and numbers of a value as `squeezed` text, without blank ones."""
    return [word for leaf in leaves(value) if (word := squeezed(leaf).strip())]


def occurs(text: str, word: str) -> bool:
    """Tell whether the text holds the word as whole words; both are `squeezed`."""
    # People leave out the mark of "#W123", but a bare 12 need not be "#12".
    word = word[1:] if word[0] == "#" and word[1:2].isascii() and word[1:2].islower() else word
    word = word[:-2] if WHOLE.fullmatch(word) else word
    before, place = BEFORE_NAME if word[0].isalpha() else BEFORE_NUMBER, text.find(word)
    while place >= 0:
        # One pattern for all words, because compiling one for each takes longer than the search.
        if before.search(text[max(0, place - 2) : place]) and AFTER_WORD.match(text, place + len(word)):
            return True
        place = text.find(word, place + 1)
    return False


def same(expected: object, actual: object) -> bool:
    """Return whether two argument values are equivalent.

    A number equals its decimal text. Lists of plain values are equal in any order, other lists in the same order. An
    object may have more entries than `expected`. Everything else is compared exactly.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return all(same(value, actual.get(name)) for name, value in expected.items())
    if isinstance(expected, list):
        actual = spelled_list(actual)
    if isinstance(expected, list) and isinstance(actual, list):
        if are_plain(expected) and are_plain(actual):
            return Counter(map(number_of, expected)) == Counter(map(number_of, actual))
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if isinstance(expected, int | float) or isinstance(actual, int | float):
        return number_of(expected) == number_of(actual)
    return expected == actual


def spelled_list(value: object) -> object:
    """Return the list that a text spells as JSON or as Python prints it, else the value."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return value
    try:
        return literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def are_plain(values: list[object]) -> bool:
    """Return whether all values are text or numbers."""
    return all(isinstance(value, str | int | float) for value in values)


def number_of(value: object) -> object:
    """Return a number, or a text that spells one, as a Decimal; a truth value as text; any other value unchanged.

    Decimals are exact: long ids differ in digits that a float does not hold. A code such as 007 is not a number.
    """
    if isinstance(value, bool):
        return str(value)
    return Decimal(str(value)) if EXACT_NUMBER.fullmatch(str(value)) else value


def is_identifier(value: object) -> TypeGuard[str]:
    """Return whether a value has letters and digits, or at least eight digits, and is not a date."""
    return isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None and not DATE.fullmatch(value)


def identifiers_in(text: str, least: int = 2) -> list[str]:
    """Return the identifiers in a text that have at least `least` characters."""
    return [code for code in CODE.findall(text) if len(code) >= least and is_identifier(code)]


def shape(value: str) -> str:
    """Return the shape that identifiers of one kind share: prefix and number of digits, length, or words and digits."""
    if re.fullmatch(r"\w+", value.strip("#")) and "_" not in value and not re.fullmatch(r"#?[A-Za-z]{1,2}\d+", value):
        return str(len(value))
    digits = re.sub(r"\d", "9", value)
    return re.sub(r"[A-Za-z]+", "A", digits) if re.search(r"[_-]", value) else digits


def is_prose(value: object) -> bool:
    """Return whether a value is prose: text of more than `PROSE` words."""
    return isinstance(value, str) and len(value.split()) > PROSE


def is_value(value: object) -> bool:
    """Return whether a value is short enough to be compared."""
    text = text_of(value)
    return len(text) <= LONGEST and not is_prose(text)


def is_common(value: object) -> bool:
    """Return whether a value is likely to occur by chance: a truth value, a small number, or an empty value."""
    return isinstance(value, bool) or value in ("", None) or (isinstance(value, int | float) and abs(value) < SMALL)


def quoted(text: str) -> str:
    """Return the beginning of a text in one line, in quotation marks."""
    text = " ".join(text.split())
    return f'"{text if len(text) <= QUOTED else text[: QUOTED - 2] + " …"}"'


def asks_consent(text: str) -> bool:
    """Return whether a text of the assistant asks the user for consent."""
    return ("?" in text and PROPOSAL.search(text) is not None) or REQUEST.search(plain(text)) is not None


def refuses(text: str) -> bool:
    """Return whether a text of the assistant says that something cannot be done."""
    return REFUSAL.search(plain(text)) is not None


def split_mark(text: str) -> tuple[list[str], str]:
    """Split a text into the marks with which a simulated user ends a conversation, and the other words."""
    return CLOSING_MARK.findall(text), CLOSING_MARK.sub("", text).strip()


def result_of(message: Message) -> object:
    """Return the content of a tool message, parsed if it is JSON."""
    content = message.get("content") or ""
    try:
        return json.loads(content)
    except ValueError:
        return content


def reports_error(message: Message) -> bool:
    """Return whether a tool message reports an error: by a flag, an `error` entry in its JSON, or its first words."""
    return is_error(message, result_of(message))


def is_error(message: Message, result: object) -> bool:
    """Return whether a tool message with this parsed result reports an error."""
    has_error_entry = isinstance(result, Mapping) and bool(result.get("error"))
    begins_as_error = isinstance(result, str) and ERROR.match(result) is not None
    return bool(message.get("error")) or has_error_entry or begins_as_error


def is_malformed(message: Message) -> bool:
    """Return whether an assistant message contains a tool call as text."""
    is_marked = bool(message.get("unexecuted")) or any(mark in (message.get("content") or "") for mark in CALL_MARKS)
    return message["role"] == "assistant" and is_marked


def is_reply(message: Message) -> bool:
    """Return whether an assistant message is addressed to the user: it has words and no call."""
    spoken = message["role"] == "assistant" and bool((message.get("content") or "").strip())
    return spoken and not message.get("tool_calls") and not is_malformed(message)
