#!/bin/sh
# IMAGE with the digest that its registry has for it now: deploy/k8s/pin.sh python:3.11-slim-bookworm
# Uses docker (with buildx), crane or skopeo, which of them is installed.
set -eu
image=${1:?give an image, such as redis:7-alpine}
if command -v docker >/dev/null && docker buildx version >/dev/null 2>&1; then
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
elif command -v crane >/dev/null; then
    digest=$(crane digest "$image")
elif command -v skopeo >/dev/null; then
    digest=$(skopeo inspect --format '{{.Digest}}' "docker://$image")
else
    echo "pin.sh: install docker with buildx, crane or skopeo: one of them has to ask the registry" >&2
    exit 1
fi
case $digest in
    sha256:*) printf '%s@%s\n' "${image%%@*}" "$digest" ;;
    *) echo "pin.sh: the registry gave no digest for $image: $digest" >&2; exit 1 ;;
esac
