"""The health check of the container image: exits 0 if the server of this container answers /livez.

It finds the server by the variables that the image sets; a server with --listen or --tls-cert as flags needs another
check.
"""

import http.client
import os
import ssl
import sys

port = int(os.environ["TIDEGATE_LISTEN"].rpartition(":")[2])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
if os.environ.get("TIDEGATE_TLS_CERT"):
    # The certificate names the service, not this address.
    context = ssl._create_unverified_context()  # noqa: S323, SLF001 - it asks its own container, for one word
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=context)
try:
    connection.request("GET", "/livez")
    status = connection.getresponse().status
except OSError as error:
    sys.exit(f"the server does not answer on port {port}: {error}")
sys.exit(None if status == 200 else f"/livez answers {status}")
