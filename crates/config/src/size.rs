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
/// mean the same). A count with a unit may have a fraction (1.5G); the result is rounded to the
/// nearest byte, as in QEMU. A count without a unit may be hexadecimal (0x10000). Leading blanks
/// are ignored, as by `strtoull`.
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
    let number = text.trim_end_matches(|c: char| !c.is_ascii_digit() && c != '.');
    let exponent = exponent_of(&text[number.len()..])?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_number = |digits: &str| digits.bytes().all(|c| c.is_ascii_digit());
    if whole.len() + fraction.len() == 0 || !is_number(whole) || !is_number(fraction) {
        return Err(HOW.into());
    }
    let part = fraction_of(fraction);
    if exponent == 0 && part > 0 {
        return Err(HOW.into());
    }
    let unit = 1u128 << (10 * exponent);
    let whole = if whole.is_empty() { Ok(0) } else { whole.parse::<u64>() };
    let bytes = whole.ok().map(|whole| u128::from(whole) * unit + ((part * unit + HALF) >> 64));
    // File offsets are signed.
    let bytes = bytes.and_then(|bytes| i64::try_from(bytes).ok());
    bytes.map(i64::cast_unsigned).ok_or_else(|| "too large".into())
}

/// One half, in 1 / 2^64.
const HALF: u128 = 1 << 63;

/// The number 0.DIGITS in 1 / 2^64; only zeros make 0. The digits are read as a floating-point
/// number, because QEMU reads them so (`do_strtosz`), and both round in the same way.
fn fraction_of(digits: &str) -> u128 {
    const ONE: f64 = 18_446_744_073_709_551_616.0;
    let fraction: f64 = format!("0.{digits}0").parse().unwrap_or(0.0);
    let has_value = digits.bytes().any(|digit| digit != b'0');
    ((fraction * ONE) as u128).max(has_value.into())
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
    fn fractions_are_rounded_to_the_nearest_byte() {
        for (text, bytes) in [
            ("1.5G", 3 << 29),
            ("0.25K", 256),
            ("0.0001K", 0),
            ("1.8T", 1_979_120_929_997),
            ("0.3G", 322_122_547),
            ("1.1M", 1_153_434),
            ("2.7k", 2765),
            ("0.00048828125K", 1),
            ("0.00048828124K", 0),
            ("1.23456789T", 1_357_421_750_334),
            ("1.9999999999999999999G", 2 << 30),
            ("7.999E", 9_222_219_115_350_168_960),
            // QEMU's forms: a side of the dot without digits, and zeros without a unit.
            (".5G", 1 << 29),
            ("1.G", 1 << 30),
            ("3.000", 3),
            ("1.0000000000000000000G", 1 << 30),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        assert!(parse("7.999999999999999999E").is_err());
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
            "0.9B",
            "1.00000000000000000000000000001",
            ".G",
            "1.5.5G",
            "-1",
            "8E",
            "1X",
            "1GB",
            "1iB",
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
