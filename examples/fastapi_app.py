"""FastAPI: a limit for the application, two for an endpoint, and one by the customer's plan."""

from fastapi import Depends, FastAPI, Request

from tidegate.integrations import Rule, header, ip
from tidegate.integrations.fastapi import install, limited

app = FastAPI()
install(app, Rule("1000/hour", namespace="all"))

user = header("x-user") | ip


async def plan(request: Request) -> str:
    """In an application: a query of the database."""
    return "100/minute" if request.headers.get("x-plan") == "paid" else "2/minute"


@app.get("/emails", dependencies=[Depends(limited("3/second; 20/hour", by=user))])
async def emails() -> list[str]:
    return ["hello"]


@app.get("/reports", dependencies=[Depends(limited(plan, by=user))])
def reports() -> str:
    return "done"
