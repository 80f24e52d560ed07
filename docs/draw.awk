# draw.awk: draws what a terminal shows, from standard input, as an SVG.
function escaped(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
{ lines[NR] = $0; if (length($0) > width) width = length($0) }
END {
    w = int(width * 8.2) + 32; h = NR * 19 + 30
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n", w, h, w, h
    printf "<rect width=\"100%%\" height=\"100%%\" rx=\"8\" fill=\"#0d1117\"/>\n"
    printf "<g font-family=\"ui-monospace, Menlo, Consolas, monospace\" font-size=\"13.5\" xml:space=\"preserve\">\n"
    for (n = 1; n <= NR; n++)
        printf "<text x=\"16\" y=\"%d\" fill=\"%s\">%s</text>\n", n * 19 + 12, lines[n] ~ /^\$/ ? "#e6edf3" : "#8b949e", escaped(lines[n])
    print "</g>\n</svg>"
}
