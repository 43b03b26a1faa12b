//! Sizes as people write them: 512, 64K, 20G, 1T.

/// A disk's new size, or the change of its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// A size in bytes.
    Absolute(u64),
    /// The bytes to add.
    Grow(u64),
    /// The bytes to take away.
    Shrink(u64),
}

impl NewSize {
    /// The new size of a disk that has `size` bytes now.
    ///
    /// # Errors
    /// The reason, in words, why the disk cannot have that size.
    pub fn of(self, size: u64) -> Result<u64, String> {
        let new = match self {
            Self::Absolute(new) => Some(new),
            Self::Grow(by) => size.checked_add(by).filter(|&new| i64::try_from(new).is_ok()),
            Self::Shrink(by) => size.checked_sub(by),
        };
        new.ok_or_else(|| match self {
            Self::Shrink(by) => format!("has {size} bytes and cannot lose {by}"),
            _ => "would be too large".into(),
        })
    }
}

/// Parses a size as [`parse`] does, or a change of it: +10G, -512M.
///
/// # Errors
/// The reason why the text is no size.
pub fn parse_new(text: &str) -> Result<NewSize, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => parse(more).map(NewSize::Grow),
        (_, Some(less)) => parse(less).map(NewSize::Shrink),
        _ => parse(text).map(NewSize::Absolute),
    }
}

/// Parses a count of bytes with an optional unit (K, M, G, T, P, E: powers of 1024; KiB and so on
/// mean the same). A count with a unit may have a fraction (1.5G); the result is rounded down to a
/// whole byte. A count without a unit may be hexadecimal (0x10000). Leading blanks are ignored, as
/// by `strtoull`.
///
/// # Errors
/// The reason why the text is no size.
pub fn parse(text: &str) -> Result<u64, String> {
    const HOW: &str = "not a size; write it as 512, 64K, 1.5G";
    let text = text.trim_start();
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let number = Some(digits).filter(|digits| !digits.starts_with('+'));
        let bytes = number.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        return bytes.filter(|&bytes| i64::try_from(bytes).is_ok()).ok_or_else(|| HOW.into());
    }
    let number = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let exponent = exponent_of(&text[number.len()..])?;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if exponent > 0 && fraction.len() <= 18 => (whole, fraction),
        Some(_) => return Err(HOW.into()),
        None => (number, ""),
    };
    let is_number = |digits: &str| digits.bytes().all(|c| c.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return Err(HOW.into());
    }
    let unit = 1u128 << (10 * exponent);
    let part = fraction.parse::<u128>().unwrap_or(0) * unit / 10u128.pow(fraction.len() as u32);
    let bytes = whole.parse::<u64>().ok().map(|whole| u128::from(whole) * unit + part);
    // File offsets are signed.
    let bytes = bytes.and_then(|bytes| i64::try_from(bytes).ok());
    bytes.map(i64::cast_unsigned).ok_or_else(|| "too large".into())
}

/// Which power of 1024 a unit stands for.
fn exponent_of(unit: &str) -> Result<u32, String> {
    let letter = match unit {
        "" | "b" | "B" => return Ok(0),
        _ => unit.strip_suffix("iB").unwrap_or(unit),
    };
    match letter {
        "K" | "k" => Ok(1),
        "M" | "m" => Ok(2),
        "G" | "g" => Ok(3),
        "T" | "t" => Ok(4),
        "P" | "p" => Ok(5),
        "E" | "e" => Ok(6),
        "KB" | "MB" | "GB" | "TB" | "PB" | "EB" => Err(format!(
            "'{unit}' may mean a power of 1000; write {0} or {0}iB, which is one of 1024",
            &unit[..1]
        )),
        _ => Err(format!("'{unit}' is no unit; use K, M, G, T, P or E (512, 64K, 1.5G)")),
    }
}

/// Formats a size as `qemu-img` does: "1.5 GiB".
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let is_next = |exponent: usize| bytes as f64 >= 1000.0 * (1u64 << (10 * exponent)) as f64;
    let exponent = (0..UNITS.len() - 1).find(|&exponent| !is_next(exponent));
    let exponent = exponent.unwrap_or(UNITS.len() - 1);
    let value = bytes as f64 / (1u64 << (10 * exponent)) as f64;
    // Three significant digits, without trailing zeros.
    let digits = match value {
        ..1.0 if bytes > 0 => 3,
        ..10.0 => 2,
        _ => usize::from(value < 100.0),
    };
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
        assert_eq!(parse("10GiB"), Ok(10 << 30));
        assert_eq!(parse("0x10000"), Ok(65536));
    }

    #[test]
    fn fractions_of_a_unit_are_whole_bytes() {
        assert_eq!(parse("1.5G"), Ok(3 << 29));
        assert_eq!(parse("0.25K"), Ok(256));
        assert_eq!(parse("0.0001K"), Ok(0));
        assert_eq!(parse("7.999999999999999999E").map(|size| size >> 43), Ok((1 << 20) - 1));
    }

    #[test]
    fn a_size_may_be_a_change() {
        let new = |text: &str, size| parse_new(text).unwrap().of(size);
        assert_eq!(new("3G", 1 << 30), Ok(3 << 30));
        assert_eq!(new("+1.5K", 512), Ok(2048));
        assert_eq!(new("-1K", 2048), Ok(1024));
        assert_eq!(new("-1K", 512), Err("has 512 bytes and cannot lose 1024".into()));
        assert!(new("+1", i64::MAX as u64).is_err());
        assert!(parse_new("+-1").is_err() && parse_new("+").is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "K",
            "0x",
            "0x-1",
            "0x+1",
            "0x10K",
            "0xffffffffffffffff",
            "1.5",
            ".5G",
            "1.G",
            "1.5.5G",
            "-1",
            "8E",
            "1X",
            "1GB",
            "1iB",
            "1.0000000000000000000G",
            "99999999999999999999",
            "G1",
            "1 G",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_three_digits() {
        let shown = [0, 512, 1536, 1 << 30, 300 << 20, (1 << 30) + 1, 10_500_000_000].map(show);
        assert_eq!(shown, ["0 B", "512 B", "1.5 KiB", "1 GiB", "300 MiB", "1 GiB", "9.78 GiB"]);
    }
}
