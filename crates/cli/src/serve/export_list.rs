//! `qemu-nbd --list`: the exports of a server, in QEMU's words.

use anyhow::{Result, anyhow};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_nbd::uri::ClientUri;
use blockhouse_storage::{ListedExport, list_exports};

use crate::output;

/// The names of transmission flags, by their bits.
const FLAGS: [(u16, &str); 12] = [
    (1, "readonly"),
    (2, "flush"),
    (3, "fua"),
    (4, "rotational"),
    (5, "trim"),
    (6, "zeroes"),
    (7, "df"),
    (8, "multi"),
    (9, "resize"),
    (10, "cache"),
    (11, "fast-zero"),
    (12, "block-status-payload"),
];

/// Lists the exports of the server at this URI on standard output.
///
/// # Errors
/// Errors of the server, or standard output cannot be written.
pub fn run(uri: &str) -> Result<()> {
    let uri: ClientUri = uri.parse().map_err(|error| anyhow!("{uri}: {error}"))?;
    let exports = EventLoop::new(EngineChoice::Auto)?.block_on(list_exports(uri))?;
    output::print(&text(&exports))
}

fn text(exports: &[ListedExport]) -> String {
    let mut lines = vec![format!("exports available: {}", exports.len())];
    for export in exports {
        lines.push(format!(" export: '{}'", printable(&export.name)));
        if !export.description.is_empty() {
            lines.push(format!("  description: {}", printable(&export.description)));
        }
        if let Some((size, flags)) = export.size_and_flags {
            let is_set =
                |(bit, name): &(u16, &'static str)| (flags & (1 << bit) != 0).then_some(*name);
            let names: Vec<_> = FLAGS.iter().filter_map(is_set).collect();
            lines.push(format!("  size:  {size}"));
            lines.push(format!("  flags: 0x{flags:x} ( {} )", names.join(" ")));
        }
        if let Some([least, preferred, most]) = export.blocks {
            lines.push(format!("  min block: {least}"));
            lines.push(format!("  opt block: {preferred}"));
            lines.push(format!("  max block: {most}"));
        }
        let bits = if export.has_extended_headers { 64 } else { 32 };
        lines.push(format!("  transaction size: {bits}-bit"));
        if !export.contexts.is_empty() {
            lines.push(format!("  available meta contexts: {}", export.contexts.len()));
            lines.extend(export.contexts.iter().map(|name| format!("   {}", printable(name))));
        }
    }
    lines.join("\n")
}

/// A text of a server, with escapes in place of control characters. Reason: these could forge
/// lines, or commands of the terminal. Quotes, backslashes and tabs stay, as in QEMU's output.
fn printable(text: &str) -> String {
    let is_plain = |one: char| matches!(one, '\'' | '"' | '\\' | '\t');
    let parts = text.split_inclusive(is_plain).map(|part| {
        let start = part.trim_end_matches(is_plain);
        format!("{}{}", start.escape_debug(), &part[start.len()..])
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_that_of_qemu_nbd() {
        let full = ListedExport {
            name: "disk".into(),
            description: "a disk".into(),
            size_and_flags: Some((4096, 0x58f)),
            blocks: Some([1, 4096, 1 << 25]),
            has_extended_headers: true,
            contexts: vec!["base:allocation".into()],
        };
        let names_alone = ListedExport { name: "x\n".into(), ..ListedExport::default() };
        let expected = "exports available: 2\n export: 'disk'\n  description: a disk\n  size:  4096\n  flags: \
                        0x58f ( readonly flush fua df multi cache )\n  min block: 1\n  opt block: 4096\n  max block: \
                        33554432\n  transaction size: 64-bit\n  available meta contexts: 1\n   base:allocation\n export: \
                        'x\\n'\n  transaction size: 32-bit";
        assert_eq!(text(&[full, names_alone]), expected);
        assert_eq!(text(&[]), "exports available: 0");
    }

    #[test]
    fn only_control_characters_of_a_text_are_escaped() {
        let plain = "it's \"a\" \\ disk,\tü e\u{301}";
        assert_eq!(printable(plain), plain);
        assert_eq!(printable("'\n\u{1b}[2J'"), "'\\n\\u{1b}[2J'");
    }
}
