"""The pages can be read: their length, the length of their sentences, and the share of sentences that negate."""

import re
import statistics

import pytest
from support.pages import PAGES, ROOT, sentences_of

from captrain.capabilities.rules import CAUSES

WORDS = {
    "index": 250, "diagnose": 800, "your-logs": 400, "no-references": 400, "analyst": 400, "clauses": 400,
    "synthesize": 400, "reading-diagnosis": 600, "validity": 1200,
    "install": 300, "concepts": 700, "troubleshooting": 800,
    "paper": 700, "paper-setting": 500, "sweeps": 500, "slurm": 500, "gpus": 500, "report": 600, "results": 1200,
    "smollm": 900, "own-benchmark": 900, "project": 400, "model": 400, "vllm": 400, "benchmark": 400, "tau2": 400,
    "mixture": 600, "verifiers": 400, "serve": 400, "hub": 400, "stages": 800,
    "environments": 400, "examination": 1100, "sandbox": 300, "export": 300, "derived": 400,
    "honesty": 800, "security": 800, "limits": 700,
}  # fmt: skip
"""The most words of a page, output of commands left out."""
TUTORIALS = ("README", "install", "diagnose", "paper", "own-benchmark")
NEGATION = re.compile(r"\b(?:not|no|none|never|nothing|without|neither|nor)\b", re.IGNORECASE)


@pytest.mark.parametrize("name", WORDS)
def test_a_page_has_at_most_its_words(name: str) -> None:
    text = re.sub(r"^```text$.*?^```$", "", (ROOT / f"docs/{name}.md").read_text("utf-8"), flags=re.M | re.S)
    assert sum(bool(re.search("[A-Za-z]", word)) for word in text.split()) <= WORDS[name]


@pytest.mark.parametrize("name", TUTORIALS)
def test_sentences_for_newcomers_are_short(name: str) -> None:
    [page] = [page for page in PAGES if page.stem == name]
    lengths = [len(sentence.split()) for sentence in sentences_of(page.read_text("utf-8"))]
    assert max(lengths) <= 35 and statistics.median(lengths) <= 16


def test_at_most_a_third_of_the_sentences_of_docs_negate() -> None:
    sentences = [
        sentence for page in PAGES for sentence in sentences_of(page.read_text("utf-8")) if page.stem != "README"
    ]
    assert sum(bool(NEGATION.search(sentence)) for sentence in sentences) <= len(sentences) / 3


def test_the_glossary_has_every_capability_with_its_title() -> None:
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "docs/concepts.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted((name, kind.name) for name, kind in CAUSES.items())


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "Makefile"]
    code = re.sub(r'"\s*f?"', "", "\n".join(path.read_text("utf-8") for path in sources))
    messages = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert len(messages) > 40
    assert [part for message in messages for part in message.split(" … ") if part not in code] == []
