# retry.sh: the second argument of RESTORE_EXT_FILE, through a probe in the plugin's place (tests/standin/retry.c).
simulate
start --mib 16 --fork-idle 2 --leak-fd
dump
check 'device files are recorded' says /img/cryopod-nvidia.img '.files | length > 0'
PLUGIN=/standin/retry.so
restore
if criu_is_from 4.3; then written=false; else written=true; fi
check "what CRIU passes is false, what it does not pass is left alone" test "$(sort -u /run/retry)" = "$written"
check 'the sum goes on' goes_on
stop
