"""Domains without tuning: each keeps the contract, and its configuration for `make domains` composes."""

import shutil
import sys
from pathlib import Path

import pytest
from support.domains.copies import copy_domain

from captrain.planning import Node, make_plan
from captrain.projects import check_benchmark, init_project
from captrain.run import compose_configuration

DOMAINS = Path(__file__).parents[1] / "support/domains"
CLASSES = {"harbour": "Harbour", "telescope": "Telescope", "toll": "Toll"}


@pytest.mark.parametrize(("name", "kind"), CLASSES.items())
def test_a_domain_keeps_the_contract_and_only_the_one_without_references_is_refused_by_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    init_project(tmp_path / "mine", "calendar")
    for module in [module for module in sys.modules if module.partition(".")[0] == "components"]:
        monkeypatch.delitem(sys.modules, module)  # those of another test's project
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")  # another process looks there
    copy_domain(name, tmp_path / "mine/components")
    shutil.copytree(DOMAINS / "conf", tmp_path / "mine/conf", dirs_exist_ok=True)
    report = check_benchmark(f"components.{name}:{kind}", tasks=6)
    assert report.problems == [] and "words that nobody told" not in report.facts
    spec, _ = compose_configuration([f"experiment={name}", "baselines.rejection_sft.run=true"], tmp_path / "mine")
    plan = make_plan(spec, Node())
    refused = [error.problem for error in plan.refusals]
    assert bool(refused) == (name == "telescope") and all("it has no reference solutions" in text for text in refused)
    assert not any("demonstrations makes the calls" in text for text in plan.warnings)
