#!/bin/sh
# Makes the passwords of deploy/compose.yaml as files in a folder: deploy/secrets.sh deploy/secrets
set -eu
mkdir -m 700 "${1:?the folder to make}"
cd "$1"
password=$(openssl rand -hex 24)
key=$(openssl rand -hex 24)
# The folder is closed to others, so that a file may be readable for the user of a container.
printf '%s' "$password" > postgres-password
printf '"dagster" "%s"\n' "$password" > userlist.txt
printf '*:*:dagster:dagster:%s\n' "$password" > pgpass
chmod 600 pgpass # libpq refuses any other mode
printf '[default]\naws_access_key_id = mm-assets\naws_secret_access_key = %s\n' "$key" > aws-credentials
cat > s3.json << END
{"identities": [{"name": "mm-assets", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
  "credentials": [{"accessKey": "mm-assets", "secretKey": "$key"}]}]}
END
