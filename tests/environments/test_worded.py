"""An answer in words that needs no look-up earns no passport, and honest environments answered in words earn one."""

from pathlib import Path

import pytest
from support.worded import FLAWED, HONEST_IN_WORDS, worded

from captrain.benchmarks import load_benchmark
from captrain.contract import load_file
from captrain.environments.evidence import Standard, make_standard
from captrain.environments.passport import run_checks
from captrain.records import CheckResult
from captrain.run import compose_spec

DEFAULT = compose_spec("default", 0, [], Path(__file__).parents[2] / "conf")
AGAINST = make_standard(load_benchmark(DEFAULT.benchmark), DEFAULT.evaluation.tasks, DEFAULT.environments)


def failed(folder: Path, name: str) -> list[CheckResult]:
    path = folder / "written.py"
    tools, text = worded(name)
    path.write_text(text)
    against = Standard(tools, AGAINST.tests, DEFAULT.environments.model_copy(update={"seeds": 20}))
    return [check for check in run_checks(load_file(path), path, against, ()) if not check.passed]


@pytest.mark.parametrize("name", FLAWED)
def test_what_is_said_or_done_without_the_capability_is_refused_with_the_script(tmp_path: Path, name: str) -> None:
    _, script = FLAWED[name]
    assert script in " ".join(check.detail for check in failed(tmp_path, name))


@pytest.mark.parametrize("name", HONEST_IN_WORDS)
def test_an_honest_environment_that_is_answered_in_words_earns_its_passport(tmp_path: Path, name: str) -> None:
    assert failed(tmp_path, name) == []
