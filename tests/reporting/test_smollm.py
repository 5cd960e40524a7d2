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
    chosen = [[item["id"], f"{item['gap']:.2f}", f"{item['coverage']:.2f}"]
              for item in selection["candidates"] if item["selected"]]  # fmt: skip
    assert [row[:3] for row in table_after("| capability | gap |")] == chosen
    summary = json.loads((RESULTS / "rollouts/summary.json").read_text())
    passed = summary["outcomes"]["passed"]
    assert f"passed {passed} of {sum(summary['outcomes'].values())} discovery tasks" in " ".join(PAGE.split())


def test_its_counts_of_steps_without_signal_are_those_of_the_histories() -> None:
    histories = {name: rows_of(f"{name}/history.csv") for name in ("adapters", "grpo_target")}
    adapters, target = ([sum(float(row["informative"]) == 0 for row in rows), len(rows)] for rows in histories.values())
    text = " ".join(PAGE.split())
    assert f"In {adapters[0]} of the adapters' {adapters[1]} steps and {target[0]} of the {target[1]} steps" in text


def test_it_says_how_many_dialogues_the_adapters_changed_and_that_no_outcome_did() -> None:
    rows = {row["adapter"]: row for row in rows_of("dialogues.csv")}
    equal = {name: row["dialogues_as_base"] for name, row in rows.items()}
    text = " ".join(PAGE.split())
    assert f"leaves {equal['valid_calls']} token for token, GRPO on the target {equal['grpo_target']}," in text
    assert all(row["outcomes_as_base"] == row["rollouts"] for row in rows.values())
    assert all(float(row["difference"]) == 0 for row in rows_of("evaluation/differences.csv"))


def test_its_times_are_those_that_were_taken() -> None:
    taken = {row["stage"]: row["cpu_s"] for row in rows_of("times.csv")}
    shown = table_after("| stage | CPU seconds |")
    assert shown and all(float(taken[stage]) == float(seconds) for stage, seconds in shown)


def test_its_results_say_which_spec_code_and_model_made_them() -> None:
    spec = yaml.safe_load((RESULTS / "spec.yaml").read_text())
    assert spec["base"]["pretrained"] in (ROOT / "conf/experiment/smollm.yaml").read_text()
    stages = yaml.safe_load((RESULTS / "dvc.lock").read_text())["stages"]
    assert all(any(dep["path"].startswith("src/") and dep["md5"] for dep in stages[name]["deps"])
               for name in ("base", "rollouts", "adapters", "grpo_target", "evaluation"))  # fmt: skip
    index = json.loads((RESULTS / "adapters/index.json").read_text())
    assert all(re.fullmatch("[0-9a-f]{16}", adapter["digest"]) for adapter in index.values())
