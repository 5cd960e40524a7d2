"""The page on the real pretrained model says what its committed tables say."""

import csv
import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/experiments/smollm"
PAGE = (ROOT / "docs/smollm.md").read_text()


def table_after(head: str) -> list[list[str]]:
    rows = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def mean(rows: list[dict[str, str]], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows)


def shortened(number: str) -> str:
    return f"{float(number):.3f}".removeprefix("0")


def test_the_table_of_the_page_is_the_committed_one() -> None:
    committed = [
        [
            row["label"],
            f"{shortened(row['pass_rate'])} ({shortened(row['low'])} to {shortened(row['high'])})",
            row["rollouts_spent"],
        ]
        for row in rows_of("evaluation/main.csv")
    ]
    listed = table_after("| row | passed (95% interval) |")
    assert len(listed) >= 3 and all(row in committed for row in listed)


def test_the_numbers_of_its_diagnosis_are_those_of_the_selection() -> None:
    selection = json.loads((RESULTS / "capabilities/selection.json").read_text())
    chosen = [
        [
            item["id"],
            "undefined" if item["gap"] is None else f"{item['gap']:.2f}",
            f"{item['coverage']:.2f}",
            f"{shortened(item['proven'])} ({shortened(item['proven_low'])} to {shortened(item['proven_high'])})",
            "proof" if item["by_proof"] else "contrast",
        ]
        for item in selection["candidates"]
        if item["selected"]
    ]
    assert table_after("| capability | gap |") == chosen
    summary = json.loads((RESULTS / "rollouts/summary.json").read_text())
    passed = summary["outcomes"]["passed"]
    assert f"passed {passed} of {sum(summary['outcomes'].values())} discovery tasks" in " ".join(PAGE.split())


def test_its_rewards_and_informative_groups_are_those_of_the_histories() -> None:
    histories: dict[str, list[dict[str, str]]] = {}
    for row in rows_of("adapters/history.csv"):
        histories.setdefault(row["adapter"], []).append(row)
    rewards = [
        [name, f"{mean(steps[:2], 'reward'):.2f}", f"{mean(steps[-2:], 'reward'):.2f}",
         f"{mean(steps, 'informative'):.2f}"]
        for name, steps in histories.items()
    ]  # fmt: skip
    assert table_after("| environment | first |") == rewards
    steps = rows_of("grpo_target/history.csv")
    assert f"{shortened(str(mean(steps, 'informative')))} of its groups are informative" in " ".join(PAGE.split())


def test_its_times_are_those_that_were_taken() -> None:
    taken = {row["stage"]: row["cpu_s"] for row in rows_of("times.csv")}
    shown = table_after("| stage | CPU seconds |")
    assert shown and all(float(taken[stage]) == float(seconds) for stage, seconds in shown)


def test_its_results_say_which_spec_code_and_model_made_them() -> None:
    spec = yaml.safe_load((RESULTS / "spec.yaml").read_text())
    assert spec["base"]["pretrained"] in (ROOT / "conf/experiment/smollm.yaml").read_text()
    stages = yaml.safe_load((RESULTS / "dvc.lock").read_text())["stages"]
    assert all(any(dep["path"].startswith("src/") and dep["md5"] for dep in stages[name]["deps"])
               for name in ("base", "rollouts", "adapters", "row@grpo_target", "evaluation"))  # fmt: skip
    index = json.loads((RESULTS / "adapters/index.json").read_text())
    assert all(re.fullmatch("[0-9a-f]{16}", adapter["digest"]) for adapter in index.values())
