from __future__ import annotations

import inspect

import pytest

from tidegate.ports import Ledger, Origin
from tidegate.testing.faults import LEDGER_OPERATIONS, ORIGIN_OPERATIONS


@pytest.mark.parametrize(("port", "operations"), [(Origin, ORIGIN_OPERATIONS), (Ledger, LEDGER_OPERATIONS)])
def test_every_operation_of_a_port_can_be_made_to_fail(port: type, operations: tuple[str, ...]) -> None:
    calls = {name for name, member in vars(port).items() if inspect.iscoroutinefunction(member)}
    assert set(operations) == calls - {"listen", "close"}
