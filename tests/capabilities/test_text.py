"""Examples of every pattern by which values and phrases are told in text."""

from collections.abc import Callable

import pytest

from captrain.capabilities import text
from captrain.capabilities.text import (
    asks_consent,
    identifiers_in,
    is_common,
    is_identifier,
    is_prose,
    is_value,
    number_of,
    plain,
    quoted,
    refuses,
    same,
    says,
    shape,
    split_mark,
    squeezed,
)

TOLD = {
    "a word in any case": ("Your MASTERCARD.", "Mastercard", True),
    "part of a word": ("Mastercards", "Mastercard", False),
    "a thousands separator": ("That is $1,327.", 1327, True),
    "zeros after the point": ("It is 327.00.", "327", True),
    "another fraction": ("It is 327.50.", "327", False),
    "a number inside another": ("It is 1327.", "327", False),
    "the mark of a code left out": ("Order w12 it is.", "#W12", True),
    "a bare number for a marked one": ("Take #12.", "12", False),
    "all parts of an object": ("Ann Lee", {"first": "Ann", "last": "Lee"}, True),
    "one part of an object": ("Ann", {"first": "Ann", "last": "Lee"}, False),
    "nothing": ("Ann", "", False),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_text_says_a_value_as_whole_words(case: str) -> None:
    words, value, expected = TOLD[case]
    assert says(words, value) == expected


PHRASES: list[tuple[Callable[[str], bool], str, bool]] = [
    (asks_consent, "Shall I cancel it?", True),
    (asks_consent, "Please confirm the change.", True),
    (asks_consent, "What is your name?", False),
    (asks_consent, "I will proceed.", False),
    (refuses, "I am unable to cancel it.", True),
    (refuses, "This is **not allowed**.", True),
    (refuses, "It cannot be undone once it is made.", False),
    (refuses, "It is cancelled.", False),
]


@pytest.mark.parametrize(("tells", "words", "expected"), PHRASES)
def test_phrases_of_consent_and_refusal(tells: Callable[[str], bool], words: str, expected: bool) -> None:
    assert tells(words) == expected


PATTERNS = [
    ("CONSENT", "Yes, please do.", True),
    ("CONSENT", "Why would I want to pay for something that I have not ordered?", False),
    ("DISCLAIMER", "I do not have access to flight durations.", True),
    ("DISCLAIMER", "I have your booking here.", False),
    ("CLAIM", "i booked it ten hours ago", True),
    ("CLAIM", "cancel my trip", False),
    ("STANDING", "i am a gold member", True),
    ("STANDING", "the member", False),
    ("AS_AGENT", "How may I help you?", True),
    ("AS_AGENT", "Can you help me?", False),
    ("DECLINES", "No, I will keep it.", True),
    ("DECLINES", "Thank you!", False),
    ("AWAITS_REPLY", "Let me know.", True),
    ("AWAITS_REPLY", "Goodbye.", False),
    ("AFTERWARDS", "it cannot be changed again", True),
    ("NOT_FOUND", "Error: user not found", True),
    ("NOT_FOUND", "Error: not allowed", False),
    ("ERROR", "ValueError: x", True),
]


@pytest.mark.parametrize(("name", "words", "expected"), PATTERNS)
def test_patterns_of_phrases(name: str, words: str, expected: bool) -> None:
    pattern = getattr(text, name)
    found = pattern.fullmatch(words) if name == "CONSENT" else pattern.search(words)
    assert (found is not None) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("B7", True), ("#W123", True), ("12345678", True), ("1234", False), ("Rome", False), ("2024-05-15", False),
        (7, False),
    ],
)  # fmt: skip
def test_an_identifier_has_letters_and_digits_or_many_digits(value: object, expected: bool) -> None:
    assert is_identifier(value) == expected


def test_identifiers_of_one_kind_share_a_shape() -> None:
    assert identifiers_in("Take #W123 or B7, by ann_lee_12.") == ["#W123", "B7", "ann_lee_12"]
    assert identifiers_in("Take #W123 or B7.", 4) == ["#W123"]
    assert shape("QX7RT2") == shape("AAAB11") != shape("QX7RT")
    assert shape("L1001") == shape("L1002") != shape("C1001")
    assert shape("ann_lee_12") == shape("bo_ek_34") != shape("credit_card_123456")


def test_values_prose_and_numbers_are_told_apart() -> None:
    assert is_common(True) and is_common(9) and is_common("") and not is_common(10) and not is_common("a")
    assert is_prose("one two three four five") and not is_prose("one two three four")
    assert is_value("B7") and not is_value("x" * 41)
    assert number_of("1.50") == number_of(1.5) and number_of("007") == "007" and number_of(True) == "True"
    assert same(["1", 2], [2, 1]) and not same("Rome", "rome") and same({"a": 1}, {"a": "1", "b": 2})


def test_texts_are_made_plain_and_marks_are_split_off() -> None:
    assert plain("**Non-refundable**  fare") == "non refundable fare"
    assert squeezed("$1,327 Le‑Marais") == "1327 le-marais"
    assert split_mark("Bye. ###STOP###") == (["STOP"], "Bye.")
    assert quoted("a\n b") == '"a b"' and quoted("x" * 200).endswith(' …"')
