"""render.py CHART [KEY=JSON...]: prints the chart's objects as helm would, for the few words of templates that the chart uses:
if, else, range, end, and values with toJson. Anything else is an error."""

import json
import pathlib
import re
import sys

chart = pathlib.Path(sys.argv[1])
values = {"Release": {"Namespace": "cryopod"}}


def yaml(text):  # of values.yaml: keys with JSON, lists of flow maps and one block of text
    lines, all = text.splitlines(), {}
    while lines:
        line = lines.pop(0)
        if not line or line.startswith("#"):
            continue
        key, rest = line.split(":", 1)
        block = []
        while lines and lines[0].startswith("  "):
            block.append(lines.pop(0)[2:])
        if rest.strip() == "|":
            all[key] = "".join(one + "\n" for one in block)
        elif block:
            all[key] = [dict(pair.split(": ") for pair in one[3:-1].split(", ")) for one in block]
        else:
            all[key] = json.loads(rest)
    return all


values["Values"] = yaml((chart / "values.yaml").read_text())
for setting in sys.argv[2:]:
    key, value = setting.split("=", 1)
    assert key in values["Values"], key
    values["Values"][key] = json.loads(value)


def look(path, names):
    word, *rest = path.split(".")
    assert word in ("", "$") or word.startswith("$"), path
    found = names[word] if word not in ("", "$") else values
    for name in rest:
        found = found[name]
    return found


def shown(line, names):
    def one(match):
        path, _, filter = (part.strip() for part in match[1].partition("|"))
        value = look(path, names)
        assert filter in ("", "toJson"), match[1]
        return json.dumps(value) if filter else str(value)

    return re.sub(r"{{ (.*?) }}", one, line)


def render(lines, names, wanted):  # until the end of a block
    while lines:
        line = lines.pop(0)
        control = re.fullmatch(r"{{- (.*) }}", line)
        if control is None:
            if wanted:
                yield shown(line, names)
            continue
        words = control[1].split()
        if words[0] in ("end", "else"):
            lines.insert(0, line)
            return
        if words[0] == "if":
            truth = bool(wanted and look(words[1], names))
            yield from render(lines, names, truth)
            if lines.pop(0) == "{{- else }}":
                yield from render(lines, names, wanted and not truth)
                assert lines.pop(0) == "{{- end }}"
        else:
            _, index, item, _, path = words
            body = list(lines)
            for at, value in enumerate(look(path, names) if wanted else []):
                lines[:] = body
                yield from render(lines, names | {index.strip(","): at, item: value}, True)
            if lines == body:
                list(render(lines, names, False))
            assert lines.pop(0) == "{{- end }}"


for template in sorted((chart / "templates").iterdir()):
    print("---")
    print("\n".join(render(template.read_text().splitlines(), {}, True)))
