//! The local date and time, in the time zone of `TZ` or of the host.

/// Year, month from 1, day, hour, minute and second.
pub type DateTime = [i32; 6];

/// The local date and time of this many seconds after 1970; `None` if the C library fails.
pub fn local_time(seconds: u64) -> Option<DateTime> {
    let seconds = libc::time_t::try_from(seconds).ok()?;
    // SAFETY: all bytes zero is a value of `tm`, which has numbers and a pointer that is never
    // followed here.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values that live until the call ends; it keeps neither.
    let found = unsafe { libc::localtime_r(&raw const seconds, &raw mut parts) };
    let (year, month) = (parts.tm_year + 1900, parts.tm_mon + 1);
    let date = [year, month, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec];
    (!found.is_null()).then_some(date)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_days_of_2000_are_in_2000_in_every_zone() {
        let [year, month, ..] = local_time(961_000_000).expect("a date");
        assert_eq!((year, month), (2000, 6));
    }
}
