"""curves.py TABLE...: draws what a soak printed, a row of small charts for each table, as SVG on the standard output.

What never changes shares a line of text: a chart of it would be empty."""
import sys
from html import escape

WIDTH, HEIGHT, GAP, COLUMNS = 200, 56, 24, 4


def table(path):
    """Returns the names of the columns, and the rows of numbers."""
    with open(path, encoding="utf-8") as file:
        rows = [line.split("\t") for line in file.read().split("\n") if "\t" in line]
    numbers = [[int(word) for word in row] for row in rows[1:]]
    return [name.replace("_", " ") for name in rows[0]], numbers


def chart(name, cycles, values, x, y):
    """Draws one curve above zero, with its name, its first and its last value."""
    top = max(values) * 1.15 or 1
    right = lambda cycle: x + WIDTH * (cycle - cycles[0]) / ((cycles[-1] - cycles[0]) or 1)
    points = " ".join(f"{right(c):.1f},{y + HEIGHT * (1 - v / top):.1f}" for c, v in zip(cycles, values))
    return (f'<text x="{x}" y="{y - 4}">{escape(name)}: {values[0]:,} to {values[-1]:,}</text>'
            f'<path class="axis" d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}"/><polyline points="{points}"/>')


def main():
    drawn, y = [], 20
    for path in sys.argv[1:]:
        names, rows = table(path)
        cycles = [row[0] for row in rows]
        columns = [(name, [row[i] for row in rows]) for i, name in enumerate(names) if i]
        flat = [f"{name} {values[0]:,}" for name, values in columns if len(set(values)) == 1]
        moving = [(name, values) for name, values in columns if len(set(values)) > 1]
        drawn.append(f'<text class="title" x="0" y="{y}">{cycles[-1]:,} cycles, measured every {cycles[0]}</text>')
        for start in range(0, len(flat), 5):
            y += 18
            drawn.append(f'<text x="0" y="{y}">{"always: " if not start else ""}{escape("; ".join(flat[start:start + 5]))}</text>')
        y += 32
        for i, (name, values) in enumerate(moving):
            drawn.append(chart(name, cycles, values, (i % COLUMNS) * (WIDTH + GAP), y))
            if i % COLUMNS == COLUMNS - 1 or i == len(moving) - 1:
                y += HEIGHT + 32
    width = COLUMNS * (WIDTH + GAP)
    style = ("text{font:11px sans-serif;fill:#333}.title{font-weight:bold}polyline{fill:none;stroke:#0a6;stroke-width:1.5}"
             ".axis{fill:none;stroke:#bbb}rect{fill:#fff}")
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {width + 8} {y}" width="{width + 8}" height="{y}">'
          f'<style>{style}</style><rect x="-8" width="{width + 8}" height="{y}"/>{"".join(drawn)}</svg>')


main()
