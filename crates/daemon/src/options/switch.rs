//! The words of QEMU's command lines for a switch.

/// Whether a word says that something is on; `None` for other words.
pub fn parse(word: &str) -> Option<bool> {
    match word {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}
