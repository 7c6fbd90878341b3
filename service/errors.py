"""Every error a user of the service can meet, as one tree.

    LooseleafError
    ├── RequestError              the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest        a field is missing, unknown, of the wrong type or out of its bounds
    │   │   └── ContextTooLong    the prompt does not fit the context or the block pool
    │   ├── UnknownModel
    │   ├── UnknownRoute
    │   ├── Unauthorized          the API key is missing or wrong
    │   ├── ForbiddenOrigin       a web page of another origin opens a WebSocket
    │   ├── MethodNotAllowed
    │   ├── UnsupportedMediaType
    │   └── MessageTooLarge       a body or frame above the transport's limit
    ├── ServiceError              the service is at fault or busy
    │   ├── QueueFull             the waiting queue is at its bound; try again later
    │   ├── Loading               the service has started and its model is not ready yet
    │   ├── Draining              the service is shutting down
    │   ├── EngineDead            the engine stopped after a fault; the process is about to end
    │   ├── StepFailed            the step that computed this request raised; neighbours in other steps go on
    │   ├── NonFiniteLogits       the model produced NaN or infinity for this request
    │   └── SlowConsumer          the client did not read its stream for too long
    ├── RequestAborted            the client cancelled or went away
    └── StartupError              the service cannot start: exit code 2 and one line on stderr
        ├── ConfigError
        ├── ModelLoadError
        └── BackendUnavailable

Transports map an error by its class attributes, never by its type: `code` is the stable machine name on every wire, `http_status` and
`ws_close` the protocol's numbers, `retryable` whether the same request may succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class LooseleafError(Exception):
    """Base of the tree; `param` names the request field at fault, as a path such as `messages[1].content`."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    ws_close: ClassVar[int] = 1011
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(LooseleafError):
    """The request is at fault; raised as one of the classes below."""

    code = "request_error"
    http_status = 400
    ws_close = 1008


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of its bounds."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt with the tokens asked for, does not fit the context length or the block pool."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404


class UnknownRoute(RequestError):
    """No such path or RPC method."""

    code = "not_found"
    http_status = 404


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class ForbiddenOrigin(RequestError):
    """A web page of an origin that is not allowed opens a WebSocket."""

    code = "forbidden_origin"
    http_status = 403


class MethodNotAllowed(RequestError):
    """The path exists, the HTTP method does not."""

    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaType(RequestError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    http_status = 415


class MessageTooLarge(RequestError):
    """A body or frame is above the transport's limit."""

    code = "message_too_large"
    http_status = 413
    ws_close = 1009


class ServiceError(LooseleafError):
    """The service is at fault or busy."""


class QueueFull(ServiceError):
    """The waiting queue is at its bound."""

    code = "queue_full"
    http_status = 429
    ws_close = 1013
    retryable = True


class Loading(ServiceError):
    """The model is still being loaded and warmed up."""

    code = "loading"
    http_status = 503
    ws_close = 1013
    retryable = True


class Draining(ServiceError):
    """The service is shutting down and takes no new requests."""

    code = "draining"
    http_status = 503
    ws_close = 1001
    retryable = True


class EngineDead(ServiceError):
    """The engine stopped after a fault."""

    code = "engine_dead"
    http_status = 503
    retryable = True


class StepFailed(ServiceError):
    """The step that computed this request raised an exception."""

    code = "step_failed"
    retryable = True


class NonFiniteLogits(ServiceError):
    """The model produced NaN or infinity for this request."""

    code = "non_finite_logits"


class SlowConsumer(ServiceError):
    """The client did not read its stream for longer than the limit."""

    code = "slow_consumer"
    http_status = 408
    ws_close = 1008


class RequestAborted(LooseleafError):
    """The client cancelled the request or went away."""

    code = "aborted"
    http_status = 499
    ws_close = 1000


class StartupError(LooseleafError):
    """The service cannot start."""

    code = "startup_failed"


class ConfigError(StartupError):
    """An option is unknown or has a bad value; the message carries its path."""

    code = "bad_config"


class ModelLoadError(StartupError):
    """The model's files are missing, damaged or of a kind that is not supported."""

    code = "model_load_failed"


class BackendUnavailable(StartupError):
    """The named attention backend cannot run here; the message lists why."""

    code = "backend_unavailable"


def error_classes() -> dict[str, type[LooseleafError]]:
    """Return every class of the tree by its code; the class nearest the root wins where a code is inherited."""
    found: dict[str, type[LooseleafError]] = {}
    queue: list[type[LooseleafError]] = [LooseleafError]
    while queue:
        cls = queue.pop(0)
        found.setdefault(cls.code, cls)
        queue.extend(cls.__subclasses__())
    return found
