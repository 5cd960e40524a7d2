"""Text of logs is text: no markup, no control characters and no keys of the environment in any file or output."""

import base64
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from markdown_it import MarkdownIt
from support.finished import Captrain

PAYLOADS = [
    "![x](http://tracker.example/x.png)",
    "[click](javascript:alert(1)) http://tracker.example www.tracker.example",
    "\\[a](http://tracker.example) \\![x](http://tracker.example/x.png) \\`b`",
    "a|b \\| c || d",
    "`code` ``two`` ```three",
    "<img src=x onerror=alert(1)><script>alert(1)</script><!-- &lt;b&gt;",
    "# heading\n\n## heading\r\n> quote\n- item\n1. item\n---\n***\n~~~\n    block",
    "**bold** __bold__ *a* _b_ ~~gone~~ $x$",
    "[ref]: http://tracker.example\n[ref]",
    "esc \x1b[2J\x1b]0;title\x07 nul \x00 bell \x07 c1 \x9b31m del \x7f cr \r bs \b vt \x0b ff \x0c",
    "bidi \u202egnp.exe\u202c \u2066a\u2069 \u200fmark \u061c bom \ufeff line \u2028 zero\u200bwidth",
]
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
RENDERED = re.compile(r"<(?!/?(?:h1|h2|p|ol|ul|li|strong|em|code|blockquote|table|thead|tbody|tr|th|td)\b)")


def log_of(payload: str) -> str:
    """A log with a text in every field, in which each other rollout fails."""
    rows = []
    for number in range(24):
        calls = [{"id": "c", "function": {"name": f"look {payload}", "arguments": json.dumps({payload: payload})}}]
        messages = [
            {"role": "system", "content": payload},
            {"role": "user", "content": f"{payload} {number}"},
            {"role": "assistant", "content": payload, "tool_calls": calls[: number % 2]},
            {"role": "tool", "tool_call_id": "c", "content": payload},
            {"role": "assistant", "content": payload},
        ]
        rows.append(
            {
                "messages": messages,
                "reward": number % 2,
                "task_id": f"{payload} {number // 4}",
                "model": f"{payload} {number % 4 < 2}",
                "reference": [{"role": "assistant", "content": payload, "tool_calls": calls}],
                "tools": [{"type": "function", "function": {"name": f"look {payload}", "description": payload}}],
            }
        )
    rows.append({"messages": [{"role": payload}]})
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markup_and_control_characters_of_a_log_are_text_everywhere(
    payload: str, tmp_path: Path, captrain: Captrain
) -> None:
    (tmp_path / "log.jsonl").write_text(log_of(payload), encoding="utf-8")
    status, out, err = captrain(tmp_path, "diagnose", "log.jsonl", "--out", "out")
    assert status == 0 and not CONTROLS.search(out + err)
    texts = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert not [name for name, text in texts.items() if CONTROLS.search(text)]
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(texts["report.md"])
    assert not RENDERED.search(page) and "javascript:" not in "".join(re.findall(r"<[^>]*>", page))
    ours = {"Why these rollouts failed, and what the agent lacks"}
    assert {*re.findall(r"<h1>(.*?)</h1>", page)} == ours
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        cells = [row.count("<td") + row.count("<th>") + row.count("<th ") for row in table.split("<tr>")[1:]]
        assert len({*cells}) == 1, table


SECRET = "hunter2/of+the=environment"
SHORT = "hunter2"
SPELLINGS = {
    "as it is": SECRET,
    "quoted": quote(SECRET, safe=""),
    "base64": base64.b64encode(SECRET.encode()).decode(),
    "base64 amid others": base64.b64encode(f"user:{SECRET}:x".encode()).decode(),
    "JSON": json.dumps({"a": SECRET}),
    "hexadecimal": SECRET.encode().hex(),
    "short": SHORT,
}


@pytest.mark.parametrize(
    "name", ["MY_DB_PASSWORD", "AZURE_CREDENTIAL", "SOME_TOKEN", "API_KEY", "CLIENT_SECRET", "DB_PASS"]
)
def test_a_value_of_a_variable_that_holds_a_key_is_written_nowhere(
    name: str, tmp_path: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv(f"SHORT_{name}", SHORT)
    words = " and ".join(SPELLINGS.values())
    (tmp_path / f"{SHORT}.jsonl").write_text(log_of(words), encoding="utf-8")
    status, out, err = captrain(tmp_path, "diagnose", f"{SHORT}.jsonl", "--out", "out", "--keep-secrets")
    assert status == 0, err
    texts = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()} | {
        "screen": out + err
    }
    signs = {
        SHORT,
        SPELLINGS["quoted"],
        SPELLINGS["base64"][:-4],
        "aHVudGVyMi9vZit0",
        "h1bnRlcjIvb2YrdGhl",
        SPELLINGS["hexadecimal"],
    }
    assert not [(file, sign) for file, text in texts.items() for sign in signs if sign in text]
    assert "[redacted]" in texts["rollouts.jsonl"]
    for line in texts["rollouts.jsonl"].splitlines():
        json.loads(line)


def test_a_word_as_a_key_leaves_files_that_can_be_read(
    tmp_path: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "messages")
    (tmp_path / "log.jsonl").write_text(log_of("a text"), encoding="utf-8")
    assert captrain(tmp_path, "diagnose", "log.jsonl", "--out", "out")[0] == 0
    assert captrain(tmp_path, "diagnose", "out/rollouts.jsonl", "--out", "again")[0] == 0
