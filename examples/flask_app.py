"""Flask: a limit for the application, and one for a view."""

from flask import Flask

from tidegate.integrations import Rule, header, ip
from tidegate.integrations.flask import install, limited

app = Flask(__name__)
install(app, Rule("1000/hour", namespace="all"))


@app.get("/emails")
@limited("2/minute", by=header("x-user") | ip)
def emails() -> str:
    return "hello"
