"""Makes untrusted text safe for paths, terminals and pages, and removes API keys from it.

Text is checked or escaped once, where it enters or leaves captrain. A key is recognized by its shape, by the name
before it, or because it is the value of an environment variable.

- Keys are removed from all text that captrain writes or prints, because a server may echo a key.
- A configuration with a key is refused before anything is written. The key would be copied to results/spec.yaml,
  dvc.lock (both in git) and Hydra's folders. A configuration names the environment variable instead.
"""

import html
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import Annotated, Any, TypeVar
from unicodedata import category
from urllib.parse import quote, quote_plus, unquote

from pydantic import AfterValidator, BaseModel

from captrain.errors import UserError

T = TypeVar("T")
REDACTED = "[redacted]"
TOKEN = r"\b(?:(?:sk|pk|rk)[-_]|hf_|gh[pousr]_|github_pat_|xox[abprs]-|glpat-|npm_|AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}"
WEB_TOKEN = r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
BLOCK = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[^-]{0,9}-----(?:(?!-----).){0,20000}(?:-----END [A-Z0-9 ]{0,60}-----)?"
NAME = r"(?:(?:api|access|secret|private|account|signing)[_-]?key|token|secret|password|passwd|credential)s?"
VALUE = r"(?:(?:bearer|basic) )?(?!(?:[\d.]+|null|none|true|false)\b)[^\s,;'\"\\(){}\[\]]{4,}"
KEY = re.compile(
    rf"(?is){TOKEN}|{WEB_TOKEN}|(\bbearer )(?=\S*\d)[\w.~+/=-]{{8,}}|(://[^\s/@:]{{0,99}}:)[^\s/@]{{1,999}}(?=@)|{BLOCK}"
    rf"|(?P<name>{NAME}[\\'\"]{{0,4}}\s{{0,4}}[=:]\s{{0,4}}[\\'\"]{{0,4}}){VALUE}"
)
"""Keys, found by their usual shapes or by the name before them. The name is kept."""
SETTING = re.compile(rf"(?i){TOKEN}|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""A key with a known shape, or a password in a URL. No setting may contain one."""
SECRET = re.compile(r"(?![A-Z_][A-Z0-9_]*$)(?=.*[A-Za-z])(?=.*\d)[\w.~+/=-]{12,}")
"""A value that looks like a secret. A setting with a secret-like name may hold only numbers and variable names."""
MIXED = re.compile(r"(?=[^\s\"']*[A-Za-z])(?=[^\s\"']*\d)[\w.~+/=-]{8,}")
"""In other tools' logs, a value after a secret-like name counts as a key only if it matches this."""
SECRET_NAME = re.compile("(?i)key|token|secret|passw|passphrase|credential|cookie|_p(?:wd|ass|at)$")
"""Pattern of the names of environment variables that hold keys."""
NUMBERS = {int, float, bool, type(None)}
LONG = 4096
"""Results for texts up to this length are cached."""
SHORTEST = 8
"""Shortest secret that is removed. A shorter one could occur in any text by chance."""
DETECTORS = {
    **{"aws": "AWSKey", "azure_storage_key": "AzureStorageKey", "discord": "DiscordBotToken", "openai": "OpenAI"},
    **{"github_token": "GitHubToken", "gitlab_token": "GitLabToken", "mailchimp": "Mailchimp"},
    **{"pypi_token": "PypiToken", "sendgrid": "SendGrid", "slack": "Slack"},
    **{"square_oauth": "SquareOAuth", "stripe": "Stripe", "telegram_token": "TelegramBotToken", "twilio": "TwilioKey"},
}
"""Detectors of detect-secrets that recognize a key by its shape.

Its other detectors are not used: those by entropy or names match ordinary ids, and two take quadratic time.
"""
RUN = re.compile(r"[^\s\"'<>]{16,}")
"""Text without spaces that is long enough to be a key. Only such text is passed to the detectors."""
SPELT = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}|(?<![\w.~+/=-])[\w.~+/=-]*(?:(?:%|\\u00)[0-9A-Fa-f]{2}[\w.~+/=-]*)+")
"""Text that may be an encoded key: base64, percent-encoding of URLs, or JSON escapes."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
"""Characters that control a terminal, change the reading direction, or are invisible."""
STRING = re.compile(r'"[A-Za-z]*":|"(?:[^"\\]|\\.)*"')
"""A string in JSON, or a key of an object that consists of letters only, as in captrain's records."""
MARKUP = re.compile(
    r"[\\|`*_\[\]~$]|(?<=\w):(?=//)|(?<=www)\.|^(?:#+(?=\s|$)|\+(?=\s)|=+(?=\s*$)|-(?=-)|\d{1,9}[.)](?=\s|$))"
)
"""Markdown markup in text that is already escaped for HTML. A backslash before the last character disables it."""
LONGEST_NAME = 120
"""Longest name of a file, in bytes; with endings it stays below the limit of 255."""


def _file_name(text: str) -> str:
    """Return the text if it is a safe file name.

    Raises:
        ValueError: it is not.
    """
    if not text or len(text.encode(errors="replace")) > LONGEST_NAME:
        raise ValueError(f"a name has 1 to {LONGEST_NAME} bytes")
    if not text.isprintable() or text[0] in ". -" or set(text) & set("/\\"):
        raise ValueError("a name has printable signs alone, no slash, and does not begin with a dot, space or dash")
    return text


FileName = Annotated[str, AfterValidator(_file_name)]
"""A name that becomes part of a path; it is checked when the record is read."""


def require_file_name(text: str, place: str) -> str:
    """Return the text if it can be a `FileName`.

    Args:
        text: the name.
        place: where the name was found, for the error message.

    Raises:
        UserError: the text is not a safe file name.
    """
    try:
        return _file_name(text)
    except ValueError as error:
        raise UserError(
            f"{place}: {plain(text[:LONGEST_NAME])!r} is not a name of a file ({error})", "rename it"
        ) from None


def leaves(value: object) -> Iterator[str]:
    """Yield the strings and numbers inside a JSON value, as text and in order."""
    if isinstance(value, str):  # most values are, and it takes least time to tell
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from leaves(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from leaves(element)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def plain(text: str) -> str:
    """Replace dangerous characters by escapes such as `\\x1b`, so that text cannot control a terminal or page.

    These are control characters, invisible characters, and characters that set the reading direction. Line breaks, tabs
    and spaces of any width are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        sign
        if sign.isprintable() or sign in "\n\t" or category(sign) == "Zs"
        else sign.encode("unicode_escape").decode()
        for sign in text
    )


def as_markdown(text: str) -> str:
    """Escape foreign text for Markdown, so that it neither breaks a table nor acts as markup."""
    return MARKUP.sub(lambda sign: f"{sign[0][:-1]}\\{sign[0][-1]}", html.escape(plain(text), quote=False))


def redacted(text: str, *secrets: str) -> str:
    """Remove keys from a text.

    Removed are text that looks like a key (also encoded in base64 or escaped), the given secrets, and the values of
    environment variables with secret-like names.
    """
    for secret in secrets:
        text = without(text.replace(secret, REDACTED) if secret else text, secret)
    return _without_keys(text, forms_of_environment())


def censored(value: T, *, shapes: bool = True) -> T:
    """Remove keys from all texts of a JSON value or a record. An unchanged record is returned as the same object.

    Args:
        value: JSON value or record.
        shapes: also remove text that looks like a key, not only the values of environment variables. A value after a
            secret-like name is removed only if it is long and has letters and digits. Short codes and passwords belong
            to the agent's task, and replaying its calls needs them.
    """
    forms = forms_of_environment()
    if not shapes:
        return _censored(value, without_secrets) if forms else value
    return _censored(value, lambda text: _without_keys(text, forms, MIXED))


def _censored(value: Any, clean: Callable[[str], str]) -> Any:
    kind = type(value)
    if kind is str:
        return clean(value)
    if kind is dict:
        return {clean(name): _censored(element, clean) for name, element in value.items()}
    if kind is list:
        # Lists of numbers (token ids, masks, log-probabilities) are most of a rollout.
        return value if NUMBERS.issuperset(map(type, value)) else [_censored(element, clean) for element in value]
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in value.model_fields_set}
        cleaned = _censored(fields, clean)
        return value if cleaned == fields else value.model_copy(update=cleaned)
    return value


def _without_keys(text: str, forms: tuple[str, ...], shape: re.Pattern[str] | None = None) -> str:
    if len(text) < SHORTEST:
        return text
    return (_searched if len(text) > LONG else _remembered)(text, forms, shape)


def _searched(text: str, forms: tuple[str, ...], shape: re.Pattern[str] | None) -> str:
    for form in forms:
        text = text.replace(form, REDACTED)
    text = KEY.sub(lambda match: _replaced(match, shape), text)
    if not RUN.search(text):
        return text
    text = RUN.sub(lambda run: _detectors().sub(REDACTED, run[0]), text)
    return SPELT.sub(lambda run: REDACTED if _hides_key(run[0]) else run[0], text)


_remembered = lru_cache(4096)(_searched)


def _replaced(match: re.Match[str], shape: re.Pattern[str] | None) -> str:
    if match["name"] and shape is not None and not shape.match(match[0].removeprefix(match["name"])):
        return match[0]
    return f"{match[match.lastindex] if match.lastindex else ''}{REDACTED}"


def _hides_key(run: str) -> bool:
    if "%" in run or "\\" in run:
        text = unquote(run.replace("\\u00", "%"))
    else:
        try:
            text = b64decode(run.rstrip("=").translate({45: "+", 95: "/"}) + "=" * (-len(run.rstrip("=")) % 4)).decode()
        except ValueError:
            return False
    return len(text) < len(run) and redacted(text) != text


@cache
def _detectors() -> re.Pattern[str]:
    """Return one pattern that joins the patterns of all `DETECTORS`."""
    patterns: list[re.Pattern[str]] = []
    for module, name in DETECTORS.items():  # importing takes a quarter of a second
        patterns += getattr(import_module(f"detect_secrets.plugins.{module}"), f"{name}Detector").denylist
    return re.compile(
        "|".join(f"(?{'i' if pattern.flags & re.IGNORECASE else ''}:{pattern.pattern})" for pattern in patterns)
    )


def without(text: str, secret: str) -> str:
    """Remove a secret from a text in all its encodings. Secrets shorter than `SHORTEST` are not removed."""
    if len(secret) >= SHORTEST:
        for form in _forms(secret):
            text = text.replace(form, REDACTED)
    return text


@lru_cache(256)
def _forms(value: str) -> tuple[str, ...]:
    """Return a value and its encodings, longest first.

    Encodings: URL, JSON, HTML, Markdown, hexadecimal, and base64 of the value alone or inside other bytes.
    """
    content = value.encode(errors="surrogateescape")
    forms = [value, quote(content, safe=""), quote_plus(content), dumps(value)[1:-1], html.escape(value)]
    forms += [as_markdown(value), content.hex(), content.hex().upper()]
    for shift, first in ((0, 0), (1, 2), (2, 3)):
        # Leave out the base64 characters that depend on the bytes before and after the value.
        last = -1 if (shift + len(content)) % 3 else None
        encoded = b64encode(bytes(shift) + content).decode().rstrip("=")[first:last]
        forms += [encoded, encoded.translate({43: "-", 47: "_"})]
    return tuple(sorted({*forms}, key=len, reverse=True))


def _secrets_of_environment() -> list[str]:
    """Return the values of environment variables with secret-like names, unless they name a file or a variable."""
    values = [os.environ.get(name, "").strip() for name in os.environ if _is_secret_name(name)]
    return [value for value in values if _is_long(value) and value not in os.environ and not _is_path(value)]


@lru_cache(1024)
def _is_secret_name(name: str) -> bool:
    return SECRET_NAME.search(name) is not None


def _is_long(value: str) -> bool:
    """Return whether a value is long enough to be removed. Short words and numbers occur in any text by chance."""
    return len(value) >= (SHORTEST if value.isalpha() or value.isdigit() else SHORTEST - 2)


@lru_cache(256)
def _is_path(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False


def forms_of_environment() -> tuple[str, ...]:
    """Return the values of environment variables with secret-like names, in all encodings (see `_forms`)."""
    return tuple(form for value in _secrets_of_environment() for form in _forms(value))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: "1 file", "2 files"."""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def without_secrets(text: str) -> str:
    """Remove the values of environment variables with secret-like names from a text, in all encodings.

    This is the last line of defence: all text that captrain writes or prints passes through here.
    """
    return _without_forms(text, forms_of_environment())


def _without_forms(text: str, forms: tuple[str, ...]) -> str:
    for form in forms:
        text = text.replace(form, REDACTED)
    return text


def json_without_secrets(text: str, forms: tuple[str, ...] | None = None) -> str:
    """Remove secrets of the environment from the strings in JSON text, and escape raw control characters.

    Args:
        text: JSON text.
        forms: result of `forms_of_environment`. Pass it if you clean many texts: reading the environment takes longer
            than cleaning a line.
    """
    forms = forms_of_environment() if forms is None else forms
    # None of these signs is printable, and the test for printable text takes a tenth of the search.
    if not text.isprintable() and CONTROLS.search(text):
        text = CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)
    if not any(form in text for form in forms):
        return text
    return STRING.sub(lambda match: match[0] if match[0].endswith(":") else _without_forms(match[0], forms), text)


def refuse_keys(overrides: Sequence[str]) -> None:
    """Check that no setting (key=value) holds text that looks like an API key.

    Raises:
        UserError: a setting does. The message does not show the key.
    """
    for override in overrides:
        name, _, value = override.partition("=")
        is_secret = bool(re.search(rf"(?i){NAME}$", name) and SECRET.fullmatch(value))
        if is_secret or SETTING.search(override) or without_secrets(value) != value:
            raise UserError(
                f"the setting {redacted(name)} holds what looks like a key, and would be written to files in git",
                "put the key into an environment variable and name the variable: policy.key=OPENAI_API_KEY; remove the "
                "key from where you typed it (params.yaml, the shell's history)",
            )


def refuse_keys_in(data: object, prefix: str = "") -> None:
    """Check all texts of a configuration with `refuse_keys`."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            refuse_keys_in(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(data, list):
        for value in data:
            refuse_keys_in(value, prefix)
    elif isinstance(data, str):
        refuse_keys([f"{prefix}={data}"])
