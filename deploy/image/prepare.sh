#!/bin/bash
# The user and the volume of every image. Written by hand, since not every base has useradd.
set -euo pipefail

grep -q '^anychip:' /etc/passwd || echo 'anychip:x:10001:0:anychip:/cache/home:/usr/sbin/nologin' >> /etc/passwd
# Group 0 may write too: OpenShift gives a container a user id of its own, in group 0.
# Keys are not in the cache: what runs a network may write there.
mkdir -p /cache /keys
chown 10001:0 /cache /keys
chmod 0770 /cache /keys
