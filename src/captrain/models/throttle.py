"""Pauses that servers ask for, and the one gate at which all threads of a process wait for them.

The `openai` library and `tenacity` know pauses of single requests (the library none above a minute). Limits are
those of a key, though: what one thread is told holds all of them back, or each would spend its attempts on finding
it out.
"""

import re
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from captrain.errors import InfrastructureError

PATIENCE = 3600.0
"""Seconds beyond which a server that says when to come back is not waited for."""
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Throttle:
    """Gate that holds threads back until a server may be asked again."""

    def __init__(self) -> None:
        self._not_before = 0.0
        self._lock = threading.Lock()

    def hold(self, headers: Mapping[str, str]) -> None:
        """Hold all threads back for as long as these headers ask."""
        seconds = requested_pause(headers)
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds until the server may be asked again."""
        return max(0.0, self._not_before - time.monotonic())

    def wait(self, stop: threading.Event) -> None:
        """Return when the server may be asked again, or `stop` is set.

        Raises:
            InfrastructureError: the pause is longer than `PATIENCE`.
        """
        # Again after each wait, because another thread may have been told to wait for longer.
        while (seconds := self.remaining()) and not stop.is_set():
            if seconds > PATIENCE:
                raise InfrastructureError(f"the model server asks for a pause of {seconds:.0f} s")
            stop.wait(seconds)


def requested_pause(headers: Mapping[str, str]) -> float:
    """Read the seconds for which a server asks to be left alone: by Retry-After, or because nothing remains of its
    limits until they are reset. 0 where it does not, or not in a form that is known."""
    pauses = [_seconds(headers.get("retry-after", ""))]
    for kind in ("requests", "tokens"):
        if headers.get(f"x-ratelimit-remaining-{kind}", "").strip() == "0":
            pauses.append(_seconds(headers.get(f"x-ratelimit-reset-{kind}", "")))
    return max(pauses)


def _seconds(text: str) -> float:
    """Parse seconds in "20", "6m0s" or "120ms", or until an HTTP date."""
    if re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?(ms|[smhd]))+", text.strip()):
        return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|[smhd])", text))
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
