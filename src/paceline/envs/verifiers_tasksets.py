"""Plays tasksets of `verifiers` 0.4 (its `verifiers.v1` interface), with a harness that runs in this process.

The package's own chat harness starts a program in a fresh interpreter for every episode, and installs what that needs
with `uv` from the network. This one speaks the same protocol (every model call goes through the endpoint it is given,
every tool call through the gate and the tool servers) at the cost of a few requests on loopback.
"""

import asyncio
import copy
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from operator import methodcaller
from statistics import fmean
from types import ModuleType
from typing import Any

import httpx
from pydantic import ValidationError

from paceline.config.env import SPLIT_NAMES
from paceline.config.env import VerifiersConfig as Config
from paceline.data import Row
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split
from paceline.rollout import Message, Seat

log = logging.getLogger("paceline.envs.verifiers")

NO_HELD_OUT = "verifiers environment `{}` has no rows of its own for `{}`: the training rows are taken"

HARNESS = "paceline_chat"
"""Its id in `verifiers`."""
CONNECT_SECONDS = 30.0


class EndpointRefused(Exception):
    """The model's endpoint answered with an error."""


def register(vf: Any) -> str:
    """Make the harness known to `verifiers`, which finds harnesses by the names of modules."""

    class Chat(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        SUPPORTS_TOOL_INTERCEPTION = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            from verifiers.v1.dialects.chat import message_to_wire  # ty: ignore[import-not-found]

            opening = _conversation(*self.resolve_prompt(data), message_to_wire)
            specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # the episode has a deadline of its own
            # Nothing here leaves the machine: no certificates are read, no proxy is asked.
            async with httpx.AsyncClient(headers=headers, timeout=timeout, verify=False, trust_env=False) as client:
                chat = _ChatLoop(client, endpoint, ctx.model, tool_interception_url)
                try:
                    await chat.run(opening, specs)
                except EndpointRefused as refusal:
                    # Whether a refusal is an error or how a task's own limit ends the episode, the package knows.
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(refusal))
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS, __doc__)
        vars(module).update(Chat=Chat, __all__=["Chat"])
        sys.modules[HARNESS] = module
    return HARNESS


class _ChatLoop:
    """One conversation until a reply calls no tool."""

    def __init__(self, client: httpx.AsyncClient, endpoint: str, model: str, gate: str | None) -> None:
        self._client, self._endpoint, self._model, self._gate = client, endpoint, model, gate

    async def run(self, messages: list[dict[str, Any]], specs: dict[str, dict[str, Any]]) -> None:
        from verifiers.v1.harnesses.utils.mcp import connect_mcp  # ty: ignore[import-not-found]

        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack) if specs else ([], {}, {})
            while (reply := await self._reply(messages, tools)) is not None:
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return
                for call in reply["tool_calls"]:
                    messages.append(await self._result(call, dispatch, servers))

    async def _reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> dict | None:
        """The model's next message; None if the conversation has grown too long for it."""
        body = {"model": self._model, "messages": messages} | ({"tools": tools} if tools else {})
        answer = await self._client.post(f"{self._endpoint.rstrip('/')}/chat/completions", json=body)
        if answer.status_code == 400 and "context" in answer.text and any(m["role"] == "assistant" for m in messages):
            return None
        message = _json_of(answer)["choices"][0]["message"]
        return {key: value for key, value in message.items() if value is not None or key == "content"}

    async def _result(self, call: dict[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> dict[str, Any]:
        """A tool's answer to a call, or why it was not asked."""
        from verifiers.v1.harnesses.utils.mcp import call_mcp  # ty: ignore[import-not-found]

        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        problem = None
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            problem = f"error: invalid JSON in tool arguments ({error}); resend with valid JSON"
        else:
            if not isinstance(arguments, dict):
                problem = "error: tool arguments must be a JSON object"
        if self._gate:  # the task may forbid the call, with its own words in place of the tool's
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            decision = _json_of(await self._client.post(self._gate, json=asked))
            if decision["action"] == "stop":
                raise EndpointRefused(decision["reason"])
            if decision["action"] == "deny":
                return decision["message"]
        if problem is None and name not in dispatch:
            problem = f"error: unknown tool {name!r}"
        content = problem or await call_mcp(servers, dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _json_of(answer: httpx.Response) -> Any:
    if answer.is_error:
        raise EndpointRefused(f"{answer.status_code}: {answer.text[-2000:]}")
    return answer.json()


class TasksetEnvironment(Environment):
    """Tasks, tools, rewards and judges are the package's business. Where it wants a model it is given a seat's address.

    Every agent that names neither a model nor an endpoint is the policy: a lone one sits in the seat `policy`, several
    in seats named after them. What an environment declares untrainable plays and is not trained. A seat's reward is
    the mean over the runs of its agent.
    """

    def __init__(self, config: Config, ident: str) -> None:
        """`ident` is the id by which the package finds the taskset."""
        self._config = config
        self._vf = _package()
        self._chat = register(self._vf)
        self._id = ident
        self._env = self._build(config.args)
        roles = [name for name, spec in _roles(self._env.config) if spec.model is None and spec.client is None]
        if not roles:
            raise EnvError(f"verifiers environment `{config.id}` leaves no agent to the policy: each names its model")
        self._seats = {role: POLICY if len(roles) == 1 else role for role in roles}
        self.actors = tuple(self._seats.values())
        self._tasks: dict[Split, list[Any]] = {}
        self._serving: asyncio.Task[None] | None = None

    def examples(self, split: Split) -> Sequence[Row]:
        config = self._config
        if split == "train" or config.eval_dataset is not None:
            self._tasks[split] = self._load_split(*config.rows_of(split))
        elif config.eval_args is not None:
            self._tasks[split] = self._load(self._build(config.args | config.eval_args).taskset, config.eval_size)
        tasks = self._tasks.get(split, [])
        return [{"split": split, "index": at, "prompt": task.data.prompt_text} for at, task in enumerate(tasks)]

    def rows(self, name: str, limit: int | None) -> list[Row]:
        """The rows of a split by its name, for environments that judge answers themselves."""
        dump = methodcaller("model_dump", exclude_none=True)
        tasks = [task.data for task in self._load_split(name, limit)]
        return [
            {"messages": _conversation(data.system_prompt, data.prompt, dump), "answer": getattr(data, "answer", "")}
            for data in tasks
        ]

    def _load_split(self, name: str, limit: int | None) -> list[Any]:
        """The tasks of a split by its name: held-out ones by `eval_args`, or by the taskset's own setting `split`."""
        args, held_out = self._config.args, [other for other, split in SPLIT_NAMES.items() if split == "eval"]
        if SPLIT_NAMES[name] == "train":
            return self._load(self._env.taskset, limit)
        if self._config.eval_args is not None:
            return self._load(self._build(args | self._config.eval_args).taskset, limit)
        if "split" in type(self._env.taskset.config).model_fields:
            for other in dict.fromkeys((name, *held_out)):
                with suppress(EnvError):
                    return self._load(self._build(args | {"split": other}).taskset, limit)
        log.warning("%s", NO_HELD_OUT.format(self._config.id, name))
        return self._load(self._env.taskset, limit)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        await self._serve()
        task = self._tasks[example["split"]][example["index"]]
        # The variable that would hold a key: the address itself is the secret.
        key = {"api_key_var": "PACELINE_NO_KEY"}
        addresses = {role: await seats[seat].base_url() for role, seat in self._seats.items()}
        clients = {role: self._vf.EvalClientConfig(base_url=url, **key) for role, url in addresses.items()}
        context = self._vf.ModelContext(model=POLICY, client=next(iter(clients.values())))
        episode = await self._with_clients(clients).run_episode(task, context)
        if not episode.ok:
            raise EnvError(f"verifiers environment `{self._config.id}`: {_episode_error(episode)}")
        for role, seat in self._seats.items():
            runs = [trace for trace in episode.traces if self._role(trace) == role]
            seats[seat].trained = any(trace.agent.trainable for trace in runs)
        return self._outcome(episode.traces)

    def _outcome(self, traces: Sequence[Any]) -> Outcome:
        runs: dict[str, list[float]] = {}
        metrics: dict[str, list[float]] = {}
        for trace in traces:
            role = self._role(trace)
            if role in self._seats and trace.agent.trainable:
                runs.setdefault(self._seats[role], []).append(trace.reward)
            where = f"{role}/" if len(self._seats) > 1 or role not in self._seats else ""
            said = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
            for name, value in {**said, **trace.metrics}.items():
                if value is not None:
                    metrics.setdefault(where + name, []).append(value)
        return Outcome(
            {seat: fmean(rewards) for seat, rewards in runs.items()},
            {name: fmean(values) for name, values in metrics.items()},
        )

    def _role(self, trace: Any) -> str:
        return trace.agent.name or next(iter(self._seats))

    def _with_clients(self, clients: Mapping[str, Any]) -> Any:
        """The environment with this episode's addresses. A copy, because many episodes are played at once; without the
        shared interception server, because that keeps a client for every address it ever saw."""
        env = copy.copy(self._env)
        agents = {role: getattr(env.config, role).model_copy(update={"client": c}) for role, c in clients.items()}
        env.config = env.config.model_copy(update=agents)
        env._interception = None
        return env

    async def _serve(self) -> None:
        """Hold what all episodes share (tool servers, say) for as long as the event loop runs."""
        if self._serving is None or self._serving.done():
            ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._keep_serving(ready), name=f"serving {self._config.id}")
            self._ready = ready
        await asyncio.shield(self._ready)  # bounded: by the episode's timeout

    async def _keep_serving(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()  # unbounded: until the event loop ends
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(EnvError(f"verifiers environment `{self._config.id}` cannot be served: {error}"))

    def _build(self, args: dict[str, Any]) -> Any:
        try:
            kind = self._vf.env_config_type(self._id, self._config.env)
            agents = copy.deepcopy(self._config.agents)
            for role, declared in _roles(kind):
                self._apply_defaults(agents.setdefault(role, {}), declared)
            raw = {"id": self._config.env, "taskset": {**args, "id": self._id}, **agents}
            return self._vf.load_environment(self._vf.resolve_env_config(raw))
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # how the package refuses a setting
            said: object = error
            if isinstance(error, ValidationError):
                problem = error.errors()[0]
                said = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            raise EnvError(f"verifiers environment `{self._config.id}` cannot be loaded: {said}") from error

    def _apply_defaults(self, agent: dict[str, Any], declared: Any) -> None:
        """Where neither the run file nor the environment's author chose, run here: no code, no remote sandbox. An
        author's choice of `null`, which only chats, is that of the same protocol: it need not install a program."""
        chosen = declared.harness
        plain = chosen is None and self._vf.default_harness_id(self._id) != self._id
        if plain or (chosen is not None and chosen.id == "null"):
            agent.setdefault("harness", {"id": self._chat})
        if isinstance(declared.runtime, self._vf.PrimeConfig):
            agent.setdefault("runtime", {"type": "subprocess"})
        if self._config.max_turns is not None:
            agent.setdefault("max_turns", self._config.max_turns)

    def _load(self, taskset: Iterable[Any], size: int | None) -> list[Any]:
        if size is None and not getattr(taskset, "bounded", True):
            raise EnvError(f"verifiers environment `{self._config.id}` makes tasks without end: set `size`")
        return list(itertools.islice(taskset, size))


def _conversation(system: str | None, prompt: Any, dump: Callable[[Any], Message]) -> list[Message]:
    opening = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*opening, {"role": "user", "content": prompt}]
    return [*opening, *map(dump, prompt or [])]


def _roles(config: Any) -> Iterable[tuple[str, Any]]:
    """The agents an environment's config declares, or a config's class with their defaults."""
    if isinstance(config, type):
        fields = ((name, field.default) for name, field in config.model_fields.items())
    else:
        fields = iter(config)
    return [(name, value) for name, value in fields if type(value).__name__.endswith("AgentConfig")]


def _episode_error(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed without saying why"


def _package() -> Any:
    try:
        package = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise EnvError(f'verifiers 0.4 is not installed ({error}): pip install "paceline[verifiers]"') from error
    if not hasattr(package, "EvalClientConfig"):
        raise EnvError('an environment with a Taskset needs verifiers 0.4: pip install "verifiers>=0.4,<0.5"')
    return package
