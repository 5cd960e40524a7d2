"""Rollouts per CPU-second: our engine against stock TRL generation, on one thread. Run by `make bench`.

`--growth` measures how time and memory grow with the input, `--barrier` how far the same bytes depend on luck.

Both sides play the same servicedesk tasks (mix `mixed`) with the same model and prompt tokens, and the same benchmark
scores their dialogues. Stock TRL is GRPOTrainer with `environment_factory`: its own loop over tool calls and Hugging
Face's `generate` for every turn; only its method `_generate` is timed. Our side is `LocalPolicy`, timed whole. Each
side runs in float64, as the pipeline does, and in float32, without an adapter. The rollouts are GRPO's groups of eight
for one task, or single ones. TRL's loop ends at the first message without a tool call, so only tasks are used that need
neither a reply of the user nor a transfer to a human.

The table also shows the arithmetic's limit: the time for the positions that no engine can skip, at the rate of one
large matrix product on this machine. A position shared by several rows counts once.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from captrain.agents import LocalPolicy
from captrain.benchmarks import ARGUMENTS, TOOLS, DeskEpisode, ServiceDesk
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.records import JsonObject, Message, Task
from captrain.run import Spec, build, compose_spec
from captrain.training import build_model, build_tokenizer

ROLLOUTS = 256
GROUPS = (8, 1)
"""Rollouts per task: GRPO's group, or one."""
PRECISIONS = ("float64", "float32")
BASE = Path("artifacts/base")
Row = JsonObject
"""Measurement of one side in one precision and group size."""


class Desk:
    """The service desk for TRL's `environment_factory`: its public methods are the tools."""

    def reset(self, task: dict[str, Any], **_: object) -> None:
        """Open a task; the prompt already contains its messages."""
        self._episode = DeskEpisode(task["data"])

    def _call(self, name: str, arguments: dict[str, object]) -> str:
        replies, _ = self._episode.step(tool_call(name, arguments))
        return replies[0]["content"] if replies else ""


def _method(name: str) -> Any:
    def call(self: Desk, **arguments: Any) -> str:
        return self._call(name, arguments)

    call.__name__ = name
    return call


# The desk rejects wrong arguments in its own words, so both models read the same text.
for _name in ARGUMENTS:
    setattr(Desk, _name, _method(_name))


class Timed(GRPOTrainer):
    """GRPOTrainer with a timer around its generation."""

    seconds = 0.0
    prompts: list[list[int]]
    model_masks: list[list[int]]
    dialogues: list[list[Message]]

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.process_time()
        generation: Any = super()._generate(prompts)
        self.seconds += time.process_time() - start
        self.prompts, self.model_masks, self.dialogues = generation[0], generation[2], generation[3]
        return generation


def make_trainer(policy: LocalPolicy, model: Path, precision: str, folder: str) -> Timed:
    """Build stock TRL with the policy's limits; only its generation is used."""
    hf_logging.disable_progress_bar()
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=8,
        max_completion_length=policy.max_length,
        temperature=policy.temperature,
        top_k=0,
        generation_kwargs={"max_new_tokens": policy.max_tokens},
        max_tool_calling_iterations=policy.max_turns - 1,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, precision), trust_remote_code=False),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}]),
        processing_class=policy.tokenizer,
        environment_factory=Desk,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
    )
    # TRL would render the methods' own schemas sorted by name. Give the model the desk's schemas in the desk's order.
    trainer._env_tools[None] = TOOLS
    return trainer


def seconds_of_position(policy: LocalPolicy) -> float:
    """Time a large matrix product 20 times; return the seconds that one position of the model takes at that rate."""
    matrix = torch.rand((1024, 1024), dtype=getattr(torch, policy.precision))
    seconds: list[float] = []
    for _ in range(20):
        start = time.process_time()
        torch.mm(matrix, matrix)
        seconds.append(time.process_time() - start)
    return 2 * sum(map(torch.numel, policy.state.values())) * min(seconds) / (2 * 1024**3)


def stock(trainer: Timed, target: CheckedEnvironment, tasks: list[Task]) -> Row:
    """Time TRL on the tasks."""
    trainer.seconds = 0.0
    openings = [target.open(task).messages for task in tasks]
    trainer._generate_and_score_completions(
        [{"prompt": opening, "task": task.model_dump()} for opening, task in zip(openings, tasks, strict=True)]
    )
    dialogues = [[*opening, *replies] for opening, replies in zip(openings, trainer.dialogues, strict=True)]
    passed = sum(target.score(task, dialogue).success for task, dialogue in zip(tasks, dialogues, strict=True))
    tokens = sum(map(sum, trainer.model_masks))
    row = {"side": "TRL", "passed": passed, "tokens": tokens, "seconds": trainer.seconds}
    return {**row, "prompts": trainer.prompts, "positions": 0}


def captrain_engine(policy: LocalPolicy, target: CheckedEnvironment, tasks: list[Task]) -> Row:
    """Time our engine on the tasks."""
    policy.batch = len(tasks)
    plays = [RunningEpisode(f"bench/{number}", target.open(task)) for number, task in enumerate(tasks)]
    assert all(play.episode.messages for play in plays)  # opened before the timer starts
    start = time.process_time()
    finished = list(policy.play(plays))
    seconds = time.process_time() - start
    passed = sum(target.score(task, play.messages).success for task, play in zip(tasks, plays, strict=True))
    rows = [tuple(play.token_ids[:-1]) for play in finished]
    tokens = sum(sum(play.mask) for play in finished)
    row = {"side": "captrain", "passed": passed, "tokens": tokens, "seconds": seconds}
    prompts = [play.token_ids[: play.mask.index(1)] for play in finished]
    positions = len({row[:stop] for row in rows for stop in range(1, len(row) + 1)})
    return {**row, "prompts": prompts, "positions": positions}


def measure(spec: Spec, model: Path) -> list[Row]:
    """Measure stock TRL and our engine in each precision and group size, after a warm-up on other tasks.

    Returns:
        TRL's row, then ours. Each has the prompts (token ids), the number of tokens written, the positions that no
        engine can skip, and the seconds that these take at best (`limit`).
    """
    target = CheckedEnvironment(ServiceDesk(mix="mixed"), "servicedesk", "bench")
    plain = [t for t in target.tasks("training", 4 * ROLLOUTS) if not (t.data["anonymous"] or t.data["human"])]
    measurements: list[Row] = []
    for group in GROUPS:
        tasks, warm_up = (
            [task for task in plain[start : start + ROLLOUTS // group] for _ in range(group)] for start in (0, ROLLOUTS)
        )
        for precision in PRECISIONS:
            policy = build(spec.policy, LocalPolicy, model=model, precision=precision)
            position = seconds_of_position(policy)
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(policy, model, precision, folder)
                stock(trainer, target, warm_up)
                trl = stock(trainer, target, tasks)
            captrain_engine(policy, target, warm_up)
            engine = captrain_engine(policy, target, tasks)
            if sorted(trl["prompts"]) != sorted(engine["prompts"]):
                raise SystemExit("the two sides gave the model different prompts: their work is not equal")
            for row in (trl, engine):
                measurements.append(
                    {**row, "group": group, "precision": precision, "limit": row["positions"] * position}
                )
    if torch.get_num_threads() != 1:
        raise SystemExit(f"{torch.get_num_threads()} threads were in use: the CPU-seconds are not those of one")
    return measurements


def table(measurements: list[Row], title: str) -> Table:
    """Make a table of the measurements, with the ratio of our engine to TRL in the same precision."""
    comparison = Table(title=title, title_justify="left")
    names = ("rollouts", "passed", "prompt", "model tokens", "CPU s", "limit s", "rollouts / CPU s", "ratio")
    for name in ("of a task", "precision", "side"):
        comparison.add_column(name)
    for name in names:
        comparison.add_column(name, justify="right")
    for trl, engine in zip(measurements[::2], measurements[1::2], strict=True):
        for row in (trl, engine):
            lengths = [*map(len, row["prompts"])]
            comparison.add_row(
                str(row["group"]),
                row["precision"],
                row["side"],
                str(len(lengths)),
                str(row["passed"]),
                f"{min(lengths)} to {max(lengths)}",
                f"{row['tokens']:,}",
                f"{row['seconds']:.2f}",
                f"{row['limit']:.2f}" if row["limit"] else "",
                f"{len(lengths) / row['seconds']:.1f}",
                f"{trl['seconds'] / row['seconds']:.1f}",
            )
        comparison.add_section()
    comparison.caption = (
        "prompt: tokens of the shortest and the longest; the same ids on both sides, compared one by one. limit: the "
        "positions that are left when what rows have in common is computed once, at the rate of one large product"
    )
    return comparison


def main() -> None:
    """Measure, print, and optionally write."""
    parser = argparse.ArgumentParser(description="Rollouts per CPU-second of our engine beside stock TRL generation.")
    parser.add_argument("--model", type=Path, default=BASE, help="folder of a model of the base stage")
    parser.add_argument(
        "--growth", action="store_true", help="how time and memory grow instead; takes --only, --largest"
    )
    parser.add_argument("--barrier", action="store_true", help="what is left to luck of the same bytes; takes --only")
    options, further = parser.parse_known_args()
    if options.growth or options.barrier:
        # Use a new process: a process inherits the peak memory of its parent.
        script = Path(__file__).with_name("bench_growth.py" if options.growth else "bench_barrier.py")
        raise SystemExit(subprocess.run([sys.executable, str(script), *further]).returncode)
    parser.parse_args()
    warnings.filterwarnings("ignore")
    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    spec = compose_spec("default", 0, [], Path("conf"))
    with tempfile.TemporaryDirectory() as folder:
        model, title = options.model, f"model {options.model}, one thread"
        if not (model / "config.json").exists():
            model, tokenizer = Path(folder), build_tokenizer()
            build_model(tokenizer, spec.base, spec.seed).save_pretrained(model)
            tokenizer.save_pretrained(model)
            title = f"random weights ({options.model} is not here): every rollout is one turn of noise; one thread"
        measurements = measure(spec, model)
    Console(width=None if os.isatty(1) else 120).print(table(measurements, title))


if __name__ == "__main__":
    main()
