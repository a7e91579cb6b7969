"""The contracts of `tidegate.ports` as test suites: an adapter, including one of your own, must pass them.

    class TestMyOrigin(OriginContract):
        @pytest.fixture
        def place(self) -> OriginPlace: ...

They need `pip install 'tidegate[testing]'` and pytest-asyncio in auto mode. Import each suite from its module:
`.origin`, `.origin_remote`, `.ledger`, `.ledger_server`, `.catalog`.
"""

from tidegate.errors import MissingExtra

try:
    import hypothesis  # noqa: F401 - the suites import it; checked here so that the error names the extra
    import pytest
except ImportError as error:
    raise MissingExtra("testing", "tidegate.testing.contracts") from error

# pytest rewrites the assertions of a module only if it is registered before its first import.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("origin", "origin_remote", "ledger", "ledger_server", "catalog"))
)
