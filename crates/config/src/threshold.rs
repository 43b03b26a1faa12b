//! The space left on the host below which an event reports it.

use std::fmt;
use std::str::FromStr;

use blockhouse_disk::Room;

use crate::size;

/// The threshold: the event is reported when less space is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threshold {
    /// Bytes.
    Bytes(u64),
    /// Percent of the total space.
    Percent(u8),
}

impl Threshold {
    /// Whether less space is left than the threshold.
    pub fn is_crossed(self, room: Room) -> bool {
        match self {
            Self::Bytes(bytes) => room.left < bytes,
            Self::Percent(percent) => {
                u128::from(room.left) * 100 < u128::from(room.total) * u128::from(percent)
            }
        }
    }
}

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.strip_suffix('%') else {
            return match size::parse(text)? {
                0 => Err("nothing is less than 0 bytes".into()),
                bytes => Ok(Self::Bytes(bytes)),
            };
        };
        match percent.parse() {
            Ok(percent @ 1..=99) => Ok(Self::Percent(percent)),
            _ => Err("write a percentage as 1% to 99%".into()),
        }
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_bytes_or_a_part() {
        for (text, crossed) in [("100", 99), ("1K", 1023), ("10%", 99), ("99%", 989)] {
            let threshold: Threshold = text.parse().expect(text);
            assert_eq!(threshold.to_string().parse(), Ok(threshold));
            let is_crossed = |left| threshold.is_crossed(Room { left, total: 1000 });
            assert!(is_crossed(crossed) && !is_crossed(crossed + 1), "{text}");
        }
        for text in ["", "0", "0%", "100%", "-1%", "1.5%", "x"] {
            assert!(text.parse::<Threshold>().is_err(), "{text}");
        }
        let all = Threshold::Percent(99).is_crossed(Room { left: u64::MAX, total: u64::MAX });
        assert!(!all);
    }
}
