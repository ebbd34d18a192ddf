"""An environment package of verifiers: a sum with a tool that adds, and a game with a user.

As somebody would publish it; verifiers itself ships none that works without a network.
"""

from __future__ import annotations

import verifiers.v1 as vf


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumsTaskConfig(vf.TaskConfig):
    with_tool: bool = True


class SumTask(vf.Task[SumData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [Adder(AdderConfig())] if config.with_tool else []

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.25)
    async def called(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages) > 0)


class SumsConfig(vf.TasksetConfig):
    task: SumsTaskConfig = SumsTaskConfig()
    largest: int = 3
    shares_tools: bool = False


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Adder(AdderConfig())] if config.shares_tools else []

    def load(self):
        for a in range(1, self.config.largest + 1):
            yield SumTask(
                SumData(
                    prompt=f"What is {a} + {a}?",
                    system_prompt="Answer with a number.",
                    answer=str(a + a),
                ),
                self.config.task,
            )


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    Adder.run()
