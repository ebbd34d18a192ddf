"""An environment package of verifiers whose user is a program: guess the number."""

from __future__ import annotations

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"


class GuessConfig(vf.TasksetConfig):
    breaks: bool = False


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number = number % 7 + 1
            data = GuessData(prompt="Guess a number from 1 to 7.", number=number)
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                if segment.terminated:
                    break
                if self.config.taskset.breaks:
                    raise ValueError("the board is broken")
                if segment.last_reply == str(task.data.number):
                    reward = 1.0
                    break
                try:
                    is_lower = int(segment.last_reply) > task.data.number
                    hint = "lower" if is_lower else "higher"
                except ValueError:
                    hint = "a number"
                segment = await interaction.turn(f"It is {hint}.")
        interaction.trace.record_reward("guessed", reward)


__all__ = ["GuessEnv", "GuessTaskset"]
