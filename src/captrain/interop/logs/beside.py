"""Finds the outcome of a dialogue in files beside it: results of Harbor and Terminal-Bench, reports of SWE-bench."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from captrain.interop.logs.records import OF_JSON, ChatRow, rows_of
from captrain.interop.logs.source import Foreign, json_of

RESULT, RESULTS = "result.json", "results.json"
NUMBER = "result.txt"
"""OSWorld's file, which holds only the score."""
OWN = (RESULT, RESULTS, "report.json", "reward.json", "outcome.json", "score.json", "metrics.json")
"""Files that may hold the outcome of the one dialogue in their folder."""
REPORTS = ("*.json", "*eval*.jsonl", "results/results.json")
REPORTS_BY_INSTANCE = ("logs/*/report.json", "eval*/*/report.json", "logs/run_evaluation/*/*/*/report.json")
"""Paths of SWE-bench's per-instance reports below the folder of a run, as various tools write them."""
LEVELS = 6
"""Number of parent folders that are searched for the result of a dialogue."""
LARGEST = 1 << 25
"""Largest result or report that is read, in bytes."""
FAILED_IDS = ("unresolved_ids", "unresolved", "empty_patch_ids", "submitted_ids", "completed_ids", "generated")
"""Names of lists in a report. Their instances failed unless the report also lists them as resolved."""
TIMEOUTS = ("AgentTimeoutError", "agent_timeout", "context_length_exceeded", "output_length_exceeded")
"""Failure modes of Harbor and Terminal-Bench that mean a limit of the harness."""
FAULTS = ("unknown_agent_error", "agent_installation_failed", "test_timeout", "parse_error", "fatal_llm_parse_error")
"""Failure modes of Terminal-Bench that are not the agent's fault."""


def completed(row: ChatRow, path: Path) -> ChatRow:
    """Add the outcome from files beside the dialogue, if its own file has none."""
    if row.reward is not None:
        return row
    for folder in (path.parent, *path.parents)[1 : LEVELS + 1]:
        for name, read in ((RESULT, of_harbor), (RESULTS, of_terminal_bench)):
            result = _document(folder / name)
            if result and (found := read(row, result)):
                return replace(found, result=str(folder / name))
        if folder == path.parent and (reward := _number(folder / NUMBER)) is not None:
            return replace(row, reward=reward)
        if row.task_id is not None and (verdict := _verdicts(folder).get(str(row.task_id))):
            return replace(row, reward=verdict["resolved"], grading=row.grading or failing_tests(verdict))
    return row


def of_harbor(row: ChatRow, result: Foreign) -> ChatRow | None:
    """Add the result of a Harbor trial to its row. None if the object is not such a result."""
    if not {"verifier_result", "exception_info"} & result.keys():
        return None
    failure, rewards = result.get("exception_info"), (result.get("verifier_result") or {}).get("rewards") or {}
    kind = str(failure.get("exception_type", failure) if isinstance(failure, dict) else failure or "")
    reward = next(iter(rewards.values()), None)
    is_limit = kind in TIMEOUTS and reward is not None
    agent = (result.get("agent_info") or {}).get("name")
    return replace(
        row,
        reward=0.0 if kind and reward is None else reward,
        task_id=result.get("task_name") or row.task_id,
        limit="time" if is_limit else row.limit,
        fault=row.fault if is_limit else kind,
        agent=row.agent or agent,
        keys=(*row.keys, str(result.get("trial_name") or "")),
    )


def of_terminal_bench(row: ChatRow, result: Foreign) -> ChatRow | None:
    """Add the result of a Terminal-Bench trial to its row. None if the object is not such a result."""
    if "is_resolved" not in result:
        return None
    mode, tests = str(result.get("failure_mode") or ""), result.get("parser_results") or {}
    failed = [name for name, state in tests.items() if state != "passed"]
    return replace(
        row,
        reward=result["is_resolved"],
        task_id=result.get("task_id") or row.task_id,
        limit=mode if mode in TIMEOUTS else row.limit,
        fault=mode if mode in FAULTS else row.fault,
        grading=f"failed tests: {', '.join(failed)}" if failed else row.grading,
        keys=(*row.keys, str(result.get("trial_name") or "")),
    )


@lru_cache(maxsize=256)
def _verdicts(folder: Path) -> dict[str, Foreign]:
    """Return instance -> verdict from the SWE-bench reports in a folder."""
    verdicts: dict[str, Foreign] = {}
    for path in sorted(path for pattern in REPORTS for path in folder.glob(pattern))[:200]:
        for report in _reports(path):
            found = _of_report(report)
            verdicts |= {name: found[name] for name in found if name not in verdicts or len(found[name]) > 1}
    several: defaultdict[str, list[Foreign]] = defaultdict(list)
    for path in sorted(path for pattern in REPORTS_BY_INSTANCE for path in folder.glob(pattern)):
        for name, verdict in [pair for report in _reports(path) for pair in _of_report(report).items()]:
            several[name].append(verdict)
    for name, [first, *others] in several.items():
        if all(other["resolved"] == first["resolved"] for other in others):  # skip instances on which two runs disagree
            verdicts.setdefault(name, first)
    return verdicts


def _of_report(report: Foreign) -> dict[str, Foreign]:
    """Return instance -> verdict from a report.

    A report has lists of ids, or a verdict for each id, or is the row of one instance.
    """
    verdicts: dict[str, Foreign] = {}
    passed = next((report[name] for name in ("resolved_ids", "resolved") if isinstance(report.get(name), list)), None)
    if passed is not None:
        failed = [name for key in FAILED_IDS for name in report.get(key) or [] if isinstance(name, str)]
        verdicts |= {name: {"resolved": name in {*passed}} for name in (*failed, *passed)}
    identity, inner = report.get("instance_id"), report.get("test_result", report)
    found = inner.get("report", inner) if isinstance(inner, dict) else {}
    if isinstance(identity, str) and isinstance(found, dict) and isinstance(found.get("resolved"), bool):
        verdicts[identity] = found
    for name, entry in report.items():
        if isinstance(entry, dict) and isinstance(entry.get("resolved"), bool) and "__" in name:
            verdicts[name] = entry
    return verdicts


def failing_tests(verdict: Foreign) -> str:
    """Return a sentence that lists the failing tests in a verdict of SWE-bench; "" if there are none."""
    states = verdict.get("tests_status") or {}
    names = [name for tests in states.values() if isinstance(tests, dict) for name in tests.get("failure") or []]
    return f"failing tests: {', '.join(names)}" if names else ""


@lru_cache(maxsize=256)
def _alike(folder: Path, name: str) -> int:
    return sum(1 for _ in folder.glob(f"*/{name}"))


def task_of(path: Path) -> str:
    """Return the task of a dialogue: the name of its file or of one of its two parent folders.

    A folder's name is used if more sibling folders have a file of this name than there are other logs in the folder.
    """
    for folder in (path.parent, path.parent.parent):
        inner = path.relative_to(folder)
        if _alike(folder.parent, str(inner)) > 1 + len(_peers(path) - {*OWN}):
            return folder.name
    return path.name.partition(".")[0]


def _peers(path: Path) -> set[str]:
    return {peer.name for peer in path.parent.iterdir() if peer.suffix in OF_JSON} - {path.name}


def _number(path: Path) -> float | None:
    with suppress(OSError, ValueError):
        return float(path.read_text(encoding="utf-8")[:99])
    return None


def result_beside(path: Path) -> tuple[str, Foreign]:
    """Return the name and content of the result beside a dialogue.

    Returns ("", {}) unless the dialogue and one result file are the only JSON files in the folder.
    """
    peers = _peers(path)
    names = [name for name in OWN if name in peers and _document(path.parent / name)]
    return (names[0], _document(path.parent / names[0])) if len(names) == len(peers) == 1 else ("", {})


def _reports(path: Path) -> Iterator[Foreign]:
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= LARGEST:
            yield from (row for _, row in rows_of(path) if isinstance(row, dict))


def _document(path: Path) -> Foreign:
    with suppress(ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= LARGEST:
            document = json_of(path)
            return document if isinstance(document, dict) else {}
    return {}
