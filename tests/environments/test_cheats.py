"""Cheats fail their passports, and honest environments pass."""

from pathlib import Path

import pytest
from support.cheats import CHEATS, HARMLESS, IN_WORDS, PASSING, cheat
from support.honest import HONEST_NAMES, honest, tools_of
from support.hostile import PAGE
from support.needs import further

from captrain.benchmarks import load_benchmark
from captrain.contract import load_file
from captrain.environments.evidence import Standard, make_standard
from captrain.environments.leakage import normalised
from captrain.environments.passport import run_checks
from captrain.records import CheckResult
from captrain.run import compose_spec

DEFAULT = compose_spec("default", 0, [], Path(__file__).parents[2] / "conf")
AGAINST = make_standard(load_benchmark(DEFAULT.benchmark), DEFAULT.evaluation.tasks, DEFAULT.environments)

FIRST = {meant: name for name, (_, _, meant) in reversed(CHEATS.items())}
"""The first cheat for each check."""
MANY = "structures among the tasks"
ALWAYS = {*FIRST.values(), "zip_denial_wrap", *IN_WORDS}
"""Cheats of every run: those, one that only the learner finds, and those whose script is known."""


def examined(folder: Path, text: str, tools: list[dict[str, object]], seeds: int, seed: int = 0) -> list[CheckResult]:
    path = folder / "written.py"
    path.write_text(text)
    against = Standard(tools, AGAINST.tests, DEFAULT.environments.model_copy(update={"seeds": seeds}))
    return run_checks(load_file(path), path, against, (), seed=seed)


@pytest.mark.parametrize("name", further(sorted(CHEATS, key=lambda name: name not in ALWAYS), len(ALWAYS)))
def test_a_cheat_earns_no_passport_and_the_check_that_is_meant_for_it_says_why(tmp_path: Path, name: str) -> None:
    _, _, meant = CHEATS[name]
    checks = examined(tmp_path, cheat(name), AGAINST.tools, 30 if "one_task" in name else 20)
    [check] = [check for check in checks if check.name == meant]
    assert not check.passed and check.detail and IN_WORDS.get(name, "") in check.detail


@pytest.mark.parametrize("name", further(PASSING, 1))
def test_a_cheat_that_the_page_says_is_not_caught_is_not(tmp_path: Path, name: str) -> None:
    assert all(check.passed for check in examined(tmp_path, cheat(name), AGAINST.tools, 20))


@pytest.mark.parametrize("name", further(HARMLESS, 3))
def test_a_sound_environment_that_looks_like_a_cheat_earns_its_passport(tmp_path: Path, name: str) -> None:
    assert [check for check in examined(tmp_path, cheat(name), AGAINST.tools, 20) if not check.passed] == []


@pytest.mark.parametrize("name", further(HONEST_NAMES[::2] + HONEST_NAMES[1::2], 6))
def test_an_honest_environment_earns_its_passport_whoever_wrote_it(tmp_path: Path, name: str) -> None:
    assert [check for check in examined(tmp_path, honest(name), tools_of(name), 20) if not check.passed] == []


def test_variety_that_few_tasks_do_not_show_is_found_in_further_ones(tmp_path: Path) -> None:
    for seed in (1, 2):
        [check] = [
            one for one in examined(tmp_path, honest("payroll"), tools_of("payroll"), 8, seed) if one.name == MANY
        ]
        assert check.passed


def test_an_examination_can_be_repeated_and_another_seed_draws_other_probes(tmp_path: Path) -> None:
    text = cheat("any_other_last_words").replace(
        "texts(messages)[-1] not in", "len(texts(messages)[-1]) % 3 and '' not in"
    )
    first, again, other = (examined(tmp_path, text, AGAINST.tools, 6, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_what_nobody_sees_in_a_text_hides_no_leak() -> None:
    assert (
        normalised("Ser\u200bvice\u00adDesk \uff11\uff12 \u2060\ufb01ve")
        == "servicedesk 12 five"
        == normalised("servicedesk 12 FIVE")
    )


def test_the_page_has_a_row_for_every_cheat_and_the_check_that_refuses_it() -> None:
    _, _, table = PAGE.read_text().partition("## Cheats")
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    assert {*rows} == {*CHEATS, *PASSING}
    assert all("| none |" in rows[name] for name in PASSING)
    assert all(f"| {meant} |" in rows[name] for name, (_, _, meant) in CHEATS.items())
