# amd_hardware.sh: what an owner of AMD GPUs runs (tests/amd/hardware), on the mock: all of it passes, and the report says so.
# long
# needs: amd
. /src/tests/amd/lib.sh
start crun vega-2
rm /etc/cryopod/config.toml
podman rmi -f localhost/kfd > /dev/null
CLIENT=/opt/amd/kfd-client CLIENT_OPTIONS='' MIB=4 /src/tests/amd/hardware /tmp/amd-report.txt || { cat /tmp/amd-report.txt; exit 1; }
cat /tmp/amd-report.txt
says /tmp/amd-report.txt '^12 passed, 0 failed$'
says /tmp/amd-report.txt 'A MOCK'
if grep -q unique_id /tmp/amd-report.txt; then echo 'serial numbers are in the report' && exit 1; fi
