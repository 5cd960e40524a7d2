# pyright: reportMissingImports=false
"""Plays some tasks of BFCL by a script and lets bfcl-eval write results and scores; runs in its environment.

Argument: the folder that gets `result` and `score`. The library's own loop plays, its own writers write, its own checks
judge; only the model is a script, and packages that these do not need are left out (the environment has hardly any).
"""

import ast
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

OUT = Path(sys.argv[1])
os.environ["BFCL_PROJECT_ROOT"] = str(OUT)
MODEL, TASKS = "scripted", 3


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages of vendors and tables, which nothing here calls."""

    def find_spec(self, name, path=None, target=None):
        return None if name.startswith("bfcl_eval") else importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.meta_path.append(Absent())
for name, contents in (
    ("overrides", {"final": lambda method: method, "EnforceOverrides": object}),
    ("bfcl_eval.constants.model_config", {"MODEL_CONFIG_MAPPING": {}}),
):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)

from bfcl_eval.eval_checker.eval_runner import multi_turn_runner
from bfcl_eval.model_handler.base_handler import BaseHandler
from bfcl_eval.model_handler.utils import convert_to_function_call
from bfcl_eval.utils import load_dataset_entry, load_file, load_ground_truth_entry


def as_response(text, functions):
    """A gold call as a model that calls functions answers with it."""
    node = ast.parse(text, mode="eval").body
    names = next(list(entry["parameters"]["properties"]) for entry in functions if entry["name"] == node.func.id)
    arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return {node.func.id: json.dumps(arguments)}


class Scripted(BaseHandler):
    """Says a turn's calls one by one, then that it is done; by calls, or in the words of a model that is prompted."""

    def prepare(self, turns):
        self.turns, self.turn, self.step = turns, -1, 0

    def _query(self, inference_data):
        calls = self.turns[self.turn]
        answer = calls[self.step] if self.step < len(calls) else None
        self.step += 1
        return answer, 0.0

    def _begin(self, inference_data, messages):
        self.turn, self.step = self.turn + 1, 0
        return inference_data

    def _same(self, inference_data, *ignored):
        return inference_data

    def _parsed(self, answer):
        words = (
            "Done." if answer is None else [answer] if self.is_fc_model else f"[{convert_to_function_call(answer)[0]}]"
        )
        return {"model_responses": words, "input_token": 1, "output_token": 1}

    def decode_execute(self, result, has_tool_call_tag=False):
        if isinstance(result, list):
            return convert_to_function_call(result)
        return [result[1:-1]] if result.startswith("[") else []

    _query_FC = _query_prompting = _query
    _parse_query_response_FC = _parse_query_response_prompting = _parsed
    _compile_tools = _add_assistant_message_FC = _add_assistant_message_prompting = _same
    _pre_query_processing_FC = _same
    _add_execution_results_FC = _add_execution_results_prompting = _same
    add_first_turn_message_FC = add_first_turn_message_prompting = _begin
    _add_next_turn_user_message_FC = _add_next_turn_user_message_prompting = _begin

    def _pre_query_processing_prompting(self, entry):
        return {"message": []}


def spoilt(turns, number):
    """Spoil the gold in one of three ways: not at all, a call left out, or a value with a slip in it."""
    if number % 3 == 1:
        return [*turns[:-1], turns[-1][:-1]]
    if number % 3 == 2:
        [(name, arguments)] = turns[0][0].items()
        values = json.loads(arguments)
        last = list(values)[-1]
        return [[{name: json.dumps({**values, last: f"{values[last]}x"})}, *turns[0][1:]], *turns[1:]]
    return turns


def main():
    category = "multi_turn_base"
    gold = load_ground_truth_entry(category)
    for is_fc_model in (True, False):
        entries = load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)
        name = f"{MODEL}{'-FC' if is_fc_model else ''}"
        agent = Scripted(name, 0.0, name, is_fc_model)
        for number in range(TASKS):
            entry = entries[number]
            turns = [[as_response(text, entry["function"]) for text in turn] for turn in gold[number]["ground_truth"]]
            agent.prepare(spoilt(turns, number))
            result, metadata = agent.inference(json.loads(json.dumps(entry)), False, True)
            metadata["latency"] = [[0.0] * len(steps) for steps in metadata["latency"]]
            agent.write({"id": entry["id"], "result": result, **metadata}, OUT / "result")
        [path] = (OUT / "result" / name).rglob("*_result.json")
        multi_turn_runner(agent, load_file(path), entries[:TASKS], gold[:TASKS], name, category, OUT / "score")


main()
