"""`captrain plan`: counts against the ledgers of real runs, assumptions against their sources, refusals."""

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console
from support.needs import further

from captrain.comparison import TRACE_STAGES, baselines
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.planning import assumptions, estimate, plan
from captrain.planning.assumptions import SIZES, ModelSize
from captrain.records import load
from captrain.run import Spec, compose_configuration

REPOSITORY = Path(__file__).parents[2]
PAPER = ("experiment=paper_tau2", "seed=42")
TRAINER = (
    "machine.accelerate.precision=bfloat16", "machine.accelerate.gradient_checkpointing=true",
    "machine.accelerate.rows=1",
)  # fmt: skip
QWEN3_4B = SIZES["Qwen/Qwen3-4B-Instruct-2507"]
CALLS = "machine.asking.input_price=2.0", "machine.asking.output_price=10.0"
NODE8 = (*PAPER, "policy=vllm", "machine=node8")
SMALL = (*PAPER, "adapters.rollouts=128", "capabilities.count=1", "rollouts.tasks=32", "environments.rounds=1")

Compose = Callable[..., Spec]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with this repository's configuration and its own params.yaml."""
    (tmp_path / "conf").symlink_to(REPOSITORY / "conf")
    (tmp_path / "params.yaml").write_text("experiment: default\nseed: 0\noverrides: [selection.delta=0.15]\n")
    return tmp_path


@pytest.fixture
def spec(root: Path) -> Compose:
    return lambda *settings: compose_configuration(settings, root)[0]


def planned(spec: Spec, **node: object) -> plan.Plan:
    return plan.make_plan(spec, estimate.Node(**node))  # type: ignore[arg-type]


def stages(works: list[estimate.StageCost]) -> dict[str, estimate.StageCost]:
    return {one.stage: one for one in works}


def printed(made: plan.Plan) -> str:
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as text:
        console.print(*plan.plan_tables(made))
    return text.get()


def test_planned_rollouts_match_the_ledgers_of_the_embedded_default(spec: Compose, committed: Path) -> None:
    default = spec("selection.delta=0.2")
    ledgers = {stage: committed / f"results/{stage}/ledger.jsonl" for stage in (*TRACE_STAGES, *baselines())}
    spent = {stage: load(path, LedgerEntry) for stage, path in ledgers.items() if path.exists()}
    real = {stage: sum(entry.rollouts for entry in entries) for stage, entries in spent.items() if entries}
    # No plan can know how many attempts are needed.
    attempts = len(spent["environments"]) / default.capabilities.count
    works = stages(estimate.RunEstimate(default, estimate.Node(), attempts).costs())
    assert {stage: works[stage].rollouts for stage in real} == real
    made = planned(default)
    low, high = stages(made.low), stages(made.high)
    assert all(low[stage].rollouts <= real[stage] <= high[stage].rollouts for stage in real)
    assert all(low[stage].rollouts == high[stage].rollouts for stage in ("rollouts", "adapters"))


def test_every_method_spends_as_many_rollouts_as_trace(spec: Compose) -> None:
    chosen = spec("experiment=all_methods", "selection.delta=0.2")
    for works in (planned(chosen).low, planned(chosen).high):
        of = {stage: work.rollouts for stage, work in stages(works).items()}
        trace = sum(of[stage] for stage in TRACE_STAGES)
        assert of["grpo_target"] == of["gepa"] == of["awm"] == trace
        shared = {"mixed": of["rollouts"] + of["environments"],
                  "single": of["rollouts"] + of["environments"] / chosen.capabilities.count}  # fmt: skip
        assert all(of[name] + spent == trace for name, spent in shared.items())
        assert of["adp"] == of["failures_sft"] == 0 and of["merging"] == chosen.merging.rollouts
        rounds = chosen.baselines.solutions.rounds
        assert of["solutions"] >= rounds.tasks / rounds.count  # a further diagnosis at least
    low, high = stages(planned(chosen).low), stages(planned(chosen).high)
    # base, 4 adapters, 8 baselines of one arm, 5 of solutions, 7 merged; at most 12 capabilities of controls, and
    # compositions in 4 columns.
    tests = chosen.evaluation.tasks * chosen.evaluation.trials
    assert (low["evaluation"].rollouts, high["evaluation"].rollouts) == (29 * tests, (29 + 12 + 4) * tests)
    assert "controls" not in low and high["controls"].rollouts == 12 * (3 * 80 + 640)


def test_a_method_that_does_not_run_costs_nothing(spec: Compose) -> None:
    nothing = [f"baselines.{name}.run=false" for name in baselines()]
    works = stages(planned(spec(*nothing)).low)
    own = ["rollouts", "environments", "pairs", "adapters", "routes", "evaluation"]
    assert list(works) == ["base", *own, "total"]
    assert works["evaluation"].rollouts == 5 * 400 * 2
    assert "gepa" in stages(planned(spec(*nothing, "baselines.gepa.run=true")).low)


def test_planned_tokens_are_near_the_ledgers_of_the_embedded_default(spec: Compose, committed: Path) -> None:
    """The plan uses one mean for all of TRACE's rollouts, but trained agents write more than the base."""
    works = stages(planned(spec()).low)
    ledgers = [committed / f"results/{stage}/ledger.jsonl" for stage in TRACE_STAGES]
    entries = [entry for path in ledgers for entry in load(path, LedgerEntry)]
    rollouts = sum(entry.rollouts for entry in entries)
    costs = [works[stage] for stage in TRACE_STAGES]
    for use, tokens in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        expected = sum(getattr(cost.use, use) for cost in costs) / sum(cost.rollouts for cost in costs)
        assert expected == pytest.approx(sum(getattr(entry, tokens) for entry in entries) / rollouts, rel=0.1)


def test_the_assumed_speed_is_the_one_in_docs_speed() -> None:
    rows = re.findall(
        r"│ 1 +│ (float\d+) +│ captrain │(?:[^│]*│){6} +([\d.]+) │", (REPOSITORY / "docs/speed.md").read_text()
    )
    assert {precision: float(rate) for precision, rate in rows} == assumptions.ROLLOUT_RATES


def test_float32_is_faster_than_float64_and_two_workers_than_one(spec: Compose) -> None:
    def seconds(*settings: str) -> float:
        return stages(planned(spec(*settings)).low)["evaluation"].seconds or 0

    assert seconds("policy.precision=float32") < seconds() < seconds("machine.workers=1")
    even = [f"baselines.{name}.run=false" for name in ("gepa", "solutions", "rejection_sft")]
    assert seconds(*even, "machine.workers=1") == 2 * seconds(*even)


@pytest.mark.parametrize("experiment", ["default", "single", "rare", "compound", "smoke", "all_methods"])
def test_every_embedded_experiment_is_accepted(spec: Compose, experiment: str) -> None:
    made = planned(spec(f"experiment={experiment}"))
    made.refuse_impossible()
    assert not made.warnings
    rows = [line for line in printed(made).splitlines() if line.startswith("│ ")]
    assert all(any(row.split()[1] == one.stage for row in rows) for one in made.high)
    ranges = [row for row in rows if row.split()[1] == "controls"]
    assert len(ranges) == (2 if experiment == "all_methods" else 0)
    assert not ranges or "│ 0 to " in " ".join(ranges[0].split())


def test_a_range_begins_with_its_lower_end_also_where_more_attempts_leave_less_to_train(spec: Compose) -> None:
    said = printed(planned(spec("experiment=all_methods")))
    [(low, high)] = re.findall(r"│ solutions_grpo .* ([\d.]+) s to ([\d.]+) s ", said)
    assert float(low) < float(high)


def test_settings_on_the_command_line_override_params_yaml(root: Path) -> None:
    chosen, title = compose_configuration([], root)
    assert (chosen.seed, chosen.selection.delta, title) == (0, 0.15, "experiment default, seed 0, selection.delta=0.15")
    other, _ = compose_configuration(["experiment=rare", "seed=3", "router=classifier"], root)
    assert (other.seed, other.rollouts.tasks, other.selection.delta) == (3, 720, 0.15)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("seed=x", "seed = 'x' is not a number"),
        ("experiment=nothing", "unknown experiment 'nothing'"),
        ("adapters.rollouts", "'adapters.rollouts' is not of the form key=value"),
    ],
)
def test_settings_that_do_not_compose_are_refused(spec: Compose, wrong: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        spec(wrong)


def test_a_node_without_throughput_is_refused() -> None:
    with pytest.raises(UserError, match="throughput"):
        estimate.Node(throughput=(1000.0, 0.0))


@pytest.mark.parametrize(
    ("settings", "said", "mended"),
    [
        (("policy.temperature=0.0",), "temperature = 0 also holds in training", ("environments.temperature=1.0",)),
        ((*SMALL, "environments.temperature=null"), "teach nothing", ("environments.temperature=1.0",)),
        (("adapters.rollouts=1280",), "need 170 tasks of an environment", ("environments.seeds=170",)),
        (
            (*SMALL, "rollouts.tasks=96"),
            "split discovery has at most 65 tasks",
            ("rollouts.tasks=32",),
        ),
        (
            (*SMALL, "evaluation.tasks=61"),
            "split test has at most 60 tasks",
            ("evaluation.tasks=60",),
        ),
        (("+trainer.experts=true",), "is not a mixture of experts", ("+trainer.experts=false",)),
        ((*NODE8, "+trainer.experts=true", "machine.vllm.gpus=0"), "need a GPU", ("machine.vllm.gpus=2",)),
        ((*NODE8, "baselines.mixture.run=true"), "neither mix adapters per layer", ("baselines.mixture.run=false",)),
        ((*NODE8, "machine.vllm.max_lora_rank=8"), "max_lora_rank = 8", ("machine.vllm.max_lora_rank=16",)),
        ((*NODE8, "trainer.groups_per_step=7"), "set trainer.groups_per_step=8", ("trainer.groups_per_step=8",)),
        (
            (*NODE8, "trainer.groups_per_step=32", "adapters.rollouts=5120"),
            r"need 328 tasks(.|\n)*set environments.seeds=328",
            ("environments.seeds=328",),
        ),
        (
            (*PAPER, *TRAINER, "policy=vllm", "machine.vllm.gpus=8"),
            "machine.vllm asks for 8 GPUs, and training for 1 more",
            ("machine.vllm.gpus=2",),
        ),
        (
            (*PAPER, *TRAINER, "policy=vllm", "machine=slurm", "machine.vllm.gpus=2", "machine.slurm.memory=64GB"),
            "machine.slurm.gpus = 0, and",
            ("machine.slurm.gpus=3",),
        ),
        (
            (*PAPER, "policy=vllm", "machine.vllm.gpus=2"),
            r"precision = float64 trains Qwen/Qwen3-30B\S+ on the CPU",
            TRAINER,
        ),
    ],
)
def test_impossible_settings_are_refused_and_the_remedy_works(
    spec: Compose, settings: tuple[str, ...], said: str, mended: tuple[str, ...]
) -> None:
    with pytest.raises(UserError, match=said):
        planned(spec(*settings), memory=141.0).refuse_impossible()
    kept = [one for one in settings if one.partition("=")[0] not in {new.partition("=")[0] for new in mended}]
    planned(spec(*kept, *mended), memory=141.0).refuse_impossible()


def test_the_plan_of_the_papers_setting_is_complete_and_warns_of_reused_training_tasks(spec: Compose) -> None:
    made = planned(spec(*NODE8))
    text = printed(made)
    assert "5,120" in text and "512 to 2,560" in text and "30.5, 3.3 of them active" in text
    # 5,888 rollouts in groups of 16 are 368.
    assert any("grpo_target uses each of 39 training tasks 10 times" in warning for warning in made.warnings)
    made.refuse_impossible()
    few = planned(spec(*NODE8, "baselines.grpo_target.run=false"))
    assert not any("training tasks" in warning for warning in few.warnings)


def test_an_endpoint_plans_only_untrained_stages_at_the_stated_price(
    spec: Compose,
) -> None:
    made = planned(spec(*SMALL))
    assert {*stages(made.low)} == {"rollouts", "labels", "environments", "pairs", "total"}
    assert made.low[-1].rollouts == sum(cost.rollouts for cost in made.low[:-1])
    said = " ".join(made.warnings)
    assert "cannot be trained through" in said and "training tasks" not in said and "--price" in said
    priced = planned(spec(*SMALL), price=(2.0, 10.0))
    use = stages(priced.low)["rollouts"].use
    assert stages(priced.low)["rollouts"].money == pytest.approx((use.input * 2 + use.output * 10) / 1e6)
    assert (priced.low[-1].money or 0) > 0 and not any("--price" in warning for warning in priced.warnings)


def test_the_papers_setting_on_our_own_servers_has_jobs_gpus_memory_and_hours(spec: Compose) -> None:
    own = (*PAPER, *TRAINER, "policy=vllm", "machine.vllm.gpus=2")
    with pytest.raises(UserError, match=r"does not fit while it is trained: about 63 GiB") as error:
        planned(spec(*own), memory=64.0).refuse_impossible()
    assert "machine.vllm.gpus" in error.value.remedy
    alone = planned(spec(*own), memory=141.0)
    alone.refuse_impossible()
    jobs = planned(spec(*own, "machine=slurm", "machine.slurm.gpus=3", "machine.slurm.memory=64GB"), memory=141.0)
    jobs.refuse_impossible()
    one, several = stages(alone.low), stages(jobs.low)
    assert one["adapters"].gpus == 3 and several["adapters"].gpus == 2 * 3 and several["rollouts"].jobs == 4
    assert (several["adapters"].seconds or 0) < (one["adapters"].seconds or 0)
    assert several["total"].gpu_hours == pytest.approx(sum(work.gpu_hours or 0 for work in jobs.low[:-1]))
    assert one["evaluation"].gpus == 2 and all(work.seconds for work in one.values())
    assert (one["adapters"].rollouts, several["adapters"].rollouts) == (5120, 5120)
    text = printed(jobs)
    assert "2 of its servers, and 1 to train" in text and "2 of training on 8 GPUs" in text


@pytest.mark.parametrize(
    ("size", "rows", "tokens", "checkpointed", "peak"),
    [
        (QWEN3_4B, 1, 13_000, True, 13.81),
        (QWEN3_4B, 1, 8_192, True, 10.96),
        (QWEN3_4B, 2, 8_192, False, 100.59),
        (ModelSize(8.224e9, 8.224e9, 32, 4096, 32, 8, 128, 14_336), 1, 13_000, True, 23.91),
        (SIZES["Qwen/Qwen3-30B-A3B-Instruct-2507"], 1, 13_000, True, 62.82),
        (SIZES["Qwen/Qwen3-30B-A3B-Instruct-2507"], 2, 8_192, True, 64.30),
    ],
)
def test_the_planned_memory_of_a_training_covers_the_peak_measured_on_a_gpu(
    size: ModelSize, rows: int, tokens: int, checkpointed: bool, peak: float
) -> None:
    """GiB by `torch.cuda.max_memory_allocated` on an H200; the second and third peak adapt attention only."""
    held = 2 * size.parameters + 16 * size.lora(16) + rows * tokens * size.activations(checkpointed)
    assert peak <= held / 2**30 < 1.5 * peak


def test_the_node_of_8_gpus_fits_the_papers_models_and_its_memory_is_itemised(spec: Compose) -> None:
    for experiment in ("paper_tau2", "paper_toolsandbox"):
        node = spec(f"experiment={experiment}", "seed=42", "policy=vllm", "machine=node8")
        made = planned(node)
        made.refuse_impossible()
        # Servers take two, every training four; the endpoint's two come on top.
        assert (stages(made.low)["adapters"].gpus, stages(made.low)["grpo_target"].gpus) == (2 + 4, 2 + 4)
        assert set(made.memory) == {"servers", "trainer"}
        # FSDP holds a quarter of the weights: 30.5 billion parameters of 2 bytes.
        assert made.memory["trainer"]["weights"] == pytest.approx(30.5e9 * 2 / 4 / 2**30)
        text = " ".join(printed(made).split())
        assert "two layers gathered" in text and "KV cache" in text and "2 of its servers, and 4 to train" in text
        assert "1 on 8 GPUs, one after another" in text
    fewer = planned(spec(*NODE8, "machine.accelerate.processes=2"))
    assert sum(fewer.memory["trainer"].values()) > sum(made.memory["trainer"].values())
    with pytest.raises(UserError, match=r"about \d+ GiB.*activations"):
        planned(spec(*NODE8, "machine.accelerate.rows=null")).refuse_impossible()


@pytest.mark.parametrize(
    "setting",
    [
        *("machine.accelerate.processes=8", "machine.vllm.replicas=3", "machine.asking.gpus=6", "machine.gpus=5"),
        "machine.workers=3",
    ],
)
def test_overlapping_gpus_are_refused(spec: Compose, setting: str) -> None:
    with pytest.raises(UserError, match="GPUs are too few"):
        spec(*NODE8, setting)


def test_all_refusals_are_reported_at_once(spec: Compose) -> None:
    with pytest.raises(UserError) as refusal:
        planned(spec(*PAPER, "evaluation.tasks=61", "environments.temperature=null")).refuse_impossible()
    assert all(said in refusal.value.problem for said in ("split test", "temperature"))


def test_split_sizes_are_those_of_the_benchmark(spec: Compose) -> None:
    assert assumptions.split_sizes(spec(*PAPER).benchmark) == {"discovery": 65, "training": 39, "test": 60}
    assert assumptions.split_sizes(spec(*PAPER, "benchmark.domains=[airline]").benchmark)["test"] == 20
    assert assumptions.split_sizes(spec().benchmark) == {}


def test_a_model_that_does_not_fit_one_gpu_is_refused_with_what_fills_it(spec: Compose) -> None:
    small = spec(*SMALL)
    planned(small).refuse_impossible()
    with pytest.raises(UserError, match=r"does not fit while it is trained: about 1\d\d GiB of each of 1 GPU") as error:
        planned(small, gpus=1).refuse_impossible()
    assert "weights 110" in error.value.problem and "KV cache" in error.value.problem
    planned(small, gpus=1, memory=288.0).refuse_impossible()


def test_sizes_of_models_follow_from_their_shapes() -> None:
    for name, size in assumptions.SIZES.items():
        attention = size.hidden * (2 * size.heads + 2 * size.kv_heads) * size.head
        # 128 experts, 8 of them active, each 768 wide. Embeddings count twice if they are not tied.
        all_of_them, active = (3 * size.hidden * (size.inner or count * 768) for count in (128, 8))
        embeddings = size.vocabulary * size.hidden * (1 if size.inner else 2)
        assert size.layers * (attention + all_of_them) + embeddings == pytest.approx(size.parameters, rel=0.01), name
        assert size.layers * (attention + active) + embeddings == pytest.approx(size.active, rel=0.02), name
    # q, k, v, o of 48 layers at rank 16.
    moe = assumptions.SIZES["Qwen/Qwen3-30B-A3B-Instruct-2507"]
    assert moe.lora(16) == 48 * 16 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    assert moe.lora(32, experts=True) / 1e9 == pytest.approx(1.69, abs=0.005)  # as published


def test_a_model_of_unknown_size_has_counts_only_until_its_size_is_stated(spec: Compose) -> None:
    other = spec(*SMALL, "base.model=someone/model@main")
    made = planned(other)
    assert any("someone/model is not known: state it with --parameters" in warning for warning in made.warnings)
    assert made.low[-1].seconds is None and made.low[-1].memory is None and made.low[-1].rollouts > 0
    assert "not known" in printed(made)
    stated = planned(other, parameters=8.0)
    assert stated.low[-1].seconds and stated.low[-1].memory and not any("size" in one for one in stated.warnings)
    with pytest.raises(UserError, match="someone/model does not fit"):
        planned(other, parameters=700.0).refuse_impossible()


def test_more_throughput_and_more_gpus_never_take_longer(spec: Compose) -> None:
    small = spec(*SMALL, "policy=vllm", "machine.vllm.gpus=0")

    def seconds(**node: object) -> float:
        return planned(small, **node).low[-1].seconds or 0

    assert seconds(throughput=(1e3, 1e2)) > seconds() > seconds(throughput=(1e9, 1e9))
    assert seconds(gpus=4, throughput=(1e3, 1e2)) > seconds(gpus=8, throughput=(1e3, 1e2))


def test_money_is_for_the_tokens_of_models_other_than_the_agents(spec: Compose) -> None:
    free = planned(spec(*SMALL))
    assert free.low[-1].money == 0
    works = stages(planned(spec(*SMALL, *CALLS)).low)
    labels = works["labels"]
    assert labels.money == pytest.approx((labels.use.input * 2 + labels.use.output * 10) / 1e6)
    assert labels.gpus == 0 and works["rollouts"].money == 0
    hosted = stages(planned(spec(*SMALL, *CALLS, "benchmark.user.name=other")).low)["rollouts"]
    user, count = assumptions.EPISODE_COSTS[assumptions.TAU2, assumptions.SERVED].user, hosted.rollouts
    assert hosted.money == pytest.approx(count * (user.input * 2 + user.output * 10) / 1e6)
    unpriced = planned(spec(*SMALL, "analyst.name=other"))
    assert unpriced.low[-1].money is None and any("input_price" in warning for warning in unpriced.warnings)


def test_a_scripted_user_costs_no_calls_and_is_warned_of(spec: Compose) -> None:
    settings = [one for one in SMALL if "user" not in one]
    scripted = planned(spec(*settings, "benchmark.user=null"))
    with_user = planned(spec(*settings))
    assert stages(scripted.low)["rollouts"].use.calls < stages(with_user.low)["rollouts"].use.calls
    assert any("for checks and not for results" in warning for warning in scripted.warnings)


def test_the_causal_test_asks_once_for_each_test_rollout_of_the_base(spec: Compose) -> None:
    chosen = spec(*SMALL, "policy=vllm")
    calls = stages(planned(chosen).low)["causality"].use.calls
    assert calls == chosen.evaluation.tasks * chosen.evaluation.trials
    assert "causality" not in stages(planned(spec(*SMALL, "policy=vllm", "causality.run=false")).low)
    assert "causality" not in stages(planned(spec()).low)  # the programmatic analyst asks nobody


def test_every_assumption_names_its_source(spec: Compose) -> None:
    own = spec(*PAPER, "policy=vllm", "baselines.adp.run=true", "controls.run=true", "baselines.gepa.model=other")
    for configuration in (spec(), spec(*PAPER), spec(*PAPER, *CALLS), own):
        for row in planned(configuration).basis:
            _, value, source = row
            assert value and source.startswith(("spec", "measured here", "published", "assumed", "stated")), row


def test_planning_does_not_import_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from captrain.run import compose_configuration; "
        "from captrain.planning import Node, make_plan; "
        f"spec, _ = compose_configuration(['experiment=paper_tau2'], Path({str(REPOSITORY)!r})); "
        "make_plan(spec, Node()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


EACH_ONCE = (
    ("paper_tau2", "headline", "classifier", "false"),
    ("paper_tau2", "all", "retrieval", "true"),
    ("paper_toolsandbox", "all", "gate", "true"),
    ("paper_toolsandbox", "headline", "sets", "false"),
)
"""Settings of the paper: each value at least once."""
TOGETHER = product(
    ("paper_tau2", "paper_toolsandbox"),
    ("headline", "all"),
    ("classifier", "gate", "retrieval", "sets"),
    ("false", "true"),
)


@pytest.mark.parametrize(
    ("experiment", "methods", "router", "experts"),
    further([*EACH_ONCE, *(case for case in TOGETHER if case not in EACH_ONCE)], len(EACH_ONCE)),
)
def test_the_papers_settings_compose_on_the_node_of_8_gpus(
    spec: Compose, experiment: str, methods: str, router: str, experts: str
) -> None:
    chosen = (f"experiment={experiment}", "seed=42", "policy=vllm", "machine=node8", "evaluation.trials=1")
    one = spec(*chosen, f"router={router}", f"methods={methods}", f"trainer.experts={experts}")
    made = planned(one)
    made.refuse_impossible()
    assert any("the oracle bound and the causal test need two trials" in text for text in made.warnings)
    assert one.trainer.settings()["experts"] == (experts == "true")


def test_at_least_as_many_capabilities_are_proposed_as_are_selected(spec: Compose) -> None:
    proposed = [spec(*PAPER, f"capabilities.count={count}").analyst.settings()["proposals"] for count in (4, 16)]
    assert proposed == [8, 16]


def test_fine_tuning_uses_the_gpus_of_all_its_processes(spec: Compose) -> None:
    four, two = (
        stages(planned(spec(*NODE8, "baselines.adp.run=true", *more)).low)["adp"]
        for more in ((), ("machine.accelerate.processes=2",))
    )
    assert (four.gpus, two.gpus) == (4, 2)
    assert four.seconds and two.seconds and two.seconds > 1.9 * four.seconds


def test_the_layout_of_the_papers_node_for_slurm_is_feasible_and_its_memory_must_hold_the_weights(
    spec: Compose,
) -> None:
    job = (*PAPER, "policy=vllm", "machine=node8_slurm")
    planned(spec(*job)).refuse_impossible()
    with pytest.raises(UserError, match="machine.slurm.memory = 8GB, and the weights of .* have 57 GiB"):
        planned(spec(*job, "machine.slurm.memory=8GB")).refuse_impossible()


def test_a_job_on_two_nodes_needs_gpus_for_its_share_and_the_servers(spec: Compose) -> None:
    job = (*PAPER, "policy=vllm", "machine=slurm", "machine.slurm.nodes=2", "machine.vllm.gpus=2")
    job += ("machine.slurm.memory=120GB",)
    with pytest.raises(UserError, match=r"processes = 1 cannot be divided evenly among slurm.nodes = 2: set .*=2"):
        spec(*job)
    fsdp = ("machine.accelerate.processes=4", "machine.accelerate.strategy=fsdp", "machine.accelerate.rows=1")
    fsdp += ("machine.accelerate.precision=bfloat16", "machine.accelerate.gradient_checkpointing=true")
    with pytest.raises(UserError, match="machine.slurm.gpus = 3, and .* training for 4 more on 2 nodes"):
        planned(spec(*job, *fsdp, "machine.slurm.gpus=3")).refuse_impossible()
    made = planned(spec(*job, *fsdp, "machine.slurm.gpus=4"))
    made.refuse_impossible()
    assert "2 of its servers, and 4 to train on 2 nodes" in " ".join(printed(made).split())


def test_a_plan_begins_with_its_total_and_leaves_out_columns_that_are_empty_throughout(root: Path) -> None:
    spec, title = compose_configuration([], root)
    lines = printed(plan.make_plan(spec, estimate.Node(), title)).splitlines()
    assert lines[0].startswith("Total of experiment default, seed 0, selection.delta=0.15: time ")
    assert re.search(r" min, rollouts [\d,]+ to [\d,]+, jobs \d+$", lines[0])
    costs = next(line for line in lines if "stage" in line and "time" in line)
    assert "GPU-hours" not in costs and "money" not in costs
    served = printed(planned(compose_configuration(NODE8, root)[0]))
    assert re.match(r"Total of : time [^,]* h, GPU-hours 110 to 130, rollouts ", served)
    assert "GPU-hours" in next(line for line in served.splitlines() if "stage" in line and "time" in line)


def test_the_plan_counts_the_whole_node_and_sets_stages_apart_that_the_paper_does_not_have(spec: Compose) -> None:
    made = planned(spec(*NODE8))
    assert made.held == 8 and "node, held throughout" in printed(made)
    assert "own: rejection_sft, solutions, causality, 25 GPU-hours" in " ".join(printed(made).split())
    alone = [f"{name}.run=false" for name in ("baselines.rejection_sft", "baselines.solutions", "causality")]
    assert "Not in the paper" not in " ".join(printed(planned(spec(*NODE8, *alone))).split())
