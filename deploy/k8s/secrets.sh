#!/bin/sh
# The Secret baton-keys on stdout, new each time: an administrator's key, a key for one tenant, the file with their hashes,
# Redis's password and Ray's token. Needs `baton` on the PATH. Once a namespace:
#   deploy/k8s/secrets.sh [TENANT] | kubectl -n baton create -f -
set -eu
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
admin=$(baton key --admin 2>"$folder/admin")
client=$(baton key "${1:-default}" 2>"$folder/tenant")
secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: baton-keys
  labels: {app.kubernetes.io/part-of: baton}
stringData:
  admin-key: $admin
  client-key: $client
  redis-password: $(secret)
  ray-token: $(secret)
  tenants.toml: |
$(cat "$folder/admin" "$folder/tenant" | sed 's/^/    /')
END
