from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.harness import TidegateServer, eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.slow


class Collector:
    """A collector: decodes what it gets over OTLP."""

    def __init__(self) -> None:
        self.spans: set[str] = set()
        self.metrics: dict[str, list[Any]] = {}
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(body)
            for resource in traces.resource_spans:
                self._resource(resource)
                self.spans |= {span.name for scope in resource.scope_spans for span in scope.spans}
        elif path == "/v1/metrics":
            metrics = ExportMetricsServiceRequest.FromString(body)
            for resource in metrics.resource_metrics:
                self._resource(resource)
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        points = metric.sum.data_points or metric.gauge.data_points
                        self.metrics[metric.name] = list(points)

    def _resource(self, message: Any) -> None:
        self.resources.append({each.key: each.value.string_value for each in message.resource.attributes})

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def environment(url: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def test_a_collector_gets_spans_and_metrics_and_no_identifier(collector: Collector) -> None:
    arguments = ("--otel-traces", "--otel-metrics", "--region", "fra")
    with TidegateServer(*arguments, env=environment(collector.url)) as server:
        workspace = server.workspace()
        for _ in range(3):
            workspace.limit(identifier="someone_secret", limit=2)

        def denied() -> int:
            points = collector.metrics.get("tidegate.decisions", [])
            return sum(
                point.as_int
                for point in points
                if {"denied"} & {attribute.value.string_value for attribute in point.attributes}
            )

        eventually(lambda: denied() == 1, "the denial is exported")
        eventually(lambda: "tidegate.origin.merge" in collector.spans, "spans of replays are exported")
        assert server.stop() == 0
    assert collector.resources[-1]["service.name"] == "tidegate"
    assert collector.resources[-1]["tidegate.region"] == "fra"
    assert "someone_secret" not in str(collector.metrics) + str(collector.spans)


def test_a_collector_that_is_down_delays_neither_decisions_nor_a_stop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with TidegateServer("--otel-traces", "--otel-metrics", env=environment(url)) as server:
            workspace = server.workspace()
            assert workspace.limit(limit=2).data["success"]
            assert server.stop() == 0
