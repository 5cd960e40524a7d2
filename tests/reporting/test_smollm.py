"""docs/smollm.md has the numbers of its committed tables."""

import csv
import json
import math
import re
import statistics
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/experiments/smollm"
FOLDERS = (RESULTS, *sorted(RESULTS.parent.glob("smollm-seed*")))
SEEDS = ROOT / "results/replicates/smollm"
PAGE = (ROOT / "docs/smollm.md").read_text()


def table_after(head: str) -> list[list[str]]:
    rows = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def rows_of(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def mean(rows: list[dict[str, str]], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows)


def shortened(number: str) -> str:
    return f"{float(number):.3f}".replace("0.", ".", 1)


def interval(row: dict[str, str], name: str) -> str:
    return f"{shortened(row[name])} ({shortened(row['low'])} to {shortened(row['high'])})"


def test_the_main_table_is_the_committed_one() -> None:
    rates: dict[str, list[str]] = {}
    for row in rows_of("points.csv", SEEDS):
        rates.setdefault(row["label"], []).append(shortened(row["pass_rate"]))
    committed = [
        [row["label"], interval(row, "pass_rate"), ", ".join(rates[row["label"]]), f"{float(row['rollouts_spent']):g}"]
        for row in rows_of("summary.csv", SEEDS)
    ]
    listed = table_after("| row | mean of seeds (95% interval) |")
    assert len(listed) == len(committed) - 1 and all(row in committed for row in listed)
    assert {row["seeds"] for row in rows_of("summary.csv", SEEDS)} == {str(len(rates["base"]))}


def over_seeds_and_tasks(rows: list[dict[str, str]]) -> str:
    """Interval of a mean over seeds, with the variance over tasks, which all seeds share, added."""
    seeds = [float(row["difference"]) for row in rows]
    errors = [(float(row["high"]) - float(row["low"])) / (2 * 1.96) for row in rows]
    half = 1.96 * math.hypot(statistics.stdev(seeds) / math.sqrt(len(seeds)), statistics.fmean(errors))
    center = statistics.fmean(seeds)
    return f"{shortened(str(center - half))} to {shortened(str(center + half))}"


def differences_of(name: str, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["first"], row["second"]): row for row in rows_of(name, folder)}


def test_differences_over_seeds_and_tasks_are_the_committed_ones() -> None:
    labels = {row["method"]: row["label"] for row in rows_of("summary.csv", SEEDS)}
    by_seed = [differences_of("evaluation/differences.csv", folder) for folder in FOLDERS]
    committed = {
        f"{labels[pair[0]]}, minus {labels[pair[1]]}": [
            interval(row, "difference"),
            *(interval(differences[pair], "difference") for differences in by_seed),
            over_seeds_and_tasks([differences[pair] for differences in by_seed]),
        ]
        for pair, row in differences_of("differences.csv", SEEDS).items()
    }
    listed = table_after("| difference | mean of seeds (95% interval) |")
    assert len(listed) >= 4 and all(committed[name] == cells for name, *cells in listed)


def test_the_readme_has_the_rates_of_the_table() -> None:
    rates = {row["method"]: shortened(row["pass_rate"]) for row in rows_of("summary.csv", SEEDS)}
    readme = (ROOT / "README.md").read_text()
    sentence = (
        f"TRACE from solutions with routing {rates['solutions_routed']}; GRPO {rates['grpo_target']}; TRACE on rewards "
        f"{rates['trace']}"
    )
    assert sentence in " ".join(readme.split())


def test_the_rows_of_a_seed_are_those_of_its_folder() -> None:
    for seed, folder in enumerate(FOLDERS):
        rows = {row["method"]: row for row in rows_of("points.csv", SEEDS) if row["seed"] == str(seed)}
        for row in rows_of("evaluation/main.csv", folder):
            assert abs(float(rows[row["method"]]["pass_rate"]) - float(row["pass_rate"])) < 1e-5
            assert rows[row["method"]]["rollouts_spent"] == row["rollouts_spent"]
        spec = yaml.safe_load((folder / "spec.yaml").read_text())
        assert spec["seed"] == seed and spec["base"] == yaml.safe_load((FOLDERS[0] / "spec.yaml").read_text())["base"]


def test_the_numbers_of_the_diagnosis_are_those_of_the_selection() -> None:
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


def test_rewards_and_informative_groups_are_those_of_the_histories() -> None:
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


def test_times_are_the_measured_ones() -> None:
    taken = {row["stage"]: row["cpu_s"] for row in rows_of("times.csv")}
    shown = table_after("| stage | CPU seconds |")
    assert shown and all(float(taken[stage]) == float(seconds) for stage, seconds in shown)


def test_the_results_name_the_spec_code_and_model_that_made_them() -> None:
    spec = yaml.safe_load((RESULTS / "spec.yaml").read_text())
    assert spec["base"]["pretrained"] in (ROOT / "conf/experiment/smollm.yaml").read_text()
    stages = yaml.safe_load((RESULTS / "dvc.lock").read_text())["stages"]
    assert all(any(dep["path"].startswith("src/") and dep["md5"] for dep in stages[name]["deps"])
               for name in ("base", "rollouts", "adapters", "row@grpo_target", "evaluation"))  # fmt: skip
    index = json.loads((RESULTS / "adapters/index.json").read_text())
    assert all(re.fullmatch("[0-9a-f]{16}", adapter["digest"]) for adapter in index.values())
