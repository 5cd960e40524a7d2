"""The report of a diagnosis in a browser. CAPTRAIN_PICTURES=docs takes the pictures of docs/diagnose.md anew."""

import os
import re
from pathlib import Path

import pytest
from PIL import Image
from support.browser import Browser
from typer.testing import CliRunner

from captrain.cli.app import app

ROOT = Path(__file__).parents[2]
MOST = 200_000
"""Bytes of all pictures together."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on the file that ships, with the commands as on the page."""
    out = tmp_path_factory.mktemp("desk") / "diagnosis"
    result = CliRunner().invoke(app, ["diagnose", str(ROOT / "docs/examples/servicedesk.jsonl"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    page = out / "report.html"
    page.write_text(page.read_text().replace(str(out), "diagnosis"))
    return page


def take(browser: Browser, path: Path) -> None:
    """A picture in few colours, so that the repository stays light."""
    browser.picture(path)
    Image.open(path).quantize(64).save(path, optimize=True)


@pytest.mark.needs("browser")
def test_a_newcomer_sees_what_to_fix_and_goes_from_a_cause_to_the_message_that_fails_beside_the_reference(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("CAPTRAIN_PICTURES", tmp_path))
    browser.events.clear()
    browser.screen(1000, 720)
    browser.open(page.as_uri())
    assert "unexplained" in browser.run("document.querySelector('.facts').innerText")
    first = browser.run("document.querySelector('#fixes + ol').innerText")
    assert "update_zip with the wrong zip: 18 of 49 failures" in first
    assert browser.run("document.querySelector('#fixes + ol').getBoundingClientRect().bottom") <= 720, "one screen"
    take(browser, pictures / "diagnose-fixes.png")
    browser.run("document.querySelectorAll('#tables h2')[2].scrollIntoView()")
    take(browser, pictures / "diagnose-tables.png")
    browser.run("document.querySelector('a[href=\"#cause-wrong_argument\"]').click()")
    browser.run("document.querySelector('#cause-wrong_argument + details').open = true")
    browser.run("document.querySelector('#cause-wrong_argument').scrollIntoView()")
    failing = browser.run("document.querySelector('#cause-wrong_argument + details .failing').innerText")
    assert "wrong_argument (Wrong argument): " in failing and "update_zip(" in failing
    boxes = "[...document.querySelectorAll('#cause-wrong_argument + details .pair > div')]"
    tops = browser.run(f"{boxes}.map((box) => box.getBoundingClientRect().top)")
    assert len(tops) == 2 and tops[0] == tops[1], "what happened and the reference stand side by side"
    take(browser, pictures / "diagnose-failure.png")
    assert browser.faults() == []
    assert 10_000 < sum(path.stat().st_size for path in pictures.glob("diagnose-*.png")) < MOST


@pytest.mark.needs("browser")
def test_an_example_leads_to_its_failure_and_the_failures_of_one_cause_can_be_shown_alone(
    browser: Browser, page: Path
) -> None:
    browser.screen(1000, 720)
    browser.open(page.as_uri())
    example = "document.querySelector('#tables td a')"
    place = browser.run(f"{example}.innerText.split(', message')[0]")
    browser.run(f"{example}.click()")
    assert browser.run("document.querySelector('details:target summary').innerText").startswith(place)
    browser.open(page.as_uri())
    shown = "[...document.querySelectorAll('section.failures')].filter((part) => part.checkVisibility()).length"
    assert browser.run(shown) > 1
    browser.run("document.querySelector('#show-missing_write').click()")
    assert browser.run(shown) == 1
    browser.run("document.querySelector('a[href=\"#cause-wrong_argument\"]').click()")
    assert browser.run(shown) == 2, "what a link leads to is shown, too"
    assert browser.run("document.querySelector('th[title]').title.length") > 10
    assert browser.run("getComputedStyle(document.querySelector('td.share')).getPropertyValue('--share')") == "37%"
    assert browser.faults() == []


@pytest.mark.needs("browser")
def test_the_page_does_not_scroll_sideways_on_a_phone_in_the_dark(browser: Browser, page: Path) -> None:
    browser.screen(360, 740, dark=True)
    browser.open(page.as_uri())
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_the_pictures_on_the_page_are_there_and_small() -> None:
    pictures = [*(ROOT / "docs").glob("diagnose-*.png")]
    pages = "".join(
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("diagnose", "reading-diagnosis")
    )
    assert len(pictures) == 3 and sum(path.stat().st_size for path in pictures) < MOST
    assert {path.name for path in pictures} <= {*re.findall(r"\((diagnose-\w+\.png)\)", pages)}


@pytest.mark.needs("browser")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_has_no_serious_barrier_to_a_reader_with_a_screen_reader_or_weak_eyes(
    browser: Browser, page: Path, dark: bool
) -> None:
    browser.screen(1000, 720, dark)
    browser.open(page.as_uri())
    browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert browser.barriers() == []
