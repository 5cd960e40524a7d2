"""Export of rollouts: Inspect evaluation logs, and chat JSONL in OpenAI's format.

Files are written with the standard library: a `.eval` log is a zip of JSON documents, and writing it with Inspect takes
a minute instead of seconds. Equal rollouts give equal bytes: nothing holds the time of writing, and as rollouts hold no
times, Inspect's required times are `NO_TIME`. In both formats every tool message names the call that it answers; ids in
the rollout are kept, missing ones are numbered.
"""

import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from captrain import __version__
from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.records import JsonObject, Message, Rollout, digest, json_without_secrets, load, place_aside, publish_text
from captrain.run import user_outputs

Format = Literal["inspect", "openai"]
NO_TIME = "1970-01-01T00:00:00+00:00"
ENTRY_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold."""
REMEDY = (
    "give a file of captrain's rollouts (artifacts/rollouts/*.jsonl, or rollouts.jsonl of a diagnosis); "
    "`captrain diagnose` reads other formats"
)
DETAILS = 1000
"""Longest text in Inspect's list of samples."""


def export_rollouts(files: Sequence[Path], to: Format, out: Path) -> list[Path]:
    """Write rollouts in another format.

    Args:
        files: JSON lines of `records.Rollout`; a repeated rollout is written once.
        to: "inspect": one log for each environment, purpose, policy and adapter; "openai": one file of chats.
        out: folder of the logs, or the file of chats.

    Returns:
        The files, in order.

    Raises:
        UserError: a file is missing or corrupt, they hold no rollouts, a tool result answers no call, or captrain did
            not write a file that it would replace.
    """
    if any(out.resolve() == file.resolve() for file in files):
        raise UserError(f"{out} is an input and cannot be the output", "name another file with --out")
    # A file repeats rollouts that several arms share.
    rollouts = [*{rollout.id: rollout for path in files for rollout in load(path, Rollout, REMEDY)}.values()]
    if not rollouts:
        raise UserError(f"there are no rollouts in {', '.join(map(str, files))}", "give files that hold some")
    if to == "openai":
        with user_outputs(out.parent, [out.name], whole=False) as aside:
            publish_text(aside / out.name, "".join(_json(chat_row(rollout)) + "\n" for rollout in rollouts))
        return [out]
    logs: dict[tuple[str, str, str, str], list[Rollout]] = {}
    for rollout in rollouts:
        key = (rollout.environment, rollout.purpose, rollout.policy, rollout.adapter or "base")
        logs.setdefault(key, []).append(rollout)
    names = [f"{re.sub(r'[^A-Za-z0-9_.+-]', '-', '_'.join(key))}.eval" for key in logs]
    with user_outputs(out, names) as aside:
        for name, group in zip(names, logs.values(), strict=True):
            _publish_log(group, aside / name)
    return [out / name for name in names]


def linked_messages(messages: Sequence[Message], place: str) -> list[Message]:
    """Convert messages to OpenAI's format: arguments are JSON text, and every call and tool message has an id.

    A tool message without an id answers the oldest open call of its tool.

    Args:
        messages: messages of a rollout.
        place: name of the rollout in errors.

    Raises:
        UserError: a tool result answers no call.
    """
    chat: list[Message] = []
    pending: list[tuple[str, str, str]] = []  # id in the rollout, id in the export, tool
    count = 0
    for index, message in enumerate(messages):
        entry: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "tool":
            call_id, name = message.get("tool_call_id") or "", message.get("name") or ""
            match = [call for call in pending if call_id and call[0] == call_id]
            match = match or [call for call in pending if not call_id and name in ("", call[2])]
            if not match:
                raise UserError(
                    f"{place}, message {index} is the result of {call_id or name or 'a tool'}, "
                    "which no open call asked for",
                    "leave this rollout out: other tools could not read it",
                )
            pending.remove(match[0])
            entry |= {"tool_call_id": match[0][1], "name": match[0][2]}
        elif calls := message.get("tool_calls"):
            entry["tool_calls"] = []
            pending = []
            for call in calls:
                function = call["function"]
                arguments = function["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                pending.append((call.get("id") or "", call.get("id") or f"call_{count}", function["name"]))
                call_text = {"name": function["name"], "arguments": text}
                entry["tool_calls"].append({"id": pending[-1][1], "type": "function", "function": call_text})
                count += 1
        chat.append(entry)
    return chat


def chat_row(rollout: Rollout) -> JsonObject:
    """Convert a rollout to a line of chat JSONL, which `captrain diagnose` can read.

    The reward is None if the infrastructure failed.
    """
    row = {
        "id": rollout.id,
        "task_id": rollout.task.id,
        "trial": rollout.trial,
        "model": _model(rollout),
        "reward": rollout.score.reward if rollout.score else None,
        "success": rollout.score.success if rollout.score else None,
        "messages": linked_messages(rollout.messages, f"rollout {rollout.id}"),
    }
    return row | (
        {"reference": linked_messages(rollout.reference, f"the reference of {rollout.id}")} if rollout.reference else {}
    )


def _model(rollout: Rollout) -> str:
    return f"captrain/{rollout.policy}{f'+{rollout.adapter}' if rollout.adapter else ''}"


def _publish_log(rollouts: Sequence[Rollout], path: Path) -> None:
    """Write one Inspect log. A sample is a task, and the epochs are its rollouts in order. Ids are digests."""
    first, model = rollouts[0], _model(rollouts[0])
    tasks = list(dict.fromkeys(rollout.task.id for rollout in rollouts))
    run = digest([rollout.id for rollout in rollouts])
    evaluation = {
        "eval_id": run,
        "run_id": run,
        "task_id": digest(first.environment, first.purpose),
        "created": NO_TIME,
        "task": f"{first.environment}/{first.purpose}",
        "dataset": {"name": f"{first.environment}/{first.task.split}", "samples": len(tasks), "sample_ids": tasks},
        "model": model,
        "config": {"epochs": sum(rollout.task.id == tasks[0] for rollout in rollouts)},
        "packages": {"captrain": __version__},
        "metadata": {"policy": first.policy, "adapter": first.adapter or "", "times": "rollouts hold none"},
    }
    start = {"version": 2, "eval": evaluation, "plan": {"name": "plan", "steps": [], "config": {}}}
    header = {
        **start,
        "status": "success",
        "results": _results(rollouts),
        "stats": {"started_at": NO_TIME, "completed_at": NO_TIME, "model_usage": {model: _usage(rollouts)}},
        "tags": [first.purpose],
    }
    epochs: dict[str, int] = {}
    summaries = []
    with place_aside(path, f".{os.getpid()}") as aside:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            _add(archive, "_journal/start.json", start)
            for rollout in rollouts:
                epochs[rollout.task.id] = epochs.get(rollout.task.id, 0) + 1
                sample = _sample(rollout, epochs[rollout.task.id], model)
                _add(archive, f"samples/{rollout.task.id}_epoch_{sample['epoch']}.json", sample)
                summaries.append(_summary(sample))
            _add(archive, "_journal/summaries/1.json", summaries)
            _add(archive, "summaries.json", summaries)
            _add(archive, "header.json", header)
        aside.replace(path)


def _add(archive: zipfile.ZipFile, name: str, document: object) -> None:
    # The default ZipInfo would hold the present time and this process's file mode.
    entry = zipfile.ZipInfo(name, ENTRY_TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, _json(document))


def _json(value: object) -> str:
    # ASCII, because some readers break lines at other characters.
    return json_without_secrets(json.dumps(value, separators=(",", ":")))


def _sample(rollout: Rollout, epoch: int, model: str) -> JsonObject:
    """Return one sample. As in Inspect, an infrastructure error has no scores."""
    chat = linked_messages(rollout.messages, f"rollout {rollout.id}")
    messages = [_inspect(message, f"{rollout.id}.{index}") for index, message in enumerate(chat)]
    answers = [message for message in messages if message["role"] == "assistant"]
    gold = [call for message in rollout.reference for call in calls_of(message)]
    sample = {
        "id": rollout.task.id,
        "epoch": epoch,
        "input": next((message["content"] for message in chat if message["role"] == "user"), ""),
        "target": [f"{name}({_json(arguments)})" for name, arguments in gold],
        "messages": messages,
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": "stop"} for message in answers[-1:]],
            "completion": answers[-1]["content"] if answers else "",
        },
        "metadata": {
            "rollout": rollout.id,
            "trial": rollout.trial,
            "kind": str(rollout.task.data.get("kind", "")),
            "split": rollout.task.split,
            "outcome": rollout.outcome,
            "retries": rollout.retries,
        },
        "model_usage": {model: _usage([rollout])},
        "uuid": rollout.id,
    }
    if rollout.score:
        sample["scores"] = {
            "success": {"value": "C" if rollout.score.success else "I"},
            "reward": {"value": rollout.score.reward, "metadata": rollout.score.parts},
        }
    else:
        reason = rollout.error or "an infrastructure error"
        sample["error"] = {"message": reason, "traceback": reason, "traceback_ansi": reason}
    return sample


def _inspect(message: Message, name: str) -> Message:
    """Convert a linked message to Inspect's format: arguments as an object; other text is a parse error."""
    entry: Message = {"id": name, "role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        entry |= {"tool_call_id": message["tool_call_id"], "function": message["name"]}
    if calls := message.get("tool_calls"):
        entry["tool_calls"] = []
        for call, (tool, arguments) in zip(calls, calls_of(message), strict=True):
            entry_call = {"id": call["id"], "function": tool, "arguments": arguments, "type": "function"}
            if set(arguments) == {""}:
                entry_call |= {"arguments": {}, "parse_error": f"no JSON object: {call['function']['arguments']}"}
            entry["tool_calls"].append(entry_call)
    return entry


def _summary(sample: JsonObject) -> JsonObject:
    """Return a sample's row in Inspect's list, with shortened texts."""
    fields = ("id", "epoch", "metadata", "scores", "model_usage", "uuid")
    row = {name: sample[name] for name in fields if name in sample}
    row |= {"input": sample["input"][:DETAILS], "target": ", ".join(sample["target"])[:DETAILS]}
    if "error" in sample:
        row["error"] = sample["error"]["message"][:DETAILS]
    return row | {"completed": True, "message_count": len(sample["messages"])}


def _usage(rollouts: Sequence[Rollout]) -> dict[str, int]:
    prompt = sum(rollout.usage.prompt_tokens for rollout in rollouts)
    completion = sum(rollout.usage.completion_tokens for rollout in rollouts)
    return {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}


def _results(rollouts: Sequence[Rollout]) -> JsonObject:
    """Return the pass rate and mean reward over rollouts without an error. No metrics if all rollouts are errors."""
    scores = [rollout.score for rollout in rollouts if rollout.score]
    counts = {"scored_samples": len(scores), "unscored_samples": len(rollouts) - len(scores)}
    values = {
        "success": ("accuracy", [float(score.success) for score in scores]),
        "reward": ("mean", [score.reward for score in scores]),
    }
    return {
        "total_samples": len(rollouts),
        "completed_samples": len(scores),
        "scores": [
            {
                "name": name,
                "scorer": name,
                **counts,
                "metrics": {metric: {"name": metric, "value": sum(numbers) / len(numbers)}} if numbers else {},
            }
            for name, (metric, numbers) in values.items()
        ],
    }
