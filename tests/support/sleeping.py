"""A server in vLLM's place that can sleep as vLLM does: it answers nothing then, and notes falling asleep and waking.

Run as `python sleeping.py MODEL ...`; the notes go to the file that `NOTES` names.
"""

import os
import sys
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from captrain.serving import server

FLAG = "--enable-sleep-mode"


class Sleeping:
    """The application of the embedded server, with the two paths of vLLM's development mode."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.asleep = app, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path in ("/sleep", "/wake_up"):
            with Path(os.environ["NOTES"]).open("a") as notes:
                notes.write(f"{path}?{scope['query_string'].decode()}\n")
            self.asleep = path == "/sleep"
            await JSONResponse({})(scope, receive, send)
        elif self.asleep and path.startswith("/v1/completions"):
            await JSONResponse({"error": {"message": "asleep"}}, 400)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


if __name__ == "__main__":
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1" and FLAG in sys.argv
    sys.argv.remove(FLAG)
    plain = server.application
    server.__dict__["application"] = lambda *arguments: Sleeping(plain(*arguments))
    server.main()
