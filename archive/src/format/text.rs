//! Makes text from strangers (names of processes, of files, of an archive's entries) safe to show.

use std::borrow::Cow;

/// Returns true if the character affects a terminal or the order of the text beside it.
pub fn hostile(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes each hostile character except line ends, as `\u{1b}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    let odd = |c: char| c != '\n' && hostile(c);
    if !text.contains(odd) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\t' => out.push(' '),
            c if odd(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_terminals_obey_is_escaped() {
        assert_eq!(
            printable("a\u{1b}[2J\rb\u{9b}\u{202e}c\td\n"),
            "a\\u{1b}[2J\\u{d}b\\u{9b}\\u{202e}c d\n"
        );
        assert!(matches!(printable("plain ü\n"), Cow::Borrowed(_)));
    }
}
