#!/bin/sh
# The Secret baton-keys, new each time: an administrator's key, a key for one tenant, the file with their hashes, Redis's
# password, Ray's token, and HF_TOKEN of the environment, if set. Needs `baton` on the PATH. Once a namespace, either as a
# manifest on stdout, or as files for the component `secrets`:
#   deploy/k8s/secrets.sh [TENANT] | kubectl -n baton create -f -
#   deploy/k8s/secrets.sh --files deploy/k8s/components/secrets [TENANT]
set -eu
umask 077
files=
if [ "${1:-}" = --files ]; then
    files=${2:?"--files needs a folder"}
    shift 2
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
admin=$(baton key --admin 2>"$folder/admin")
client=$(baton key "${1:-default}" 2>"$folder/tenant")
secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
cat >"$folder/keys" <<END
admin-key=$admin
client-key=$client
redis-password=$(secret)
ray-token=$(secret)
${HF_TOKEN:+hf-token=$HF_TOKEN}
END
if [ -n "$files" ]; then
    grep . "$folder/keys" >"$files/keys.env"
    cat "$folder/admin" "$folder/tenant" >"$files/tenants.toml"
    exit
fi
cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: baton-keys
  labels: {app.kubernetes.io/part-of: baton}
stringData:
$(grep . "$folder/keys" | sed 's/^/  /; s/=/: /')
  tenants.toml: |
$(cat "$folder/admin" "$folder/tenant" | sed 's/^/    /')
END
