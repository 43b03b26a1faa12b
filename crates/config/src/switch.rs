//! Command-line words for a switch: ours and QEMU's.

/// True for a word that means on, false for off; `None` for other words.
pub fn parse(word: &str) -> Option<bool> {
    match word {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// `on` or `off`.
///
/// # Errors
/// The word is neither.
pub fn on_or_off(word: &str) -> Result<bool, String> {
    match word {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("use on or off".into()),
    }
}
