# schema.sh: archive/src/criu/schema.txt has every field of the messages of this CRIU's images, with its number and its type.
python3 /src/tests/criu/schema.py /usr/lib/python3/dist-packages/pycriu/images > /tmp/schema
[ "$(wc -l < /tmp/schema)" -gt 100 ]
# A later CRIU may have renamed a field.
fields() { awk '{for (i = 2; i <= NF; i++) {split($i, f, ":"); print $1, f[1], f[3]}}' "$1" | sort; }
fields /src/archive/src/criu/schema.txt > /tmp/known
fields /tmp/schema > /tmp/here
missing=$(comm -13 /tmp/known /tmp/here)
[ -z "$missing" ] || { echo "not in schema.txt: $missing" && exit 1; }
