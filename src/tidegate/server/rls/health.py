"""`grpc.health.v1.Health/Check`. `Watch` is a stream and answers UNIMPLEMENTED, which clients take for healthy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidegate.server.http2.grpc import GrpcError, Method, Status
from tidegate.server.rls.messages import ServingStatus, parse_health_request, serving_response
from tidegate.server.rls.protobuf import DecodeError

HEALTH_PATH: Final = "/grpc.health.v1.Health/Check"


def health_method(services: frozenset[str], is_serving: Callable[[], bool]) -> Method:
    """Says whether these services, and the server as a whole (`""`), take calls."""

    def check(message: bytes) -> bytes:
        try:
            service = parse_health_request(message)
        except DecodeError as error:
            raise GrpcError(Status.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}") from error
        if service and service not in services:
            raise GrpcError(Status.NOT_FOUND, f"no service {service[:128]}")
        return serving_response(ServingStatus.SERVING if is_serving() else ServingStatus.NOT_SERVING)

    return Method(HEALTH_PATH, check)
