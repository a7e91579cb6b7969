from __future__ import annotations

from typing import Any

import pytest
from flask import Blueprint, Flask, g, request
from flask.views import MethodView

from tests.integrations.kit import consumed, manual_clock, manual_limiter
from tidegate import ConfigurationError, Limit, Limiter
from tidegate.integrations import Rule, header, user
from tidegate.integrations.flask import install, limited


@pytest.fixture
def limiter() -> Limiter:
    return manual_limiter(manual_clock())


def application(limiter: Limiter, *rules: Any, **options: Any) -> Flask:
    app = Flask(__name__)

    @app.before_request
    def login() -> None:
        g.user = request.headers.get("x-user")

    install(app, *rules, limiter=limiter, **options)

    @app.get("/mail")
    @limited("2/minute", by=user | (lambda _: "anonymous"))
    def mail() -> str:
        return "ok"

    @app.get("/free")
    def free() -> str:
        return "ok"

    return app


def test_a_view_answers_until_its_limit_is_used_up_and_then_429(limiter: Limiter) -> None:
    client = application(limiter).test_client()
    first = client.get("/mail")
    assert first.status_code == 200 and first.headers["RateLimit"] == '"mail";r=1;t=60'
    assert client.get("/mail").status_code == 200
    denied = client.get("/mail")
    assert denied.status_code == 429
    assert denied.headers["Retry-After"] == "61"
    assert denied.content_type == "application/problem+json"
    assert denied.headers.getlist("RateLimit") == ['"mail";r=0;t=61']
    assert client.get("/mail", headers={"x-user": "ann"}).status_code == 200
    assert "RateLimit" not in client.get("/free").headers


def test_limits_of_application_and_view_are_one_batch_and_hold_for_unknown_urls(limiter: Limiter) -> None:
    client = application(limiter, Rule("3/minute", namespace="all")).test_client()
    assert [client.get("/mail").status_code for _ in range(4)] == [200, 200, 429, 429]
    assert consumed(limiter, "3/minute", "all", "127.0.0.1") == 2
    assert client.get("/nowhere").status_code == 404
    assert client.get("/nowhere").status_code == 429
    assert client.get("/free").status_code == 429


def test_asynchronous_views_method_views_and_blueprints_may_have_limits(limiter: Limiter) -> None:
    app = application(limiter, Rule("1/minute", route="shop.*"))

    @app.get("/asynchronous")
    @limited("1/minute")
    async def asynchronous() -> str:
        return "ok"

    class Items(MethodView):
        decorators = [limited("1/minute")]  # noqa: RUF012

        def get(self) -> str:
            return "ok"

    app.add_url_rule("/items", view_func=Items.as_view("items"))
    shop = Blueprint("shop", __name__)

    @shop.get("/shop")
    def goods() -> str:
        return "ok"

    app.register_blueprint(shop)
    client = app.test_client()
    for path in ("/asynchronous", "/items", "/shop"):
        assert [client.get(path).status_code for _ in range(2)] == [200, 429], path


def test_two_decorators_are_one_batch(limiter: Limiter) -> None:
    app = application(limiter)

    @app.get("/both")
    @limited("1/minute", by=header("x-user"), namespace="user")
    @limited("5/minute", namespace="address")
    def both() -> str:
        return "ok"

    client = app.test_client()
    assert [client.get("/both", headers={"x-user": "ann"}).status_code for _ in range(3)] == [200, 429, 429]
    assert consumed(limiter, "5/minute", "address", "127.0.0.1") == 1


def test_a_denial_of_the_librarys_own_decorator_anywhere_below_is_a_429(limiter: Limiter) -> None:
    app = application(limiter)

    @limiter.limited(Limit("1/minute", namespace="sending"), key=lambda to: to)
    def send(to: str) -> str:
        return to

    @app.get("/send")
    def view() -> str:
        return send("ann")

    client = app.test_client()
    assert client.get("/send").status_code == 200
    denied = client.get("/send")
    assert denied.status_code == 429 and denied.headers["Retry-After"] == "61"


def test_a_decorator_without_install_says_what_to_do() -> None:
    app = Flask(__name__)
    app.testing = True

    @app.get("/")
    @limited("1/minute")
    def view() -> str:
        return "ok"

    with pytest.raises(ConfigurationError, match=r"install\(app\)"):
        app.test_client().get("/")


def test_the_settings_of_the_application_choose_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "gopher://not-used")
    app = Flask(__name__)
    app.config["TIDEGATE_ORIGIN"] = "memory://"
    limits = install(app, "1/minute")
    client = app.test_client()
    assert [client.get("/").status_code for _ in range(2)] == [404, 429]
    limits.stop()


def test_a_test_can_replace_the_limiter(limiter: Limiter) -> None:
    app = application(limiter)
    limits = app.extensions["tidegate"]
    client = app.test_client()
    assert [client.get("/mail").status_code for _ in range(3)] == [200, 200, 429]
    with limits.override(Limiter()):
        assert client.get("/mail").status_code == 200
