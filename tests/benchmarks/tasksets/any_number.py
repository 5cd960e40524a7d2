# pyright: reportMissingImports=false
"""A taskset with a flaw: an answer passes if the right number is anywhere in it."""

from collections.abc import Iterator

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    right: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.right) in (trace.last_reply or "").split())


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self) -> Iterator[NumberTask]:
        for number in range(20):
            prompt = f"How much is {number} times 17?"
            yield NumberTask(NumberData(prompt=prompt, right=17 * number), self.config.task)


__all__ = ["NumberTaskset"]
