#!/bin/bash
# grpc.sh SOCKET SERVICE/METHOD JSON [NAMESPACE]: a gRPC call to containerd, by curl and jq: the GPU machine's root has no more.
# Messages are lists of [field, value]: a string, a number, or a list for a message. Prints the first string of the answer,
# or fails with containerd's words.
set -euo pipefail

# shellcheck disable=SC2016
encode='
def varint: if . > 127 then [. % 128 + 128] + (. / 128 | floor | varint) else [.] end;
def bytes: explode | map(if . < 128 then . elif . < 2048 then 192 + (. / 64 | floor), 128 + . % 64
    else 224 + (. / 4096 | floor), 128 + (. / 64 | floor) % 64, 128 + . % 64 end);
def field($key; $data): ($key | varint) + ($data | length | varint) + $data;
def message: [.[] | .[0] as $number | .[1]
    | if type == "number" then ($number * 8 | varint) + varint
      elif type == "string" then field($number * 8 + 2; bytes) else field($number * 8 + 2; message) end] | add // [];
def octal: [floor / 64, . / 8, .] | map(floor % 8 | tostring) | "\\0" + add;
message | [0] + (length as $n | [16777216, 65536, 256, 1] | map(($n / . | floor) % 256)) + . | map(octal) | add'

headers=$(mktemp) answer=$(mktemp)
trap 'rm -f "$headers" "$answer"' EXIT
printf %b "$(jq -r "$encode" <<< "$3")" |
    curl --silent --show-error --http2-prior-knowledge --max-time "${GRPC_LIMIT:-60}" --unix-socket "$1" \
        --header 'content-type: application/grpc' --header 'te: trailers' --header "containerd-namespace: ${4:-default}" \
        --dump-header "$headers" --output "$answer" --data-binary @- "http://localhost/$2"
said() { sed -n "s/^$1: *\([^\r]*\).*/\1/p" "$headers"; }
[ "$(said grpc-status)" = 0 ] || { echo "$2: $(said grpc-status): $(said grpc-message)" >&2 && exit 1; }
# Behind the length: a string of field 1, of fewer than 128 bytes.
read -r tag length < <(tail -c +6 "$answer" | od -An -tu1 -N2) || true
[ "${tag:-}" != 10 ] || tail -c +8 "$answer" | head -c "$length"
echo
