"""Sets up the OpenTelemetry SDK of a server process: spans and metrics go to a collector over OTLP (HTTP).

Only for `tidegate serve` with `otel.traces` or `otel.metrics`; an application that hosts the API has an SDK of its own.
Where to export, how often and with which header fields is configured by the standard variables (`OTEL_EXPORTER_OTLP_…`,
`OTEL_RESOURCE_ATTRIBUTES`, …). Exporting happens in threads of the SDK; a collector that is down costs spans and a
line in the log, never a decision.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Final

import tidegate
from tidegate.errors import MissingExtra
from tidegate.server.process.config import ServerConfig

# A stop waits this long for the last export.
STOP_TIMEOUT_S: Final = 2.0


async def stop_export(shutdowns: list[Callable[[], object]]) -> None:
    """Export the rest, within two seconds."""
    # A thread that is not waited for: the SDK may retry for longer than a stop may take.
    threads = [threading.Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, STOP_TIMEOUT_S)


def start_export(config: ServerConfig, node: str) -> list[Callable[[], object]]:
    """Create the providers that the configuration asks for, unless the process has some already. Returns what ends
    them, for `stop_export`."""
    if not config.otel.traces and not config.otel.metrics:
        return []
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise MissingExtra("otel", "otel.traces and otel.metrics") from error
    attributes = {
        "service.version": tidegate.__version__,
        "service.instance.id": node,
        "tidegate.region": config.region_name,
    }
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "tidegate"
    resource = Resource.create(attributes)
    shutdowns: list[Callable[[], object]] = []
    if config.otel.traces and not isinstance(trace.get_tracer_provider(), TracerProvider):
        tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(tracing)
        shutdowns.append(tracing.shutdown)
    if config.otel.metrics and not isinstance(metrics.get_meter_provider(), MeterProvider):
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        metering = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(metering)
        shutdowns.append(metering.shutdown)
    return shutdowns
