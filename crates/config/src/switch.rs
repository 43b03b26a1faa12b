//! The words of command lines for a switch: ours, and those of QEMU.

/// Whether a word says that something is on; `None` for other words.
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
/// It is another word.
pub fn on_or_off(word: &str) -> Result<bool, String> {
    match word {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("use on or off".into()),
    }
}
