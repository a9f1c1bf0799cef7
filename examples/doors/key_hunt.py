"""Look for a key: an environment for `verifiers` with a tool, served for all episodes by one process."""

import verifiers.v1 as vf

PLACES = ("up", "down", "here", "there")


class World(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "world"

    @vf.tool
    async def look(self, where: str) -> str:
        """Look somewhere."""
        return f"a key is {where}" if where in PLACES else "nothing"


class HuntTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float("a key is" in trace.transcript and trace.last_reply == "key")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class HuntConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class KeyHunt(vf.Taskset[HuntTask, HuntConfig]):
    def load(self) -> list[HuntTask]:
        return [HuntTask(vf.TaskData(prompt=f"what is {place}?"), self.config.task) for place in PLACES]

    @classmethod
    def toolsets(cls, config: HuntConfig) -> list[vf.Toolset]:
        return [World(config.tools)]


__all__ = ["KeyHunt"]

if __name__ == "__main__":
    World.run()
