#!/bin/bash
# The entry of every image: the vendor's environment, then the command in this shell's place, so that it gets the signals.

# Files that set a vendor's variables, such as CANN's set_env.sh: the first that is there counts.
IFS=: read -ra files <<< "${VENDOR_ENVIRONMENT:-}"
for file in "${files[@]}"; do
    if [ -r "$file" ]; then
        # shellcheck disable=SC1090
        source "$file"
        break
    fi
done

# Everything that is written lies in the cache: the root file system may be read-only.
if ! mkdir -p "$HOME" "$TMPDIR"; then
    echo "anychip: $ANYCHIP_CACHE_DIR cannot be written by uid $(id -u), gid $(id -g): mount a volume there that it may write" >&2
    exit 1
fi
exec /opt/anychip/bin/anychip "$@"
