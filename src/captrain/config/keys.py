"""Keys: known by their shape, by the name that they stand behind, or as the value of an environment variable.

What captrain writes or prints may hold text of others, who may echo a key: there it is taken out. What the user writes
into a configuration would be copied into results/spec.yaml and dvc.lock, which git keeps, and into Hydra's folders:
there it is refused before anything is written. A configuration names the variable that holds a key, never the key.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from captrain.errors import UserError

TOKEN = r"\b(?:(?:sk|pk|rk)-|hf_|gh[pousr]_|github_pat_|xox[abprs]-|glpat-|AKIA|AIza)[A-Za-z0-9_-]{12,}"
PASSWORD = r"(?<=:)[^\s:/@]{3,}(?=@[\w.-]+)"
NAME = r"(?<![A-Za-z])[\w.]*(?:api_?key|token|secret|password|passwd|credential)s?"
KEY = re.compile(rf"(?i){TOKEN}|(?<=bearer )[\w.~+/=-]{{8,}}|{PASSWORD}|({NAME}\s*[=:]\s*)(?![\d.]+\b)[^\s,;'\"]{{4,}}")
"""Keys by their usual shapes, or by the name that they stand behind."""
SETTING = re.compile(rf"(?i){TOKEN}|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""Pattern of a key by its shape or a password in an address, which no setting may hold, whatever its name."""
SECRET = re.compile(r"(?![A-Z_][A-Z0-9_]*$)(?=.*[A-Za-z])(?=.*\d)[\w.~+/=-]{12,}")
"""Pattern of a secret, which no setting may hold that is named as one: neither a number nor the name of a variable."""
SHORTEST = 8
"""Characters of a value that is looked for in its other spellings: shorter ones stand in any text."""


def redacted(text: str, *secrets: str) -> str:
    """Take out of a text what looks like a key, and secrets: those given, and the values of environment variables that
    are named as keys are."""
    for secret in secrets:
        text = text.replace(secret, "[redacted]") if secret else text
    values = [value for name, value in os.environ.items() if re.search(r"(?i)key|token|secret|password", name)]
    for value in (*secrets, *values):
        text = without(text, value)
    return KEY.sub(lambda match: f"{match[1] or ''}[redacted]", text)


def without(text: str, secret: str) -> str:
    """Take a secret out of a text, however it is spelt there; one that is too short to be any is left."""
    for form in _forms(secret) if len(secret) >= SHORTEST else ():
        text = text.replace(form, "[redacted]")
    return text


def _forms(value: str) -> Iterator[str]:
    """Yield a value as it is, and as an answer may echo it: quoted for an address, in JSON, base64, hexadecimal."""
    from base64 import b64encode
    from json import dumps
    from urllib.parse import quote

    yield value
    yield quote(value, safe="")
    yield dumps(value)[1:-1]
    yield b64encode(value.encode()).decode().rstrip("=")
    yield value.encode().hex()


def refuse_keys(overrides: Sequence[str]) -> None:
    """Refuse settings, as key=value, that hold what looks like a key.

    Raises:
        UserError: one does; the message does not show it.
    """
    for override in overrides:
        name, _, value = override.partition("=")
        is_secret = bool(re.fullmatch(rf"(?i)\+*{NAME}", name) and SECRET.fullmatch(value))
        if is_secret or SETTING.search(override) or _is_of_environment(value):
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
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                refuse_keys([f"{prefix}{name}={text}"])


def _is_of_environment(value: str) -> bool:
    names = [name for name in os.environ if re.search(r"(?i)key|token|secret|password", name)]
    return len(value) >= SHORTEST and any(os.environ[name] == value for name in names)
