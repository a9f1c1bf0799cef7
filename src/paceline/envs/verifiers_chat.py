"""A `verifiers` harness that talks and calls tools in this process.

The package's own chat harness starts a program in a fresh interpreter for every episode, and installs what that needs
with `uv` from the network. This one speaks the same protocol (every model call goes through the endpoint it is given,
every tool call through the gate and the tool servers) at the cost of a few requests on loopback.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import httpx

HARNESS = "paceline_chat"
"""Its id in `verifiers`."""
CONNECT_SECONDS = 30.0


class Refused(Exception):
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

            system, prompt = self.resolve_prompt(data)
            opening = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                opening.append({"role": "user", "content": prompt})
            else:
                opening.extend(message_to_wire(message) for message in prompt or [])
            specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # the episode has a deadline of its own
            # Nothing here leaves the machine: no certificates are read, no proxy is asked.
            async with httpx.AsyncClient(headers=headers, timeout=timeout, verify=False, trust_env=False) as client:
                talk = _Talk(client, endpoint, ctx.model, tool_interception_url, secret)
                try:
                    await talk.converse(opening, specs)
                except Refused as refusal:
                    # Whether a refusal is an error or how a task's own limit ends the episode, the package knows.
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(refusal))
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS, __doc__)
        vars(module).update(Chat=Chat, __all__=["Chat"])
        sys.modules[HARNESS] = module
    return HARNESS


class _Talk:
    """One conversation until a reply calls no tool."""

    def __init__(self, client: httpx.AsyncClient, endpoint: str, model: str, gate: str | None, secret: str) -> None:
        self._client, self._endpoint, self._model = client, endpoint, model
        self._gate, self._secret = gate, secret

    async def converse(self, messages: list[dict[str, Any]], specs: dict[str, dict[str, Any]]) -> None:
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
        if answer.is_error:
            raise Refused(f"{answer.status_code}: {answer.text[-2000:]}")
        message = answer.json()["choices"][0]["message"]
        return {key: value for key, value in message.items() if value is not None or key == "content"}

    async def _result(self, call: dict[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> dict[str, Any]:
        """A tool's answer to a call, or why it was not asked."""
        from verifiers.v1.harnesses.utils.mcp import call_mcp  # ty: ignore[import-not-found]

        name, written = call["function"]["name"], call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(written)
        except json.JSONDecodeError as error:
            arguments, problem = written, f"error: invalid JSON in tool arguments ({error}); resend with valid JSON"
        else:
            problem = None if isinstance(arguments, dict) else "error: tool arguments must be a JSON object"
        if self._gate and (denied := await self._denied(call, name, arguments)) is not None:
            return denied
        if problem is None and name not in dispatch:
            problem = f"error: unknown tool {name!r}"
        content = problem or await call_mcp(servers, dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _denied(self, call: dict[str, Any], name: str, arguments: Any) -> dict[str, Any] | None:
        """The task's word instead of the tool's, if it forbids the call."""
        assert self._gate is not None
        asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
        answer = await self._client.post(self._gate, json=asked)
        if answer.is_error:
            raise Refused(f"{answer.status_code}: {answer.text[-2000:]}")
        decision = answer.json()
        if decision["action"] == "stop":
            raise Refused(decision["reason"])
        return decision["message"] if decision["action"] == "deny" else None
