"""`captrain serve --route`: one URL in front of a server with the base and its adapters.

Each chat completion is passed to the adapter that `choose` names for its messages; the answer names it in the header
`HEADER`. Everything else, streams included, passes unchanged. The upstream server is vLLM, or the engine in this
process without a socket. Missing adapters are loaded under vLLM's path when first needed.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import httpx2
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

from captrain.errors import UserError
from captrain.records import JsonObject, Message
from captrain.serving.openai_schemas import RequestMessage
from captrain.serving.protection import Protected, Protection, new_application

HEADER = "x-captrain-adapter"
PATIENCE = httpx2.Timeout(600.0, connect=10.0)
EXCERPT = 500
MESSAGES = TypeAdapter(list[RequestMessage])
Body = Annotated[JsonObject, BeforeValidator(lambda body: from_json(body) if isinstance(body, bytes) else body)]
"""JSON, whatever its content type."""
Choose = Callable[[list[Message]], str]
"""Returns the name of the arm that answers these messages."""


class RoutedEndpoint:
    """An endpoint that routes each chat completion to an adapter of an upstream server.

    Args:
        upstream: client of the upstream server; its base URL ends in /v1.
        choose: returns the arm for a conversation.
        folder_of: returns the folder of an arm's adapter, or None for the base.
        name: name of the routed agent.
        base: the upstream server's name of the model without an adapter.
    """

    def __init__(
        self,
        upstream: httpx2.AsyncClient,
        choose: Choose,
        folder_of: Callable[[str], Path | None],
        name: str,
        base: str,
    ) -> None:
        self.upstream, self.choose, self.folder_of = upstream, choose, folder_of
        self.name, self.base = name, base
        self._loading = asyncio.Lock()
        self._models: set[str] | None = None

    async def complete(self, body: Body) -> Response:
        """Route a chat completion to an arm, and return that arm's answer.

        Raises:
            HTTPException: the request is malformed, or the upstream server does not answer it.
        """
        try:
            messages = [message.message() for message in MESSAGES.validate_python(body.get("messages"))]
        except ValidationError as error:
            raise HTTPException(400, f"messages: {error.errors()[0]['msg']}") from None
        if body.get("model", self.name) != self.name:
            raise HTTPException(404, f"there is no model {body['model']!r}; there is {self.name}")
        try:
            arm = await asyncio.to_thread(self.choose, messages)
            model = await self._served(arm)
            try:
                request = self.upstream.build_request("POST", "chat/completions", json={**body, "model": model})
            except ValueError as error:  # NaN, or half a character
                raise HTTPException(400, f"body: {error}") from None
            answer = await self.upstream.send(request, stream=True)
        except UserError as error:
            raise HTTPException(502, str(error)) from None
        except httpx2.HTTPError as error:
            raise HTTPException(502, _silent(error)) from None
        passed = ("content-type", "retry-after")
        headers = {HEADER: arm, **{name: answer.headers[name] for name in passed if name in answer.headers}}
        return StreamingResponse(
            answer.aiter_bytes(), answer.status_code, headers=headers, background=BackgroundTask(answer.aclose)
        )

    async def _served(self, arm: str) -> str:
        """Return the upstream server's name of an arm. Its adapter is loaded first if the server lacks it."""
        folder = await asyncio.to_thread(self.folder_of, arm)
        if folder is None:
            return self.base
        async with self._loading:
            if self._models is None:
                listing = await self.upstream.get("models")
                self._models = {str(model["id"]) for model in listing.raise_for_status().json()["data"]}
            if arm not in self._models:
                request = {"lora_name": arm, "lora_path": str(folder.resolve())}
                answer = await self.upstream.post("load_lora_adapter", json=request)
                if answer.is_error:
                    raise UserError(
                        f"the server behind this one does not load adapter {arm}: {answer.text[:EXCERPT]}",
                        f"start it with --lora-modules '{arm}={folder}', or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                    )
                self._models.add(arm)
        return arm

    def application(self, protection: Protection) -> Protected:
        """Build the HTTP application with its protection."""
        app = new_application(self.upstream.aclose)
        app.post("/v1/chat/completions")(self.complete)

        @app.get("/health")
        async def health() -> Response:
            try:
                answer = await self.upstream.get("models")
            except httpx2.HTTPError as error:
                raise HTTPException(503, _silent(error)) from None
            return JSONResponse({}, 503 if answer.is_error else 200)

        @app.get("/v1/models")
        async def models() -> dict[str, object]:
            model = {"id": self.name, "object": "model", "created": 0, "owned_by": "captrain"}
            return {"object": "list", "data": [model]}

        return Protected(app, protection)


def _silent(error: httpx2.HTTPError) -> str:
    return f"the server behind this one does not answer ({type(error).__name__}: {error})"
