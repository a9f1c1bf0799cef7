"""POST /v1/responses."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request, Response

from paceline.inference.base import EngineError
from paceline.inference.server.bodies import ChatBody
from paceline.inference.server.chat import Talk, plan_chat
from paceline.inference.server.errors import refusal_of
from paceline.inference.server.http import EventStream, Json, read_body, unless_gone
from paceline.inference.server.responses import ResponseBody, ResponseWriter, as_chat
from paceline.inference.server.service import service_of


async def respond(request: Request) -> Response:
    """Respond to text or to the items of a conversation."""
    service = service_of(request)
    body = await read_body(request, ResponseBody)
    chat = as_chat(body, ChatBody)
    talk = Talk(service, chat, await unless_gone(request.receive, plan_chat(service, chat)))
    writer = ResponseWriter(body, body.model or service.models.name)
    if body.stream:
        return await EventStream.begin(request, _stream(talk, writer))
    answer = await unless_gone(request.receive, talk.answer())
    (choice,) = answer["choices"]
    return Json(writer.whole(choice["message"], choice["finish_reason"], answer["usage"]))


async def _stream(talk: Talk, writer: ResponseWriter) -> AsyncGenerator[bytes]:
    begun, finish = False, None
    try:
        async with aclosing(talk.reply.steps(listen=True)) as steps:
            async for index, delta, ended in steps:
                for choice in talk.chunks(index, delta, ended):
                    finish = choice["finish_reason"] or finish
                    data = b"" if begun else writer.begin()
                    data += writer.add(choice["delta"])
                    if data:
                        begun = True
                        yield data
    except EngineError as error:
        if not begun:
            raise
        refusal = refusal_of(error)
        yield writer.fail(str(refusal), refusal.code)
        return
    yield writer.end(finish, talk.reply.usage())
