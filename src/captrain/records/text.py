"""Foreign text: made safe for paths, terminals and pages, with keys removed.

Text is checked or escaped once, where it enters or leaves. A key is recognized by its shape, by the name before it, or
as the value of an environment variable. In text that captrain writes or prints, keys are removed: a server may echo
one. In a configuration a key is refused before anything is written, because it would be copied to results/spec.yaml,
dvc.lock (both in git) and Hydra's folders. A configuration names the variable that holds a key, never the key.
"""

import html
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from json import dumps
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

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
"""Keys by their usual shapes, or by the name before them, which stays."""
SETTING = re.compile(rf"(?i){TOKEN}|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""A key by its shape, or a password in an address: no setting may hold it."""
SECRET = re.compile(r"(?![A-Z_][A-Z0-9_]*$)(?=.*[A-Za-z])(?=.*\d)[\w.~+/=-]{12,}")
"""A secret that a setting named like one may not hold: neither a number nor the name of a variable."""
MIXED = re.compile(r"(?=[^\s\"']*[A-Za-z])(?=[^\s\"']*\d)[\w.~+/=-]{8,}")
"""A value behind a key's name that counts as a key in other people's logs."""
SECRET_NAME = re.compile("(?i)key|token|secret|password")
NUMBERS = {int, float, bool, type(None)}
LONG = 4096
"""Longer texts are searched every time, without a cache."""
SHORTEST = 8
"""Shortest value that is searched in other spellings; a shorter one may occur in any text."""
DETECTORS = {
    **{"aws": "AWSKey", "azure_storage_key": "AzureStorageKey", "discord": "DiscordBotToken", "openai": "OpenAI"},
    **{"github_token": "GitHubToken", "gitlab_token": "GitLabToken", "mailchimp": "Mailchimp"},
    **{"pypi_token": "PypiToken", "sendgrid": "SendGrid", "slack": "Slack"},
    **{"square_oauth": "SquareOAuth", "stripe": "Stripe", "telegram_token": "TelegramBotToken", "twilio": "TwilioKey"},
}
"""Detectors of detect-secrets that recognize a key by its own shape. Those by entropy or names match ordinary ids, and
two take quadratic time."""
RUN = re.compile(r"[^\s\"'<>]{16,}")
"""Text without blanks that is long enough for a key of the detectors."""
SPELT = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}|(?<![\w.~+/=-])[\w.~+/=-]*(?:(?:%|\\u00)[0-9A-Fa-f]{2}[\w.~+/=-]*)+")
"""Text that may be encoded in base64, or quoted for an address or for JSON."""
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
        place: where it stands, for the message.

    Raises:
        UserError: it cannot.
    """
    try:
        return _file_name(text)
    except ValueError as error:
        raise UserError(
            f"{place}: {plain(text[:LONGEST_NAME])!r} is not a name of a file ({error})", "rename it"
        ) from None


def leaves(value: object) -> Iterator[str]:
    """Yield the strings and numbers inside a JSON value, as text and in order."""
    if isinstance(value, Mapping):
        for element in value.values():
            yield from leaves(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from leaves(element)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def plain(text: str) -> str:
    """Replace characters that are neither printable nor a line break or tab, so that foreign text cannot control the
    terminal."""
    return (
        text
        if text.isprintable()
        else "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
    )


def as_markdown(text: str) -> str:
    """Escape foreign text for Markdown, so that it neither breaks a table nor acts as markup."""
    return html.escape(plain(text), quote=False).translate({ord(sign): f"\\{sign}" for sign in "|`*_[]"})


def redacted(text: str, *secrets: str) -> str:
    """Remove from a text what looks like a key (also in base64 or quoted), the given secrets, and the values of
    environment variables with names like a key's."""
    for secret in secrets:
        text = without(text.replace(secret, REDACTED) if secret else text, secret)
    return _without_keys(text, _forms_of_environment())


def censored(value: T) -> T:
    """Remove what looks like a key from all texts of a JSON value or a record; an unchanged record is returned itself.

    A value behind a name is removed only if it is long and mixed like a key: a code or password that the agent was told
    belongs to its task, and replaying the call needs it.
    """
    return _censored(value, _forms_of_environment())


def _censored(value: Any, forms: tuple[str, ...]) -> Any:
    kind = type(value)
    if kind is str:
        return _without_keys(value, forms, MIXED)
    if kind is dict:
        return {_without_keys(name, forms, MIXED): _censored(element, forms) for name, element in value.items()}
    if kind is list:
        # Lists of numbers (token ids, masks, log-probabilities) are most of a rollout.
        return value if NUMBERS.issuperset(map(type, value)) else [_censored(element, forms) for element in value]
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in value.model_fields_set}
        clean = _censored(fields, forms)
        return value if clean == fields else value.model_copy(update=clean)
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
    """Join the patterns of the detectors."""
    patterns: list[re.Pattern[str]] = []
    for module, name in DETECTORS.items():  # importing takes a quarter of a second
        patterns += getattr(import_module(f"detect_secrets.plugins.{module}"), f"{name}Detector").denylist
    return re.compile(
        "|".join(f"(?{'i' if pattern.flags & re.IGNORECASE else ''}:{pattern.pattern})" for pattern in patterns)
    )


def without(text: str, secret: str) -> str:
    """Remove a secret from a text in all its spellings, unless it is shorter than `SHORTEST`."""
    if len(secret) >= SHORTEST:
        for form in _forms(secret):
            text = text.replace(form, REDACTED)
    return text


def _forms(value: str) -> Iterator[str]:
    """Yield a value and the forms in which it may be echoed: quoted for an address, JSON, base64, hexadecimal."""
    yield value
    yield quote(value, safe="")
    yield dumps(value)[1:-1]
    yield b64encode(value.encode()).decode().rstrip("=")
    yield value.encode().hex()


def _secrets_of_environment() -> list[str]:
    """List the values of environment variables with names like a key's."""
    return [value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST]


def _forms_of_environment() -> tuple[str, ...]:
    return tuple(form for value in _secrets_of_environment() for form in dict.fromkeys(_forms(value)))


def refuse_keys(overrides: Sequence[str]) -> None:
    """Refuse settings (key=value) that hold what looks like a key.

    Raises:
        UserError: one does; the message does not show the key.
    """
    for override in overrides:
        name, _, value = override.partition("=")
        is_secret = bool(re.search(rf"(?i){NAME}$", name) and SECRET.fullmatch(value))
        if is_secret or SETTING.search(override) or value in _secrets_of_environment():
            raise UserError(
                f"the setting {redacted(name)} holds what looks like a key, and would be written to files in git",
                "put the key into an environment variable and name the variable: policy.key=OPENAI_API_KEY; remove the "
                "key from where you typed it (params.yaml, the shell's history)",
            )


def refuse_keys_in(data: Mapping[str, object], prefix: str = "") -> None:
    """Refuse keys in all texts of a configuration."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            refuse_keys_in(value, f"{prefix}{name}.")
        texts = value if isinstance(value, list) else [value]
        refuse_keys([f"{prefix}{name}={text}" for text in texts if isinstance(text, str)])
