"""Errors of an endpoint: redirections."""

import pytest
from support.answering import SECRET, Answering

from captrain.errors import UserError
from captrain.models.endpoint import Endpoint


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_names_its_target_and_the_setting_to_change(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    target = "https://models.example/context_length/v1/chat/completions"
    with Answering(lambda _: (status, b"moved", {"Location": f"{target}?key={SECRET}"})) as server:
        server.use(monkeypatch)
        model = Endpoint("m", endpoint="OPENAI_BASE_URL", key="OPENAI_API_KEY", retries=2, timeout=30)
        with pytest.raises(UserError) as refused:
            model.chat(messages=[{"role": "user", "content": "Hi"}])
    assert refused.value.problem.startswith("the endpoint named by OPENAI_BASE_URL redirects requests")
    assert f"{status}: to {target}" in refused.value.problem and SECRET not in str(refused.value)
    assert "set OPENAI_BASE_URL to the base URL of the target" in str(refused.value)
    assert len(server.requests) == 1
