"""Text of anyone's: made fit for paths, terminals and pages, and keys taken out of it.

It is checked or escaped once, where it comes in or goes out. Keys are known by their shape, by the name that they stand
behind, or as the value of an environment variable. What captrain writes or prints may hold text of others, who may echo
a key: there it is taken out. What the user writes into a configuration would be copied into results/spec.yaml and
dvc.lock, which git keeps, and into Hydra's folders: there it is refused before anything is written. A configuration
names the variable that holds a key, never the key.
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
"""Keys by their usual shapes, or by the name that they stand behind, which stays."""
SETTING = re.compile(rf"(?i){TOKEN}|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""Pattern of a key by its shape or a password in an address, which no setting may hold, whatever its name."""
SECRET = re.compile(r"(?![A-Z_][A-Z0-9_]*$)(?=.*[A-Za-z])(?=.*\d)[\w.~+/=-]{12,}")
"""Pattern of a secret, which no setting may hold that is named as one: neither a number nor the name of a variable."""
MIXED = re.compile(r"(?=[^\s\"']*[A-Za-z])(?=[^\s\"']*\d)[\w.~+/=-]{8,}")
"""Pattern of what stands behind a name in other people's logs, and is taken for a key."""
SECRET_NAME = re.compile("(?i)key|token|secret|password")
NUMBERS = {int, float, bool, type(None)}
LONG = 4096
"""Characters beyond which a text is searched each time it comes, and not remembered."""
SHORTEST = 8
"""Characters of a value that is looked for in its other spellings: shorter ones stand in any text."""
DETECTORS = {
    **{"aws": "AWSKey", "azure_storage_key": "AzureStorageKey", "discord": "DiscordBotToken", "openai": "OpenAI"},
    **{"github_token": "GitHubToken", "gitlab_token": "GitLabToken", "mailchimp": "Mailchimp"},
    **{"pypi_token": "PypiToken", "sendgrid": "SendGrid", "slack": "Slack"},
    **{"square_oauth": "SquareOAuth", "stripe": "Stripe", "telegram_token": "TelegramBotToken", "twilio": "TwilioKey"},
}
"""Detectors of detect-secrets that know a key by its own shape; those by entropy or by names take ordinary ids, and two
take a time that grows as the square of a text."""
RUN = re.compile(r"[^\s\"'<>]{16,}")
"""Shortest text without a blank that a key of the detectors fits in."""
SPELT = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}|(?<![\w.~+/=-])[\w.~+/=-]*(?:(?:%|\\u00)[0-9A-Fa-f]{2}[\w.~+/=-]*)+")
"""Text that may be another one in base64, or quoted for an address or for JSON."""
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


def redacted(text: str, *secrets: str) -> str:
    """Take out of a text what looks like a key, in base64 and quoted, too, and secrets: those given, and the values of
    environment variables that are named as keys are."""
    for secret in secrets:
        text = without(text.replace(secret, REDACTED) if secret else text, secret)
    return _without_keys(text, _forms_of_environment())


def censored(value: T) -> T:
    """Take what looks like a key out of all texts of a JSON value or a record; a record itself where there is none.

    What stands behind a name goes only if it is as long and as mixed as a key: a code or a password that an agent was
    told is part of its task, and a world that replays the call needs it.
    """
    return _censored(value, _forms_of_environment())


def _censored(value: Any, forms: tuple[str, ...]) -> Any:
    kind = type(value)
    if kind is str:
        return _without_keys(value, forms, MIXED)
    if kind is dict:
        return {_without_keys(name, forms, MIXED): _censored(element, forms) for name, element in value.items()}
    if kind is list:
        # Token ids, masks and log-probabilities are most of a rollout.
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
    """Join the patterns of the detectors to one."""
    patterns: list[re.Pattern[str]] = []
    for module, name in DETECTORS.items():  # a quarter of a second to import
        patterns += getattr(import_module(f"detect_secrets.plugins.{module}"), f"{name}Detector").denylist
    return re.compile(
        "|".join(f"(?{'i' if pattern.flags & re.IGNORECASE else ''}:{pattern.pattern})" for pattern in patterns)
    )


def without(text: str, secret: str) -> str:
    """Take a secret out of a text, however it is spelt there; one that is too short to be any is left."""
    for form in _forms(secret) if len(secret) >= SHORTEST else ():
        text = text.replace(form, REDACTED)
    return text


def _forms(value: str) -> Iterator[str]:
    """Yield a value as it is, and as an answer may echo it: quoted for an address, in JSON, base64, hexadecimal."""
    yield value
    yield quote(value, safe="")
    yield dumps(value)[1:-1]
    yield b64encode(value.encode()).decode().rstrip("=")
    yield value.encode().hex()


def _secrets_of_environment() -> list[str]:
    """List the values of environment variables that are named as keys are."""
    return [value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST]


def _forms_of_environment() -> tuple[str, ...]:
    return tuple(form for value in _secrets_of_environment() for form in dict.fromkeys(_forms(value)))


def refuse_keys(overrides: Sequence[str]) -> None:
    """Refuse settings, as key=value, that hold what looks like a key.

    Raises:
        UserError: one does; the message does not show it.
    """
    for override in overrides:
        name, _, value = override.partition("=")
        is_secret = bool(re.search(rf"(?i){NAME}$", name) and SECRET.fullmatch(value))
        if is_secret or SETTING.search(override) or value in _secrets_of_environment():
            raise UserError(
                f"the setting {redacted(name)} holds what looks like a key, and would be written into files that are "
                "kept",
                "put it into an environment variable, and name that: policy.key=OPENAI_API_KEY; where it was typed, "
                "take it out (params.yaml, the shell's history)",
            )


def refuse_keys_in(data: Mapping[str, object], prefix: str = "") -> None:
    """Refuse keys in every text of a configuration."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            refuse_keys_in(value, f"{prefix}{name}.")
        texts = value if isinstance(value, list) else [value]
        refuse_keys([f"{prefix}{name}={text}" for text in texts if isinstance(text, str)])
