# pyright: reportMissingImports=false
"""A taskset of verifiers that is none of captrain's: prices are looked up with a tool, and a sum is answered."""

from collections.abc import Iterator

import verifiers.v1 as vf

PRICES = {"apple": 3, "bread": 4, "cheese": 7, "dates": 5, "eggs": 2}


class SumData(vf.TaskData):
    goods: list[str]


class PriceToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, good: str) -> str:
        """The price of a good."""
        return str(PRICES.get(good, "there is none"))


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(sum(PRICES[good] for good in self.data.goods)))

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))


class SumConfig(vf.TasksetConfig):
    count: int = 10
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [PriceToolset(config.tools)]

    def load(self) -> Iterator[SumTask]:
        names = list(PRICES)
        for number in range(self.config.count):
            goods = [names[(number + step) % len(names)] for step in range(2 + number // len(names))]
            prompt = f"What do these cost together: {', '.join(goods)}? Answer with the number alone."
            yield SumTask(SumData(prompt=prompt, goods=goods), self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    PriceToolset.run()
