from __future__ import annotations

from typing import Any

import pytest

from tidegate.server.console.documents import document, merge_identifier, point


def report(node: str = "a", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "node": node,
        "pid": 1,
        "region": "fra",
        "uptime_s": 10.0,
        "allowed": 100,
        "denied": 10,
        "sources": {"local": 100, "origin": 8, "degraded": 2},
        "latency": {"40": 100},
        "origin_latency": {"bounds_s": [0.001, 0.01], "counts": [10, 0, 0]},
        "subjects": 3,
        "subjects_max": 10,
        "cells": 4,
        "evicted": 0,
        "rss_bytes": 1_000,
        "connections": 2,
        "dirty": 0,
        "replay_lag_s": 0.0,
        "clock_offset_ms": 3,
        "dependencies": [["origin", True, "reachable"], ["breaker origin_read", True, "closed"]],
        "breakers": {"origin_read": 0},
        "heartbeat_age_ms": {"fra": 100, "iad": 2_000},
        "lag_ms": {"iad": 700},
        "namespaces": {"email": [60, 6]},
        "hot": [{"namespace": "email", "identifier": "x", "per_s": 2.0}],
        "denied_most": [],
        "denials": [],
    }
    return {**values, **changes}


def test_rates_are_the_growth_of_each_worker_added_up() -> None:
    before = {"a": report("a"), "b": report("b")}
    now = [
        report(
            "a",
            uptime_s=12.0,
            allowed=120,
            denied=20,
            sources={"local": 120, "origin": 16, "degraded": 4},
            namespaces={"email": [70, 16]},
        ),
        report("b", uptime_s=11.0, allowed=105),
    ]
    shown = document(before, now, at_ms=5)
    assert shown["rates"]["allowed"] == pytest.approx(10 + 5)
    assert shown["rates"]["denied"] == pytest.approx(5)
    assert shown["rates"]["sources"] == {"local": 10, "origin": 4, "degraded": 1}
    (email,) = shown["namespaces"]
    assert (email["allowed"], email["denied"]) == (5, 5)
    assert (email["total_allowed"], email["total_denied"]) == (130, 22)
    assert shown["hot"] == [{"namespace": "email", "identifier": "x", "per_s": 4.0}]
    assert shown["workers"] == 2


def test_a_worker_that_was_replaced_has_no_rate_and_does_not_make_one_negative() -> None:
    shown = document({"old": report("old")}, [report("new", allowed=5)], at_ms=5)
    assert shown["rates"]["allowed"] == 0
    assert shown["nodes"][0]["allowed"] == 0


def test_percentiles_are_those_of_the_time_between_two_reports() -> None:
    shown = document(
        {"a": report()},
        [
            report(
                uptime_s=11.0,
                latency={"40": 100, "48": 9},
                origin_latency={"bounds_s": [0.001, 0.01], "counts": [10, 4, 0]},
            )
        ],
        at_ms=5,
    )
    assert shown["latency_s"]["p50"] == shown["latency_s"]["p99"] > 15e-6
    assert shown["origin_latency_s"]["p50"] == 0.01
    assert point(shown)[0] == 5


def test_without_traffic_there_is_no_percentile() -> None:
    shown = document({"a": report()}, [report(uptime_s=11.0)], at_ms=5)
    assert shown["latency_s"] == {"p50": None, "p90": None, "p99": None}
    assert point(shown)[5:] == [None, None]


def test_a_dependency_is_down_if_it_is_down_for_one_worker_and_breakers_show_the_worst() -> None:
    down = report(
        "b", dependencies=[["origin", False, "refused"]], breakers={"origin_read": 2, "origin_replay": 1}
    )
    shown = document({}, [report("a"), down, report("c")], at_ms=5)
    assert shown["dependencies"] == [{"name": "origin", "ok": False, "detail": "refused", "failing": 1}]
    assert shown["breakers"] == [
        {"name": "origin_read", "state": "open"},
        {"name": "origin_replay", "state": "half open"},
    ]


def test_a_region_without_a_recent_heartbeat_is_not_live() -> None:
    shown = document({}, [report(heartbeat_age_ms={"fra": 10, "iad": 90_000})], at_ms=5)
    assert [(each["region"], each["is_own"], each["is_live"]) for each in shown["regions"]] == [
        ("fra", True, True),
        ("iad", False, False),
    ]


def test_the_best_informed_worker_comes_first_and_all_are_listed() -> None:
    def subject(total: int) -> dict[str, Any]:
        cell = {"own": total, "others": 0, "foreign": 0, "regions": {}, "total": total}
        return {
            "namespace": "email",
            "namespace_id": "rlns_1",
            "duration_ms": 60_000,
            "current": cell,
            "previous": {**cell, "total": 0, "own": 0},
            "effective": total,
            "unreplayed": 0,
            "regional_age_ms": None,
            "global_age_ms": None,
            "credit": None,
        }

    def answer(node: str, pid: int, total: int) -> dict[str, Any]:
        return {
            "node": node,
            "pid": pid,
            "now_ms": pid,
            "is_complete": pid == 1,
            "subjects": [subject(total)],
            "denials": [{"at_ms": pid}],
        }

    merged = merge_identifier([answer("a", 1, 3), answer("b", 2, 9)])
    (found,) = merged["subjects"]
    assert (found["node"], found["current"]["total"]) == ("b", 9)
    assert [view["node"] for view in found["views"]] == ["b", "a"]
    assert [each["at_ms"] for each in merged["denials"]] == [2, 1]
    assert not merged["is_complete"]
