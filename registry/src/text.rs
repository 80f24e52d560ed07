//! Makes the text of registries and their errors fit to show.

/// Returns the last cause, which helps most: "Connection refused" rather than "error sending request".
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    shortened(&text)
}

/// Shortens a registry's text, which is untrusted, to one line.
pub(crate) fn shortened(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(300)
        .collect()
}
