"""Answers of endpoints, bounded in bytes and seconds: whoever serves them may send without end."""

import time
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

LARGEST = 1 << 26
"""Bytes of an answer once it is unpacked; the largest with log-probabilities have some millions."""

PACKINGS = ("identity", "gzip", "deflate")
"""Codings of which a piece unpacks to megabytes at most."""


class BoundedTransport(httpx2.BaseTransport):
    """Transport that reads each answer whole, and gives up one that is too large or comes too slowly.

    Args:
        url: whose host is asked, through the proxy that the environment names for it.
        timeout: seconds from the request to the end of its answer.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts, proxies = urlsplit(url), getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if proxy_bypass(parts.hostname or ""):
            proxy = None
        limits = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)
        self._timeout, self._transport = timeout, httpx2.HTTPTransport(limits=limits, proxy=proxy)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and read its answer.

        Raises:
            httpx2.ReadError: the answer is too large, or packed in a way that was not asked for.
            httpx2.ReadTimeout: it takes too long, however steadily it comes.
        """
        start, body = time.monotonic(), bytearray()
        answer = self._transport.handle_request(request)
        try:
            if answer.headers.get("content-encoding", "identity") not in PACKINGS:
                raise httpx2.ReadError("the answer is packed in a way that was not asked for", request=request)
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > LARGEST:
                    raise httpx2.ReadError(f"the answer has more than {LARGEST >> 20} MiB", request=request)
                if time.monotonic() - start > self._timeout:
                    raise httpx2.ReadTimeout(f"the answer takes more than {self._timeout:g} s", request=request)
        finally:
            answer.close()
        coded = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in coded]
        return httpx2.Response(answer.status_code, headers=headers, content=bytes(body), extensions=answer.extensions)

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()
