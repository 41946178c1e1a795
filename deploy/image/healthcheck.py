#!/opt/anychip/bin/python -IS
"""Exit 0 while the service in this container is ready; the standard library only, as it runs every few seconds."""

import os
import sys
import urllib.request

address = f"http://127.0.0.1:{os.environ.get('ANYCHIP_PORT', '8000')}/v2/health/ready"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    opener.open(address, timeout=4).close()
except OSError as error:
    sys.exit(f"{address}: {error}")
