"""Error mapping at both ends of a call.

Server: a MeshfireError raised by a servicer becomes its status; anything else becomes INTERNAL, with the trace in the
log and nothing on the wire. Client: unary and server-streaming calls raise the MeshfireError again. Bidirectional
streams are left alone on the client, for speed: their holders map with `meshfire.rpc.status.from_rpc_error`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from meshfire import errors
from meshfire.rpc import status

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # generic in the stubs, plain classes at run time
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    _UnaryUnary = grpc.aio.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStream = grpc.aio.UnaryStreamClientInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor
    _UnaryUnary = grpc.aio.UnaryUnaryClientInterceptor
    _UnaryStream = grpc.aio.UnaryStreamClientInterceptor


class ErrorsToStatus(_ServerInterceptor):
    """Maps what servicer methods raise."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        name = handler_call_details.method
        make = _HANDLER[handler.request_streaming, handler.response_streaming]
        method = getattr(handler, _METHOD[handler.request_streaming, handler.response_streaming])
        wrapped = _streaming(method, name) if handler.response_streaming else _single(method, name)
        mapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return mapped


_METHOD = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
_HANDLER: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _single(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(request, context)
        except Exception as error:
            await _abort(context, error, name)

    return call


def _streaming(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            # Closed here, not by the garbage collector: a call cancelled while it writes frees what it holds now.
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error, name)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, name: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = _known(error, name)
    await context.abort(status.code_of(known), known.message, status.trailing_metadata(known))


def _known(error: Exception, name: str) -> errors.MeshfireError:
    if isinstance(error, errors.MeshfireError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return status.from_rpc_error(error)
    if isinstance(error, TimeoutError):
        return errors.DeadlineExceeded("the deadline passed")
    if isinstance(error, ExceptionGroup):
        return _known(error.exceptions[0], name)
    log.exception("%s failed", name)
    return errors.InternalError("internal error")


class UnaryErrors(_UnaryUnary):
    """Raises MeshfireErrors for failed unary calls."""

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = await continuation(client_call_details, request)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error) from None
        return call


class StreamErrors(_UnaryStream):
    """Raises MeshfireErrors for server streams that fail."""

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return _mapped(await continuation(client_call_details, request))


async def _mapped(call: Any) -> AsyncIterator[Any]:
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise status.from_rpc_error(error) from None
    finally:
        call.cancel()  # a caller that leaves early ends the call; no effect on one that has ended
