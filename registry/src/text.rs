//! What a registry says, fit to be shown.

/// The last cause says what a person can use: "Connection refused", not "error sending request".
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    shortened(&text)
}

/// What a registry says is a stranger's text: one line of it, and not too long.
pub(crate) fn shortened(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(300)
        .collect()
}
