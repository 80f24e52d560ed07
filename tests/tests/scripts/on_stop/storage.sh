# storage.sh: object storage on this machine, the bucket `jobs` with places below `team`. Needs moto_server, which SUITE=trixie has.
# shellcheck shell=bash disable=SC2154
mkdir -p /etc/cryopod
printf '%s\n' AWS_ENDPOINT=http://127.0.0.1:5555 AWS_ALLOW_HTTP=true AWS_REGION=us-east-1 AWS_ACCESS_KEY_ID=a \
    AWS_SECRET_ACCESS_KEY=b > /etc/cryopod/objects.env
chmod 600 /etc/cryopod/objects.env
s3() { curl -sf --aws-sigv4 aws:amz:us-east-1:s3 --user a:b "$@"; }
server_up() {
    moto_server -H 127.0.0.1 -p 5555 > /tmp/moto.log 2>&1 &
    server=$!
    disown # a `wait` is for others
    wait_for s3 http://127.0.0.1:5555/ > /dev/null
    s3 -X PUT http://127.0.0.1:5555/jobs > /dev/null
}
get() { s3 "http://127.0.0.1:5555/jobs/team/$1"; } # KEY
listed() { s3 "http://127.0.0.1:5555/jobs?list-type=2&prefix=team/$1" | tr '<' '\n'; } # PREFIX
objects() { listed "${1-}" | sed -n 's/^Key>team\///p'; } # [PREFIX]
stored() { echo $(($(listed "${1-}" | sed -n 's/^Size>//p' | paste -sd+))); } # [PREFIX]: all bytes there
marks() { objects "$1/" | sed -n 's/^[^/]*\/\([^/]*\)$/\1/p' | grep -v lease | xargs; } # NAME: its objects but files and leases
