"""Django in one file: the middleware with a limit for the site, and limits for views."""

import sys

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from tidegate.integrations import Rule

if not settings.configured:
    settings.configure(
        SECRET_KEY="change me",  # noqa: S106  # an example
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        MIDDLEWARE=["tidegate.integrations.django.RateLimitMiddleware"],
        TIDEGATE_RULES=[Rule("1000/hour", namespace="all")],
    )

from tidegate.integrations.django import get_asgi_application, limited


@limited("2/minute")
def emails(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


@limited("2/minute")
async def reports(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


urlpatterns = [path("emails", emails, name="emails"), path("reports", reports, name="reports")]

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
else:
    app = get_wsgi_application()
    asgi_app = get_asgi_application()
