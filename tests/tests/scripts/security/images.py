#!/usr/bin/env python3
"""Reads, changes and writes CRIU's images without CRIU's .proto files.

A message is a list of fields [number, wiretype, value]: an int for wiretype 0 (varint), bytes for 1 (8 bytes),
2 (length and content: string, bytes or message) and 5 (4 bytes). decode(value) opens a nested message.

    images.py show FILE...      prints each message
"""
import struct
import sys

COMMON = (0x54564319, 0x55105940)  # IMG_COMMON_MAGIC, IMG_SERVICE_MAGIC: another magic follows


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def to_varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data):
    fields, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        wiretype = key & 7
        if wiretype == 0:
            value, at = varint(data, at)
        else:
            length = {1: 8, 5: 4}.get(wiretype)
            if wiretype == 2:
                length, at = varint(data, at)
            if length is None or at + length > len(data):
                raise ValueError("no message")
            value = data[at : at + length]
            at += length
        fields.append([key >> 3, wiretype, value])
    return fields


def encode(fields):
    out = b""
    for number, wiretype, value in fields:
        out += to_varint(number << 3 | wiretype)
        if wiretype == 0:
            out += to_varint(value)
        elif wiretype == 2:
            out += to_varint(len(value)) + value
        else:
            out += value
    return out


def wire(value):
    """The field value for an int, a string, bytes or a message."""
    if isinstance(value, int):
        return 0, value
    if isinstance(value, str):
        return 2, value.encode()
    return 2, encode(value) if isinstance(value, list) else value


def field(number, value):
    return [number, *wire(value)]


def get(fields, number, default=None):
    """The last one counts, as for protobuf-c."""
    return next((v for n, _, v in reversed(fields) if n == number), default)


def put(fields, number, value):
    """Sets a field, in place of all of this number; None removes them."""
    fields[:] = [f for f in fields if f[0] != number]
    if value is not None:
        fields.append(field(number, value))


class Image:
    """An image: its magic, and its messages one after the other. What is no message at its end stays as it is."""

    def __init__(self, path):
        data = open(path, "rb").read()
        magic = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
        at = min(8 if magic in COMMON else 4, len(data))
        self.path, self.magic, self.messages = path, data[:at], []
        while at + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, at)
            if at + 4 + length > len(data):
                break
            try:
                self.messages.append(decode(data[at + 4 : at + 4 + length]))
            except (ValueError, IndexError):
                break
            at += 4 + length
        self.rest = data[at:]

    def write(self, path=None):
        with open(path or self.path, "wb") as out:
            out.write(self.magic)
            for message in self.messages:
                data = encode(message)
                out.write(struct.pack("<I", len(data)) + data)
            out.write(self.rest)


def show(fields, indent="  "):
    for number, wiretype, value in fields:
        if wiretype == 2:
            printable = value.isascii() and value.decode().isprintable()
            try:
                inner = None if printable else decode(value)
            except (ValueError, IndexError):
                inner = None
            if inner is not None:
                print(f"{indent}{number}:")
                show(inner, indent + "  ")
                continue
        print(f"{indent}{number}: {value}")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "show":
        sys.exit(__doc__)
    for name in sys.argv[2:]:
        for number, message in enumerate(Image(name).messages):
            print(f"{name} {number}")
            show(message)
