# page.sh: the page that `cryopod inspect --html` makes of a real checkpoint, without a browser. A process of the container
# has a name that would be markup. `make test-browser` opens the same page: it finds it in /out.
mkimage
simulate crun --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
on_failure() { cat /tmp/said; printed job | tail -n 5; }
: > /tmp/said

# shellcheck disable=SC2016
pod run -d --name job --annotation dev.cryopod.vram=on --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
    -e LD_LIBRARY_PATH=/cusim localhost/busybox sh -c \
    'printf "<script>a()</b>" > /proc/$$/comm; /cusim/cusim-client --mib 96 --content half --procs 2 --gpus 0,1 & wait' > /dev/null
wait_for ticked job 3
cryopod export job -e podman -o oci:/tmp/job --leave-running -q
check 'the job goes on' goes_on job
page=/tmp/page.html
check 'a page' cryopod inspect oci:/tmp/job --html $page
check 'the same on standard output' sh -c 'cryopod inspect oci:/tmp/job --html - | cmp - /tmp/page.html'
check 'JSON of it is another thing' sh -c '! cryopod inspect oci:/tmp/job --json --html - 2> /tmp/said'
cryopod inspect oci:/tmp/job --json > /tmp/facts.json
check 'the process of that name is in the checkpoint' jq -e '.criu.processes[0].comm == "<script>a()</b>"' /tmp/facts.json
cat > /tmp/look.py << 'P'
import html.parser, json, sys

class Page(html.parser.HTMLParser):
    """Balanced, of known elements, and nothing that loads or runs."""
    void = {"meta", "br"}
    known = void | set("""html head title style body header main section footer div span h1 h2 h3 p ul li dl dt dd b i code
        table thead tbody tr th td""".split())
    def __init__(self):
        super().__init__()
        self.open, self.text, self.ids = [], "", set()
    def handle_starttag(self, tag, attributes):
        assert tag in self.known, tag
        for name, value in attributes:
            assert name in {"id", "class", "style", "title", "charset", "http-equiv", "content", "name", "lang", "aria-label"}, name
            if name == "id":
                self.ids.add(value)
        if tag not in self.void:
            self.open.append(tag)
    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag
    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

facts = json.load(open("/tmp/facts.json"))
page = Page()
text = open("/tmp/page.html").read()
page.feed(text)
page.close()
assert not page.open, page.open
assert {"timeline", "memory", "processes", "gpus", "facts"} <= page.ids, page.ids
assert "<script>a()</b>" in page.text
for process in facts["criu"]["processes"]:
    assert str(process["pid"]) in page.text
for gpu in facts["gpu"]["gpus"]:
    assert gpu["id"] in page.text and gpu["model"] in page.text
mib = facts["gpu"]["vram_bytes"] / (1 << 20)
assert f"{mib:.1f} MiB" in page.text, mib
assert "VRAM files" in page.text and "driver's checkpoint" in page.text
P
check 'its structure' python3 /tmp/look.py
cryopod inspect oci:/tmp/job --html /tmp/mapped.html --map 0=1,1=0
check 'with a map: both GPUs have a new place' test "$(grep -o '>on this host<' /tmp/mapped.html | wc -l)" = 2
check 'a map that cannot be' sh -c '! cryopod inspect oci:/tmp/job --html /tmp/no.html --map 0=7 2> /tmp/said && ! test -e /tmp/no.html'
check 'and why' says /tmp/said '7'
if [ -d /out ]; then cp /tmp/mapped.html /out/page.html && cp /tmp/facts.json /out; fi
