"""Prints the messages of CRIU's images as archive/src/criu/schema.txt has them, from the Python modules of one or more
versions of CRIU (Debian's python3-pycriu), oldest first: schema.py DIRECTORY-OF-pycriu/images...

One message a line: its name, then its fields as NUMBER:NAME:TYPE with `!` (required), `?` (optional) or `*` (repeated). A
TYPE that is no scalar is another message. A field that versions declare differently is an error."""
import ast
import pathlib
import sys

SCALARS = {1: "double", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool", 9: "string",
           12: "bytes", 13: "uint32", 14: "enum", 17: "sint32", 18: "sint64"}
LABELS = {1: "?", 2: "!", 3: "*"}


def fields(data):
    """Yields number and value of each field of a protobuf message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, data[at:at + size]
            at += size
        else:
            raise ValueError(f"wire type {key & 7}")


def last(message, number):
    return dict(fields(message)).get(number)


def all_of(message, number):
    return [value for n, value in fields(message) if n == number]


def messages(descriptor, prefix=""):
    name = prefix + last(descriptor, 1).decode()
    yield name, {last(f, 3): field(f) for f in all_of(descriptor, 2)}
    for nested in all_of(descriptor, 3):
        yield from messages(nested, name + ".")


def field(descriptor):
    kind = last(descriptor, 5)
    kind = last(descriptor, 6).decode().lstrip(".") if kind == 11 else SCALARS[kind]
    return f"{last(descriptor, 3)}:{last(descriptor, 1).decode()}:{kind}{LABELS[last(descriptor, 4)]}"


def serialized(module):
    """The file descriptor in a generated module: the bytes that it hands to AddSerializedFile."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return node.args[0].value
    raise ValueError(f"{module}: no descriptor")


found = {}
for directory in sys.argv[1:]:
    for module in sorted(pathlib.Path(directory).glob("*_pb2.py")):
        if module.stem in ("rpc_pb2", "opts_pb2", "img_streamer_pb2"):
            continue  # none of them is in an image
        for descriptor in all_of(serialized(module), 4):
            for name, message in messages(descriptor):
                known = found.setdefault(name, {})
                for number, text in message.items():
                    before = known.get(number, text)
                    if before.split(":")[2] != text.split(":")[2]:
                        sys.exit(f"{name}: {before} and {text}")
                    known[number] = text  # the last version's name
for name, message in sorted(found.items()):
    print(name, *(text for _, text in sorted(message.items())))
