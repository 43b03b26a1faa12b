//! Sizes as people write them: 512, 64K, 20G, 1T.

/// Parses a count of bytes with an optional unit (K, M, G, T, P, E: powers of 1024).
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let exponent = match &text[digits.len()..] {
        "" | "b" | "B" => 0,
        "K" | "k" => 1,
        "M" | "m" => 2,
        "G" | "g" => 3,
        "T" | "t" => 4,
        "P" | "p" => 5,
        "E" | "e" => 6,
        unit => return Err(format!("'{unit}' is no unit; use K, M, G, T, P or E (512, 64K, 20G)")),
    };
    if digits.is_empty() || !digits.bytes().all(|c| c.is_ascii_digit()) {
        return Err("not a size; write it as 512, 64K, 20G".into());
    }
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << (10 * exponent)));
    // File offsets are signed.
    bytes.filter(|&bytes| i64::try_from(bytes).is_ok()).ok_or_else(|| "too large".into())
}

/// The way `qemu-img` shows sizes: "1.5 GiB".
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let exponent = (bytes.max(1).ilog2() / 10) as usize;
    let value = bytes as f64 / (1u64 << (10 * exponent)) as f64;
    // Three significant digits, without trailing zeros.
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", UNITS[exponent])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        assert_eq!(parse("512"), Ok(512));
        assert_eq!(parse("64K"), Ok(65536));
        assert_eq!(parse("1T"), Ok(1 << 40));
        assert_eq!(parse("7E"), Ok(7 << 60));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "K", "1.5G", "-1", "8E", "1X", "99999999999999999999", "G1", "1 G"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_three_digits() {
        let shown = [0, 512, 1536, 1 << 30, 300 << 20, (1 << 30) + 1, 10_500_000_000].map(show);
        assert_eq!(shown, ["0 B", "512 B", "1.5 KiB", "1 GiB", "300 MiB", "1 GiB", "9.78 GiB"]);
    }
}
