"""The contracts of `tidegate.ports` as test suites. An adapter, also one of your own, is right when it passes them.

    class TestMyOrigin(OriginContract):
        @pytest.fixture
        def place(self) -> OriginPlace: ...

They need pytest, pytest-asyncio (mode auto) and hypothesis. Import them from their modules: `.origin`,
`.origin_remote`, `.ledger`, `.ledger_server`.
"""

import pytest

# Here, because it has to happen before the modules with the assertions are imported.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("origin", "origin_remote", "ledger", "ledger_server"))
)
