#!/opt/anychip/bin/python -IS
"""Exit with 0 while the service in this container is ready; with the argument `live`: while it answers at all.

It uses only the standard library, as it runs every few seconds.
"""

import os
import ssl
import sys
import urllib.request

port = int(os.environ.get("ANYCHIP_PORT", "8000"))
secure = bool(os.environ.get("ANYCHIP_TLS_CERT"))
if os.environ.get("ANYCHIP_TLS_CLIENT_CA"):  # We have no certificate to show: the administration's port asks for none.
    port, secure = int(os.environ.get("ANYCHIP_ADMIN_PORT") or port + 2), False
address = f"http{'s' if secure else ''}://127.0.0.1:{port}/v2/health/{'live' if 'live' in sys.argv[1:] else 'ready'}"
# The certificate need not name 127.0.0.1: that does not matter for the service's health.
handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
opener = urllib.request.build_opener(*handlers)
try:
    opener.open(address, timeout=4).close()
except OSError as error:
    sys.exit(f"{address}: {error}")
